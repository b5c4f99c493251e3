"""Folds that show their totals, by NumPy: up to every row, or up to the rows that are here.

A total of narrow floats is in float32, and is not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from arraycomm._dtypes import DType, Kind, kind_of
from arraycomm._folds.by_numpy import BOOLEAN, UFUNCS, Array, block_length, complex_product, divide
from arraycomm._folds.ieee import ieee_mode


def total_dtype(dtype: DType) -> DType:
    """Return the dtype of totals, which narrow floats have in float32."""
    return np.dtype(np.float32) if kind_of(dtype) is Kind.NARROW else dtype


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

    If `more` are to come, `out` gets their total, and else the result. It overlaps neither rows nor
    total.
    """
    join = _join(op, dtype)
    with np.errstate(all="ignore"), ieee_mode():
        for start in range(0, len(out), block_length(dtype)):
            block = slice(start, start + block_length(dtype))
            wide = [row[block].astype(total_dtype(dtype), copy=False) for row in rows]
            totals = wide.pop(0).copy() if total is None else total[block].copy()
            for row in wide:
                join(totals, row)
            if op == "mean" and not more:
                divide(totals, before + len(rows))
            out[block] = totals


def _join(op: str, dtype: DType) -> Callable[[Array, Array], object]:
    """Return what folds a row onto totals, in their memory."""
    kind = kind_of(dtype)
    if kind is Kind.COMPLEX and op == "prod":
        return lambda totals, row: complex_product([totals, row], totals)
    ufunc = BOOLEAN[op] if kind is Kind.BOOL else UFUNCS[op]
    return lambda totals, row: ufunc(totals, row, out=totals)


def prefixes(op: str, dtype: DType, rows: Sequence[Array], outs: Sequence[Array]) -> None:
    """Write the fold of rows 0 to k, both included, to `outs[k]`; no row overlaps any of `outs`."""
    join, wide = _join(op, dtype), total_dtype(dtype)
    with np.errstate(all="ignore"), ieee_mode():
        count_at_once = block_length(dtype)
        for start in range(0, len(rows[0]), count_at_once):
            block = slice(start, start + count_at_once)
            total = rows[0][block].astype(wide)
            outs[0][block] = total
            for count, (row, out) in enumerate(zip(rows[1:], outs[1:], strict=True), 2):
                join(total, row[block].astype(wide, copy=False))
                out[block] = _mean_of(total, count) if op == "mean" else total


def _mean_of(total: Array, count: int) -> Array:
    """Return the mean of `count` rows whose sum is `total`."""
    mean = total.copy()
    divide(mean, count)
    return mean
