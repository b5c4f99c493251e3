"""`arraycomm bench --tune FILE`: measure where one algorithm of a reduction becomes faster than another."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

import arraycomm
from arraycomm._communicator import group_of
from arraycomm._protocol.tuning import VARIABLE, Entries, read, write
from arraycomm._transports.base import Transport
from arraycomm._transports.crossovers import NOT_MEASURED, Crossovers
from arraycomm.cli.bench.contenders import Field
from arraycomm.cli.bench.tables import Table, as_text, number_text, size_text
from arraycomm.cli.bench.timing import measure

# The largest arrays in which two algorithms are compared, and what all ranks gather of them at most.
_LARGEST: Final = {"steps": 4 << 20, "gather": 4 << 20, "slices": 16 << 20}
_GATHERED: Final = 64 << 20
# The lengths of chunks that are compared, and the arrays; None is the length without measurements.
_CHUNKS: Final = (None, *(1 << bits for bits in range(20, 25)))
_CHUNKED: Final = (4 << 20, 16 << 20, 64 << 20)
# Another length of chunks has to take less than so many times as long.
_BETTER: Final = 0.95

# Seconds, by the bytes of the array: of the algorithm for small arrays and of that for large ones.
Compared = Mapping[int, tuple[float, float]]
# Seconds, by the bytes of the array and by the length of a chunk.
Chunked = Mapping[int, Mapping[int | None, float]]


class Plan(NamedTuple):
    """What is measured between some ranks: algorithms against that for larger arrays, and chunks."""

    sizes: Mapping[str, Sequence[int]]
    chunked: Sequence[int]


def crossover(seconds: Compared) -> int:
    """Return up to how many bytes the algorithm for small arrays is to be taken; 0 if never.

    Of all limits it is the one whose choices take the least time, each size counted alike.
    """
    limits = [0, *sorted(seconds)]

    def cost(limit: int) -> float:
        return math.fsum(
            math.log(small if n <= limit else large) for n, (small, large) in seconds.items()
        )

    return min(limits, key=cost)


def best_chunk(seconds: Chunked) -> int | None:
    """Return the length of chunks that takes the least time, each size counted alike.

    It is None if the length without measurements, which grows with the array, takes hardly longer.
    """

    def relative(chunk: int | None) -> float:
        return statistics.geometric_mean(times[chunk] / times[None] for times in seconds.values())

    candidates = next(iter(seconds.values()), {None: 1.0})
    best = min(candidates, key=relative) if seconds else None
    return best if best is not None and relative(best) < _BETTER else None


def plan_of(
    size: int, payload: int, shared: bool, sizes: Sequence[int] | None, *, chained: bool = False
) -> Plan:
    """Return what to measure between so many ranks; `sizes` are those that the user asks for.

    `chained` is whether the nodes are a chain, so that slices are compared with it.
    """
    largest = _LARGEST | {"gather": min(_LARGEST["gather"], _GATHERED // size)}
    algorithms = ["steps"] if shared else ["gather", *(["slices"] if chained else [])]
    asked = (
        [1 << bits for bits in range(max(payload, 1).bit_length(), 30)] if sizes is None else sizes
    )
    compared = {name: [n for n in asked if payload < n <= largest[name]] for name in algorithms}
    # Two ranks between nodes exchange arrays whole.
    if shared or size == 2:
        return Plan(compared, ())
    return Plan(compared, _CHUNKED if sizes is None else [n for n in sizes if n >= _CHUNKED[0]])


def run(arguments: argparse.Namespace) -> int:
    """Measure, and write the file; collective. Return 0, or 1 if nothing can be written."""
    # The file may be the one that is to be written.
    os.environ.pop(VARIABLE, None)
    comm = arraycomm.init("mpi")
    path: Path = arguments.tune
    entries, reason = _before(path) if comm.rank == 0 else ({}, "")
    reason = comm.bcast_object(reason or ("--tune needs several ranks" if comm.size == 1 else ""))
    if reason:
        if comm.rank == 0:
            print(f"bench: {reason}", file=sys.stderr)
        return 1
    transport = group_of(comm).transport
    field = Field(comm)
    found = _measured(field, transport, arguments)
    field.close()
    if comm.rank == 0:
        shape = comm.size, len(set(transport.nodes()))
        write(path, {**entries, shape: found})
        print(_summary(path, *shape, found, chunked=not transport.slot[1]))
    return 0


def _before(path: Path) -> tuple[Entries, str]:
    """Return what the file has so far, and why it cannot be written; seen before it takes time to measure."""
    try:
        entries = read(path) if path.exists() else {}
        with path.open("a", encoding="utf-8"):
            return entries, ""
    except ValueError as error:
        return {}, f"--tune would overwrite a file: {error}"
    except OSError as error:
        return {}, f"--tune: cannot write {str(path)!r}: {error.strerror}"


def _measured(field: Field, transport: Transport, arguments: argparse.Namespace) -> Crossovers:
    payload, shared = transport.slot
    chained = transport.chain is not None
    plan = plan_of(field.size, payload, shared, arguments.sizes, chained=chained)
    found: dict[str, int | None] = {}
    compared: dict[str, dict[int, tuple[float, float]]] = {}
    # What is smaller than by slices goes by them, until more is known.
    rest = {} if shared else {"gather": 0, "slices": 1 << 40}
    try:
        for algorithm, sizes in plan.sizes.items():
            choices = [Crossovers(**{**rest, algorithm: limit}) for limit in (1 << 40, 0)]
            compared[algorithm] = {}
            for nbytes in sizes:
                small, large = _times(field, transport, nbytes, choices, arguments)
                compared[algorithm][nbytes] = small, large
            if sizes:
                found[algorithm] = crossover(compared[algorithm])
        by_chunk = [NOT_MEASURED._replace(**rest, chunk=n) for n in _CHUNKS]
        chunked = {
            nbytes: dict(
                zip(_CHUNKS, _times(field, transport, nbytes, by_chunk, arguments), strict=True)
            )
            for nbytes in plan.chunked
        }
    finally:
        transport.crossovers = NOT_MEASURED
    found["chunk"] = best_chunk(chunked)
    if field.rank == 0:
        for table in _tables(compared, chunked):
            print(as_text(table), end="\n\n")
    return Crossovers(**found)


def _times(
    field: Field,
    transport: Transport,
    nbytes: int,
    choices: Sequence[Crossovers],
    arguments: argparse.Namespace,
) -> list[float]:
    """Return the seconds of an allreduce by each choice; collective."""
    x = np.ones(nbytes // 4, np.float32)
    out = np.empty_like(x)

    def by(choice: Crossovers) -> Callable[[], object]:
        def call() -> None:
            transport.crossovers = choice
            field.comm.allreduce(x, out=out)

        return call

    _, samples = measure([by(c) for c in choices], arguments.repeats, arguments.seconds, field)
    if field.rank == 0:
        print(f"bench: measured {size_text(nbytes)}", file=sys.stderr, flush=True)
    return [statistics.median(row) for row in samples]


def _tables(by_algorithm: Mapping[str, Compared], chunked: Chunked) -> Iterator[Table]:
    for algorithm, compared in by_algorithm.items():
        rows = [
            [size_text(nbytes), *(number_text(1e6 * s) for s in times)]
            for nbytes, times in sorted(compared.items())
        ]
        yield Table("µs of an allreduce", ["", algorithm, "for larger arrays"], rows)
    if chunked:
        titles = ["", *("as built" if n is None else size_text(n) for n in _CHUNKS)]
        rows = [
            [size_text(nbytes), *(number_text(1e6 * s) for s in times.values())]
            for nbytes, times in sorted(chunked.items())
        ]
        yield Table("µs of an allreduce, by the length of its chunks", titles, rows)


def _summary(path: Path, ranks: int, nodes: int, found: Crossovers, *, chunked: bool) -> str:
    limits = [
        f"{name} up to {size_text(limit)}" if limit else f"{name} never"
        for name, limit in found._asdict().items()
        if name != "chunk" and limit is not None
    ]
    if chunked:
        limits.append(f"chunks of {size_text(found.chunk)}" if found.chunk else "chunks as built")
    return (
        f"{path} has now, for {ranks} ranks on {nodes} node{'s' if nodes > 1 else ''}: "
        f"{', '.join(limits) or 'nothing, since no size was measured'}\n"
        f"Programs use it with {VARIABLE}={path}, which rank 0 reads"
    )
