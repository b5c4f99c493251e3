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
from arraycomm._collectives import exact_sums
from arraycomm._folds import by_numpy, exact, in_c
from arraycomm._native import compiled
from arraycomm.testing import given
from arraycomm.testing._arrays.dtypes import dtype_of
from arraycomm.testing._arrays.oracle import COMPLEX, FLOAT, NARROW, same_bits
from tests.support import internals
from tests.support.on_ranks import alone

Array = np.ndarray[Any, Any]

DTYPES = [dtype.name for dtype in (*NARROW, *FLOAT, *COMPLEX)]
FOLDS = [by_numpy] + [in_c] * (compiled is not None)
WORDS = [exact] + [in_c] * (compiled is not None)


def _part(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.empty(0, dtype).real.dtype


def numbers(dtype: np.dtype[Any], count: int, seed: int) -> Array:
    """Return reals that cancel, are ties or beside them, or overflow on the way, of all exponents.

    They are few, so that they meet; Hypothesis would draw most of them equal.
    """
    rng, part = np.random.default_rng(seed), _part(dtype)
    limits = ml_dtypes.finfo(part)
    any_bits = np.frombuffer(rng.bytes(6 * part.itemsize), part)
    base = 2.0 ** rng.integers(limits.minexp + limits.nmant, limits.maxexp)
    beside = base * np.array(
        [1, -1, limits.eps, limits.eps / 2, limits.eps / 4, -limits.eps / 2, 2.0**-70]
    )
    ends = np.array(
        [limits.max, -limits.max, limits.smallest_subnormal, limits.tiny, 0.0, -0.0], np.float64
    )
    with np.errstate(all="ignore"):
        pool = [any_bits, beside.astype(part), ends.astype(part)][seed % 3 :]
        pool = np.concatenate([*pool, beside.astype(part)])
        if seed % 2:
            pool = pool[np.isfinite(pool)]
    few = rng.choice(pool, rng.integers(3, 6))
    return rng.choice(np.concatenate([few, -few]), count)


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, (1 << 24) - 1)


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
    # A cast of a signalling NaN sets NumPy's flag of invalid operations.
    with np.errstate(invalid="ignore"):
        columns = rows.astype(np.float64).T.tolist()
    return np.array([rounded(column, _part(dtype)) for column in columns], _part(dtype)).view(dtype)


@alone
@given_here(
    name=st.sampled_from(DTYPES), rows=st.integers(1, 10), count=st.integers(0, 20), seed=seeds()
)
def test_a_fold_is_the_sum_of_fractions(name, rows, count, seed) -> None:
    """In any order of the rows, and so are the folds of the first ones."""
    dtype = dtype_of(name)
    width = 2 if dtype in COMPLEX else 1
    table = numbers(dtype, rows * count * width, seed).reshape(rows, count * width)
    arrays = [row.view(dtype) for row in table.copy()]
    for way in FOLDS:
        outs = [np.empty(count, dtype) for _ in arrays]
        way.prefixes("fsum", dtype, arrays, outs)
        way.fold("fsum", dtype, arrays, whole := np.empty(count, dtype))
        for last, out in enumerate([*outs, whole], 1):
            assert same_bits(out, exactly(table[: min(last, rows)], dtype)), way


@alone
@given_here(
    name=st.sampled_from(DTYPES),
    columns=st.integers(1, 2) | st.integers(1, 700),
    rows=st.sampled_from((0, 1, 3, 130, 1_500, 9_000)),
    seed=seeds(),
)
def test_words_are_the_same_integers_in_c(name, columns, rows, seed) -> None:
    """Whatever the rows of a column are, and so are the roundings; NaN counts for infinities beside it.

    What lies behind the words, and behind the sums, stays as it is.
    """
    dtype, count = dtype_of(name), min(rows, 90_000 // columns) * columns
    x = numbers(dtype, count * (2 if dtype in COMPLEX else 1), seed)
    x = x.view(dtype).reshape(-1, columns)
    found = []
    for way in WORDS:
        memory = np.zeros((2, columns * exact.words_of(dtype)), exact.WORD)
        out = np.ones((2, columns), dtype)
        way.add_rows(dtype, x, words := memory[0])
        table = words.reshape(-1, exact.words_of(np.dtype(np.float64)))
        table[table[:, -3] > 0, -3:] = (1, 0, 0)
        kept = memory.tobytes()
        way.round_words(dtype, words, out[0])
        found.append((kept, out))
    assert all(kept == found[0][0] and same_bits(out, found[0][1]) for kept, out in found)


@alone
@pytest.mark.parametrize("more", [0, 1, 1 << 21])
def test_any_number_of_equal_numbers_may_be_added_up(more) -> None:
    """All bits of their fractions are set, which is the most that a sum of them has to hold."""
    count, one = (1 << 21) + more, np.nextafter(2.0, 0)
    for way in WORDS:
        words, out = np.zeros(exact.words_of(np.dtype(np.float64)), exact.WORD), np.empty(1)
        way.add_rows(out.dtype, np.full((count, 1), one), words)
        way.round_words(out.dtype, words, out)
        assert out[0] == rounded([float(count), -count * 2.0**-52, float(count)], out.dtype)


@pytest.fixture(params=["whole", "in pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the result comes with the headers, or element by element, and of a few rows at a time."""
    if request.param == "in pieces":
        monkeypatch.setattr(exact_sums, "_PIECE", 1)
        monkeypatch.setattr(exact_sums, "_COPIED", 4)
    return str(request.param)


@given(
    name=st.sampled_from(DTYPES),
    rows=st.integers(0, 40),
    columns=st.integers(1, 12),
    seed=seeds(),
    slots=st.sampled_from(((0, 4 << 10, 4 << 10), internals.slots())),
)
@pytest.mark.usefixtures("pieces")
def test_rows_may_be_spread_over_ranks_in_any_way(comm, name, rows, columns, seed, slots) -> None:
    """In any order; ranks may have no rows. The words of some columns do not fit into a small slot."""
    with internals.small_limits(comm, slots, 1 << 10):
        comm = comm.dup()
    dtype, rng = dtype_of(name), np.random.default_rng(seed)
    width = 2 if dtype in COMPLEX else 1
    parts = numbers(dtype, rows * columns * width, seed).reshape(rows, columns * width)
    table, want = parts.view(dtype), exactly(parts, dtype)
    whole = exactly(parts.reshape(-1, width), dtype)
    for _ in range(2):
        spread = table[rng.permutation(len(table))]
        mine = spread[rng.integers(0, comm.size, len(table)) == comm.rank]
        for found in (ac.fsum(mine, 0, comm=comm), ac.fsum(mine.T, -1, comm=comm)):
            assert same_bits(found, want)
        for x in (mine, mine.T[:, ::-1], mine[..., None]):
            assert same_bits(ac.fsum(x, comm=comm).reshape(1), whole)
