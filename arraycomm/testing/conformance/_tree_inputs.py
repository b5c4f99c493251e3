"""The inputs of laws of trees and of numbers."""

from __future__ import annotations

import enum
import random
from typing import Any, Final

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy as Strategy

from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays.oracle import OPS
from arraycomm.testing._arrays.rank_values import RankValues
from arraycomm.testing.conformance._inputs import (
    Arrays,
    Sealed,
    arrays,
    complete_frameworks,
    dtypes_and_ops,
    sealed,
    small_and_long,
)


class Colour(enum.Enum):
    """An enumeration that drawn trees contain."""

    RED = 1
    BLUE = "blue"


def _repeated(leaves: Strategy[Any]) -> Strategy[Any]:
    """Draw trees in which the same object may occur several times."""
    pools = st.lists(leaves, min_size=1, max_size=4)
    return pools.flatmap(lambda pool: ranked.trees(st.sampled_from(pool)))


def state_trees(frameworks: Any = None) -> Strategy[Sealed[Any]]:
    """Draw trees of all kinds of leaves that `synchronize` accepts; values differ between ranks."""
    values = (
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.integers(-(2**31), 2**31 - 1).map(np.int32),
        st.floats(width=32).map(np.float32),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.sampled_from(Colour),
    )
    leaves = st.one_of(
        st.none(),
        st.sampled_from(values).flatmap(ranked.per_rank),
        ranked.rank_arrays(ranked.dtypes(movable=True), small_and_long(), frameworks=frameworks),
    )
    return sealed(_repeated(leaves))


def kept_trees() -> Strategy[Any]:
    """Draw trees of leaves that `synchronize` does not change."""
    return ranked.trees(
        st.one_of(
            st.none(),
            st.sampled_from((len, sorted)),
            ranked.per_rank(st.builds(random.Random, st.integers(0, 9))),
        )
    )


@st.composite
def reducible_trees(draw: st.DrawFn) -> tuple[str, Any]:
    """Draw a reduction, and a tree of leaves that have it; values differ between ranks."""
    op = draw(ranked.ops())
    numbers = [numbers for kind, numbers in _NUMBERS if op in OPS[kind]]
    leaves = st.one_of(
        st.none(),
        st.sampled_from(numbers).flatmap(ranked.per_rank),
        ranked.rank_arrays(ranked.dtypes(op), small_and_long()),
    )
    return op, draw(_repeated(leaves))


# The frameworks with which programs train that are installed.
training_frameworks: Final = tuple(
    name for name in ("numpy", "torch", "jax") if name in ranked.installed_frameworks()
)


@st.composite
def metrics(draw: st.DrawFn) -> tuple[Sealed[Any], Sealed[Any]]:
    """Draw two numbers and two arrays, and a weight; values differ between ranks.

    The second array is of any framework, and of few numbers that every dtype has.
    """
    number = st.floats(-(2.0**20), 2.0**20, width=32)
    count = draw(st.integers(0, 3))
    array = st.lists(number, min_size=count, max_size=count).map(np.array)
    kind = draw(st.sampled_from(("float32", "bfloat16", "complex64", "int32", "bool")))
    framework = draw(st.sampled_from(training_frameworks))
    few = ranked.arrays(kind, (count,), frameworks=framework, elements=st.integers(0, 1))
    values = st.tuples(number, st.integers(-100, 100), array, few)
    # Numbers of samples beyond the integers of float32, and the least of them beside the largest.
    weight = st.integers(0, 9) | st.floats(2.0**-149, 2.0**10) | st.integers(2**24, 2**40)
    return draw(sealed(ranked.per_rank(values))), draw(sealed(ranked.per_rank(weight)))


@st.composite
def reductions_of_numbers(draw: st.DrawFn) -> tuple[str, Sealed[RankValues[Any]]]:
    """Draw a reduction, and for each rank a number of a kind that has it."""
    kind, numbers = draw(st.sampled_from(_NUMBERS))
    return draw(st.sampled_from(OPS[kind])), draw(sealed(ranked.per_rank(numbers)))


_NUMBERS: Final[tuple[tuple[str, Strategy[Any]], ...]] = (
    ("integer", st.integers(-(2**63), 2**63 - 1)),
    ("integer", st.integers(-(2**31), 2**31 - 1).map(np.int32)),
    ("bool", st.booleans()),
    ("real", st.floats()),
    ("real", st.floats(width=32).map(np.float32)),
    ("complex", st.complex_numbers()),
)


@st.composite
def gradients(draw: st.DrawFn) -> tuple[str, list[Arrays], Sealed[RankValues[list[bool]]]]:
    """Draw a reduction, arrays for each rank, and which of its arrays each rank passes."""
    dtype, op = draw(dtypes_and_ops())
    # A rank that passes None gets an array of the kind of another leaf.
    leaf = arrays(dtype, small_and_long(), frameworks=complete_frameworks)
    leaves = draw(st.lists(leaf, min_size=1, max_size=3))
    flags = st.lists(st.booleans(), min_size=len(leaves), max_size=len(leaves))
    return op, leaves, draw(sealed(ranked.per_rank(flags)))
