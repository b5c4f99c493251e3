"""The reductions of rows by NumPy, in the same order and with the same bits as those in C.

A total of narrow floats is in float32, and is rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arraycomm._dtypes import DType, Kind, kind_of
from arraycomm._folds.exact import fold_exactly
from arraycomm._folds.float16 import convert
from arraycomm._folds.ieee import ieee_mode

Array = np.ndarray[Any, Any]

# Bytes folded at a time, so that the total and scratch memory stay in the level-2 cache.
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


def total_dtype(dtype: DType) -> DType:
    """Return the dtype of totals, which narrow floats have in float32."""
    return np.dtype(np.float32) if kind_of(dtype) is Kind.NARROW else dtype


def goes_on(op: str) -> bool:
    """Return whether a fold can go on from a total: an exact sum takes all rows at once."""
    return op != "fsum"


def fold(op: str, dtype: DType, rows: Sequence[Array], out: Array) -> None:
    """Fold one-dimensional rows into `out`, which overlaps none of them."""
    fold_on(op, dtype, None, 0, rows, out, more=False)


def fold_on(
    op: str,
    dtype: DType,
    total: Array | None,
    before: int,
    rows: Sequence[Array],
    out: Array,
    *,
    more: bool,
) -> None:
    """Fold rows onto the `total` of as many rows `before`, or begin with them if it is None.

    If `more` are to come, `out` gets their total, and else the result. It overlaps no row.
    """
    count, wide, length = before + len(rows), total_dtype(dtype), block_length(dtype)
    if not goes_on(op) and (more or total is not None):
        raise ValueError("an exact sum takes all rows at once")
    rows = rows if total is None else [total, *rows]
    with np.errstate(all="ignore"), ieee_mode():
        for start in range(0, len(out), length):
            first, *others = (row[start : start + length] for row in rows)
            part = out[start : start + length]
            if not goes_on(op):
                fold_exactly(dtype, [first, *others], part)
                continue
            join = _join(op, dtype)
            folded = part if part.dtype == wide else np.empty(part.shape, wide)
            convert(first, folded)
            for row in others:
                join(folded, _widened(row, wide))
            if op == "mean" and not more:
                divide(folded, count)
            if folded is not part:
                convert(folded, part)


def prefixes(op: str, dtype: DType, rows: Sequence[Array], outs: Sequence[Array]) -> None:
    """Write the fold of rows 0 to k, both included, to `outs[k]`; no row overlaps any of `outs`."""
    if not goes_on(op):
        for last, out in enumerate(outs, 1):
            fold(op, dtype, rows[:last], out)
        return
    total = np.empty(len(rows[0]), total_dtype(dtype))
    for before, (row, out) in enumerate(zip(rows, outs, strict=True)):
        fold_on(op, dtype, total if before else None, before, [row], total, more=True)
        fold_on(op, dtype, total, before + 1, [], out, more=False)


def block_length(dtype: DType) -> int:
    """Return the number of elements folded at a time; narrow floats need two float32 rows too."""
    return _BLOCK_BYTES // (16 if kind_of(dtype) is Kind.NARROW else dtype.itemsize)


def _join(op: str, dtype: DType) -> Callable[[Array, Array], object]:
    """Return what folds a row onto a total, in its memory."""
    kind = kind_of(dtype)
    if kind is Kind.COMPLEX and op == "prod":
        return _multiply_complex
    ufunc = BOOLEAN[op] if kind is Kind.BOOL else UFUNCS[op]
    return lambda total, row: ufunc(total, row, out=total)


def _multiply_complex(total: Array, row: Array) -> None:
    """(ac − bd) + (ad + bc)i, each operation rounded: NumPy's own product may fuse some."""
    ac, bd = total.real * row.real, total.imag * row.imag
    ad, bc = total.real * row.imag, total.imag * row.real
    total.real, total.imag = ac - bd, ad + bc


def _widened(row: Array, wide: DType) -> Array:
    if row.dtype == wide:
        return row
    converted = np.empty(row.shape, wide)
    convert(row, converted)
    return converted


def divide(total: Array, count: float) -> None:
    """Divide in place, the parts of complex numbers as reals: else (inf + 0j) / n would be NaN."""
    for part in (total.real, total.imag) if total.dtype.kind == "c" else (total,):
        np.divide(part, part.dtype.type(count), out=part)


def use_threads(limit: int) -> None:
    """Do nothing: NumPy's loops take one thread."""
