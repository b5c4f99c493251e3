"""Any pytree as a list of leaves with their paths, and back.

Optree decides what a container is; None is a leaf. A type that optree does not know may still be a
torch module, a type registered with JAX (equinox, flax) if JAX is loaded, or a dataclass.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import optree

# Leaves of these types have nothing inside; skipping further checks saves time.
_PLAIN: Final = frozenset((type(None), bool, int, float, complex, str, bytes, np.ndarray))


class Flat(NamedTuple):
    """A tree's leaves, a path for each, and how to make a tree of new leaves."""

    leaves: list[Any]
    paths: Sequence[str]
    rebuild: Callable[[list[Any]], Any]


class _Node(NamedTuple):
    """A container that optree does not know."""

    children: list[Any]
    suffixes: list[str]
    rebuild: Callable[[list[Any]], Any]


def flatten(tree: Any, name: str = "tree") -> Flat:
    """Return the leaves of `tree`, with paths that begin with `name`."""
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    paths = _paths(spec, name)
    nodes = [None if type(leaf) in _PLAIN else _open(leaf) for leaf in leaves]
    if not any(nodes):
        return Flat(leaves, paths, lambda new: optree.tree_unflatten(spec, new))
    return _flatten_nodes(leaves, paths, nodes, spec)


def is_torch(obj: Any, *names: str) -> bool:
    """Tell whether `obj` is an instance of a class of torch, given by its dotted name."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    kind: Any = torch
    for name in names:
        # If another thread is importing torch, a name may be missing, but no object exists yet.
        kind = getattr(kind, name, None)
    return kind is not None and isinstance(obj, kind)


@lru_cache(maxsize=256)
def _paths(spec: optree.PyTreeSpec, name: str) -> tuple[str, ...]:
    return tuple(accessor.codify(name) for accessor in spec.accessors())


def _flatten_nodes(
    leaves: list[Any], paths: Sequence[str], nodes: list[_Node | None], spec: optree.PyTreeSpec
) -> Flat:
    """Flatten those leaves of optree that are containers."""
    all_leaves: list[Any] = []
    all_paths: list[str] = []
    parts: list[tuple[int, _Node | None, list[Flat]]] = []
    for leaf, path, node in zip(leaves, paths, nodes, strict=True):
        if node is None:
            inner = [Flat([leaf], [path], lambda new: new[0])]
        else:
            inner = [
                flatten(child, path + suffix)
                for child, suffix in zip(node.children, node.suffixes, strict=True)
            ]
        for flat in inner:
            all_leaves.extend(flat.leaves)
            all_paths.extend(flat.paths)
        parts.append((sum(len(flat.leaves) for flat in inner), node, inner))

    def rebuild(new: list[Any]) -> Any:
        rest = iter(new)
        built = []
        for _, node, inner in parts:
            children = [flat.rebuild([next(rest) for _ in flat.leaves]) for flat in inner]
            built.append(children[0] if node is None else node.rebuild(children))
        return optree.tree_unflatten(spec, built)

    return Flat(all_leaves, all_paths, rebuild)


def _open(leaf: Any) -> _Node | None:
    """Return the contents of a leaf of optree, or None if it is no container."""
    if isinstance(leaf, (*_PLAIN, np.generic)) or hasattr(leaf, "__dlpack__"):
        return None
    if is_torch(leaf, "nn", "Module"):
        return _open_module(leaf)
    if is_torch(leaf, "optim", "Optimizer"):
        return None
    jax = sys.modules.get("jax")
    if jax is not None and hasattr(jax, "tree_util"):
        node = _open_registered(jax.tree_util, leaf)
        if node is not None:
            return node
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return _open_dataclass(leaf)
    return None


def _open_module(module: Any) -> _Node:
    """Open a torch module: its children are parameters and buffers, which are changed in place."""
    import torch

    named = [*module.named_parameters(), *module.named_buffers()]

    def rebuild(new: list[Any]) -> Any:
        with torch.no_grad():
            for (_, tensor), value in zip(named, new, strict=True):
                if value is not None:
                    tensor.copy_(value)
        return module

    return _Node(
        [tensor.detach() for _, tensor in named], [f".{name}" for name, _ in named], rebuild
    )


def _open_registered(tree_util: Any, leaf: Any) -> _Node | None:
    """Open a type that is registered with JAX, one level deep."""
    entries, treedef = tree_util.tree_flatten_with_path(leaf, is_leaf=lambda x: x is not leaf)
    if len(entries) == 1 and entries[0][1] is leaf:
        return None
    return _Node(
        [child for _, child in entries],
        [tree_util.keystr(path) for path, _ in entries],
        lambda new: tree_util.tree_unflatten(treedef, new),
    )


def _open_dataclass(instance: Any) -> _Node:
    names = [field.name for field in dataclasses.fields(instance)]

    def rebuild(new: list[Any]) -> Any:
        made = copy.copy(instance)
        for name, value in zip(names, new, strict=True):
            # Works for frozen dataclasses too, and for fields that __init__ does not take.
            object.__setattr__(made, name, value)
        return made

    return _Node(
        [getattr(instance, name) for name in names], [f".{name}" for name in names], rebuild
    )
