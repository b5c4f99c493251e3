# ruff: noqa: RUF001 - formulas have Greek letters
"""What follows from the model, as sentences: the summary and the limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from arraycomm._collectives.chunks import overlapping_chunk
from arraycomm._transports.control import message_slot
from arraycomm.cli.bench.tables import ratio_text, size_text
from docs.studies.scaling import model
from docs.studies.scaling.formats import count_text, time_text
from docs.studies.scaling.large import (
    LARGEST,
    POWERS,
    SIZES,
    better,
    cluster,
    first,
    header,
    own,
)
from docs.studies.scaling.model import Machine
from docs.studies.scaling.real import without_python

# Seconds of Python in a round of the header, measured with a list in place of the network.
ROUND = 4e-6


def in_short(results: dict[str, Any]) -> str:
    """Return the summary."""
    one, many = cluster(results, 1), cluster(results, 64)
    return _section("Summary", [*_header_in_short(one, many), *_large_arrays_in_short(one, many)])


def limits(results: dict[str, Any]) -> str:
    """Return from where on something else would take less, and what the model leaves out."""
    one, many = cluster(results, 1), cluster(results, 64)
    lines = [
        *_limits_of_slices(one, many),
        *_limits_of_order(many),
        *_limits_of_steps(many),
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


def _large_arrays_in_short(one: Machine, many: Machine) -> Iterator[str]:
    n = SIZES["100 MB"]
    grid = first(lambda p: model.chosen(p, n, False) == "grid")
    yield (
        f'For 100 MB on one rank a node arraycomm chooses "slices", and from {count_text(grid)} ranks on "grid". This takes {time_text(own(64, n, one))} on 64 ranks, {time_text(own(1024, n, one))} '
        f'on 1,024 and **{time_text(own(LARGEST, n, one))} on {LARGEST:,}**. With 64 ranks a node it chooses "chain", which takes {time_text(own(1024, n, many))} on 1,024 ranks and **{time_text(own(LARGEST, n, many))} on {LARGEST:,}**.'
    )
    yield (
        f"Rabenseifner's algorithm takes {time_text(model.by_halving(LARGEST, n, one))} on {LARGEST:,} ranks, one a node, and {time_text(model.by_halving(LARGEST, n, many))} with 64 a node. It sends and folds each byte as seldom as is possible, "
        f"on every rank 2 n β + n γ, and has few latencies: it is the bound that the bandwidth sets. arraycomm takes {ratio_text(own(LARGEST, n, one) / model.by_halving(LARGEST, n, one))} and {ratio_text(own(LARGEST, n, many) / model.by_halving(LARGEST, n, many))} times as long, header included."
    )


def _limits_of_slices(one: Machine, many: Machine) -> Iterator[str]:
    for title in ("64 KiB", "100 MB"):
        n = SIZES[title]
        yield (
            f"{title}: arraycomm with its header takes more than twice as long as `MPI_Allreduce` "
            f"{_twice(n, model.mpi_allreduce, one, many)}, and more than twice as long as the fastest "
            f"by slices or by gathering {_twice(n, better, one, many)}."
        )
    n = SIZES["100 MB"]
    chunks = ", ".join(f"{_chunks_of(n, p)} on {p:,}" for p in (64, 256, 1024, 4096))
    yield (
        f"Between nodes, smaller chunks of slices hide folds behind messages, and cost more latencies. With more ranks chunks are larger: 100 MB go in {chunks} ranks."
    )
    fixed = {p: own(p, n, one, 4 << 20) for p in (1024, LARGEST)}
    yield (
        f"In slices of chunks of 4 MiB, whatever the number of ranks, 100 MB would take {time_text(fixed[1024])} on 1,024 ranks and {time_text(fixed[LARGEST])} on {LARGEST:,}, instead of "
        f"{time_text(own(1024, n, one))} and {time_text(own(LARGEST, n, one))}; and slices of the whole array, with a message to each rank, {time_text(model.in_slices(LARGEST, n, one))} on {LARGEST:,}."
    )
    latencies = without_python(replace(one, per_byte=0.0, fold_byte=0.0))
    yield (
        f"Over a grid every byte goes between ranks three times, where slices send it twice, and is copied once more, to be in rank order. On {LARGEST:,} ranks latencies are {time_text(model.in_grid(LARGEST, n, latencies))} of the "
        f"{time_text(own(LARGEST, n, one))} for 100 MB, and Python and the native part take {time_text(_of_python(LARGEST, n, one))} beside folds. A number of ranks without divisors, such as a prime, has no grid, and takes slices."
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
        f"{time_text(_of_python(LARGEST, n, many))} of that, with the copies into and out of the segment: a chunk goes through "
        f"{LARGEST // many.per_node:,} nodes, and its result down a tree of them in {(LARGEST // many.per_node).bit_length() - 1} hops."
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


def _limits_of_mpi(one: Machine) -> Iterator[str]:
    yield (
        "MPI's own reduction could be used with `reproducible=False`, and for integers and bit operations, whose results do not depend on the "
        "order. arraycomm does not use it today. "
        f"8 bytes on {LARGEST:,} ranks take {time_text(own(LARGEST, 8, one))}; MPI's reduction would take "
        f"{time_text(header(LARGEST, one) + model.mpi_allreduce(LARGEST, 8, one))} with the header."
    )


def _limits_of_headers(one: Machine) -> Iterator[str]:
    yield (
        "Between nodes, arrays of up to 1 MiB divided by the ranks (1 MiB of two ranks, and 128 bytes at least) are sent with the header. So the bytes that a node receives grow with "
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
    if from_one is None:
        return "on no number of ranks"
    with_many = "never" if from_many is None else f"{from_many:,}"
    return f"from {from_one:,} ranks on ({with_many} with 64 a node)"
