"""Sums, means and weights of gradients, by their own array namespace and on their device.

What has no such namespace is read as NumPy's: numbers, MLX's arrays, plain DLPack objects. The bits
are the same either way, apart from subnormal numbers in JAX, which counts them as zero on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from array_api_compat import (
    array_namespace,
    is_array_api_obj,
    is_cupy_array,
    is_cupy_namespace,
    is_jax_array,
    is_jax_namespace,
    is_torch_array,
    is_torch_namespace,
)

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.exchange import exchange
from arraycomm._arrays.frameworks import BY_NAME as FRAMEWORKS
from arraycomm._arrays.frameworks.jax import check_jax
from arraycomm._arrays.frameworks.torch import check_storage, torch_refusal, without_history
from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import result_prototype, view
from arraycomm._dtypes import BY_NAME, DType, DTypeInfo, Kind, kind_of

# What an array's own namespace must have.
_FUNCTIONS: Final = ("astype", "full_like")
_NOTHING: Final = nullcontext()


class Operand(NamedTuple):
    """An array as arithmetic takes it."""

    # Of the framework's own namespace, or of NumPy.
    array: Any
    xp: Any
    # NumPy's, whatever the namespace, and the namespace's.
    dtype: DType
    own: Any
    # What results must be like, if the namespace is not the caller's own.
    like: BufferView | None


def operand_of(x: Any, name: str) -> Operand:
    """Return an array or a number for arithmetic on its device; raise for what cannot be read."""
    xp = _own_namespace(x, name)
    dtype = None if xp is None else _own_dtype(xp, x.dtype)
    if dtype is None:
        like = view(x, name)
        return Operand(like.array, np, like.dtype, like.dtype, like)
    array = x.detach().resolve_conj().resolve_neg() if is_torch_array(x) else x
    return Operand(array, xp, dtype, x.dtype, None)


def widened(x: Operand, *, copy: bool = True) -> Any:
    """Return the elements in the dtype of their sums: float32 for floats of 16 and 8 bits."""
    narrow = kind_of(x.dtype) is Kind.NARROW
    return _cast(x.array, x.xp, x.xp.float32 if narrow else x.own, copy=copy)


def added(total: Any, x: Operand) -> Any:
    """Return the sum of wide gradients and another gradient, which may be elsewhere."""
    wide = widened(x, copy=False)
    if not _are_together(total, wide):
        total = exchange(total, wide)
    return _on_parts(x, lambda a, b: a + b, total, wide)


def divided(wide: Any, x: Operand, by: float) -> Any:
    """Return the wide gradients of an operand divided by a number, rounded once."""
    return _on_parts(x, lambda parts: parts / _filled(parts, x.xp, by), wide)


def multiplied(wide: Any, x: Operand, by: float) -> Any:
    """Return the wide gradients of an operand times a number, which is rounded to their dtype."""
    return _on_parts(x, lambda parts: parts * _filled(parts, x.xp, by), wide)


def _filled(parts: Any, xp: Any, number: float) -> Any:
    """Return a number as an operand of the array's dtype.

    It has the array's shape, because some frameworks do not divide by a number alone: they multiply
    by its reciprocal, which rounds twice.
    """
    return parts.dtype.type(number) if xp is np else xp.full_like(parts, number)


def _on_parts(x: Operand, compute: Callable[..., Any], *arrays: Any) -> Any:
    """Compute with real numbers: by parts of complex ones, so that infinities stay as they are."""
    first = arrays[0]
    with _current(first):
        if kind_of(x.dtype) is not Kind.COMPLEX:
            return compute(*arrays)
        flat = [array.ravel() for array in arrays]
        parts = compute(*(array.view(array.real.dtype) for array in flat))
        return parts.view(first.dtype).reshape(first.shape)


def restored(wide: Any, x: Operand) -> Any:
    """Return the wide gradients of an operand as an array of the caller's dtype and framework."""
    if x.like is None:
        return _cast(wide, x.xp, x.own)
    # What NumPy computes without dimensions is a scalar.
    return to_framework(_cast(np.asarray(wide), x.xp, x.own), x.like)


def _cast(array: Any, xp: Any, dtype: Any, *, copy: bool = False) -> Any:
    with _current(array):
        if xp is np:
            # Its function of this name is younger than the oldest NumPy supported.
            return array.astype(dtype, copy=copy)
        return xp.astype(array, dtype, copy=copy)


def _own_namespace(x: Any, name: str) -> Any:
    """Return an array's own namespace, None if it has none, or is NumPy's anyway.

    Raises what `view` raises, without reading the elements.
    """
    if isinstance(x, np.ndarray) or not (is_array_api_obj(x) and hasattr(x, "__dlpack__")):
        return None
    if type(x).__module__.partition(".")[0] == "mlx":
        # Its namespace is not that of the array API yet: `astype` has no `copy`.
        return None
    if is_torch_array(x):
        if x.requires_grad:
            without_history(x, name)
        if torch_refusal(x) is not None:
            return None
        check_storage(x, name)
    elif is_jax_array(x):
        # Refuses tracers.
        result_prototype(x, name)
        check_jax(x, name)
    with suppress(AttributeError):  # a namespace need not have a name
        return array_namespace(x)
    return None


def _own_dtype(xp: Any, dtype: Any) -> DType | None:
    """Return NumPy's dtype for one whose namespace does all the arithmetic; None for others."""
    row = _row_of(xp, dtype)
    if row is None:
        return None
    # Without its 64-bit mode, JAX makes no further array of 64 bits.
    if is_jax_namespace(xp) and row.dtype.itemsize > FRAMEWORKS["jax"].widest_float().itemsize:
        return None
    return row.dtype


@lru_cache(maxsize=256)
def _row_of(xp: Any, dtype: Any) -> DTypeInfo | None:
    row = BY_NAME.get(str(dtype).rpartition(".")[2])
    if row is None or not all(hasattr(xp, function) for function in _FUNCTIONS):
        return None
    # Other namespaces have no way from parts to complex numbers that keeps infinities.
    if row.kind is Kind.COMPLEX and not (is_torch_namespace(xp) or is_cupy_namespace(xp)):
        return None
    return row


def _are_together(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (isinstance(a, np.ndarray | np.generic) or a.device == b.device)


def _current(x: Any) -> AbstractContextManager[Any]:
    """Compute silently in NumPy, and on the array's device in CuPy, which does not by itself."""
    if isinstance(x, np.ndarray | np.generic):
        return np.errstate(all="ignore")
    device: AbstractContextManager[Any] = x.device if is_cupy_array(x) else _NOTHING
    return device
