"""Values to draw for each rank, and ranks."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy as Strategy

from arraycomm.testing._arrays.rank_values import RankValues, rank_count

T = TypeVar("T")


@st.composite
def per_rank(draw: st.DrawFn, strategy: Strategy[T]) -> RankValues[T]:
    """Draw one value for each rank, independently of each other.

    Parameters
    ----------
    strategy : SearchStrategy
        What each value is drawn from.

    Returns
    -------
    SearchStrategy of RankValues
        In a test of `given`, each rank gets its own value.
    """
    return RankValues(*(draw(strategy) for _ in range(rank_count())))


@st.composite
def roots(draw: st.DrawFn) -> int:
    """Draw one rank of the example; every rank gets the same number.

    Returns
    -------
    SearchStrategy of int
        At least 0 and less than the number of ranks; shrinks to 0.
    """
    return draw(st.integers(0, rank_count() - 1))
