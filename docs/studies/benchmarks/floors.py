"""Where the time of large reductions goes, beside what no library can do without; run by every rank of a job.

    mpiexec -n 2 python -m docs.studies.benchmarks.floors FILE

Rank 0 writes the figures to the file. No reduction that leaves its array as it is takes less time than a plain copy
of the bytes, by all ranks at the same time: each rank reads its array once, and writes a result of that length.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final
from unittest import mock

import numpy as np
from mpi4py import MPI

import arraycomm as ac
from arraycomm._collectives import segment
from arraycomm._protocol.engine import Engine
from arraycomm._transports.base import Transport
from arraycomm.cli.bench.machine import machine
from arraycomm.cli.bench.trees import TREES

# Repetitions, and calls that are looked at from inside.
_REPEATED: Final = 15
_PROFILED: Final = 15
_MB: Final = 1 << 20
# What of a call is timed from inside: the function that does it, and its name in the table. What one of
# them does within another counts for the outer one.
_INSIDE: Final = (
    (Engine, "wait_for", "waiting"),
    (Transport, "fold", "folding"),
    (segment.SharedSegment, "fold_part", "folding"),
    (segment._Timed, "fill", "copying in"),
)

Call = Callable[[], Any]


def _array(nbytes: int, dtype: str, rank: int) -> list[Any]:
    count = nbytes // np.dtype(dtype).itemsize
    return [(np.arange(count) % 61 + rank).astype(dtype)]


def _works(rank: int) -> Iterator[tuple[str, list[Any], bool]]:
    """Yield what is reduced: its name, its arrays, and whether they are a tree."""
    yield "64 MB of float32", _array(64 * _MB, "float32", rank), False
    yield "8 MB of float16", _array(8 * _MB, "float16", rank), False
    for name, tree in TREES.items():
        leaves = [np.full(shape, rank + 1, np.float32) for shape in tree.leaves]
        yield f"a tree, {name}", leaves, True


def _copied(arrays: list[Any], outs: list[Any]) -> None:
    for x, y in zip(arrays, outs, strict=True):
        np.copyto(y, x)


def _by_mpi(world: MPI.Intracomm, arrays: list[Any], outs: list[Any]) -> None:
    for x, y in zip(arrays, outs, strict=True):
        world.Allreduce(x, y)


def _timed(world: MPI.Intracomm, calls: dict[str, Call]) -> dict[str, list[float]]:
    """Return the seconds of each call on the slowest rank, measured in turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_REPEATED):
        for name, call in calls.items():
            world.Barrier()
            started = perf_counter()
            call()
            samples[name].append(world.allreduce(perf_counter() - started, MPI.MAX))
    return samples


@contextmanager
def _watched(seconds: dict[str, float]) -> Iterator[None]:
    """Add up the seconds of each part of the calls that are made meanwhile."""
    depth = 0

    def timing(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            nonlocal depth
            if depth:
                return function(*args, **keywords)
            depth, started = depth + 1, perf_counter()
            try:
                return function(*args, **keywords)
            finally:
                depth -= 1
                seconds[part] = seconds.get(part, 0.0) + perf_counter() - started

        return timed

    natively = segment.SharedSegment.reduce_natively

    def turns(self: Any, go_on: Any, target: Any, count: int, first: int) -> Iterator[Any]:
        places: list[tuple[Any, ...]] = []

        def noted(place: tuple[Any, ...]) -> Any:
            places[:] = [place]
            return go_on(place)

        yield from natively(self, noted, target, count, first)
        # The native part notes the seconds of a byte of each chunk.
        for part, each in zip(("copying in", "folding"), places[0][4].mean(axis=0), strict=True):
            seconds[part] += each * target.nbytes

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(segment.SharedSegment, "reduce_natively", turns))
        for owner, name, part in _INSIDE:
            timed = timing(getattr(owner, name), part)
            patches.enter_context(mock.patch.object(owner, name, timed))
        yield


def _profile(world: MPI.Intracomm, call: Call) -> dict[str, float]:
    """Return the median seconds of each part of a call, on this rank."""
    profiles = []
    for _ in range(_PROFILED):
        parts = dict.fromkeys([part for *_, part in _INSIDE], 0.0)
        world.Barrier()
        with _watched(parts):
            started = perf_counter()
            call()
            parts["whole"] = perf_counter() - started
        profiles.append(parts)
    return {part: median(profile[part] for profile in profiles) for part in profiles[0]}


def main() -> None:
    world, comm = MPI.COMM_WORLD, ac.init()
    lines = []
    for name, arrays, is_tree in _works(comm.rank):
        outs = [np.zeros_like(x) for x in arrays]
        plan = comm.plan(arrays, "sum") if is_tree else None
        ours: Call = (
            (lambda plan=plan, arrays=arrays: plan(arrays))
            if plan is not None
            else (lambda x=arrays[0], out=outs[0]: comm.allreduce(x, out=out))
        )
        calls: dict[str, Call] = {
            "mpi4py": lambda arrays=arrays, outs=outs: _by_mpi(world, arrays, outs),
            "arraycomm": ours,
            "copy": lambda arrays=arrays, outs=outs: _copied(arrays, outs),
        }
        for call in (ours, ours, *calls.values()):
            call()
        samples = _timed(world, calls)
        lines.append({"work": name, "samples": samples, "profile": _profile(world, ours)})
    if comm.rank == 0:
        figures = {"machine": machine(), "ranks": comm.size, "lines": lines}
        Path(sys.argv[1]).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
