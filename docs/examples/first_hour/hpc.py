"""A heat equation on a grid of ranks, with mpi4py and with arraycomm: both give the bits of one process.

    arraycomm run -n 3 hpc.py     # or: mpiexec -n 3 python hpc.py
    python hpc.py                 # one process

With three ranks it prints

    heat: a grid of (3, 1) ranks, residual 3.11e-02, bits as on one process
    tasks: 10 squares from 2 workers, sums [[0, 3], [1, 3], [2, 3]]

It needs nothing but `pip install 'arraycomm[mpich]'`.
"""

from typing import Any

import numpy as np

import arraycomm as ac

CELLS, STEPS = 48, 60
TASK, DONE, STOP = 1, 2, 3  # tags


def begin(dims: Any, coords: Any) -> np.ndarray:
    """Return this rank's cells, with a row or column of its neighbours' on each side."""
    rows, cols = (np.array_split(np.arange(CELLS), n)[c] for n, c in zip(dims, coords, strict=True))
    u = np.zeros((len(rows) + 2, len(cols) + 2))
    u[1:-1, 1:-1] = np.exp(-((rows[:, None] - 20) ** 2 + (cols - 30) ** 2) / 30)
    return u


def advance(u: np.ndarray) -> float:
    """Take a step in this rank's cells, and return the sum of the squared changes."""
    near = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    change = 0.2 * (near - 4 * u[1:-1, 1:-1])
    u[1:-1, 1:-1] += change
    return (change**2).sum()


def with_mpi4py(mpi: Any) -> np.ndarray:
    from mpi4py import MPI

    grid = mpi.Create_cart(MPI.Compute_dims(mpi.Get_size(), 2), periods=[False, True])
    u = begin(grid.dims, grid.coords)
    total = np.empty(1)
    for _ in range(STEPS):
        for axis, v in enumerate((u, u.T)):
            before, after = grid.Shift(axis, 1)
            for sent, dest, got, source in ((1, before, -1, after), (-2, after, 0, before)):
                buffer = v[got].copy()  # memory has to be contiguous, and stays beyond a border
                grid.Sendrecv(v[sent].copy(), dest, recvbuf=buffer, source=source)
                v[got] = buffer
        grid.Allreduce(np.array([advance(u)]), total)
    sizes = grid.gather(u[1:-1, 1:-1].size)
    cells = np.empty(CELLS**2)
    grid.Gatherv(u[1:-1, 1:-1].copy(), [cells, sizes])
    grid.Free()
    return cells


def with_arraycomm(comm: ac.Communicator) -> tuple[np.ndarray | None, float]:
    with comm.grid(2, [False, True]) as grid:
        u = begin(grid.dims, grid.coords)
        # Rows, then columns, before and after: arrays of any layout. They leave out the corners.
        cells = [u[1, 1:-1], u[-2, 1:-1], u[1:-1, 1], u[1:-1, -2]]
        halo = [u[0, 1:-1], u[-1, 1:-1], u[1:-1, 0], u[1:-1, -1]]
        for _ in range(STEPS):
            # Beyond a border nothing comes, and out= stays. Without out= the result is None there.
            grid.neighbor_alltoall(cells, out=halo)
            total = grid.allreduce(advance(u))  # returns the sum
        return grid.gatherv(u[1:-1, 1:-1].ravel()), total**0.5


def squares(comm: ac.Communicator, tasks: int) -> dict[int, int] | None:
    """Let rank 0 hand out tasks to whichever rank is done; the objects are pickled."""
    if comm.rank > 0:
        status = ac.Status()
        while True:
            task = comm.recv_object(0, ac.ANY_TAG, status=status)
            if status.tag == STOP:
                return None
            comm.send_object({task: task**2}, 0, DONE)
    results: dict[int, int] = {}
    idle, left = list(range(1, comm.size)), list(range(tasks))
    while len(results) < tasks and comm.size > 1:
        while idle and left:
            comm.send_object(left.pop(), idle.pop(), TASK)
        worker = comm.probe(ac.ANY_SOURCE, DONE).source
        results |= comm.recv_object(worker, DONE)
        idle.append(worker)
    for worker in idle:
        comm.send_object(None, worker, STOP)
    return results


if __name__ == "__main__":
    comm = ac.init()
    cells, residual = with_arraycomm(comm)
    alone, _ = with_arraycomm(comm.split(comm.rank))
    other = with_mpi4py(comm.mpi_comm) if comm.mpi_comm else cells
    results = squares(comm, tasks=10)
    grid = comm.grid(2)
    sums = comm.gather_object([comm.split(c).allreduce(comm.rank) for c in grid.coords])
    if comm.rank == 0:
        assert cells.tobytes() == other.tobytes()
        assert np.array_equal(np.sort(cells), np.sort(alone))  # parts are in the order of ranks
        assert comm.size == 1 or results == {n: n**2 for n in range(10)}
        print(f"heat: a grid of {grid.dims} ranks, residual {residual:.2e}, bits as on one process")
        print(f"tasks: {len(results)} squares from {comm.size - 1} workers, sums {sums}")
