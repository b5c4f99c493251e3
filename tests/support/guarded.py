"""Elements that folds are tried with, and memory that shows what is written beside it."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

GUARD = 0x5A


def special(dtype: np.dtype[Any]) -> Array:
    """Return values at the ends of a dtype, and those that compare in a way of their own."""
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return np.array([bounds.min, bounds.max, 0, 1, bounds.max - 1], dtype)
    limits = ml_dtypes.finfo(dtype)
    tiny = [float(limits.tiny), float(limits.smallest_subnormal), float(limits.max)]
    signed = np.array([0.0, 1.0, 3.0, np.inf, np.nan, *tiny])
    with np.errstate(all="ignore"):
        return np.concatenate([signed, -signed]).astype(dtype)


@cache
def values(dtype: np.dtype[Any], count: int, seed: int) -> Array:
    """Return any bits, numbers of like magnitude, and special values among them."""
    rng = np.random.default_rng((seed, count))
    if dtype == np.bool_:
        return rng.integers(0, 2, count).astype(bool)
    if dtype.kind == "c":
        return values(np.empty(0, dtype).real.dtype, 2 * count, seed).view(dtype)
    array = rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    if dtype.kind not in "iu":
        array[::2] = rng.standard_normal(len(array[::2])).astype(dtype)
    some = rng.random(count) < 0.2
    array[some] = rng.choice(special(dtype), int(some.sum()))
    return array


def guarded(count: int, dtype: np.dtype[Any], offset: int = 0) -> tuple[Array, Array]:
    """Return elements this many bytes behind an aligned address, and all of their memory."""
    whole = np.full(count * dtype.itemsize + 256, GUARD, np.uint8)
    start = 64 + -whole.ctypes.data % 64 + offset
    return whole[start : start + count * dtype.itemsize].view(dtype), whole


def placed(array: Array, offset: int) -> Array:
    """Return a copy of an array this many bytes behind an aligned address."""
    copy, _ = guarded(len(array), array.dtype, offset)
    copy[...] = array
    return copy


def check_guard(part: Array, whole: Array) -> None:
    """Fail if anything was written beside the elements."""
    start = part.ctypes.data - whole.ctypes.data
    assert (whole[:start] == GUARD).all()
    assert (whole[start + part.nbytes :] == GUARD).all()
