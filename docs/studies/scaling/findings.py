"""What follows from the model, as sentences: the summary and the limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from arraycomm._collectives.chunks import overlapping_chunk
from arraycomm._transports.base import DIRECT_RANKS
from arraycomm._transports.control import message_slot
from arraycomm.cli.bench.tables import size_text
from docs.studies.scaling import model
from docs.studies.scaling.formats import count_text, time_text
from docs.studies.scaling.large import (
    GAP,
    LARGEST,
    POWERS,
    SIZES,
    better,
    cluster,
    first,
    header,
    latencies,
    own,
)
from docs.studies.scaling.model import Machine
from docs.studies.scaling.real import without_python

# Seconds of Python in a round of the header, measured with a list in place of the network.
ROUND = 4e-6


def in_short(results: dict[str, Any]) -> str:
    """Return the summary."""
    one, many = cluster(results, 1), cluster(results, 64)
    return _section("Summary", [*_header_in_short(one, many), *_slices_in_short(one)])


def limits(results: dict[str, Any]) -> str:
    """Return from where on something else would take less, and what the model leaves out."""
    one, many = cluster(results, 1), cluster(results, 64)
    lines = [
        *_limits_of_slices(one, many),
        *_limits_of_order(many),
        *_limits_of_steps(many),
        *_limits_of_python(one),
        *_limits_of_mpi(one),
        *_limits_of_headers(one),
    ]
    return _section("Limits", lines)


def _section(title: str, lines: list[str]) -> str:
    return f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines) + "\n"


def _header_in_short(one: Machine, many: Machine) -> Iterator[str]:
    yield (
        "Between nodes, ranks that agree have one header in common, which takes as many bytes on any number of ranks. "
        f"With one rank a node it takes {time_text(header(1024, one))} on 1,024 ranks and **{time_text(header(LARGEST, one))} on {LARGEST:,}**; "
        f"with 64 ranks a node it takes {time_text(header(1024, many))} and {time_text(header(LARGEST, many))}. An `MPI_Allreduce` of 8 bytes takes "
        f"{time_text(model.mpi_allreduce(1024, 8, one))} and {time_text(model.mpi_allreduce(LARGEST, 8, one))} in this model."
    )
    yield (
        f"With a slot of {message_slot(LARGEST)} bytes for each rank and each of two steps, "
        f"a node of {LARGEST:,} ranks reserves {2 * message_slot(LARGEST) * LARGEST / 1e6:.0f} MB of memory for them."
    )


def _slices_in_short(one: Machine) -> Iterator[str]:
    n = SIZES["100 MB"]
    yield (
        f'For 100 MB arraycomm chooses "slices". This takes {time_text(own(64, n, one))} on 64 ranks, {time_text(own(1024, n, one))} '
        f"on 1,024 and {time_text(own(LARGEST, n, one))} on {LARGEST:,}, since each chunk costs 2 (p − 1) latencies. Rabenseifner's algorithm "
        f"takes {time_text(model.by_halving(1024, n, one))} on 1,024 ranks and {time_text(model.by_halving(LARGEST, n, one))} on {LARGEST:,}."
    )
    yield (
        f"The fastest by slices or by gathering would take {time_text(better(1024, n, one))} on 1,024 ranks and {time_text(better(LARGEST, n, one))} on {LARGEST:,}."
    )


def _limits_of_slices(one: Machine, many: Machine) -> Iterator[str]:
    for title in ("64 KiB", "100 MB"):
        n = SIZES[title]
        yield (
            f"{title}: arraycomm with its header takes more than twice as long as `MPI_Allreduce` from "
            f"{_twice(n, model.mpi_allreduce, one, many)}, and more than twice as long as the fastest "
            f"by slices or by gathering from {_twice(n, better, one, many)}."
        )
    n = SIZES["100 MB"]
    tenth = first(lambda p: latencies(p, n, one) > 0.1 * own(p, n, one))
    half = first(lambda p: latencies(p, n, one) > 0.5 * own(p, n, one))
    chunks = ", ".join(f"{_chunks_of(n, p)} on {p:,}" for p in (64, 256, 1024, 4096))
    yield (
        f"Between nodes, smaller chunks hide folds behind messages, and cost more latencies. With more ranks chunks are larger: 100 MB go in {chunks} ranks. The latencies are a tenth of the time from "
        f"{count_text(tenth)} ranks on, and half of it from {count_text(half)}."
    )
    fixed = {p: own(p, n, one, 4 << 20) for p in (1024, LARGEST)}
    yield (
        f"In chunks of 4 MiB, whatever the number of ranks, 100 MB would take {time_text(fixed[1024])} on 1,024 ranks and {time_text(fixed[LARGEST])} on {LARGEST:,}, instead of "
        f"{time_text(own(1024, n, one))} and {time_text(own(LARGEST, n, one))}; and 8 MiB on 1,024 ranks {time_text(own(1024, 8 << 20, one, 2 << 20))} in chunks of 2 MiB, instead of "
        f"{time_text(own(1024, 8 << 20, one))} in {_chunks_of(8 << 20, 1024)}."
    )
    gained = _count_of(n, LARGEST) * (LARGEST - 1) * (one.latency - GAP)
    yield (
        f"If messages overlap, with a gap of {GAP * 1e6:g} µs between two, the all-to-all of 100 MB on {LARGEST:,} ranks takes {time_text(gained)} less "
        f"(the whole takes {time_text(own(LARGEST, n, one))}). The rings take as long as before."
    )


def _count_of(nbytes: int, size: int) -> int:
    return -(-nbytes // overlapping_chunk(nbytes, size))


def _chunks_of(nbytes: int, size: int) -> str:
    count = _count_of(nbytes, size)
    return f"{count} chunk{'s' if count > 1 else ''}"


def _limits_of_order(many: Machine) -> Iterator[str]:
    n = SIZES["100 MB"]
    yield (
        "With 64 ranks a node, \"slices\" sends the elements of all ranks over the node's link. Rabenseifner's algorithm first folds "
        f"those of one node. On 256 ranks, the fastest by slices or by gathering takes {time_text(better(256, n, many))} for 100 MB, Rabenseifner's "
        f'{time_text(model.mpi_allreduce(256, n, many))}. Along "chain" each node continues the fold of the one before, which keeps the '
        f"rank order and sends each byte over a link once in each direction: {time_text(own(256, n, many))}, of which Python takes "
        f"{time_text(_of_python(256, n, many))}. On {LARGEST:,} ranks it takes {time_text(own(LARGEST, n, many))}, and Python "
        f"{time_text(_of_python(LARGEST, n, many))} of that: in each turn it looks at the part of each rank of its node, and a chunk goes through "
        f"{LARGEST // many.per_node:,} nodes and back."
    )


def _of_python(size: int, nbytes: int, machine: Machine) -> float:
    return own(size, nbytes, machine) - own(size, nbytes, without_python(machine))


def _limits_of_steps(many: Machine) -> Iterator[str]:
    n, size = 64 << 10, many.per_node
    steps, slices = (
        model.header_in_shared_memory(size, many) + algorithm(size, n, many, True)
        for algorithm in (model.in_steps, model.in_slices)
    )
    on_node = [p for p in POWERS if 2 <= p <= size]
    dearer = [
        p for p in on_node if model.in_steps(p, n, many, True) > model.in_slices(p, n, many, True)
    ]
    yield (
        f'With "steps", every rank of a node folds the elements of all of them. 64 KiB on {size} ranks take {time_text(steps)} by "steps", which arraycomm '
        f'chooses, and {time_text(slices)} by "slices". Steps take longer from {count_text(min(dearer, default=None))} ranks on. The limit of '
        "16 steps depends on the number of ranks only through the size of a slot."
    )


def _limits_of_python(one: Machine) -> Iterator[str]:
    n = SIZES["64 KiB"]
    half = first(lambda p: p * one.part > 0.5 * better(p, n, one))
    yield (
        f"On {LARGEST:,} ranks the fastest by slices or by gathering takes {time_text(better(LARGEST, n, one))} for 64 KiB. Python takes {time_text(LARGEST * one.part)} of it: "
        f"a NumPy call and some bookkeeping for each rank. It takes half of the time from {count_text(half)} ranks on. "
        "No algorithm helps as long as Python folds the rows one by one."
    )


def _limits_of_mpi(one: Machine) -> Iterator[str]:
    yield (
        "MPI's own reduction could be used with `reproducible=False`, and for integers and bit operations, whose results do not depend on the "
        "order. arraycomm does not use it today. "
        f"8 bytes on {LARGEST:,} ranks take {time_text(own(LARGEST, 8, one))}; MPI's reduction would take "
        f"{time_text(header(LARGEST, one) + model.mpi_allreduce(LARGEST, 8, one))} with the header."
    )
    n = SIZES["100 MB"]
    few = first(lambda p: overlapping_chunk(n, p) <= 2048 * p)
    yield (
        "In MPICH, `MPI_Ialltoall` takes few rounds if slices are equal and have at most 2 KiB. `MPI_Ialltoallv`, which "
        f"arraycomm calls on more than {DIRECT_RANKS} ranks, never does. A chunk of 100 MB has such slices from {count_text(few)} ranks on, an array of 64 KiB from 32."
    )


def _limits_of_headers(one: Machine) -> Iterator[str]:
    yield (
        "Between nodes, arrays of up to 64 KiB (512 KiB of two ranks; of more, 256 KiB divided by the ranks, and 128 bytes at least) are sent with the header. So the bytes that a node receives grow with "
        f"the ranks: {size_text(8 * LARGEST)} for 8 bytes from each of {LARGEST:,}."
    )
    yield (
        f"In each round of the header Python begins two messages and waits for one, unless the native part makes the step, as for small reductions that repeat. This takes Python about {time_text(ROUND)}, which the model leaves out: {time_text(model.exponent(LARGEST) * ROUND)} on {LARGEST:,} ranks."
    )
    yield (
        "The model leaves out contention between nodes, noise of the operating system, ranks that arrive late, "
        "the memory of buffers, and the time to start a job."
    )


def _twice(
    nbytes: int, other: Callable[[int, int, Machine], float], one: Machine, many: Machine
) -> str:
    """Say from how many ranks on arraycomm takes twice as long as another algorithm."""
    from_one, from_many = (
        first(lambda p, m=machine: own(p, nbytes, m) > 2 * other(p, nbytes, m))
        for machine in (one, many)
    )
    with_many = "never" if from_many is None else f"{from_many:,}"
    return f"{count_text(from_one)} ranks on ({with_many} with 64 a node)"
