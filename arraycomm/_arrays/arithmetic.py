"""Classes with arithmetic of their own: their elements mean more than their memory.

A quantity has a unit, a masked array a mask. A sum of their memory would be a wrong number, and a
copy of it would lose what it means. So they are refused by name, in every collective.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NoReturn

import numpy as np

from arraycomm._arrays.buffer import type_name

# What a class defines to take part in the arithmetic of NumPy's arrays, or of torch's tensors.
_OF_NUMPY: Final = ("__array_ufunc__", "__array_function__")
_OF_TORCH: Final = "__torch_function__"
# Their classes compute as plain arrays do: torchvision's say what a tensor shows, and JAX's, which
# eager programs leave behind, carry its own dtype.
_KNOWN: Final = frozenset(("torch", "torchvision", "jax"))


def numpy_subclass_has_own(kind: type) -> bool:
    """Return whether a subclass of NumPy's arrays has arithmetic of its own."""
    own = any(getattr(kind, name) is not getattr(np.ndarray, name) for name in _OF_NUMPY)
    return own and not _is_known(kind)


def torch_subclass_has_own(kind: type) -> bool:
    """Return whether a subclass of torch's tensors has arithmetic of its own."""
    torch: Any = sys.modules["torch"]
    if _is_known(kind):
        return False
    # Torch has a parameter's results be plain tensors.
    return _function(kind) not in map(_function, (torch.Tensor, torch.nn.Parameter))


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _KNOWN


def _function(kind: Any) -> Any:
    found = getattr(kind, _OF_TORCH, None)
    return getattr(found, "__func__", found)


def foreign_has_own(x: Any) -> bool:
    """Return whether an object of no framework has arithmetic of its own."""
    return any(hasattr(type(x), name) for name in (*_OF_NUMPY, _OF_TORCH))


def refuse(x: Any, name: str) -> NoReturn:
    """Raise for an array whose class has arithmetic of its own."""
    raise TypeError(
        f"{name} is {type_name(x)}, a class with arithmetic of its own: its memory does not say "
        f"all that its elements mean (a unit, a mask); pass the plain array (such as "
        f"{name}.to_numpy(), {name}.value, {name}.magnitude, or torch.Tensor.as_subclass({name}, "
        "torch.Tensor)), and convert it to the same unit on all ranks before"
    )
