"""Each collective, called on an array that has a row for each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from arraycomm import Communicator

Collective = Callable[[Communicator, Any], Any]

COLLECTIVES: dict[str, Collective] = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "mean": lambda comm, x: comm.allreduce(x, "mean"),
    "max": lambda comm, x: comm.allreduce(x, "max"),
    "reduce": lambda comm, x: comm.reduce(x, root=comm.size - 1),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "reduce_scatter with counts": lambda comm, x: comm.reduce_scatter(
        x, counts=[comm.size] + [0] * (comm.size - 1)
    ),
    "scan": lambda comm, x: comm.scan(x),
    "exscan": lambda comm, x: comm.exscan(x),
    "bcast": lambda comm, x: comm.bcast(x, comm.size - 1),
    "bcast to None": lambda comm, x: comm.bcast(x if comm.rank == 0 else None, 0),
    "allgather": lambda comm, x: comm.allgather(x),
    "allgatherv": lambda comm, x: comm.allgatherv(x[: comm.rank + 1]),
    "gather": lambda comm, x: comm.gather(x, root=0),
    "gatherv": lambda comm, x: comm.gatherv(x[comm.rank :], root=0),
    "scatter": lambda comm, x: comm.scatter(x if comm.rank == 0 else None, 0),
    "scatterv": lambda comm, x: (
        comm.scatterv(x, [comm.size] + [0] * (comm.size - 1), 0)
        if comm.rank == 0
        else comm.scatterv(None, None, 0)
    ),
    "alltoall": lambda comm, x: comm.alltoall(x),
    "alltoallv": lambda comm, x: comm.alltoallv(x, [1] * comm.size),
    "iallreduce": lambda comm, x: comm.iallreduce(x).wait(),
}
