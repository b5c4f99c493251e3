"""What ranks on many nodes learn of one another's waits, over messages that a list stands for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from arraycomm._protocol.waits.deadlock import WaitStatus
from arraycomm._transports.mpi import wait_replies
from arraycomm._transports.mpi.wait_replies import ASKING, COLLECTING, WaitReplies
from tests.support.on_ranks import alone

# Nothing in it depends on what else runs.
pytestmark = alone

SIZE, STEP = 120, 7
HERE = "in allreduce at train.py:41, step 7 of world"
# Ranks that collectors are among, and those that are not.
COLLECTORS = [number * SIZE // 9 for number in range(9)]


class _Ranks:
    """Ranks that wait for a step, at another place, or not at all; those that have left say so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.messages = 100.0, 0
        monkeypatch.setattr(wait_replies, "monotonic", lambda: self.now)
        self.steps = [STEP] * SIZE
        self.silent: set[int] = set()
        self.left: set[int] = set()
        self.seen_left: list[set[int]] = [set() for _ in range(SIZE)]
        self.sent: list[tuple[int, int, int, int, str]] = []
        self.ranks = [self._rank(rank) for rank in range(SIZE)]

    def _rank(self, rank: int) -> WaitReplies:
        def send(to: int, kind: int, step: int, text: str) -> None:
            assert len(text) < 3000
            self.messages += 1
            self.sent.append((rank, to, kind, step, text))

        made = WaitReplies(rank, SIZE, lambda: self.steps[rank], send)
        made.status = WaitStatus(HERE, number=rank, version=rank).encode()
        return made

    def wait_elsewhere(self, ranks: range) -> None:
        for rank in ranks:
            self.steps[rank] = STEP - 1
            self.ranks[rank].status = WaitStatus("in recv", in_vain=True, number=rank).encode()

    @property
    def waiting(self) -> Iterator[int]:
        return (rank for rank in range(SIZE) if rank not in self.silent | self.left)

    def missing(self, rank: int) -> list[int]:
        return [r for r in range(SIZE) if r != rank and self.ranks[rank].step(r) < STEP]

    def ask_and_look(self, seconds: float) -> None:
        """Let all ranks of the step ask for all others, and look for a while."""
        for rank in self.waiting:
            if self.steps[rank] == STEP:
                self.ranks[rank].ask_wait_status(self.missing(rank))
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            sent, self.sent = self.sent, []
            for source, to, kind, step, text in sent:
                if to in self.left:
                    if kind in (ASKING, COLLECTING):
                        self.messages += 1
                        self.seen_left[source].add(to)
                elif to not in self.silent:
                    self.ranks[to].receive(source, kind, step, text)
            for rank in self.waiting:
                self.ranks[rank].go_on()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> _Ranks:
    return _Ranks(monkeypatch)


def _check(ranks: _Ranks, late: set[int]) -> None:
    for rank in ranks.waiting:
        if ranks.steps[rank] == STEP:
            assert set(ranks.missing(rank)) == late - {rank}


@pytest.mark.parametrize(
    "silent", [{17}, {0, 17, SIZE - 1}, set(range(1, SIZE, 2)), set(range(SIZE // 2))]
)
def test_every_rank_learns_who_is_missing_by_few_messages(silent: set[int], ranks: _Ranks) -> None:
    ranks.silent = silent
    for rank in silent:
        ranks.steps[rank] = STEP - 1
    # As long as the line of a long wait takes to appear.
    ranks.ask_and_look(0.5)
    _check(ranks, silent)
    # To collectors, from them to all, the replies, what they tell, and to some of whom nothing is known.
    assert ranks.messages < SIZE * (4 * len(COLLECTORS) + 8)


def test_what_ranks_wait_in_elsewhere_is_told(ranks: _Ranks) -> None:
    ranks.silent, elsewhere = {17}, range(40, 70)
    ranks.steps[17] = STEP - 1
    ranks.wait_elsewhere(elsewhere)
    ranks.ask_and_look(0.5)
    _check(ranks, {17, *elsewhere})
    for rank in ranks.waiting:
        for late in (r for r in elsewhere if r != rank and ranks.steps[rank] == STEP):
            found = WaitStatus.decode(ranks.ranks[rank].wait_status(late))
            assert str(found) == "has waited in vain in recv"
        assert ranks.ranks[rank].wait_status(17) == ""


def test_without_a_collector_ranks_ask_for_themselves(ranks: _Ranks) -> None:
    ranks.silent = {*COLLECTORS, *range(20, SIZE)}
    for rank in ranks.silent:
        ranks.steps[rank] = STEP - 1
    ranks.ask_and_look(0.5)
    _check(ranks, ranks.silent)


def test_a_rank_that_has_left_tells_every_rank(ranks: _Ranks) -> None:
    ranks.left = {40, 99}
    ranks.steps[40] = ranks.steps[99] = STEP - 1
    ranks.ask_and_look(0.5)
    assert all(ranks.seen_left[rank] == {40, 99} for rank in ranks.waiting)


def test_a_later_wait_is_told_anew(ranks: _Ranks) -> None:
    ranks.ask_and_look(0.5)
    _check(ranks, set())
    ranks.silent = {5}
    ranks.steps = [STEP - 1 if rank == 5 else STEP for rank in range(SIZE)]
    for rank in range(SIZE):
        ranks.steps[rank] += 3
    for rank in ranks.waiting:
        ranks.ranks[rank].ask_wait_status([r for r in range(SIZE) if r != rank])
    ranks.ask_and_look(0.5)
    for rank in ranks.waiting:
        later = [r for r in range(SIZE) if ranks.ranks[rank].step(r) == STEP + 3]
        assert set(range(SIZE)) - set(later) <= {5, rank}


def test_ranks_are_asked_directly_if_they_are_few(ranks: _Ranks) -> None:
    ranks.ranks[3].ask_wait_status([1, 2])
    assert [(to, kind) for _, to, kind, *_ in ranks.sent] == [(1, ASKING), (2, ASKING)]
