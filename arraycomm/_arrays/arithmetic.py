"""Classes with arithmetic of their own: their elements mean more than their memory.

A quantity has a unit, a masked array a mask, the product of two matrices is another one than that
of arrays. A sum of their memory would be a wrong number, and a copy of it would lose what it means.
So they are refused by name, in every collective.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Final, NoReturn

import numpy as np

from arraycomm._arrays.buffer import type_name

_BINARY: Final = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("lshift", "rshift", "and", "or", "xor"),
)
_UNARY_AND_ORDER: Final = ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge")
# What a class defines to take part in the arithmetic of NumPy's arrays, or of torch's tensors. None
# means that it takes no part.
_OF_OTHERS: Final = ("__array_ufunc__", "__array_function__", "__torch_function__")
_PROTOCOLS: Final = (*_OF_OTHERS, "__array_wrap__")
_ARITHMETIC: Final = (
    *(f"__{side}{name}__" for name in _BINARY for side in ("", "r", "i")),
    *(f"__{name}__" for name in _UNARY_AND_ORDER),
    *_PROTOCOLS,
)
# Beside the frameworks: packages of plain numbers, and those whose subclasses of frameworks' arrays
# compute as plain arrays do, and only say more of them: where an image is from, or that an array
# was changed.
_PLAIN: Final = ("enum", "ml_dtypes", "torchvision", "imageio", "pyvista", "trimesh")
# NumPy's own classes in which operators mean something else.
_OTHER_OPERATORS: Final = frozenset(("matrix", "chararray"))


def has_own(kind: type, frameworks: Container[str]) -> bool:
    """Return whether a class of a framework's arrays or numbers overrides their arithmetic.

    `frameworks` are the modules of all of them.
    """
    plain = next(base for base in kind.__mro__ if _is_plain(base, frameworks))
    return any(_overrides(kind, plain, name, frameworks) for name in _ARITHMETIC)


def _is_plain(found: Any, frameworks: Container[str]) -> bool:
    module = str(getattr(found, "__module__", None) or "").partition(".")[0]
    known = module in frameworks or module in _PLAIN
    return known and getattr(found, "__name__", "") not in _OTHER_OPERATORS


def _overrides(kind: type, plain: type, name: str, frameworks: Container[str]) -> bool:
    found = _defined(kind, name)
    if found is None and name in _PROTOCOLS:
        return False
    if name == "__torch_function__" and _is_plain(found, frameworks):
        # Torch's own function for classes whose results are plain tensors.
        return False
    return found is not _defined(plain, name)


def _defined(kind: type, name: str) -> Any:
    # `getattr` would find the operators of classes themselves, such as `int | str`.
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def foreign_has_own(x: Any) -> bool:
    """Return whether an object of no framework, which has operators as any, is not for others'."""
    return any(getattr(type(x), name, None) is not None for name in _OF_OTHERS)


def refuse(x: Any, name: str) -> NoReturn:
    """Raise for an array whose class has arithmetic of its own."""
    raise TypeError(
        f"{name} is {type_name(x)}, a class with arithmetic of its own: its memory does not say "
        f"all that its elements mean (a unit, a mask, another product); pass {_plain(x, name)}, "
        "in the same unit on all ranks"
    )


def _plain(x: Any, name: str) -> str:
    """Return how to get the plain array or number."""
    if isinstance(x, np.ndarray):
        return f"the plain array, numpy.asarray({name})"
    if isinstance(x, np.generic):
        return f"the plain number, {name}.item()"
    for number in (int, float, complex):
        if isinstance(x, number):
            return f"the plain number, {number.__name__}({name})"
    if hasattr(x, "as_subclass"):
        return f"the plain array, torch.Tensor.as_subclass({name}, torch.Tensor)"
    ways = ("magnitude", "value", "to_numpy()", "compute()")
    found = [f", {name}.{way}" for way in ways if hasattr(type(x), way.removesuffix("()"))]
    return "".join(["the plain array", *found[:1]])
