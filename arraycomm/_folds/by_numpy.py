"""The reductions of rows by NumPy, in the same order and with the same bits as those in C."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import lru_cache
from typing import Any

import numpy as np

from arraycomm._dtypes import DType, Kind, kind_of
from arraycomm._folds.float16 import round_to_half, widen_half
from arraycomm._folds.ieee import ieee_mode, in_ieee_mode

Array = np.ndarray[Any, Any]
Fold = Callable[[Sequence[Array], Array], None]

# Bytes folded at a time, so that the accumulator and scratch memory stay in the level-2 cache.
_BLOCK_BYTES = 512 << 10

UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
BOOLEAN: dict[str, np.ufunc] = {
    "min": np.logical_and,
    "max": np.logical_or,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


@lru_cache(maxsize=1024)
def fold_function(op: str, dtype: DType) -> Fold:
    """Return `fold(rows, out)`, which writes the rows reduced by `op`, in their order, to `out`.

    `rows` are arrays of one shape and of `dtype`, none of which overlaps `out`. The function runs
    in the calling thread's floating-point mode and error state; `fold` sets both.
    """
    kind = kind_of(dtype)
    if kind is Kind.NARROW:
        return _narrow(op, dtype)
    if kind is Kind.COMPLEX and op == "prod":
        return complex_product
    return _chain(BOOLEAN[op] if kind is Kind.BOOL else UFUNCS[op], mean=op == "mean")


def fold(op: str, dtype: DType, rows: Sequence[Array], out: Array) -> None:
    """Fold one-dimensional rows into `out`, by blocks, in IEEE default mode, without warnings."""
    step = fold_function(op, dtype)
    if in_ieee_mode():
        _quiet.run(_fold_blocks, step, rows, out)
    else:
        with ieee_mode():
            _quiet.run(_fold_blocks, step, rows, out)


class _Quiet(threading.local):
    """One context a thread in which NumPy does not warn: entering it is cheaper than making it."""

    def __init__(self) -> None:
        self.run = Context().run
        self.run(np.seterr, all="ignore")


_quiet = _Quiet()


def _fold_blocks(step: Fold, rows: Sequence[Array], out: Array) -> None:
    count = block_length(out.dtype)
    if len(out) <= count:
        step(rows, out)
        return
    for start in range(0, len(out), count):
        block = slice(start, start + count)
        step([row[block] for row in rows], out[block])


@lru_cache(maxsize=64)
def block_length(dtype: DType) -> int:
    """Return the number of elements folded at a time; narrow floats need two float32 rows too."""
    return _BLOCK_BYTES // (16 if kind_of(dtype) is Kind.NARROW else dtype.itemsize)


def divide(total: Array, count: int) -> None:
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
            divide(out, len(rows))

    return chain


def complex_product(rows: Sequence[Array], out: Array) -> None:
    """(ac − bd) + (ad + bc)i, each operation rounded: NumPy's own product may fuse some."""
    real, imag = rows[0].real.copy(), rows[0].imag.copy()
    for row in rows[1:]:
        ac, bd = real * row.real, imag * row.imag
        ad, bc = real * row.imag, imag * row.real
        real, imag = ac - bd, ad + bc
    out.real, out.imag = real, imag


def _narrow(op: str, dtype: DType) -> Fold:
    """Accumulate 16- and 8-bit floats in float32, and round once at the end."""
    ufunc, by_bits = UFUNCS[op], dtype == np.float16
    widen, round_to = (widen_half, round_to_half) if by_bits else (np.copyto, np.copyto)

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


def use_threads(limit: int) -> None:
    """Do nothing: NumPy's loops take one thread."""
