"""The grid of many ranks over MPI."""

from __future__ import annotations

from typing import cast

from mpi4py import MPI

from arraycomm._transports import rank_grid
from arraycomm._transports.base import Blocks, Handle
from arraycomm._transports.mpi_movement import begin, vector
from arraycomm._transports.rank_grid import RankGrid, sides
from arraycomm._transports.routes import Places


class MpiLine:
    """The movements of a row or a column, which has a communicator of its own."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        """Send block r to rank r; receive rank r's block in block r."""
        return begin(self.comm.Ialltoallv, vector(send), vector(recv))

    def allgather(self, recv: Blocks) -> Handle:
        """Send this rank's own block of `recv` to all, and receive theirs, in place."""
        return begin(self.comm.Iallgatherv, MPI.IN_PLACE, vector(recv))


def make_grid(comm: MPI.Intracomm, places: Places) -> RankGrid | None:
    """Return the grid of all ranks, or None if they are few or make none; collective, and may block."""
    rank, (rows, columns) = comm.rank, sides(comm.size)
    if comm.size < rank_grid.LEAST_RANKS or rows == 1:
        return None
    row, column = (
        MpiLine(cast(MPI.Intracomm, comm.Split(color, rank)))
        for color in (rank // columns, rank % columns)
    )
    return RankGrid(rank, rows, columns, row, column, max(map(len, places.members)))


def free_grid(grid: RankGrid) -> None:
    """Free the communicators of a grid; collective, and may block."""
    for line in (grid.row, grid.column):
        assert isinstance(line, MpiLine)
        line.comm.Free()
