from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arraycomm._trace.clocks import Samples, corrected, difference
from arraycomm._trace.records import Clock

DELAYS = st.integers(0, 10**6)


@given(
    offset=st.integers(-(10**12), 10**12),
    rounds=st.lists(st.tuples(DELAYS, DELAYS, DELAYS, DELAYS), min_size=1, max_size=8),
)
def test_difference_of_clocks_is_right_to_within_its_uncertainty(offset, rounds) -> None:
    first, own, true = Samples([], [], ""), Samples([], [], ""), 0
    for delays in rounds:
        true += 10**7
        # Nobody sees the end of a step before everybody has begun it.
        begun = [true + delay for delay in delays[:2]]
        seen = [max(begun) + delay for delay in delays[2:]]
        first.begun.append(begun[0])
        first.seen.append(seen[0])
        own.begun.append(begun[1] - offset)
        own.seen.append(seen[1] - offset)
    found = difference(first, own)
    assert abs(found.offset - offset) <= found.uncertainty
    assert found.uncertainty <= 2 * 10**6


def test_clocks_that_may_be_the_same_are_taken_for_it() -> None:
    found = difference(Samples([0, 100], [90, 130], ""), Samples([40, 101], [50, 190], ""))
    assert (found.offset, found.uncertainty) == (0, 50)


@pytest.mark.parametrize(("time", "expected"), [(0, 100), (500, 605), (1000, 1110), (2000, 2120)])
def test_difference_between_two_comparisons_is_linear(time: int, expected: int) -> None:
    assert corrected(time, [Clock(0, 100, 1), Clock(1000, 110, 1)]) == expected
    assert corrected(time, [Clock(0, 100, 1)]) == time + 100
