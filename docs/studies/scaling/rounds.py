"""How long does a reduction take when its messages are played one by one?

A schedule is a sequence of steps, a step says whom each rank sends to and how many bytes. Each rank
has a clock of its own: it goes on when its own message is sent and the one for it has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from docs.studies.scaling.model import Machine

Ranks = np.ndarray[Any, Any]
NOBODY = -1


class Step(NamedTuple):
    """Rank r sends `nbytes[r]` to rank `to[r]`, or to nobody; who receives folds `folded` bytes."""

    to: Ranks
    nbytes: Ranks
    folded: float = 0.0


def play(schedule: Iterable[Step], size: int, machine: Machine) -> float:
    """Return when the last rank is done."""
    return float(played(schedule, np.zeros(size), nodes_of(size, machine), machine).max())


def nodes_of(size: int, machine: Machine) -> Ranks:
    """Return the node of each rank."""
    return np.arange(size) // machine.per_node


def played(schedule: Iterable[Step], begun: Ranks, node: Ranks, machine: Machine) -> Ranks:
    """Return when each rank is done that has begun at its own time, on its node."""
    clock = begun.copy()
    for step in schedule:
        source = np.flatnonzero(step.to != NOBODY)
        if not len(source):
            continue
        target, nbytes = step.to[source], step.nbytes[source]
        took = _took(node[source], node[target], nbytes, machine)
        arrival = np.maximum(clock[source], clock[target]) + took
        folded = arrival + step.folded * machine.fold_byte
        sent = clock[source] + took
        np.maximum.at(clock, source, sent)
        np.maximum.at(clock, target, folded)
    return clock


def _took(source: Ranks, target: Ranks, nbytes: Ranks, machine: Machine) -> Ranks:
    """How long each message takes; those that leave a node share its link."""
    far = source != target
    leaving = np.bincount(source[far], minlength=int(source.max()) + 1)[source]
    near = machine.near_latency + nbytes * machine.near_byte
    return np.where(far, machine.latency + leaving * nbytes * machine.per_byte, near)


def pairwise(size: int, nbytes: float) -> Iterator[Step]:
    """In round k everyone sends a slice to the rank k further."""
    for k in range(1, size):
        yield _shift(size, k, nbytes / size)


def ring(size: int, nbytes: float) -> Iterator[Step]:
    """Everyone sends the slice that came last to its neighbour."""
    for _ in range(size - 1):
        yield _shift(size, 1, nbytes / size)


def bruck(size: int, nbytes: float) -> Iterator[Step]:
    """Everyone sends all slices it knows, as far as they are news; what is known doubles."""
    known = 1
    while known < size:
        yield _shift(size, -known, min(known, size - known) * nbytes / size)
        known *= 2


def bruck_alltoall(size: int, nbytes: float) -> Iterator[Step]:
    """A slice for the rank d further takes one hop for each binary digit 1 of d."""
    further = np.arange(size)
    bit = 1
    while bit < size:
        yield _shift(size, bit, np.count_nonzero(further & bit) * nbytes / size)
        bit *= 2


def doubling(size: int, nbytes: float) -> Iterator[Step]:
    """Pairs exchange everything, at doubling distances."""
    pairs = _pairs(size, [nbytes] * (size.bit_length() - 1), nbytes)
    yield from _with_odd_ranks(size, nbytes, pairs)


def rabenseifner(size: int, nbytes: float) -> Iterator[Step]:
    """Pairs exchange halves of halves and fold them, and then the results back."""
    rounds = size.bit_length() - 1
    halves = [nbytes / (2 << k) for k in range(rounds)]
    there = list(_pairs(size, halves, None))
    back = [step._replace(folded=0.0) for step in reversed(there)]
    yield from _with_odd_ranks(size, nbytes, [*there, *back])


def _shift(size: int, distance: int, nbytes: float) -> Step:
    return Step((np.arange(size) + distance) % size, np.full(size, nbytes))


def _pairs(size: int, sizes: list[float], folded: float | None) -> Iterator[Step]:
    """Ranks at distance 2 ** k exchange sizes[k] bytes; those beyond a power of two stand aside."""
    even = 1 << (size.bit_length() - 1)
    place = np.arange(even)
    # Of the first pairs only the second of each goes on.
    aside = size - even
    rank = np.where(place < aside, 2 * place + 1, place + aside)
    for k, nbytes in enumerate(sizes):
        to = np.full(size, NOBODY)
        to[rank] = rank[place ^ (1 << k)]
        yield Step(to, np.full(size, nbytes), nbytes if folded is None else folded)


def _with_odd_ranks(size: int, nbytes: float, steps: Iterable[Step]) -> Iterator[Step]:
    aside = size - (1 << (size.bit_length() - 1))
    first = np.arange(0, 2 * aside, 2)
    if aside:
        yield _handed(size, first, first + 1, nbytes, nbytes)
    yield from steps
    if aside:
        yield _handed(size, first + 1, first, nbytes, 0.0)


def _handed(size: int, source: Ranks, target: Ranks, nbytes: float, folded: float) -> Step:
    to = np.full(size, NOBODY)
    to[source] = target
    return Step(to, np.full(size, nbytes), folded)
