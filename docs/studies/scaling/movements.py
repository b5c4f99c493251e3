"""Which messages does each movement of a transport take?

A transport's movements are those of an MPI library. Each is a schedule here, of the blocks that the
ranks have passed; an empty block is no message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from arraycomm._transports.routes import Places, parts_of, route
from docs.studies.scaling import model
from docs.studies.scaling.rounds import NOBODY, Ranks, Step

Counts = np.ndarray[Any, Any]


def alltoall(counts: Counts) -> Iterator[Step]:
    """Rank r sends counts[r, s] bytes to rank s: one partner after another, as MPI_Alltoallv does."""
    rank = np.arange(len(counts))
    for distance in range(1, len(counts)):
        to = (rank + distance) % len(counts)
        yield _sent(to, counts[rank, to])


def allgather(counts: Sequence[int]) -> Iterator[Step]:
    """Everyone gets the counts[r] bytes of each rank r: as MPICH chooses by the sum of the bytes."""
    few_rounds = model.mpich_doubles(len(counts), sum(counts))
    return (_bruck if few_rounds else _ring)(np.asarray(counts))


def spread(counts: Sequence[int], nodes: Sequence[int]) -> Iterator[Step]:
    """Everyone gets the counts[r] bytes of each rank r, as `DirectMessages` sends them.

    A block goes once to each other node. The ranks of a node take turns in receiving, and pass on to the others
    what they have received. The messages are under way at once; here they go one by one.
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    places = list(members.values())
    for further in range(1, len(places)):
        yield _each(counts, [(r, r, _taker(r, at, places, further)) for at, r in _placed(places)])
    longest = max(len(ranks) for ranks in places)
    # A block from so many nodes before; its own from none.
    for before in range(len(places)):
        for further in range(1, longest):
            yield from _passed_on(counts, places, before, further)


def _placed(places: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    for at, ranks in enumerate(places):
        for rank in ranks:
            yield at, rank


def _taker(rank: int, at: int, places: Sequence[Sequence[int]], further: int) -> int:
    """Return who receives a rank's block on the node so many further."""
    there = places[(at + further) % len(places)]
    return there[places[at].index(rank) % len(there)]


def _passed_on(
    counts: Sequence[int], places: Sequence[Sequence[int]], before: int, further: int
) -> Iterator[Step]:
    """Blocks from so many nodes before, each to the rank of the node that is so many further.

    A rank of a smaller node has several blocks to pass on, one after another.
    """
    waiting = []
    for at, ranks in enumerate(places):
        for origin in places[at - before]:
            sender = _taker(origin, (at - before) % len(places), places, before)
            if further < len(ranks):
                to = ranks[(ranks.index(sender) + further) % len(ranks)]
                waiting.append((origin, sender, to))
    while waiting:
        first = {sender: move for move in reversed(waiting) for sender in [move[1]]}
        yield _each(counts, list(first.values()))
        waiting = [move for move in waiting if first[move[1]] is not move]


def _each(counts: Sequence[int], moves: Sequence[tuple[int, int, int]]) -> Step:
    """Send the block of an origin from a rank to another, for each (origin, from, to)."""
    to, nbytes = np.full(len(counts), NOBODY), np.zeros(len(counts), np.int64)
    for origin, sender, target in moves:
        to[sender], nbytes[sender] = target, counts[origin]
    return Step(np.where(nbytes > 0, to, NOBODY), nbytes)


def gather(counts: Sequence[int], root: int) -> Iterator[Step]:
    """Rank after rank sends its counts[r] bytes to the root."""
    for rank, nbytes in enumerate(counts):
        if rank != root:
            yield _one(len(counts), rank, root, nbytes)


def scatter(counts: Sequence[int], root: int) -> Iterator[Step]:
    """The root sends counts[r] bytes to rank after rank."""
    for rank, nbytes in enumerate(counts):
        if rank != root:
            yield _one(len(counts), root, rank, nbytes)


def bcast(nodes: Sequence[int], nbytes: int, root: int) -> Iterator[Step]:
    """Whoever has a piece passes it on by the routes of the library, one message after another."""
    places, size = Places(nodes), len(nodes)
    pieces = [len(piece) for piece in parts_of(range(nbytes), len(places.members))]
    routes = [route(rank, root, places, len(pieces)).to for rank in range(size)]
    waiting = [[(n, to) for n in range(len(pieces)) for to in tos] for tos in routes]
    here = [0] * size
    here[root] = len(pieces)
    while any(waiting):
        step = Step(np.full(size, NOBODY), np.zeros(size, np.int64))
        for rank in range(size):
            if waiting[rank] and waiting[rank][0][0] < here[rank]:
                number, step.to[rank] = waiting[rank].pop(0)
                step.nbytes[rank] = pieces[number]
        for peer in step.to[step.to != NOBODY]:
            here[peer] += 1
        yield step


def among_nodes(nodes: Sequence[int], records: Sequence[int], first: int = 0) -> Iterator[Step]:
    """The first rank of each node sends what its node knows to another node, until all know all records.

    Each message begins with so many bytes more.
    """
    size = len(nodes)
    names, leaders, place = np.unique(np.asarray(nodes), return_index=True, return_inverse=True)
    known = np.zeros(len(names), np.int64)
    np.add.at(known, place, records)
    for step in _bruck(known, first):
        to, nbytes = np.full(size, NOBODY), np.zeros(size, np.int64)
        to[leaders] = np.where(step.to == NOBODY, NOBODY, leaders[step.to])
        nbytes[leaders] = step.nbytes
        yield Step(to, nbytes)


def _bruck(counts: Ranks, first: int = 0) -> Iterator[Step]:
    """Everyone sends all blocks it has, as far as they are news, to the rank so many before it."""
    size = len(counts)
    before = np.concatenate([[0], np.cumsum(np.concatenate([counts, counts]))])
    rank, known = np.arange(size), 1
    while known < size:
        news = min(known, size - known)
        yield _sent((rank - known) % size, first + before[rank + news] - before[rank])
        known *= 2


def _ring(counts: Ranks) -> Iterator[Step]:
    """Everyone sends the block that came last to the next rank."""
    rank = np.arange(len(counts))
    for k in range(len(counts) - 1):
        yield _sent((rank + 1) % len(counts), counts[(rank - k) % len(counts)])


def _sent(to: Ranks, nbytes: Ranks) -> Step:
    return Step(np.where(nbytes > 0, to, NOBODY), nbytes)


def _one(size: int, source: int, target: int, nbytes: int) -> Step:
    to = np.full(size, NOBODY)
    to[source] = target
    return _sent(to, np.full(size, nbytes))
