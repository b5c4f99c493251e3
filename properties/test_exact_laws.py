"""Laws of exact sums: they are what fractions give, in any order, and however rows are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given as given_here
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import Communicator
from arraycomm._collectives import exact_sums
from arraycomm._folds import by_numpy, exact, in_c
from arraycomm._native import compiled
from arraycomm.testing import given
from arraycomm.testing._arrays.dtypes import dtype_of
from arraycomm.testing._arrays.oracle import COMPLEX, FLOAT, NARROW, same_bits

Array = np.ndarray[Any, Any]

DTYPES = [dtype.name for dtype in (*NARROW, *FLOAT, *COMPLEX)]
FOLDS = [by_numpy] + [in_c] * (compiled is not None)
WORDS = [exact] + [in_c] * (compiled is not None)


def _part(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.empty(0, dtype).real.dtype


@st.composite
def numbers(draw: st.DrawFn, dtype: np.dtype[Any], most: int) -> Array:
    """Draw numbers that cancel, are ties, or overflow on the way: few of all exponents, and their negatives."""
    part = _part(dtype)
    limits = ml_dtypes.finfo(part)
    any_bits = st.integers(0, (1 << 8 * part.itemsize) - 1).map(
        lambda bits: np.array(bits, f"u{part.itemsize}").view(part)
    )
    lowest = round(math.log2(limits.smallest_subnormal))
    power = st.integers(lowest, round(math.log2(float(limits.max))) - 1).map(
        lambda n: np.array(2.0**n, part)
    )
    ends = st.sampled_from(
        [limits.max, limits.smallest_subnormal, limits.tiny, limits.eps, limits.eps / 2, 1, 0]
    )
    one = any_bits | power | ends.map(lambda end: np.array(end, part))
    if draw(st.booleans()):
        one = one.filter(lambda number: bool(np.isfinite(number)))
    pool = np.array(draw(st.lists(one, min_size=1, max_size=5)), part)
    pool = np.concatenate([pool, -pool])
    places = draw(st.lists(st.integers(0, len(pool) - 1), max_size=most))
    return pool[places]


def rounded(values: Sequence[float], dtype: np.dtype[Any]) -> Array:
    """Round the sum of fractions to a real dtype, as an integer number of its last places."""
    special = [value for value in values if not math.isfinite(value)]
    if special:
        return np.array(sum(special)).astype(dtype)
    total, limits = sum(map(Fraction, values), Fraction(0)), ml_dtypes.finfo(dtype)
    exponent = math.frexp(float(limits.smallest_subnormal))[1] - 1
    while abs(total) >= Fraction(2) ** (exponent + limits.nmant + 1):
        exponent += 1
    # `round` takes the even one of two that are equally near.
    found = round(total / Fraction(2) ** exponent) * Fraction(2) ** exponent
    if abs(found) > Fraction(float(limits.max)):
        return np.array(math.inf if found > 0 else -math.inf).astype(dtype)
    return np.array(float(found)).astype(dtype)


def exactly(rows: Array, dtype: np.dtype[Any]) -> Array:
    """Return the exact sum of each column of reals, as elements of a dtype."""
    columns = rows.astype(np.float64).T.tolist()
    return np.array([rounded(column, _part(dtype)) for column in columns], _part(dtype)).view(dtype)


@given_here(name=st.sampled_from(DTYPES), rows=st.integers(1, 7), data=st.data())
def test_a_fold_is_the_sum_of_fractions(name, rows, data) -> None:
    """In every order of the rows, and so are the folds of the first ones."""
    dtype = dtype_of(name)
    reals = data.draw(numbers(dtype, 60))
    width = 2 if dtype in COMPLEX else 1
    count = len(reals) // (rows * width)
    table = reals[: rows * count * width].reshape(rows, count * width)
    table = table[data.draw(st.permutations(range(rows)))]
    arrays = [row.view(dtype) for row in table.copy()]
    for way in FOLDS:
        outs = [np.empty(count, dtype) for _ in arrays]
        way.prefixes("fsum", dtype, arrays, outs)
        way.fold("fsum", dtype, arrays, whole := np.empty(count, dtype))
        for last, out in enumerate([*outs, whole], 1):
            assert same_bits(out, exactly(table[: min(last, rows)], dtype)), way


@given_here(
    name=st.sampled_from(DTYPES),
    columns=st.integers(1, 700),
    rows=st.integers(0, 1_500),
    data=st.data(),
)
def test_words_are_the_same_integers_in_c(name, columns, rows, data) -> None:
    """Of the few elements that are drawn, repeated, and so are the roundings."""
    dtype, count = dtype_of(name), min(rows, 90_000 // columns) * columns
    pool = data.draw(numbers(dtype, 20).filter(lambda drawn: len(drawn) > 1))
    order = np.random.default_rng(count).integers(0, len(pool), 2 * count)
    x = pool[order] if dtype in COMPLEX else pool[order[:count]]
    x = x.view(dtype).reshape(-1, columns)
    found = []
    for way in WORDS:
        words, out = np.zeros(columns * exact.words_of(dtype), exact.WORD), np.empty(columns, dtype)
        way.add_rows(dtype, x, words)
        kept = words.tobytes()
        way.round_words(dtype, words, out)
        found.append((kept, out))
    assert all(kept == found[0][0] and same_bits(out, found[0][1]) for kept, out in found)


@st.composite
def tables(draw: st.DrawFn) -> Array:
    """Draw rows of a few columns; there may be none."""
    dtype = dtype_of(draw(st.sampled_from(DTYPES)))
    reals, width = (
        draw(numbers(dtype, 60)),
        draw(st.integers(1, 3)) * (2 if dtype in COMPLEX else 1),
    )
    return reals[: len(reals) // width * width].reshape(-1, width).view(dtype)


@pytest.fixture(params=["whole", "in pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the result comes with the headers, or element by element, and of a few rows at a time."""
    if request.param == "in pieces":
        monkeypatch.setattr(exact_sums, "_PIECE", 1)
        monkeypatch.setattr(exact_sums, "_COPIED", 4)
    return str(request.param)


@given(table=tables(), seed=st.integers(0, 99))
@pytest.mark.usefixtures("pieces")
def test_rows_may_be_spread_over_ranks_in_any_way(comm: Communicator, table, seed) -> None:
    """In any order; ranks may have no rows."""
    dtype, rng = table.dtype, np.random.default_rng(seed)
    parts = np.ascontiguousarray(table).view(_part(dtype))
    want = exactly(parts, dtype)
    whole = exactly(parts.reshape(-1, parts.shape[1] // table.shape[1]), dtype)
    for _ in range(2):
        spread = table[rng.permutation(len(table))]
        mine = spread[rng.integers(0, comm.size, len(table)) == comm.rank]
        columns = mine.T
        for found in (ac.fsum(mine, 0, comm=comm), ac.fsum(columns, -1, comm=comm)):
            assert same_bits(found, want)
        for x in (mine, columns[:, ::-1], mine[..., None]):
            assert same_bits(ac.fsum(x, comm=comm).reshape(1), whole)
