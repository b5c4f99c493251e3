"""How long do the steps of arraycomm take on this machine?

`measure()` starts three kinds of jobs: one process that pretends to have many ranks and so times what
a rank does by itself; two ranks on one core, for the price of giving up a core; and 2, 4 and 8 ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from math import log
from pathlib import Path
from typing import Any, Final

import numpy as np

from arraycomm import Communicator
from arraycomm._collectives.chain import ChainSegment
from arraycomm._collectives.placement import Placements
from arraycomm._collectives.runner import Runner
from arraycomm._collectives.segment import chunk_tasks, forbid_segment
from arraycomm._communicator import group_of
from arraycomm._folds import fold
from arraycomm._launch.launchers import find_launcher
from arraycomm._protocol.group import Group
from arraycomm._protocol.options import Options
from arraycomm._transports.base import Bytes, Handle, Steps, Transport
from arraycomm._transports.control import ControlChannel, SharedControl, message_slot
from arraycomm._transports.mpi_movement import begin
from arraycomm._transports.node_chain import NodeChain
from arraycomm._transports.rank_grid import RankGrid, sides
from arraycomm.cli.bench.machine import machine, versions
from arraycomm.cli.bench.timing import measure as timed

ROOT: Final = Path(__file__).resolve().parents[3]
RANKS: Final = (2, 4, 8)
# What is timed on ranks: a kind of control channel, and bytes of float32; "mpi" is mpi4py's Allreduce.
CASES: Final = (
    *(("shared", n) for n in (8, 16 << 10, 256 << 10, 1 << 20, 16 << 20)),
    *(("messages", n) for n in (8, 4 << 10, 2 << 20, 16 << 20)),
    *(("mpi", n) for n in (8, 1 << 20, 16 << 20)),
)
# Pretended numbers of ranks, by the kind of control channel: a shared one has 4 KiB for each rank.
PRETENDED: Final = {"shared": (2, 8, 64, 1024), "messages": (2, 64, 1024, 16384)}
# Ranks of a node in a chain, and shares of a chunk in it; and those of a grid, with an element of each for each.
CHAINED: Final = (2, 64)
SHARES: Final = 8
GRIDS: Final = (1024, 16384)
STEPS: Final = 100
PRETENDED_SLICES: Final = 8 << 20
_REPETITIONS: Final = 61
# For each case: all jobs together stay below three minutes.
_SECONDS: Final = 0.4
# Runs of each job, of which the least disturbed is kept.
_RUNS: Final = 2

Times = dict[str, dict[str, float]]


class Alone:
    """The barrier and the maximum of a single process."""

    def barrier(self) -> None:
        """Nobody to wait for."""

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return this process's own numbers."""
        return list(seconds)


class Together:
    """The barrier and the maximum of MPI ranks, which poll and give up the core between polls."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi

    def barrier(self) -> None:
        """Wait for all ranks."""
        request = self._mpi.Ibarrier()
        while not request.Test():
            os.sched_yield()

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return, element by element, the largest of all ranks' numbers."""
        rows = self._mpi.allgather(list(seconds))
        return [max(column) for column in zip(*rows, strict=True)]


# A rank by itself


class _Finished:
    def done(self) -> bool:
        return True


def _answer(control: ControlChannel, mine: Bytes, rows: Bytes, seen: list[bytes | None]) -> None:
    """Copy what this rank shows to all pretended ranks, if that has changed."""
    parity = control.step & 1
    if seen[parity] is not control.shown[parity]:
        rows[:, 8:] = mine[8:]
        seen[parity] = control.shown[parity]


class _PretendedShared(SharedControl):
    """A control channel in shared memory on which all others show what this rank shows."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size, np.zeros(SharedControl.nbytes(size), np.uint8))
        self._seen: list[bytes | None] = [None, None]
        self._stamps = [rows.view(np.int64)[:, 0] for rows in self.rows]

    def post(self, nbytes: int | None = None) -> None:
        super().post(nbytes)
        parity = self.step & 1
        _answer(self, self.rows[parity][0], self.rows[parity], self._seen)
        self._stamps[parity][...] = self.step


class _PretendedMessages(ControlChannel):
    """A control channel over messages that have always arrived."""

    def __init__(self, size: int) -> None:
        rows = [np.zeros((size, message_slot(size)), np.uint8) for _ in range(2)]
        mine = [np.zeros(message_slot(size), np.uint8) for _ in range(2)]
        super().__init__(0, size, rows, mine)
        self._sent = mine
        self._seen: list[bytes | None] = [None, None]
        self._pending = False
        self.alike = [True, True]

    def post(self, nbytes: int | None = None) -> None:
        self.step += 1
        parity = self.step & 1
        _answer(self, self._sent[parity], self.rows[parity], self._seen)

    def done(self) -> bool:
        return not self._pending

    def missing(self) -> list[int]:
        return []


class Pretended(Transport):
    """Rank 0 of a group whose other ranks do not exist: nothing is sent, and nothing waited for."""

    name = "pretended"
    rank = local_rank = 0

    def __init__(self, size: int, *, shared: bool, grid: bool = False) -> None:
        self.size = self.local_size = size
        self.control = _PretendedShared(size) if shared else _PretendedMessages(size)
        if grid:
            self.grid = RankGrid(0, *sides(size), self, self, 1)

    def _nothing(self, *_: Any) -> Handle:
        return _Finished()

    alltoall = allgather = gather = scatter = bcast = send = recv = _nothing

    def probe(self, source: int | None, tags: range) -> None:
        return None

    def split(self, color: int | None, members: Sequence[int]) -> None:
        return None

    def free(self) -> None:
        """Nothing is held."""

    def nodes(self) -> Sequence[int]:
        return [0] * self.size


class _PretendedChain(NodeChain):
    """A rank of the second of three nodes; what comes is always there."""

    def __init__(self, lanes: int) -> None:
        ranks = np.arange(3 * lanes).reshape(3, lanes).tolist()
        super().__init__(lanes, ranks, _PretendedShared(lanes))

    def send(self, buffer: Bytes, peer: int) -> Handle:
        return _Finished()

    recv = send


def _turns(lanes: int, shares: int = 1) -> Callable[[], Any]:
    """Return a call that takes `STEPS` turns of a chain, with a line of each rank's for each share of a chunk."""
    place = _PretendedChain(lanes)
    segment = ChainSegment(place, np.zeros(ChainSegment.nbytes_of(place), np.uint8))
    # Of three nodes, the second one has K + 4 turns of K chunks.
    segment.chunk_bytes = 64 * lanes * shares
    segment.shares_for = lambda nbytes: shares
    x, y = np.ones((2, (STEPS - 4) * segment.chunk_bytes // 4), np.float32)

    def call() -> None:
        for handle in segment.reduce(chunk_tasks(segment, x, y), "sum", x.nbytes):
            handle.done()

    return call


def _steps(size: int) -> Callable[[], Any]:
    """Return a call that takes `STEPS` steps of a control channel in shared memory."""
    group = group_of(communicator(Pretended(size, shared=True)))
    control = group.control

    def steps() -> Steps:
        for _ in range(STEPS):
            control.post()
            yield control

    return lambda: group.engine.run(steps())


def _messages() -> Callable[[], Any]:
    """Return a call that sends `STEPS` / 2 messages to itself, and receives them."""
    from mpi4py import MPI

    x, y = np.zeros((2, 64), np.uint8)

    def call() -> None:
        for _ in range(STEPS // 2):
            for handle in (
                begin(MPI.COMM_SELF.Irecv, [y, MPI.BYTE], 0, 0),
                begin(MPI.COMM_SELF.Isend, [x, MPI.BYTE], 0, 0),
            ):
                handle.done()

    return call


Calls = dict[str, Callable[[], Any]]


def communicator(transport: Transport, timeout: float | None = 1800.0) -> Communicator:
    """Return a communicator over a transport."""
    group = Group(transport, Options(timeout=timeout))
    return Communicator(Runner(group, Placements(group)))


def _alone() -> Calls:
    """Return the calls of a single rank, by name: kind of control channel, what is called, ranks."""
    calls: Calls = {}
    for kind, sizes in PRETENDED.items():
        for size in sizes:
            comm = communicator(Pretended(size, shared=kind == "shared"))
            calls[f"{kind} header {size}"] = comm.barrier
            x, y = np.ones((2, 2), np.float32)
            calls[f"{kind} small {size}"] = partial(comm.allreduce, x, out=y)
            if kind == "messages":
                x, y = np.ones((2, PRETENDED_SLICES // 4), np.float32)
                calls[f"{kind} slices {size}"] = partial(comm.allreduce, x, out=y)
    calls |= {f"turns {lanes}": _turns(lanes) for lanes in CHAINED}
    calls[f"shares {SHARES}"] = _turns(CHAINED[0], SHARES)
    calls |= {"steps": _steps(2), "messages": _messages()}
    for size in GRIDS:
        comm = communicator(Pretended(size, shared=False, grid=True))
        x, y = np.ones((2, size), np.float32)
        calls[f"grid {size}"] = partial(comm.allreduce, x, out=y)
        calls[f"pieces {size}"] = partial(fold, "sum", x.dtype, x[:, None], y[:1])
    return calls | _folds()


def _folds() -> Calls:
    """Folds of 2 and of 8 rows of 256 KiB, which stay in the cache like those of a chunk."""
    rows, out = np.ones((8, 64 << 10), np.float32), np.empty(64 << 10, np.float32)
    return {
        f"fold {count}": partial(fold, "sum", rows.dtype, list(rows[:count]), out)
        for count in (2, 8)
    }


def run_alone() -> Times:
    """Time what a rank does by itself; return seconds a call, median and least."""
    return _times(_alone(), Alone())


# Ranks


def run_ranks() -> Times:
    """Time every case on the ranks of this job; return seconds a call, median and least."""
    from mpi4py import MPI

    from arraycomm._transports.mpi import MPITransport

    world = MPI.COMM_WORLD
    transports = {
        kind: MPITransport(world.Dup(), share=kind == "shared") for kind in ("shared", "messages")
    }
    assert all(made.control.shared == (kind == "shared") for kind, made in transports.items())
    # What the page says of shared memory is how it is reduced without a segment.
    forbid_segment(transports["shared"])
    # What it says of messages is how arrays go in slices, also those of two ranks.
    transports["messages"].exchange_pairs = None
    comms = {kind: communicator(made) for kind, made in transports.items()}
    calls: Calls = {}
    for kind, nbytes in CASES:
        x, y = np.ones((2, nbytes // 4), np.float32)
        call = partial(world.Allreduce, x, y)
        if kind in comms:
            call = partial(comms[kind].allreduce, x, out=y)
        call()
        assert y[0] == y[-1] == world.size
        calls[f"{kind} {nbytes}"] = call
    times = _times(calls, Together(world.Dup()))
    world.Barrier()
    for made in transports.values():
        made.free()
    return times


def _times(calls: Calls, meeting: Any) -> Times:
    _, samples = timed(list(calls.values()), _REPETITIONS, _SECONDS * len(calls), meeting)
    return {
        name: {"median": statistics.median(row), "min": min(row)}
        for name, row in zip(calls, samples, strict=True)
    }


def measure() -> dict[str, Any]:
    """Take all figures of this machine, in about two minutes."""
    results: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "alone": quietest(1, "alone"),
        "one core": quietest(2, "one-core"),
        "ranks": {},
        "runs": dict.fromkeys(("alone", "one core", *map(str, RANKS)), _RUNS),
    }
    for count in RANKS:
        results["ranks"][str(count)] = quietest(count, "ranks")
    return results


def quietest(count: int, what: str, runs: int = _RUNS) -> Times:
    """Run a job several times, and keep the run that other programs disturbed least."""
    return min((_job(count, what) for _ in range(runs)), key=disturbance)


def disturbance(times: Times) -> float:
    """Return a number that grows with every case's median."""
    return sum(log(figures["median"]) for figures in times.values())


def _job(count: int, what: str) -> Times:
    print(f"{count} ranks, {what} …", file=sys.stderr)
    launcher = find_launcher(os.environ)
    start = [] if count == 1 else launcher.command(count)
    command = [*start, sys.executable, "-m", __name__, what]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=launcher.environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    figures: Times = json.loads(done.stdout)
    return figures


def main(what: str) -> None:
    """Be one process of a job; the first one writes the figures to standard output."""
    if what == "alone":
        print(json.dumps(run_alone()))
        return
    if what == "one-core":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from mpi4py import MPI

    figures = run_ranks()
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1])
