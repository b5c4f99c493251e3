"""`python -m arraycomm overlap`: how much of a nonblocking call other work hides."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

import arraycomm
from arraycomm import Communicator
from arraycomm._launch import detect
from arraycomm.cli.bench.machine import machine
from arraycomm.cli.bench.tables import Table, as_text
from arraycomm.cli.launch import launch
from arraycomm.cli.numbers import positive

_SIZES: Final = (1 << 20, 8 << 20, 64 << 20)
_ORDER: Final = 256
Work = Callable[[int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("--ranks", type=positive, default=2, metavar="N", help="without mpiexec; default 2")
    add("--repeats", type=positive, default=15, metavar="N", help="samples of each; default 15")
    add("--json", type=Path, metavar="FILE", help="write the medians there")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and return 0."""
    if detect(os.environ) is None:
        words = ["overlap", "--repeats", str(arguments.repeats)]
        words += [] if arguments.json is None else ["--json", str(arguments.json)]
        return launch(arguments.ranks, words)
    comm = arraycomm.init("mpi")
    works = {"sleep": _sleep, "matmul": _matmul}
    lines = [
        measure(comm, name, work, nbytes, arguments.repeats)
        for name, work in works.items()
        for nbytes in _SIZES
    ]
    if comm.rank == 0:
        print(as_text(overlap_table(lines, comm.size)))
        if arguments.json is not None:
            results = {"ranks": comm.size, "machine": machine(), "lines": lines}
            arguments.json.write_text(f"{json.dumps(results, indent=1)}\n", encoding="utf-8")
    return 0


def measure(comm: Communicator, name: str, work: Work, nbytes: int, repeats: int) -> dict[str, Any]:
    """Time a call, work that takes as long, and both at once, in turns; medians, in seconds."""
    x = np.ones(nbytes // 4, np.float32)
    out = np.empty_like(x)
    call = partial(comm.allreduce, x, out=out)
    pieces = _pieces(comm, work, _typical_seconds(comm, call))

    def both() -> None:
        request = comm.iallreduce(x, out=out)
        work(pieces)
        request.wait()

    samples: dict[str, list[float]] = {"call": [], "work": [], "both": []}
    for _ in range(repeats):
        for key, fn in (("call", call), ("work", partial(work, pieces)), ("both", both)):
            samples[key].append(_slowest(comm, fn))
    medians = {key: median(times) for key, times in samples.items()}
    hidden = (medians["call"] + medians["work"] - medians["both"]) / min(
        medians["call"], medians["work"]
    )
    return {"beside": name, "nbytes": nbytes, **medians, "hidden": hidden}


def overlap_table(lines: list[dict[str, Any]], ranks: int) -> Table:
    """Return the lines as a table: times in milliseconds."""
    rows = [
        [
            f"{line['nbytes'] >> 20} MB",
            line["beside"],
            *(f"{line[key] * 1e3:.2f}" for key in ("call", "work", "both")),
            f"{line['hidden'] * 100:.0f} %",
        ]
        for line in lines
    ]
    header = ["size", "work", "call alone", "work alone", "both", "hidden"]
    return Table(f"iallreduce of float32 beside other work, {ranks} ranks: ms", header, rows)


def _slowest(comm: Communicator, fn: Callable[[], object]) -> float:
    """Return the seconds that `fn` took on the slowest rank."""
    comm.barrier()
    started = time.perf_counter()
    fn()
    return float(comm.allreduce(time.perf_counter() - started, "max"))


def _typical_seconds(comm: Communicator, fn: Callable[[], object]) -> float:
    """Return the median seconds of `fn` on the slowest rank, after a call that warms up."""
    fn()
    return median(_slowest(comm, fn) for _ in range(5))


def _pieces(comm: Communicator, work: Work, seconds: float) -> int:
    """Return how many pieces of work take about that long."""
    return max(round(seconds / _typical_seconds(comm, partial(work, 1))), 1)


def _sleep(pieces: int) -> None:
    """Work that waits, as for a disk, a network or a device."""
    time.sleep(pieces * 1e-4)


_left: Final = np.ones((_ORDER, _ORDER), np.float32)
_product: Final = np.empty_like(_left)


def _matmul(pieces: int) -> None:
    """Work that computes, and releases Python's lock meanwhile."""
    for _ in range(pieces):
        np.matmul(_left, _left, out=_product)
