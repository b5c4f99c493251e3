"""Long messages in pieces: both ranks cut alike, and only few are under way."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from arraycomm._transports.mpi import pieces as mpi_pieces
from tests.support.on_ranks import alone

# Nothing in it depends on what else runs.
pytestmark = alone

_NBYTES = st.one_of(st.integers(0, 10_000), st.integers(0, 40 * mpi_pieces.PIECE))


@given(_NBYTES, _NBYTES)
def test_both_ranks_cut_alike(one: int, other: int) -> None:
    pieces_of = mpi_pieces.Pieces(mpi_pieces.PIECE)
    count = pieces_of.count_both(one, other)
    assert count == pieces_of.count_both(other, one)
    assert len(pieces_of.of(np.empty(one, np.uint8))) == pieces_of.count_both(one, one)
    both = max(one, other) <= 2 * min(one, other)
    for nbytes in (one, other):
        pieces = mpi_pieces.cut(np.empty(nbytes, np.uint8), count)
        assert len(pieces) == count
        assert sum(map(len, pieces)) == nbytes
        # A piece may begin up to a line earlier.
        assert not both or max(map(len, pieces)) < mpi_pieces.PIECE + 64
        assert all(len(piece) % 64 == 0 for piece in pieces[:-1])


class _Request:
    """A receive or a send that is over when the test says so."""

    over = False

    def Test(self) -> bool:  # noqa: N802 - as MPI has it
        return self.over


class _Lane(mpi_pieces.Lane):
    def __init__(self, count: int, before: _Lane | None = None) -> None:
        nothing = np.empty(0, np.uint8)
        super().__init__(None, (0, 0), nothing, nothing, count, before)
        self.requests: list[tuple[_Request, _Request]] = []

    @property
    def over(self) -> bool:
        return self.begun and all(r.over for pair in self.requests for r in pair)

    def start(self, number: int) -> None:
        assert number == len(self.requests)
        self.requests.append((_Request(), _Request()))
        self.receives.append(self.requests[-1][0])
        self.sends.append(self.requests[-1][1])


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_few_pieces_are_under_way_whichever_is_over_first(count: int, random: Any) -> None:
    lane = _Lane(count)
    lane.begin()
    while not lane.done():
        come = next((n for n, (r, _) in enumerate(lane.requests) if not r.over), count)
        # All are begun that may be: nobody waits for nothing.
        assert len(lane.requests) == min(count, come + mpi_pieces.AHEAD)
        left = [request for pair in lane.requests for request in pair if not request.over]
        random.choice(left).over = True
    assert len(lane.requests) == count
    assert all(request.over for pair in lane.requests for request in pair)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_lanes_begin_one_after_the_other(counts: list[int], random: Any) -> None:
    """Whichever of them is asked: what it waits for goes on as well."""
    lanes, before = list[_Lane](), None
    for count in counts:
        lanes.append(before := _Lane(count, before))
        before.begin()
    while not all(lane.over for lane in lanes):
        random.choice(lanes).done()
        for lane, later in pairwise(lanes):
            assert lane.begun or not later.requests
        left = [r for lane in lanes for pair in lane.requests for r in pair if not r.over]
        if left:
            random.choice(left).over = True
    assert all(lane.done() for lane in lanes)
    assert [len(lane.requests) for lane in lanes] == counts


@pytest.mark.parametrize(
    ("here", "elsewhere", "whole"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
def test_messages_stay_whole_if_every_node_has_a_card_for_them(
    here: bool, elsewhere: bool, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if here:
        (tmp_path / "mlx5_0").mkdir()

    def reduce(kind: Any, flags: Any, op: Any) -> SimpleNamespace:
        assert op is mpi_pieces.MPI.MIN
        flags[0] = min(flags[0], elsewhere)
        return SimpleNamespace(Test=lambda: True)

    monkeypatch.setattr(mpi_pieces, "_CARDS", (tmp_path / "none", tmp_path))
    pieces = mpi_pieces.agreed(SimpleNamespace(Iallreduce=reduce))
    assert pieces.count(1 << 40) == 1 if whole else pieces.count(64_001) == 2
    assert pieces.count_both(1 << 30, 1 << 30) > 1 or whole
