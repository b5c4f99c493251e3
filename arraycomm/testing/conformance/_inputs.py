"""The inputs of laws, of which every rank knows all.

A law compares a rank's result with what follows from the inputs of all ranks. So every rank gets
the descriptions of all inputs: asking the other ranks would rely on what is being tested.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy as Strategy

from arraycomm._arrays.buffer import Array
from arraycomm._dtypes import OPS as ALL_OPS
from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays.array_case import ArrayCase
from arraycomm.testing._arrays.dtypes import dtype_of
from arraycomm.testing._arrays.layouts import LAYOUTS, Shape
from arraycomm.testing._arrays.oracle import OPS, expected, family
from arraycomm.testing._arrays.rank_values import RankValues, rank_count
from arraycomm.testing._ranks.transfer import dump, load

T = TypeVar("T")


class Sealed(Generic[T]):
    """A drawn value that reaches every rank as it was drawn, including the other ranks' values."""

    def __init__(self, value: T) -> None:
        # Values of `per_rank` stay `RankValues` here, and descriptions of arrays `ArrayCase`.
        self.value = value

    def on(self, rank: int) -> Any:
        """Return the value as it would arrive on a rank; each call makes a new one."""
        return load(dump(self.value), rank)

    def __reduce__(self) -> Any:
        # As bytes, so that `dump` does not replace the values in it by one rank's.
        return _unseal, (type(self), pickle.dumps(self.value, pickle.HIGHEST_PROTOCOL))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"


def _unseal(kind: type[Sealed[Any]], data: bytes) -> Sealed[Any]:
    return kind(pickle.loads(data))


class Arrays(Sealed[RankValues[ArrayCase]]):
    """One array for each rank; every rank knows all of them."""

    def elements(self) -> list[Array]:
        """Return the elements of all ranks' arrays, in rank order."""
        return [case.numpy() for case in self.value]

    def build(self, rank: int) -> Any:
        """Return a new array with the contents, layout and framework of a rank's."""
        return self.value[rank].build()


class Reduction(NamedTuple):
    """A reduction, and one array for each rank that it can be applied to."""

    # One of the named ones.
    op: Any
    arrays: Arrays

    def fold(self) -> Array:
        """Return the result of the reduction over all ranks."""
        return expected(self.arrays.elements(), self.op)


def sealed(strategy: Strategy[T]) -> Strategy[Sealed[T]]:
    """Draw a value of which every rank gets all ranks' parts."""
    return strategy.map(Sealed)


def arrays(*args: Any, **kwargs: Any) -> Strategy[Arrays]:
    """Draw one array for each rank, as `rank_arrays` does."""
    return ranked.rank_arrays(*args, **kwargs).map(Arrays)


@st.composite
def dtypes_and_ops(
    draw: st.DrawFn, ops: Sequence[str] | None = None, families: Sequence[str] | None = None
) -> tuple[str, str]:
    """Draw a reduction, and a dtype that has it; all reductions and families are equally likely.

    `ranked.reductions` would draw integers most of the time, since most dtypes are integers.
    """
    kinds = tuple(OPS) if families is None else families
    among = ALL_OPS if ops is None else ops
    op = draw(st.sampled_from([op for op in among if any(op in OPS[kind] for kind in kinds)]))
    kind = draw(st.sampled_from([kind for kind in kinds if op in OPS[kind]]))
    return draw(ranked.dtypes(op).filter(lambda name: family(dtype_of(name)) == kind)), op


@st.composite
def reductions(
    draw: st.DrawFn,
    /,
    ops: Sequence[str] | None = None,
    families: Sequence[str] | None = None,
    **choices: Any,
) -> Reduction:
    """Draw a reduction, and its arrays as `rank_arrays` does with `choices`."""
    dtype, op = draw(dtypes_and_ops(ops, families))
    return Reduction(op, draw(arrays(dtype, **choices)))


def small_and_long() -> Strategy[Shape]:
    """Draw shapes of few elements, and of one dimension with too many elements for a header."""
    long = st.integers(1, 9_000).map(lambda count: (count,))
    return ranked.shapes(large=False) | _many_dimensions() | long


def moved_shapes() -> Strategy[Shape]:
    """Draw shapes of all kinds, and of too many elements for a header as often."""
    long = st.sampled_from((5_000, 20_000)).map(lambda count: (count,))
    return ranked.shapes() | _many_dimensions() | long


def _many_dimensions() -> Strategy[Shape]:
    """Draw shapes of more dimensions than a header has room for."""
    return st.sampled_from(((1,) * 9, (1, 2) * 5, (0,) * 9))


@st.composite
def reductions_of_sizes(draw: st.DrawFn) -> Reduction:
    """Draw reductions of sizes around powers of two, at which one algorithm replaces another."""
    dtype, op = draw(dtypes_and_ops())
    itemsize = dtype_of(dtype).itemsize
    # Powers of two in bytes, as for messages, or in elements, as for folds. They are sampled, since
    # drawn integers would be small most of the time.
    counts = [2**power // itemsize for power in range(6, 20)] + [2**power for power in range(4, 17)]
    count = draw(st.sampled_from(counts)) + draw(st.integers(-1, 1))
    return Reduction(op, draw(arrays(dtype, (count,))))


@st.composite
def successive_reductions(draw: st.DrawFn) -> list[Reduction]:
    """Draw several reductions of plain arrays of one dtype and shape; ops and values differ."""
    dtype, _ = draw(dtypes_and_ops())
    known = st.sampled_from(OPS[family(dtype_of(dtype))])
    ops = st.sampled_from(draw(st.lists(known, min_size=1, max_size=2)))
    plain = arrays(dtype, draw(small_and_long()), layouts="contiguous", frameworks="numpy")
    return draw(st.lists(st.builds(Reduction, ops, plain), min_size=3, max_size=8))


@st.composite
def reductions_of_rows(draw: st.DrawFn) -> Reduction:
    """Draw reductions of arrays that have a row for each rank."""
    dtype, op = draw(dtypes_and_ops())
    return Reduction(op, draw(arrays(dtype, (rank_count(), *draw(small_and_long())))))


@st.composite
def reductions_of_shares(draw: st.DrawFn) -> tuple[Reduction, list[int]]:
    """Draw reductions of arrays, and how many of their rows each rank gets: none, some or many."""
    dtype, op = draw(dtypes_and_ops())
    count = st.integers(0, 3) | st.just(draw(st.sampled_from((1, 2_000))))
    counts = [draw(count) for _ in range(rank_count())]
    tail = draw(st.lists(st.integers(0, 3), max_size=2))
    return Reduction(op, draw(arrays(dtype, (sum(counts), *tail)))), counts


@st.composite
def rows(draw: st.DrawFn, shapes: Strategy[Shape]) -> Arrays:
    """Draw arrays that have a row of such a shape for each rank, of any dtype."""
    return draw(arrays(ranked.dtypes(movable=True), (rank_count(), *draw(shapes))))


class Ragged(NamedTuple):
    """Arrays whose number of rows differs between ranks, and the ranks to which the rows go."""

    arrays: Arrays
    # For each rank, how many of its rows go to each rank.
    counts: list[list[int]]

    def rows(self, sender: int, receiver: int) -> Array:
        """Return the rows that go from one rank to another."""
        start = sum(self.counts[sender][:receiver])
        return self.arrays.elements()[sender][start : start + self.counts[sender][receiver]]


@st.composite
def ragged(draw: st.DrawFn) -> Ragged:
    """Draw for each rank an array with rows for every rank: none, some, or many."""
    dtype = draw(ranked.dtypes(movable=True))
    tail = draw(st.lists(st.integers(0, 3), max_size=2))
    count = st.integers(0, 3) | st.just(draw(st.sampled_from((1, 2_000))))
    counts = [[draw(count) for _ in range(rank_count())] for _ in range(rank_count())]
    cases = [draw(ranked.arrays(dtype, (sum(own), *tail))) for own in counts]
    return Ragged(Arrays(RankValues(*cases)), counts)


def messages(shapes: Strategy[Shape]) -> Strategy[Arrays]:
    """Draw an array for each rank; dtypes and shapes differ between ranks."""
    one = ranked.arrays(ranked.dtypes(movable=True), shapes)
    return ranked.per_rank(one).map(Arrays)


# All layouts but the one in which elements have to be equal.
_ANY_ELEMENTS: Final = tuple(name for name in LAYOUTS if name != "broadcast")


@st.composite
def arranged_twice(draw: st.DrawFn) -> tuple[Reduction, Arrays]:
    """Draw a reduction of plain arrays, and the same elements in other layouts and frameworks."""
    dtype, op = draw(dtypes_and_ops())
    shape = draw(ranked.shapes())
    plain = draw(arrays(dtype, shape, layouts="contiguous", frameworks="numpy"))
    other = draw(arrays(dtype, shape, layouts=_ANY_ELEMENTS))
    arranged = [
        replace(case, elements=same.elements, seed=same.seed)
        for case, same in zip(other.value, plain.value, strict=True)
    ]
    return Reduction(op, plain), Arrays(RankValues(*arranged))


@st.composite
def reductions_into(draw: st.DrawFn) -> tuple[Reduction, RankValues[ArrayCase]]:
    """Draw a reduction, and an array on each rank to which its result can be written."""
    reduction = draw(reductions())
    like = reduction.arrays.value[0]
    return reduction, draw(outs(like.dtype, like.shape))


@st.composite
def moved_into(draw: st.DrawFn) -> tuple[Arrays, RankValues[ArrayCase], RankValues[ArrayCase]]:
    """Draw arrays to move, and on each rank an array for one of them and an array for all."""
    drawn = draw(arrays(ranked.dtypes(movable=True), small_and_long()))
    like = drawn.value[0]
    one, all_ = outs(like.dtype, like.shape), outs(like.dtype, (rank_count(), *like.shape))
    return drawn, draw(one), draw(all_)


# The frameworks that have every dtype, and arithmetic that works as NumPy's.
complete_frameworks: Final = tuple(
    name for name in ("numpy", "torch") if name in ranked.installed_frameworks()
)

# The frameworks whose arrays can be passed as `out=`.
_WRITEABLE: Final = ("numpy", "torch", "array_api_strict", "cupy")


def outs(dtype: str, shape: Shape) -> Strategy[RankValues[ArrayCase]]:
    """Draw an array for each rank, in any layout in which every element can be written."""
    installed = [name for name in _WRITEABLE if name in ranked.installed_frameworks()]
    return ranked.rank_arrays(
        dtype, shape, layouts=_ANY_ELEMENTS, frameworks=installed, readonly=False
    )


@st.composite
def equal_arrays(draw: st.DrawFn) -> ArrayCase:
    """Draw an array of numbers with few digits: sums of a few of them are exact in every dtype."""
    dtype = draw(ranked.dtypes("mean"))
    digits = st.tuples(st.integers(-8, 8), st.integers(-6, 5))
    number: Strategy[Any] = st.one_of(
        digits.map(lambda drawn: drawn[0] * 2.0 ** drawn[1]), st.sampled_from((-0.0, np.nan))
    )
    if dtype_of(dtype).kind == "c":
        number = st.builds(complex, number, number)
    return draw(ranked.arrays(dtype, elements=number))


@st.composite
def orders_of_ranks(draw: st.DrawFn) -> list[int]:
    """Draw an order of the ranks, the same on every rank."""
    return draw(st.permutations(range(rank_count())))


def tags() -> Strategy[tuple[int, int]]:
    """Draw two tags of messages: small ones, those around powers of two, and any."""
    powers = st.builds(lambda power, step: 2**power + step, st.integers(3, 19), st.integers(-1, 1))
    one = st.one_of(st.integers(0, 8), powers, st.integers(0, (1 << 20) - 1))
    return st.tuples(one, one).filter(lambda drawn: drawn[0] != drawn[1])


def numbers_of_ranks(least: int, most: int) -> Strategy[RankValues[int]]:
    """Draw a small number for each rank, or its multiples by one factor of any size."""
    return _multiples(ranked.per_rank(st.integers(least, most)))


def keys_of_ranks() -> Strategy[RankValues[int]]:
    """Draw keys of ranks, often in an order of their own."""
    least = st.sampled_from((1, 1, -2))
    ordered = st.builds(lambda order, n: [n + rank for rank in order], orders_of_ranks(), least)
    return _multiples(ordered) | numbers_of_ranks(-2, 2)


def _multiples(numbers: Strategy[Any]) -> Strategy[RankValues[int]]:
    factor = st.sampled_from((1, 1, 100, 256, 1_000, 1 << 16, 1 << 32, 1 << 59))
    return st.builds(
        lambda values, by: RankValues(*(by * value for value in values)), numbers, factor
    )


def orders_of_requests() -> Strategy[RankValues[list[int]]]:
    """Draw, for each rank, the order in which it waits for three requests."""
    return ranked.per_rank(st.permutations(range(3)))


def objects() -> Strategy[Any]:
    """Draw Python objects, small and large, that can be pickled and are equal to their copies."""
    small = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
    )
    large = st.integers(0, 200_000).map(lambda n: random.Random(n).randbytes(n))
    nested = st.recursive(
        small,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.text(max_size=3), inner, max_size=3),
        ),
        max_leaves=6,
    )
    return st.one_of(nested, large)
