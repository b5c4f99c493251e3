"""What do the measurements say of this machine, and what does the model predict from them?

Everything is fitted to one process, to two ranks on one core, and to two ranks on two. More ranks than
cores take turns: whatever they do costs `size / cores` times as much, and each wait a change of turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final, NamedTuple

from arraycomm._collectives.chunks import overlapping_chunk
from arraycomm._collectives.selection import CHUNK_BYTES
from arraycomm._transports.rank_grid import sides
from docs.studies.scaling import model
from docs.studies.scaling.measure import (
    CASES,
    CHAINED,
    GRIDS,
    PRETENDED_SLICES,
    RANKS,
    SHARES,
    STEPS,
)
from docs.studies.scaling.model import Machine

# The least of all repetitions: other programs on the machine only ever add to a time.
BEST: Final = "min"
LARGE: Final = 16 << 20
SLICED: Final = 2 << 20
MEDIUM: Final = 16 << 10
_FOLDED: Final = 256 << 10
_SMALL: Final = 8


@dataclass(frozen=True, slots=True)
class Here:
    """The machine of the measurements: as arraycomm sees it, as MPI sees it, and taking turns.

    `turn` has the seconds of a change of turns while waiting, by kind of case.
    """

    machine: Machine
    mpi: Machine
    turn: dict[str, float]
    cores: int


class Prediction(NamedTuple):
    """A case on so many ranks: seconds as predicted, as measured at best, and as in the median."""

    ranks: int
    kind: str
    nbytes: int
    algorithm: str
    fitted: bool
    predicted: float
    best: float
    median: float


def fitted(results: dict[str, Any]) -> Here:
    """Return what the measurements say of this machine."""
    alone, two, one_core = results["alone"], results["ranks"]["2"], results["one core"]
    machine = _local(alone)
    # With its neighbours a rank makes such a call in the native part; the one that pretends does so in Python.
    native = _at(two, f"shared {_SMALL}") - 2 * (machine.slot + machine.row)
    machine = _between_two(replace(machine, call=min(machine.call, native)), two)
    mpi = _mpi(machine, two)
    free = Here(machine, mpi, {}, results["machine"]["cores"])
    turn = {
        kind: max(0.0, one_core[f"{kind} {_SMALL}"][BEST] / 2 - _work(free, kind, 2, _SMALL))
        for kind in ("shared", "messages", "mpi")
    }
    return replace(free, turn=turn)


def predictions(results: dict[str, Any]) -> Iterator[Prediction]:
    """Compare the model with every measurement on ranks."""
    here = fitted(results)
    for ranks in RANKS:
        for kind, nbytes in CASES:
            times = results["ranks"][str(ranks)][f"{kind} {nbytes}"]
            yield Prediction(
                *(ranks, kind, nbytes, _algorithm(kind, ranks, nbytes)),
                ranks == 2 and (kind, nbytes) in _FITTED,
                predicted(here, kind, ranks, nbytes),
                *(times["min"], times["median"]),
            )


def predicted(here: Here, kind: str, ranks: int, nbytes: int) -> float:
    """Return how long a case takes on so many ranks of this machine."""
    crowd = max(1.0, ranks / here.cores)
    turns = waits(kind, ranks, nbytes) * here.turn[kind] if crowd > 1 else 0.0
    return crowd * (_work(here, kind, ranks, nbytes) + turns)


def waits(kind: str, ranks: int, nbytes: int) -> int:
    """Return how often a rank waits for another: once a step of the control channel, once a round."""
    if kind == "mpi":
        return len(_mpi_rounds(ranks, nbytes))
    header = 1 if kind == "shared" else model.exponent(ranks)
    match _algorithm(kind, ranks, nbytes):
        case "header":
            return header
        case "steps":
            return header + ceil(nbytes / model.payload(ranks, shared=True))
        case _ if kind == "messages":
            # The messages of a movement overlap.
            return header + 2 * ceil(nbytes / overlapping_chunk(nbytes, ranks))
        case _:
            chunk = min(nbytes, CHUNK_BYTES)
            return header + ceil(nbytes / CHUNK_BYTES) * (1 + _rounds(ranks, chunk))


def alone(results: dict[str, Any]) -> Machine:
    """Return what the process that pretends says of this machine, with its call in Python."""
    return replace(fitted(results).machine, call=_local(results["alone"]).call)


# What one rank does by itself, from the times on pretended ranks


def _local(alone: dict[str, Any]) -> Machine:
    def slope(what: str, few: int, many: int) -> float:
        return (_at(alone, f"{what} {many}") - _at(alone, f"{what} {few}")) / (many - few)

    fold_byte = slope("fold", 2, 8) / _FOLDED
    slot = slope("shared header", 64, 1024)
    row = slope("messages small", 64, 1024)
    chunks = PRETENDED_SLICES / CHUNK_BYTES
    part = slope("messages slices", 64, 1024) / chunks
    call = _at(alone, "messages small 2") - 2 * row
    step = _at(alone, "steps") / STEPS - 2 * slot
    lane = slope("turns", *CHAINED) / STEPS
    turn = _at(alone, f"turns {CHAINED[0]}") / STEPS - CHAINED[0] * lane
    share = (_at(alone, f"shares {SHARES}") / STEPS - turn - CHAINED[0] * lane) / (SHARES - 1)
    piece = slope("pieces", *GRIDS)
    few, many = (_at(alone, f"grid {size}") - size * piece for size in GRIDS)
    entries = [sum(sides(size)) for size in GRIDS]
    return Machine(
        *(0.0, 0.0, 0.0, 0.0, fold_byte),
        call=call,
        step=step,
        message=_at(alone, "messages") / STEPS,
        turn=turn,
        lane=lane,
        share=share,
        entry=(many - few) / (entries[1] - entries[0]),
        piece=piece,
        slot=slot,
        row=row,
        part=part,
        per_node=1 << 30,
    )


def _between_two(machine: Machine, two: dict[str, Any]) -> Machine:
    """Fit parameters to two ranks on two cores, one after another, until all are consistent."""
    for _ in range(_PASSES):
        for name, kind, nbytes, times in _SHOWN:
            measured = _at(two, f"{kind} {nbytes}")
            least, most = 0.0, measured / times
            for _ in range(_HALVINGS):
                value = (least + most) / 2
                machine = replace(machine, **{name: value})
                if _work(Here(machine, machine, {}, 2), kind, 2, nbytes) < measured:
                    least = value
                else:
                    most = value
    return machine


def _mpi(machine: Machine, two: dict[str, Any]) -> Machine:
    latency = _at(two, f"mpi {_SMALL}")
    mpi = replace(machine, near_latency=latency, near_byte=0.0)
    rest = _at(two, f"mpi {LARGE}") - model.by_halving(2, LARGE, mpi)
    return replace(mpi, near_byte=rest / LARGE)


# Which parameter is fitted to which case on two ranks, and how many times the case contains it. Each
# byte of an array is sent once between two ranks, whole or in two halves.
_SHOWN: Final = (
    ("seen", "shared", _SMALL, 1),
    ("seen_byte", "shared", MEDIUM, MEDIUM),
    ("near_latency", "messages", _SMALL, 1),
    ("begin", "messages", SLICED, 2),
    ("near_byte", "messages", LARGE, LARGE),
)
_PASSES: Final = 5
_HALVINGS: Final = 40
_FITTED: Final = {
    *((kind, nbytes) for _, kind, nbytes, _ in _SHOWN),
    *(("mpi", _SMALL), ("mpi", LARGE)),
}


def _work(here: Here, kind: str, ranks: int, nbytes: int) -> float:
    """Return the seconds of a case if every rank had a core of its own."""
    if kind == "mpi":
        return model.mpi_allreduce(ranks, nbytes, here.mpi)
    shared = kind == "shared"
    work = model.ALGORITHMS[_algorithm(kind, ranks, nbytes)]
    return model.header(ranks, here.machine, shared) + work(ranks, nbytes, here.machine, shared)


def _algorithm(kind: str, ranks: int, nbytes: int) -> str:
    if kind == "mpi":
        return "recursive doubling" if _doubles(ranks, nbytes) else "Rabenseifner"
    chosen = model.chosen(ranks, nbytes, kind == "shared")
    # Two ranks are kept from it.
    return "slices" if chosen == "exchange" else chosen


def _doubles(ranks: int, nbytes: int) -> bool:
    return nbytes <= _SMALL


def _mpi_rounds(ranks: int, nbytes: int) -> list[model.Rounds]:
    return (model.doubling if _doubles(ranks, nbytes) else model.rabenseifner)(ranks, nbytes)


def _rounds(ranks: int, nbytes: int) -> int:
    return sum(rounds.count for rounds in model.mpich_allgather(ranks, nbytes))


def _at(times: dict[str, Any], name: str) -> float:
    seconds: float = times[name][BEST]
    return seconds
