"""The routes of broadcasts between nodes: each node gets one copy, in parts passed on early.

One rank of each node gets a part from another node, and sends it to further nodes and to ranks of
its own. The nodes, and the ranks of each, are a chain if there are enough parts to fill it, and
otherwise a binary tree. In a chain each sends every part once, but the last one waits for as many
parts as there are others before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from arraycomm._transports.base import Flat

# A part has at least so many bytes. There are at most so many for each level of a binary tree of
# the nodes: with twice as many on four nodes, whose ranks shared two cores, the whole took half as
# long again.
_LEAST: Final = 512 << 10
_MOST: Final = 4

T = TypeVar("T")


class Places:
    """Which ranks are on which node; `nodes` has for each rank a number of its node."""

    def __init__(self, nodes: Sequence[int]) -> None:
        numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        # The ranks of each node.
        self.members: list[list[int]] = [[] for _ in numbers]
        # For each rank, where its node is among these, and where it is in its node.
        self.node = [numbers[node] for node in nodes]
        self.place: list[int] = []
        for rank, number in enumerate(self.node):
            self.place.append(len(self.members[number]))
            self.members[number].append(rank)


class Route(NamedTuple):
    """From whom a rank gets each part, None for the root, and to whom it passes it on."""

    origin: int | None
    to: list[int]


def parts_of(buffer: Flat, nodes: int) -> list[Flat]:
    """Cut what goes to so many nodes into parts."""
    most = _MOST * max((nodes - 1).bit_length(), 1)
    step = max(_LEAST, -(-len(buffer) // most))
    return [buffer[start : start + step] for start in range(0, len(buffer), step)]


def route(rank: int, root: int, places: Places, parts: int) -> Route:
    """Return the route of so many parts over a rank."""
    own, at_root = places.node[rank], places.node[root]
    ranks = _turned(places.members[own], places.place[root] if own == at_root else 0)
    within = _along(ranks, ranks.index(rank), parts)
    if rank != ranks[0]:
        return within
    firsts = [root, *(others[0] for others in _turned(places.members, at_root)[1:])]
    between = _along(firsts, firsts.index(rank), parts)
    # Other nodes first: their links are slower.
    return Route(between.origin, between.to + within.to)


def _turned(items: Sequence[T], first: int) -> list[T]:
    return [*items[first:], *items[:first]]


def _along(ranks: Sequence[int], place: int, parts: int) -> Route:
    """Return the route over one of these ranks, of which the first one has all parts."""
    width = 1 if len(ranks) < parts + len(ranks).bit_length() else 2
    origin = ranks[(place - 1) // width] if place else None
    return Route(origin, list(ranks[width * place + 1 :][:width]))
