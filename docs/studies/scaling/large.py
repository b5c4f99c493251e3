"""How long do allreduces take on the large machine that is assumed, and where do the curves cross?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from docs.studies.scaling import fit, model
from docs.studies.scaling.model import Machine

POWERS: Final = tuple(1 << k for k in range(1, 18))
LARGEST: Final = POWERS[-1]
SIZES: Final = {"8 B": 8, "64 KiB": 64 << 10, "100 MB": 100_000_000}
NODES: Final = {"one rank a node": 1, "64 ranks a node": 64}


def cluster(results: dict[str, Any], per_node: int) -> Machine:
    """Return the large machine that is assumed; Python costs what it costs on the measured one."""
    here = fit.fitted(results).machine
    return replace(
        here,
        latency=1.5e-6,
        per_byte=1 / 25e9,
        near_latency=0.5e-6,
        near_byte=1 / 10e9,
        copy_byte=1 / 10e9,
        fold_byte=1 / 10e9,
        per_node=per_node,
    )


# What is compared


def on_one_node(size: int, machine: Machine) -> bool:
    """Tell whether all ranks share memory."""
    return size <= machine.per_node


def header(size: int, machine: Machine) -> float:
    """Return the seconds of the header as it is built."""
    return model.header(size, machine, on_one_node(size, machine))


def own(size: int, nbytes: int, machine: Machine, chunk: int | None = None) -> float:
    """Return the seconds of arraycomm's allreduce, header included; of "slices" in such chunks if they are given."""
    if chunk is not None:
        head = model.header_of_messages(size, machine)
        return head + model.in_slices(size, nbytes, machine, chunk=chunk)
    return model.allreduce(size, nbytes, machine, shared=on_one_node(size, machine))


def better(size: int, nbytes: int, machine: Machine) -> float:
    """Return the seconds of the fastest algorithm in rank order, with the header."""
    return model.header_of_messages(size, machine) + model.in_rank_order(size, nbytes, machine)


def first(holds: Callable[[int], bool]) -> int | None:
    """Return the least power of two from which on all satisfy a condition."""
    found = None
    for size in reversed(POWERS):
        if not holds(size):
            break
        found = size
    return found
