"""Reductions between two nodes, beside MPI's own and what no library can do without; run by every rank of a job.

    mpiexec -n 2 -ppn 1 -hosts A,B python -m docs.studies.benchmarks.nodes FILE

Rank 0 adds the figures to those in the file, for the number of ranks on each node. Each node has to learn of the other's
elements: as many bytes as a rank's array has cross the link in each direction. The least time of that is measured too, each
rank of a node exchanging its part of the bytes with one rank of the other node, in pieces as the library does.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import numpy as np
from mpi4py import MPI

import arraycomm as ac
from docs.studies.benchmarks.results import machine
from docs.studies.benchmarks.trees import TREES

_SIZES: Final = {
    "8 B": 8,
    "1 KB": 1 << 10,
    "64 KB": 64 << 10,
    "256 KB": 256 << 10,
    "1 MB": 1 << 20,
    "16 MB": 16 << 20,
    "64 MB": 64 << 20,
}
# The bytes of a piece, and how many are under way.
_PIECE: Final = 64_000
_AHEAD: Final = 4
# Rounds in which all contenders take turns, and the seconds of one contender's calls in a round.
_ROUNDS: Final = 15
_SECONDS: Final = 0.1
# Calls before these, of which the quickest says how many there are in a round.
_FIRST: Final = 5

Call = Callable[..., Any]


def _works() -> Iterator[tuple[str, list[Any]]]:
    for name, nbytes in _SIZES.items():
        yield name, [np.ones(nbytes // 4, np.float32)]
    for name, shapes in TREES.items():
        yield f"a tree, {name}", [np.ones(shape, np.float32) for shape in shapes]
    # TCP has measured the link by then, and may pace what it sends.
    yield "64 KB, after these", [np.ones(16 << 10, np.float32)]


def _calls(comm: ac.Communicator, world: MPI.Intracomm, arrays: list[Any]) -> dict[str, Call]:
    """Return what is timed: by both libraries, and the exchange of the bytes alone."""
    size, nodes = world.size, 2
    outs = [np.empty_like(x) for x in arrays]
    count = max(sum(x.size for x in arrays) * nodes // size, 1)
    sent, come = np.ones(count, np.float32), np.empty(count, np.float32)
    other = (world.rank + size // nodes) % size
    alone = len(arrays) == 1
    reduce: Call = partial(comm.allreduce, out=outs[0]) if alone else comm.plan(arrays, "sum")
    return {
        "arraycomm": partial(reduce, arrays[0] if alone else arrays),
        "MPI": lambda: [world.Allreduce(x, y) for x, y in zip(arrays, outs, strict=True)],
        "exchange": partial(_exchange, world, other, sent.view(np.uint8), come.view(np.uint8)),
    }


def _exchange(world: MPI.Intracomm, other: int, sent: Any, come: Any) -> None:
    """Send as much as comes."""
    receives, sends = deque[MPI.Request](), list[MPI.Request]()
    for start in range(0, len(sent), _PIECE):
        if len(receives) == _AHEAD:
            _wait(receives.popleft())
        piece = slice(start, start + _PIECE)
        receives.append(world.Irecv([come[piece], MPI.BYTE], other))
        sends.append(world.Isend([sent[piece], MPI.BYTE], other))
    for request in (*receives, *sends):
        _wait(request)


def _wait(request: MPI.Request) -> None:
    """Wait for a message; ranks that share a core let one another have it."""
    while not request.Test():
        os.sched_yield()


def _repeated(world: MPI.Intracomm, call: Call) -> int:
    """Return how often all ranks make a call in a round."""
    took = float("inf")
    # The first calls take longer: they make messages, and TCP's window grows.
    for _ in range(_FIRST):
        started = perf_counter()
        call()
        took = min(took, world.allreduce(perf_counter() - started, MPI.MAX))
    return max(1, min(2000, int(_SECONDS / took)))


def _timed(world: MPI.Intracomm, calls: dict[str, Call]) -> dict[str, float]:
    """Return the median seconds of each call, measured in turns."""
    counts = {name: _repeated(world, call) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            world.Barrier()
            started = perf_counter()
            for _ in range(counts[name]):
                call()
            took = (perf_counter() - started) / counts[name]
            samples[name].append(world.allreduce(took, MPI.MAX))
    return {name: median(values) for name, values in samples.items()}


def main() -> None:
    """Measure, and write the figures."""
    world, about = MPI.COMM_WORLD, machine()
    comm = ac.init()
    names = world.allgather(MPI.Get_processor_name())
    ranks = names.count(names[0])
    if len(set(names)) != 2 or names != sorted(names, key=names.index) or 2 * ranks != world.size:
        raise SystemExit(
            "this takes two nodes with the same number of ranks, one node after the other"
        )
    found = {name: _timed(world, _calls(comm, world, arrays)) for name, arrays in _works()}
    if world.rank == 0:
        path = Path(sys.argv[1])
        stored = json.loads(path.read_text("utf-8")) if path.exists() else {}
        of_ranks = stored.setdefault(str(ranks), {"machine": about, "runs": []})
        of_ranks["runs"].append(found)
        path.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        for name, seconds in found.items():
            print(name, *(f"{key} {1e6 * value:.1f}" for key, value in seconds.items()), flush=True)


if __name__ == "__main__":
    main()
