"""The reductions of rows, in rank order: ((x0 ∘ x1) ∘ x2) ∘ …; narrow floats are rounded once."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from functools import lru_cache
from typing import Any

import numpy as np

from arraycomm._dtypes import DType, Kind, kind_of

Array = np.ndarray[Any, Any]
Fold = Callable[[Sequence[Array], Array], None]

# Bytes folded at a time, so that the accumulator and scratch memory stay in the level-2 cache.
_BLOCK_BYTES = 512 << 10

_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_BOOLEAN: dict[str, np.ufunc] = {
    "min": np.logical_and,
    "max": np.logical_or,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


@lru_cache(maxsize=1024)
def fold_function(op: str, dtype: DType) -> Fold:
    """Return `fold(rows, out)`, which writes the rows reduced by `op`, in their order, to `out`.

    `rows` are arrays of one shape and of `dtype`, none of which overlaps `out`. The function runs in
    the calling thread's floating-point mode and error state; `fold` sets both.
    """
    kind = kind_of(dtype)
    if kind is Kind.NARROW:
        return _narrow(op, dtype)
    if kind is Kind.COMPLEX and op == "prod":
        return _complex_product
    return _chain(_BOOLEAN[op] if kind is Kind.BOOL else _UFUNCS[op], mean=op == "mean")


def fold(op: str, dtype: DType, rows: Sequence[Array], out: Array) -> None:
    """Fold one-dimensional rows into `out`, block by block, in IEEE default mode, with no warnings."""
    step = fold_function(op, dtype)
    if in_ieee_mode():
        _quiet.run(_fold_blocks, step, rows, out)
    else:
        with ieee_mode():
            _quiet.run(_fold_blocks, step, rows, out)


class _Quiet(threading.local):
    """One context for each thread in which NumPy does not warn: entering costs less than making one."""

    def __init__(self) -> None:
        self.run = Context().run
        self.run(np.seterr, all="ignore")


_quiet = _Quiet()


def _fold_blocks(step: Fold, rows: Sequence[Array], out: Array) -> None:
    count = _block(out.dtype)
    if len(out) <= count:
        step(rows, out)
        return
    for start in range(0, len(out), count):
        block = slice(start, start + count)
        step([row[block] for row in rows], out[block])


@lru_cache(maxsize=64)
def _block(dtype: DType) -> int:
    """Return how many elements are folded at a time; narrow floats need two rows of float32 as well."""
    return _BLOCK_BYTES // (16 if kind_of(dtype) is Kind.NARROW else dtype.itemsize)


def prefixes(op: str, dtype: DType, rows: Sequence[Array], outs: Sequence[Array]) -> None:
    """Write the fold of the rows up to and including k to `outs[k]`; no row overlaps any of `outs`."""
    kind = kind_of(dtype)
    ufunc = _BOOLEAN[op] if kind is Kind.BOOL else _UFUNCS[op]
    wide = np.dtype(np.float32) if kind is Kind.NARROW else dtype
    with np.errstate(all="ignore"), ieee_mode():
        count_at_once = _block(dtype)
        for start in range(0, len(rows[0]), count_at_once):
            block = slice(start, start + count_at_once)
            total = rows[0][block].astype(wide)
            outs[0][block] = total
            for count, (row, out) in enumerate(zip(rows[1:], outs[1:], strict=True), 2):
                if kind is Kind.COMPLEX and op == "prod":
                    _complex_product([total, row[block]], total)
                else:
                    ufunc(total, row[block].astype(wide, copy=False), out=total)
                out[block] = _mean_of(total, count) if op == "mean" else total


def _mean_of(total: Array, count: int) -> Array:
    """Return the mean of `count` rows whose sum is `total`."""
    mean = total.copy()
    _divide(mean, count)
    return mean


def _divide(total: Array, count: int) -> None:
    """Divide in place, the parts of complex numbers as reals: else (inf + 0j) / n would be NaN."""
    for part in (total.real, total.imag) if total.dtype.kind == "c" else (total,):
        np.divide(part, part.dtype.type(count), out=part)


def _chain(ufunc: np.ufunc, *, mean: bool) -> Fold:
    def chain(rows: Sequence[Array], out: Array) -> None:
        if len(rows) == 1:
            np.copyto(out, rows[0])
        else:
            ufunc(rows[0], rows[1], out=out)
        for row in rows[2:]:
            ufunc(out, row, out=out)
        if mean:
            _divide(out, len(rows))

    return chain


def _complex_product(rows: Sequence[Array], out: Array) -> None:
    """(ac − bd) + (ad + bc)i, each operation rounded: NumPy's own product may fuse some."""
    real, imag = rows[0].real.copy(), rows[0].imag.copy()
    for row in rows[1:]:
        ac, bd = real * row.real, imag * row.imag
        ad, bc = real * row.imag, imag * row.real
        real, imag = ac - bd, ad + bc
    out.real, out.imag = real, imag


def _narrow(op: str, dtype: DType) -> Fold:
    """Accumulate 16- and 8-bit floats in float32, and round once at the end."""
    ufunc = _UFUNCS[op]
    widen: Callable[[Array, Array], None] = np.copyto
    round_to: Callable[[Array, Array], None] = np.copyto
    if dtype == np.float16:
        widen, round_to = _widen_half, _round_to_half

    def narrow(rows: Sequence[Array], out: Array) -> None:
        accumulator = np.empty(rows[0].shape, np.float32)
        wide = np.empty_like(accumulator)
        widen(accumulator, rows[0])
        for row in rows[1:]:
            widen(wide, row)
            ufunc(accumulator, wide, out=accumulator)
        if op == "mean":
            np.divide(accumulator, np.float32(len(rows)), out=accumulator)
        round_to(out, accumulator)

    return narrow


# Keeps the sign and the lower 28 bits: of a float16 moved up by 13 bits, not the copies of its sign.
_HALF_BITS = np.int32(-0x70000001)
_HALF_SCALE = np.float32(2.0**112)
_HALF_MAGNITUDE = np.int16(0x7FFF)
_HALF_INFINITY = 0x7C00


def _widen_half(wide: Array, half: Array) -> None:
    """Convert float16 to float32 by its bits, about four times as fast as NumPy.

    The same exponent bits mean a number 2¹¹² times smaller in float32. If the row has an infinity
    or NaN, which this does not convert, NumPy converts the whole row.
    """
    words, bits = half.view(np.int16), wide.view(np.int32)
    np.copyto(bits, words)
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, _HALF_BITS, out=bits)
    np.multiply(wide, _HALF_SCALE, out=wide)
    if words.size and np.bitwise_and(words, _HALF_MAGNITUDE).max() >= _HALF_INFINITY:
        np.copyto(wide, half)


_SIGN = np.int32(-(1 << 31))
_EXPONENT = np.int32(0x7F800000)
# The exponents, in a float32, of the least normal float16 and of the first power of two above all.
_LEAST_EXPONENT = np.int32((127 - 14) << 23)
_END_EXPONENT = (127 + 16) << 23
# Added to the bits of a power of two, makes 1.5 · 2¹³ times it.
_TO_ROUNDER = np.int32((13 << 23) + (1 << 22))


def _round_to_half(half: Array, wide: Array) -> None:
    """Round float32 to float16 by its bits, to nearest even; overwrites `wide`.

    To each number, 1.5 · 2¹³ times its power of two is added and subtracted again, which rounds away
    the bits that float16 does not have. For a subnormal float16, the power is that of the least
    normal one. If a number is too large for float16, NumPy converts the whole row.
    """
    bits, rounder = wide.view(np.int32), np.empty_like(wide)
    as_bits = rounder.view(np.int32)
    np.bitwise_and(bits, _EXPONENT, out=as_bits)
    if not as_bits.size or as_bits.max() >= _END_EXPONENT:
        np.copyto(half, wide)
        return
    sign = np.bitwise_and(bits, _SIGN, out=np.empty_like(bits))
    np.maximum(as_bits, _LEAST_EXPONENT, out=as_bits)
    np.add(as_bits, _TO_ROUNDER, out=as_bits)
    np.add(wide, rounder, out=wide)
    np.subtract(wide, rounder, out=wide)
    np.multiply(wide, 1 / _HALF_SCALE, out=wide)
    np.left_shift(bits, 3, out=bits)
    np.bitwise_or(bits, sign, out=bits)
    np.right_shift(bits, 16, out=bits)
    np.copyto(half.view(np.int16), bits, casting="unsafe")


_SMALLEST = math.ulp(0.0)
_SMALLEST_NORMAL = 2.0**-1022
_ONE = 1.0
_TIE = 2.0**-53
_ABOVE_TIE = 1.5 * 2.0**-53


def in_ieee_mode() -> bool:
    """Tell whether this thread rounds to nearest even and keeps subnormal numbers."""
    return (
        _SMALLEST * _ONE != 0.0
        and _SMALLEST_NORMAL * 0.5 != 0.0
        and _ONE + _TIE == _ONE
        and _ONE + _ABOVE_TIE != _ONE
    )


@contextmanager
def ieee_mode() -> Iterator[None]:
    """Run a block in the IEEE default mode, then restore the thread's own mode."""
    if in_ieee_mode():
        yield
        return
    library = _math_library()
    saved = ctypes.create_string_buffer(256)
    library.fegetenv(saved)
    library.fesetenv(ctypes.c_void_p(-1))
    try:
        yield
    finally:
        library.fesetenv(saved)


@lru_cache(maxsize=1)
def _math_library() -> ctypes.CDLL:
    from ctypes.util import find_library

    return ctypes.CDLL(find_library("m"))
