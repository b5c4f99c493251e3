"""The reductions of rows by the native part, in the IEEE default mode of its own accord."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from arraycomm._dtypes import DType, name_of
from arraycomm._folds.by_numpy import Array
from arraycomm._native import compiled

# A few threads read as fast as memory can be read.
_MOST_THREADS: Final = 8


@lru_cache(maxsize=1024)
def number_of(op: str, dtype: DType) -> int:
    """Return the number by which the native part knows a reduction."""
    number: int = compiled.find_fold(op, name_of(dtype))
    if number < 0:
        raise ValueError(f"there is no fold {op!r} of {dtype}")
    return number


def fold(op: str, dtype: DType, rows: Sequence[Array], out: Array) -> None:
    """Fold contiguous rows into `out`."""
    compiled.fold(number_of(op, dtype), rows, out)


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
    """Fold contiguous rows onto an earlier total; see `by_numpy.fold_on`."""
    compiled.fold_on(number_of(op, dtype), total, before, rows, out, more)


def prefixes(op: str, dtype: DType, rows: Sequence[Array], outs: Sequence[Array]) -> None:
    """Write the fold of rows 0 to k, both included, to `outs[k]`; no row overlaps any of `outs`."""
    compiled.prefixes(number_of(op, dtype), rows, outs)


def add_rows(dtype: DType, x: Array, words: Array) -> None:
    """Add the rows of a contiguous array to the words of each column."""
    if x.size:
        compiled.add_rows(number_of("fsum", dtype), x, words, x.shape[1])


def round_words(dtype: DType, words: Array, out: Array) -> None:
    """Round the words of each element, which change, to that element of `out`."""
    compiled.round_words(number_of("fsum", dtype), out, words)


def use_threads(limit: int) -> None:
    """Let a large fold take this many threads of this process."""
    compiled.use_threads(max(1, min(limit, _MOST_THREADS)))
