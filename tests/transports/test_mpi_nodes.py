"""The rounds in which nodes tell one another what their ranks show, over messages that a list stands for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from arraycomm._transports.control import PAYLOAD
from arraycomm._transports.mpi import nodes as mpi_nodes
from arraycomm._transports.mpi import pieces as mpi_pieces

_ROOM = 2048


class _Messages:
    """What ranks have sent to one another, and is not yet received."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self.lengths: list[int] = []
        # Receives that were begun, in this order, and where they note what has come.
        self.wanted: dict[tuple[int, int], list[tuple[Any, list[int]]]] = defaultdict(list)

    def match(self, route: tuple[int, int]) -> None:
        """Let receives have what was sent, in the order in which both were begun."""
        waiting, wanted = self.sent[route], self.wanted[route]
        while waiting and wanted:
            (message, as_sent), (into, come) = waiting.pop(0), wanted.pop(0)
            assert (message == as_sent).all()
            into[: len(message)] = message
            come.append(len(message))

    def of(self, rank: int) -> SimpleNamespace:
        def prepare_send(what: list[Any], to: int, tag: int) -> SimpleNamespace:
            def start() -> None:
                self.lengths.append(len(what[0]))
                # MPI may read a message late: nothing may have written over it until it has been taken.
                self.sent[rank, to].append((what[0], what[0].copy()))

            return SimpleNamespace(Start=start, Test=lambda: True)

        def send(what: list[Any], to: int, tag: int) -> SimpleNamespace:
            request = prepare_send(what, to, tag)
            request.Start()
            return request

        def prepare_receive(into: list[Any], origin: int, tag: int) -> SimpleNamespace:
            come: list[int] = []

            def start() -> None:
                come.clear()
                self.wanted[origin, rank].append((into[0], come))

            def test(status: Any = None) -> bool:
                self.match((origin, rank))
                if come and status is not None:
                    status.Get_count = lambda kind: come[0]
                return bool(come)

            return SimpleNamespace(Start=start, Test=test)

        def receive(into: list[Any], origin: int, tag: int) -> SimpleNamespace:
            request = prepare_receive(into, origin, tag)
            request.Start()
            return request

        return SimpleNamespace(
            rank=rank,
            size=self.size,
            Isend=send,
            Irecv=receive,
            Send_init=prepare_send,
            Recv_init=prepare_receive,
        )


class _Shown(NamedTuple):
    """What a rank shows: one of two headers, and so many bytes."""

    header: int
    nbytes: int


class _Nodes:
    """Ranks on nodes, of which each has its own memory."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self.members = [[r for r, n in enumerate(nodes) if n == node] for node in set(nodes)]
        size = len(nodes)
        self.messages = _Messages(size)
        self.rows = [np.zeros((2, size, PAYLOAD + _ROOM), np.uint8) for _ in self.members]
        self.lengths = [np.zeros((2, size), np.int64) for _ in self.members]
        self.exchanges = [self._exchange(own) for own in range(len(self.members))]

    def _exchange(self, own: int) -> mpi_nodes.NodeExchange:
        comm = self.messages.of(self.members[own][0])
        lengths = [row.data for row in self.lengths[own]]
        shown = list(self.rows[own]), lengths, mpi_pieces.Pieces(512)
        return mpi_nodes.NodeExchange(comm, self.members, own, *shown)

    def step(self, number: int, shown: Sequence[_Shown]) -> None:
        """Make a step; check what each node knows then."""
        parity = number & 1
        for own, ranks in enumerate(self.members):
            self.rows[own][parity] = 255
            for rank in ranks:
                self.lengths[own][parity, rank] = shown[rank].nbytes
                row = _row(number, rank, shown[rank])
                self.rows[own][parity, rank, : len(row)] = row
            self.exchanges[own].start(parity)
        waiting = list(self.exchanges)
        for _ in range(2 * len(waiting) + 2):
            # The last ones first, so that messages wait.
            waiting = [exchange for exchange in reversed(waiting) if not exchange.received()]
        assert not waiting
        alike = len({len(_row(0, 0, rank)) for rank in shown}) == len(set(shown)) == 1
        for own, exchange in enumerate(self.exchanges):
            assert exchange.alike == alike
            for rank, by in enumerate(shown):
                row = _row(number, rank, by)
                start = PAYLOAD if exchange.alike and rank not in self.members[own] else 8
                assert (self.rows[own][parity, rank, start : len(row)] == row[start:]).all()


def _row(number: int, rank: int, shown: _Shown) -> Any:
    """Return the slot of a rank, whose payload nobody else has."""
    words = np.arange(PAYLOAD) + 100 * shown.header + number
    payload = np.arange(shown.nbytes) * 7 + 31 * rank + number
    return np.concatenate([words, payload]).astype(np.uint8)


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing go by MPI."""
    monkeypatch.setattr(mpi_nodes, "MPI", SimpleNamespace(BYTE=None, Status=SimpleNamespace))
    monkeypatch.setattr(mpi_pieces, "MPI", SimpleNamespace(Prequest=lambda: None))
    monkeypatch.setattr(mpi_nodes, "_LARGE", 1024)


_LENGTHS = st.sampled_from([0, 5, 8, 1000, 1024, 1032, _ROOM])
_ALIKE = st.builds(_Shown, st.just(0), _LENGTHS).map(lambda shown: [shown] * 12)
_ANY = st.lists(st.builds(_Shown, st.integers(0, 1), _LENGTHS), min_size=12, max_size=12)
_FEW = st.tuples(_ALIKE, st.integers(0, 11), st.builds(_Shown, st.just(1), _LENGTHS)).map(
    lambda drawn: [*drawn[0][: drawn[1]], drawn[2], *drawn[0][drawn[1] + 1 :]]
)


@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=12).filter(lambda nodes: len(set(nodes)) > 1),
    st.lists(st.one_of(_ALIKE, _FEW, _ANY), min_size=1, max_size=5),
)
def test_every_node_knows_what_each_rank_shows(nodes: list[int], steps: list[list[_Shown]]) -> None:
    made = _Nodes(nodes)
    for number, shown in enumerate(steps, 1):
        made.step(number, shown[: len(nodes)])


@pytest.mark.parametrize(("nodes", "rounds"), [(3, 2), (8, 3), (9, 4), (33, 6)])
def test_messages_are_few_and_do_not_grow_with_the_ranks_that_agree(
    nodes: int, rounds: int
) -> None:
    made = _Nodes([rank // 3 for rank in range(3 * nodes)])
    made.step(1, [_Shown(0, 0)] * (3 * nodes))
    assert made.messages.lengths == [PAYLOAD] * (nodes * rounds)
    # Elements go without the words in front of them.
    made.messages.lengths.clear()
    made.step(2, [_Shown(0, 16)] * (3 * nodes))
    assert sum(made.messages.lengths) == nodes * (rounds * PAYLOAD + (nodes - 1) * 3 * 16)
    # One rank that differs costs the words of all.
    made.messages.lengths.clear()
    made.step(3, [_Shown(int(rank == 4), 0) for rank in range(3 * nodes)])
    assert max(made.messages.lengths) > PAYLOAD
