"""A law of the rings in which bytes go from one process to another."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from arraycomm._transports.processes.rings import Ring

TURNS = st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60)


@given(capacity=st.integers(1, 40), turns=TURNS)
def test_a_ring_gives_what_it_was_given(capacity: int, turns: list[tuple[bool, int]]) -> None:
    """In pieces of any length, also where they begin at its end and go on at its beginning."""
    memory = np.zeros(Ring.nbytes(capacity), np.uint8)
    sender, receiver = Ring(memory), Ring(memory)
    given = np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8)
    got, sent, read = np.zeros_like(given), 0, 0
    # At the end all that was sent is read, in steps that move at least a byte.
    for writes, count in (*turns, *[(False, capacity)] * capacity):
        if writes:
            moved = sender.write(given[sent : sent + count])
            assert (moved > 0) == (count > 0 and sent - read < capacity)
            sent += moved
        else:
            moved = receiver.read(got[read : read + count])
            assert (moved > 0) == (count > 0 and sent > read)
            read += moved
        assert 0 <= sent - read <= capacity
        assert (got[:read] == given[:read]).all()
    assert sent == read
