"""The routes of a broadcast: every rank gets every piece once, and every node gets one copy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from arraycomm._transports.mpi_relay import Route, pieces_of, route


@st.composite
def _routes(draw: st.DrawFn) -> tuple[list[int], int, int, list[Route]]:
    nodes = draw(st.lists(st.integers(0, 5), min_size=2, max_size=16))
    root = draw(st.integers(0, len(nodes) - 1))
    pieces = draw(st.integers(1, 20))
    return nodes, root, pieces, [route(rank, root, nodes, pieces) for rank in range(len(nodes))]


@given(_routes())
def test_each_rank_gets_a_piece_once_from_one_that_sends_it(
    drawn: tuple[list[int], int, int, list[Route]],
) -> None:
    nodes, root, _, routes = drawn
    sent = Counter((rank, peer) for rank, found in enumerate(routes) for peer in found.to)
    assert sent == Counter(
        (found.origin, rank) for rank, found in enumerate(routes) if found.origin is not None
    )
    assert [rank for rank, found in enumerate(routes) if found.origin is None] == [root]
    # From the root on, everyone is reached: no two ranks wait for one another.
    reached = [root]
    for rank in reached:
        reached += routes[rank].to
    assert sorted(reached) == list(range(len(nodes)))
    # One copy for each node.
    assert sum(nodes[a] != nodes[b] for a, b in sent) == len(set(nodes)) - 1


@given(_routes())
def test_nobody_is_far_from_the_root_unless_there_are_many_pieces(
    drawn: tuple[list[int], int, int, list[Route]],
) -> None:
    nodes, _, pieces, routes = drawn

    def distance(rank: int) -> int:
        origin = routes[rank].origin
        return 0 if origin is None else 1 + distance(origin)

    longest = max(Counter(nodes).values()), len(set(nodes))
    limits = [n - 1 if pieces >= n else (n - 1).bit_length() for n in longest]
    assert max(map(distance, range(len(nodes)))) <= sum(limits)
    # A rank sends each of many pieces once to another node and once within its own.
    if pieces >= max(longest):
        assert all(len(found.to) <= 2 for found in routes)


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 20, (1 << 20) + 1, 100_000_001])
def test_pieces_are_all_of_the_bytes(nbytes: int) -> None:
    buffer = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (nbytes,), (0,))
    pieces = pieces_of(buffer)
    assert sum(map(len, pieces)) == nbytes
    assert len(pieces) <= 4
    assert min(map(len, pieces), default=1) >= 1
    assert len(pieces) <= 1 or len(pieces[0]) >= 1 << 20
