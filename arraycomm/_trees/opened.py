"""Leaves of optree that are no values: they say what is in them, or stay as they are."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from functools import lru_cache
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Final, NamedTuple

import numpy as np

_METHOD: Final = "__arraycomm_tree__"

_FUNCTIONS: Final = (
    type,
    FunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
    np.ufunc,
    type(np.dot),
    type(lru_cache(print)),
)
_BOUND: Final = (BuiltinFunctionType, MethodType, MethodWrapperType)
# Looked up only if these are loaded: `numpy.random` takes long.
_GENERATORS: Final = (
    ("numpy.random", "Generator"),
    ("numpy.random", "RandomState"),
    ("numpy.random", "BitGenerator"),
    ("random", "Random"),
    ("torch", "Generator"),
    ("cupy.random", "Generator"),
    ("cupy.random", "RandomState"),
)
_FURTHER: Final = (
    ("jax", "custom_jvp"),
    ("jax", "custom_vjp"),
    ("jax.numpy", "ufunc"),
    ("torch.jit", "ScriptFunction"),
)


class Opened(NamedTuple):
    """What is in an object, and how to make such an object of other values."""

    tree: Any
    rebuild: Callable[[Any], Any]


def stays(leaf: Any) -> bool:
    """Return whether a leaf is a function, a class or a random generator, which ranks do not share.

    A method belongs to an object, and stays if that does.
    """
    if isinstance(leaf, _BOUND):
        owner = leaf.__self__
        return owner is None or isinstance(owner, ModuleType) or stays(owner)
    if isinstance(leaf, _FUNCTIONS) or type(leaf).__name__ == "PjitFunction":
        return True
    return is_generator(leaf) or _is_any(leaf, _FURTHER)


def is_generator(leaf: Any) -> bool:
    """Return whether an object is a random generator."""
    return _is_any(leaf, _GENERATORS)


def _is_any(leaf: Any, kinds: tuple[tuple[str, str], ...]) -> bool:
    found = (getattr(sys.modules.get(module), name, None) for module, name in kinds)
    return isinstance(leaf, tuple(kind for kind in found if isinstance(kind, type)))


def says_contents(leaf: Any) -> bool:
    """Return whether the class of a leaf says what is in it."""
    return hasattr(type(leaf), _METHOD)


def opened(leaf: Any, path: str) -> Opened | None:
    """Return what a leaf, its class or the adapter of its framework says is in it, or None."""
    if isinstance(leaf, type):
        return None
    if type(leaf) is functools.partial:
        return _partial(leaf)
    if says_contents(leaf):
        return _checked(getattr(leaf, _METHOD)(), leaf, path)
    if all(base.__module__.partition(".")[0] != "thinc" for base in type(leaf).__mro__):
        return None
    found = importlib.import_module("arraycomm.adapters.thinc").open_tree(leaf, path)
    return None if found is None else Opened(*found)


def _partial(leaf: functools.partial[Any]) -> Opened:
    def rebuild(tree: dict[str, Any]) -> Any:
        return functools.partial(tree["func"], *tree["args"], **tree["keywords"])

    return Opened({"func": leaf.func, "args": leaf.args, "keywords": leaf.keywords}, rebuild)


def _checked(found: Any, leaf: Any, path: str) -> Opened:
    if not (isinstance(found, tuple) and len(found) == 2 and callable(found[1])):
        raise TypeError(
            f"{path}: {type(leaf).__name__}.{_METHOD} must return a pair (leaves, rebuild), a tree "
            f"and a function that makes the object of such a tree; got {found!r}"
        )
    if found[0] is leaf:
        raise TypeError(
            f"{path}: {type(leaf).__name__}.{_METHOD} returns the object itself as its leaves; "
            "return a dict or a list of what is in it"
        )
    return Opened(*found)
