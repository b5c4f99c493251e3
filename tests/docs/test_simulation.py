"""The library's own code on simulated ranks: what it sends is what the model says, and when it is done."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arraycomm import Request
from arraycomm._collectives.selection import Algorithm
from arraycomm._transports.base import Blocks
from arraycomm._transports.crossovers import Crossovers
from docs.studies.scaling import model, movements, real, rounds
from docs.studies.scaling.large import cluster
from docs.studies.scaling.network import Network
from docs.studies.scaling.page import simulated, stored
from docs.studies.scaling.simulated import communicators, transports
from tests.support import internals

ALPHA, BETA, GAMMA = 2e-6, 1e-10, 3e-10
STORED, OTHERS = simulated()
LIVE = [(2, 1), (3, 1), (8, 1), (33, 1), (132, 1), (4, 4), (8, 4), (12, 4)]


def machine(per_node: int = 1) -> model.Machine:
    return model.Machine(ALPHA, BETA, ALPHA / 4, BETA / 2, GAMMA, per_node=per_node)


@cache
def live(size: int, per_node: int) -> tuple[real.Simulated, ...]:
    """Simulate what is small: the elements move, and results are compared."""
    on = machine(per_node)
    cases = [(algorithm, n) for algorithm, n in real.cases(size, on) if n <= 1 << 20 or size == 2]
    return tuple(real.simulated(size, on, algorithm, nbytes) for algorithm, nbytes in cases)


# What is sent


def check_sent(call: real.Simulated) -> None:
    movement = call.movement()
    # Over a grid, the last ranks may have shorter slices, or none.
    assert call.messages - model.messages(movement) in {0, -(call.algorithm == Algorithm.GRID)}, (
        call
    )
    # A slice is a whole number of elements: at most one more in each message.
    # Along a chain, who sends headers as well has the shortest parts.
    fewer = {Algorithm.CHAIN: 4 * call.messages, Algorithm.GRID: 0.02 * call.sent}.get(
        Algorithm(call.algorithm), 1e-6
    )
    assert -fewer <= call.sent - model.sent_bytes(movement) <= 4 * call.messages, call


def _near(call: real.Simulated) -> float:
    """How near a time is to the formula's: along a chain, ranks of a node may send in another order."""
    return 0.045 if call.algorithm == Algorithm.CHAIN else 1e-3


@pytest.mark.parametrize(("size", "per_node"), LIVE)
def test_the_library_sends_and_takes_what_the_model_says(size, per_node) -> None:
    for call in live(size, per_node):
        check_sent(call)
        assert call.seconds == pytest.approx(call.predicted(machine(per_node)), rel=_near(call)), (
            call
        )


def test_so_it_did_on_a_thousand_ranks() -> None:
    on = {nodes: cluster(stored(), nodes) for nodes in {call.per_node for call in STORED}}
    for call in STORED:
        check_sent(call)
        assert call.seconds == pytest.approx(call.predicted(on[call.per_node]), rel=_near(call)), (
            call
        )
    chosen = {(r, a) for r in (1000, 1024) for a, _ in real.cases(r, machine())}
    assert {(call.ranks, call.algorithm) for call in STORED if call.per_node == 1} >= chosen


def reduced(size: int, nbytes: int, chunk: int | None) -> float:
    """Return when all simulated ranks have reduced an array, by slices in chunks of this length."""
    network = Network(size, cluster(stored(), 1), moves_data=False)
    comms = communicators(network)
    for comm in comms:
        internals.transport(comm).crossovers = Crossovers(gather=0, chunk=chunk)
    x, out = np.zeros((2, nbytes // 4), np.float32)
    network.run([partial(comm.iallreduce, x, out=out) for comm in comms])
    return float(network.clock.max())


@pytest.mark.parametrize(("size", "nbytes"), [(20, 64 << 20), (110, 8 << 20)])
def test_no_other_length_of_chunks_is_much_faster(size, nbytes) -> None:
    lengths = [nbytes // count for count in (1, 2, 4, 8, 16)]
    others = [reduced(size, nbytes, max(chunk, 64 << 10)) for chunk in lengths]
    assert reduced(size, nbytes, None) < 1.1 * min(others)
    # The length does matter.
    assert max(others) > 1.2 * min(others)


def test_chunks_of_the_length_of_few_ranks_took_a_thousand_longer() -> None:
    on = real.without_python(cluster(stored(), 1))
    (call,) = (c for c in STORED if (c.ranks, c.nbytes, c.per_node) == (1024, 8 << 20, 1))
    header = model.header(1024, on, False)
    assert call.seconds < 0.5 * (header + model.in_slices(1024, 8 << 20, on, chunk=2 << 20))


def test_a_thousand_ranks_show_headers() -> None:
    network = Network(1024, machine(), moves_data=False)
    network.run([comm.ibarrier for comm in communicators(network)])
    header = model.header_movement(1024, shared=False)
    assert set(network.messages) == {model.messages(header)}
    assert set(network.nbytes) == {model.sent_bytes(header)}
    expected = model.header(1024, real.without_python(machine()), False)
    assert network.clock == pytest.approx(np.full(1024, expected))


@pytest.mark.parametrize("collective", model.COLLECTIVES)
def test_other_collectives_send_as_many_messages_as_the_model_says(collective) -> None:
    stored = [call for call in OTHERS if call.collective == collective]
    assert max(call.ranks for call in stored) >= 1024
    for call in [*(real.sent(collective, size, machine()) for size in (3, 13)), *stored]:
        assert call.messages == call.formula(), call


def test_messages_that_two_ranks_exchange_have_the_length_of_pieces() -> None:
    pieces = pytest.importorskip("arraycomm._transports.mpi_pieces", exc_type=ImportError)
    assert model.PIECE == pieces.PIECE


def test_every_algorithm_that_the_library_may_choose_has_a_formula_and_is_simulated() -> None:
    assert {*model.MOVEMENTS, *real.NOT_MODELLED} == set(Algorithm)
    assert set(model.MOVEMENTS) == set(model.ALGORITHMS)
    assert {call.algorithm for case in LIVE for call in live(*case)} == set(model.MOVEMENTS)
    assert {call.algorithm for call in STORED} == set(model.MOVEMENTS)
    hosts = itertools.product(
        (1 << k for k in range(1, 18)), (1 << k for k in range(32)), (False, True), (1, 64)
    )
    assert {model.chosen(*case) for case in hosts} == set(model.MOVEMENTS)


# Along a chain ranks wait for one another; of an exchange, the last chunk is folded when all have come.
@pytest.mark.parametrize("algorithm", sorted(set(model.MOVEMENTS) - {"chain", "exchange"}))
@pytest.mark.parametrize(("size", "per_node"), [(2, 1), (100, 1), (1024, 1), (128, 64)])
def test_the_times_of_an_algorithm_are_those_of_its_messages(algorithm, size, per_node) -> None:
    on = replace(machine(per_node), fold_byte=0.0)
    payload = 9_000_000 if algorithm == "header" else 0
    header = model.header_movement(size, False, per_node, payload)
    moved = model.MOVEMENTS[algorithm](size, 9_000_000, per_node)
    took = model.header(size, on, False) + model.ALGORITHMS[algorithm](size, 9_000_000, on, False)
    # One rank of a node sends the header's messages.
    expected = model.seconds(header, replace(on, per_node=1)) + model.seconds(moved, on)
    assert took == pytest.approx(expected)


# Time


@pytest.mark.parametrize(("per_node", "late"), [(1, 2), (2, 3)])
def test_ranks_wait_for_one_that_is_late(per_node, late) -> None:
    on = machine(per_node)
    network = Network(4, on)
    comms = communicators(network)
    network.clock[late] = 1.0
    network.run([comm.ibarrier for comm in comms])
    header = model.header(4, real.without_python(on), False)
    assert network.clock == pytest.approx(np.full(4, 1.0 + header), rel=1e-12)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_messages_between_two_ranks_take_what_those_of_a_schedule_take(size) -> None:
    on, n = machine(), 1000
    network = Network(size, on)
    links = transports(network)

    def steps(rank: int) -> Iterator[Any]:
        link, known = links[rank], np.full(n, rank, np.uint8)
        for _ in range(size - 1):
            came = np.empty(n, np.uint8)
            yield link.send(known, (rank + 1) % size, 7)
            yield link.recv(came, (rank - 1) % size, 7)
            known = came
        results[rank] = int(known[0])

    results = [-1] * size
    network.run([partial(_Coroutine, steps(rank)) for rank in range(size)])
    assert results == [(rank + 1) % size for rank in range(size)]
    assert network.messages.tolist() == [size - 1] * size
    expected = rounds.play(rounds.ring(size, n * size), size, on)
    assert network.clock.max() == pytest.approx(expected, rel=1e-12)


def test_ranks_of_a_node_share_its_link_message_by_message() -> None:
    on, n = machine(per_node=4), 100_000
    network = Network(8, on)
    links = transports(network)
    data = np.zeros(n, np.uint8)

    def steps(rank: int) -> Iterator[Any]:
        yield (
            links[rank].send(data, rank + 4, 0) if rank < 4 else links[rank].recv(data, rank - 4, 0)
        )

    network.run([partial(_Coroutine, steps(rank)) for rank in range(8)])
    assert network.clock.max() == pytest.approx(ALPHA + 4 * n * BETA)
    assert network.leaving.tolist() == [1] * 4 + [0] * 4


class _Coroutine:
    """Steps of a test in place of a request."""

    def __init__(self, steps: Iterator[Any]) -> None:
        self._steps = steps
        self._waiting: Any = None

    def test(self) -> bool:
        while self._waiting is None or self._waiting.done():
            self._waiting = next(self._steps, False)
            if self._waiting is False:
                return True
        return False

    def wait(self) -> None:
        return None


# What goes wrong


def test_a_rank_that_waits_for_ever_is_named() -> None:
    network = Network(3, machine())
    comms = communicators(network)

    def start(rank: int) -> Request:
        return comms[rank].irecv((rank + 1) % 3) if rank == 1 else comms[rank].isend(1, rank)

    with pytest.raises(RuntimeError, match=r"ranks \[1\] wait, and nothing more will happen"):
        network.run([partial(start, rank) for rank in range(3)])


def test_ranks_that_begin_different_movements_are_found() -> None:
    network = Network(2, machine())
    links = transports(network)
    data = np.zeros(2, np.uint8)
    links[0].bcast(data, 0)
    links[1].gather(data, None, 0)
    with pytest.raises(RuntimeError, match="ranks of a group begin different movements"):
        network.run([partial(_Coroutine, iter(())) for _ in range(2)])


# Everything that a transport moves


def test_every_collective_gives_what_it_gives_on_ranks() -> None:
    size = 5
    network = Network(size, machine(per_node=2))
    comms = communicators(network)
    rows = np.arange(size * size * 300).reshape(size, size, 300)

    def all_ranks(start: Any) -> list[Any]:
        return network.run([partial(start, comm, rows[comm.rank]) for comm in comms])

    every = range(size)
    assert all((got == rows).all() for got in all_ranks(lambda c, x: c.iallgather(x)))
    swapped = all_ranks(lambda c, x: c.ialltoall(x))
    assert all((swapped[r] == rows[:, r]).all() for r in every)
    assert (all_ranks(lambda c, x: c.igather(x, 3))[3] == rows).all()
    mine = all_ranks(lambda c, x: c.iscatter(x if c.rank == 1 else None, 1))
    assert all((mine[r] == rows[1, r]).all() for r in every)
    assert all((got == rows[4]).all() for got in all_ranks(lambda c, x: c.ibcast(x, 4)))
    scanned = all_ranks(lambda c, x: c.iscan(x))
    assert all((scanned[r] == rows[: r + 1].sum(0)).all() for r in every)
    assert (all_ranks(lambda c, x: c.ireduce(x, root=2))[2] == rows.sum(0)).all()


@pytest.mark.parametrize("mebibytes", [1, 3, 40])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 13, 40, 100])
def test_a_broadcast_takes_what_the_model_says(size: int, mebibytes: int) -> None:
    nbytes, sent = mebibytes << 20, np.zeros(size, int)
    for step in movements.bcast(range(size), nbytes, 0):
        sent += np.where(step.to == rounds.NOBODY, 0, step.nbytes)
    assert sent.sum() == (size - 1) * nbytes
    assert sent.max() == model.sent_bytes(model.sent_by_root(size, nbytes))
    machine = cluster(stored(), 1)
    played = rounds.play(movements.bcast(range(size), nbytes, 0), size, machine)
    assert played == pytest.approx(model.seconds(model.broadcast(size, nbytes), machine), rel=0.02)


def test_a_broadcast_sends_one_copy_to_each_node() -> None:
    nodes = [0, 1, 0, 2, 1, 0, 3, 3]
    crossing = sum(
        int(step.nbytes[rank])
        for step in movements.bcast(nodes, 5 << 20, 3)
        for rank in np.flatnonzero(step.to != rounds.NOBODY)
        if nodes[rank] != nodes[step.to[rank]]
    )
    assert crossing == 3 * (5 << 20)


@pytest.mark.parametrize(
    "nodes",
    [
        [0, 1, 2],
        [0, 0, 1, 1],
        [0, 1, 0, 1, 2],
        [0, 0, 0, 1, 2, 2],
        [3, 3, 3, 3, 1, 1],
        [0] * 5 + [1] * 5,
    ],
)
def test_few_ranks_gather_by_the_messages_of_the_library(nodes, monkeypatch) -> None:
    from arraycomm._transports import mpi_direct
    from arraycomm._transports.mpi_pieces import Pieces
    from arraycomm._transports.routes import Places

    size = len(nodes)
    sent: Counter[tuple[int, int, int]] = Counter()
    finished = SimpleNamespace(Test=lambda: True)
    monkeypatch.setattr(mpi_direct, "MPI", SimpleNamespace(BYTE=None, Exception=Exception))

    def noting(rank: int) -> Any:
        def send(message: Any, peer: int, tag: int) -> Any:
            sent[rank, peer, len(message[0])] += 1
            return finished

        return SimpleNamespace(rank=rank, size=size, Isend=send, Irecv=lambda *_: finished)

    counts = [10 + rank for rank in range(size)]
    blocks = Blocks(
        np.zeros(sum(counts), np.uint8), counts, [0, *itertools.accumulate(counts)][:-1]
    )
    for rank in range(size):
        assert (
            mpi_direct.DirectMessages(noting(rank), Places(nodes), Pieces(1 << 20))
            .allgather(blocks)
            .done()
        )
    planned = Counter(
        (int(rank), int(step.to[rank]), int(step.nbytes[rank]))
        for step in movements.spread(counts, nodes)
        for rank in np.flatnonzero(step.to != rounds.NOBODY)
    )
    assert planned == sent


def test_empty_blocks_are_no_messages() -> None:
    counts = np.array([[0, 5, 0], [0, 0, 0], [7, 0, 0]])
    steps = list(movements.alltoall(counts))
    assert sum((step.to != rounds.NOBODY).sum() for step in steps) == 2
