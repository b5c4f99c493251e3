"""Many ranks as a grid: a rank that sends messages to its row and to its column reaches all by few of them."""

from __future__ import annotations

from math import isqrt
from typing import Final, NamedTuple, Protocol

from arraycomm._transports.blocks import Blocks
from arraycomm._transports.pairs import Handle

# Fewer ranks send each other messages of their own.
LEAST_RANKS: Final = 129


class Line(Protocol):
    """The movements of a row or a column, whose ranks are numbered from 0."""

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        """Send block r to rank r; receive rank r's block in block r."""

    def allgather(self, recv: Blocks) -> Handle:
        """Send this rank's own block of `recv` to all, and receive theirs, in place."""


class RankGrid(NamedTuple):
    """A rank's place in the grid: rank r is in row r // columns, and in column r % columns.

    Attributes
    ----------
    rank, rows, columns : int
        This rank, and how many rows and columns there are.
    row, column : Line
        Those of this rank.
    lanes : int
        The most ranks of a node, which share its link.
    """

    rank: int
    rows: int
    columns: int
    row: Line
    column: Line
    lanes: int


def sides(size: int) -> tuple[int, int]:
    """Return how many rows and columns so many ranks have: the divisors that are closest to one another."""
    rows = isqrt(size)
    while size % rows:
        rows -= 1
    return rows, size // rows
