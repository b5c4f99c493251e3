"""Exact sums by NumPy, rounded once: of the rows of a fold, and of columns of any length.

A fold adds its rows up in pairs of doubles, a sum and what its additions have lost (Knuth's
TwoSum). Both are exact unless the second is rounded as well, or something is not finite. The few
elements of which that is so are added up in integers.

A column is added up in words: an integer of 67 of them, of 32 bits each but for the last, in units
of 2⁻¹⁰⁷⁴; then come the counts of NaN, of inf and of −inf. Those of several ranks are added up word
by word.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from arraycomm._dtypes import DType, Kind, kind_of
from arraycomm._folds.float16 import convert
from arraycomm._folds.ieee import ieee_mode

Array = np.ndarray[Any, Any]

_UNIT: Final = 1074
_SUM_WORDS: Final = 67
_NANS, _INFINITIES, _MINUS_INFINITIES = range(_SUM_WORDS, _SUM_WORDS + 3)
WORD: Final = np.dtype(np.int64)
# Elements that are added to words at a time, of which few fill no word.
_BLOCK: Final = 1 << 16


def words_of(dtype: DType) -> int:
    """Return the words of the exact sum of a column; a complex number has two columns."""
    return (_SUM_WORDS + 3) * (1 + (kind_of(dtype) is Kind.COMPLEX))


def fold_exactly(dtype: DType, rows: Sequence[Array], out: Array) -> None:
    """Fold one-dimensional rows of one place after another into `out`."""
    sums, *others = map(_reals, rows)
    all_lost, failed = np.zeros((2, len(sums)))
    for row in others:
        sums, lost = _add(sums, row)
        all_lost, rest = _add(all_lost, lost)
        failed += np.abs(rest)
    found, left = _add(sums, all_lost)
    narrower = _real_dtype(dtype) != np.float64
    if narrower:
        found = _made_odd(found, left)
    for place in np.flatnonzero(~(failed == 0)):
        found[place] = _sum([float(_reals(row)[place]) for row in rows], odd=narrower)
    _narrow(found, out)


def add_rows(dtype: DType, x: Array, words: Array) -> None:
    """Add the rows of an array to the words of each column, one row of `words` for each."""
    if not x.size:
        return
    reals = _real_dtype(dtype)
    columns = np.ascontiguousarray(x).view(reals) if kind_of(dtype) is Kind.COMPLEX else x
    table = words.reshape(columns.shape[1], -1)
    step = max(_BLOCK // len(table), 1)
    with np.errstate(all="ignore"), ieee_mode():
        for start in range(0, len(columns), step):
            _add_block(columns[start : start + step].astype(np.float64), table)
            _carry(table)


def round_words(dtype: DType, words: Array, out: Array) -> None:
    """Round the words of each element to that element of `out`."""
    part = _real_dtype(dtype)
    table = words.reshape(-1, _SUM_WORDS + 3)
    found = [_rounded(row.tolist(), odd=part != np.float64) for row in table]
    with np.errstate(all="ignore"), ieee_mode():
        _narrow(np.array(found, np.float64), out)


def _real_dtype(dtype: DType) -> DType:
    """Return the dtype of the parts of a complex number, or that of a real one."""
    return np.empty(0, dtype).real.dtype if kind_of(dtype) is Kind.COMPLEX else dtype


def _reals(row: Array) -> Array:
    """Return the elements, or their parts, as doubles of their own."""
    return np.ascontiguousarray(row).view(_real_dtype(row.dtype)).astype(np.float64)


def _add(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a rounded sum, and what it has lost; NaN if the sum is not finite."""
    total = a + b
    added = total - a
    return total, (a - (total - added)) + (b - added)


def _made_odd(rounded: Array, left: Array) -> Array:
    """Return, of the two floats beside a number that was rounded, the one that is odd.

    It is rounded to a format of fewer bits as the number itself would be.
    """
    bits = rounded.view(np.dtype(f"i{rounded.itemsize}")).copy()
    inexact = ((left > 0) | (left < 0)) & (bits & 1 == 0)
    bits += np.where(inexact, np.where((left > 0) == (rounded > 0), 1, -1), 0).astype(bits.dtype)
    return bits.view(rounded.dtype)


def _narrow(found: Array, out: Array) -> None:
    """Round doubles, which are odd unless the dtype has as many bits, to elements."""
    into = out.view(_real_dtype(out.dtype))
    if kind_of(out.dtype) is not Kind.NARROW:
        into[...] = found
        return
    wide = found.astype(np.float32)
    convert(_made_odd(wide, found - wide), into)


def _sum(numbers: Iterable[float], *, odd: bool) -> float:
    """Return the sum of numbers, rounded to nearest even or to odd."""
    finite, special = 0, 0.0
    for number in numbers:
        if math.isfinite(number):
            top, bottom = number.as_integer_ratio()
            finite += top * ((1 << _UNIT) // bottom)
        else:
            special += number
    return special or _round(finite, odd=odd)


def _rounded(words: list[int], *, odd: bool) -> float:
    nans, infinities, minus_infinities = words[_SUM_WORDS:]
    if nans or (infinities and minus_infinities):
        return math.nan
    if infinities or minus_infinities:
        return math.inf if infinities else -math.inf
    total = sum(word << 32 * place for place, word in enumerate(words[:_SUM_WORDS]))
    return _round(total, odd=odd)


def _round(total: int, *, odd: bool) -> float:
    """Round an integer in units of 2⁻¹⁰⁷⁴; 0 becomes +0."""
    more = max(abs(total).bit_length() - 53, 0)
    significand, rest = abs(total) >> more, abs(total) & ((1 << more) - 1)
    if odd:
        significand |= rest != 0
    else:
        twice = 2 * rest
        significand += twice > 1 << more or (more and twice == 1 << more and significand & 1)
    try:
        size = math.ldexp(significand, more - _UNIT)
    except OverflowError:
        size = math.inf
    return -size if total < 0 else size


def _add_block(reals: Array, words: Array) -> None:
    bits = reals.reshape(-1).view(np.int64)
    columns = np.broadcast_to(np.arange(len(words)), reals.shape).reshape(-1)
    exponent, fraction = bits >> 52 & 0x7FF, bits & (1 << 52) - 1
    special = exponent == 0x7FF
    if special.any():
        count = np.where(bits < 0, _MINUS_INFINITIES, _INFINITIES)
        count[fraction != 0] = _NANS
        np.add.at(words, (columns[special], count[special]), 1)
    significand = np.where(special, 0, fraction | (exponent != 0).astype(np.int64) << 52)
    place = np.where(special, 0, exponent - (exponent != 0))
    shift, sign = place % 32, np.where(bits < 0, -1, 1)
    low = (significand & 0xFFFFFFFF) << shift
    high = (significand >> 32) << shift
    for part, offset in (
        (low & 0xFFFFFFFF, 0),
        (low >> 32, 1),
        (high & 0xFFFFFFFF, 1),
        (high >> 32, 2),
    ):
        np.add.at(words, (columns, place // 32 + offset), sign * part)


def _carry(words: Array) -> None:
    """Let each word but the last have 32 bits and no sign."""
    for place in range(_SUM_WORDS - 1):
        over = words[:, place] >> 32
        words[:, place] &= 0xFFFFFFFF
        words[:, place + 1] += over
