"""arraycomm through the same wrapper, which shows that the wrapper itself breaks no law."""

from __future__ import annotations

from typing import Any

from arraycomm._communicator import Communicator
from docs.studies.peers.wrapper import Call


class Arraycomm:
    """One rank's part."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.counts: Any = None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.comm, name)
        if name not in _OF_ARRAYS:
            return method

        def call(x: Any, *args: Any, later: bool, out: Any = None, **options: Any) -> Call:
            if out is not None:
                options["out"] = out
            if later:
                request = getattr(self.comm, f"i{name}")(x, *args, **options)
                made = Call(test=request.test)
                made.wait = lambda: setattr(made, "result", request.wait())
                return made
            if name in ("allgatherv", "alltoallv"):
                result, self.counts = method(x, *args, **options, return_counts=True)
                return Call(result)
            return Call(method(x, *args, **options))

        return call

    def split(self, color: int | None, key: int) -> Arraycomm | None:
        """Split the group."""
        made = self.comm.split(color, key)
        return None if made is None else Arraycomm(made)

    def dup(self) -> Arraycomm:
        """Return the same ranks."""
        return Arraycomm(self.comm.dup())


_OF_ARRAYS = frozenset(
    [
        "allreduce",
        "reduce",
        "reduce_scatter",
        "scan",
        "exscan",
        "bcast",
        "allgather",
        "gather",
        "scatter",
        "alltoall",
        "allgatherv",
        "gatherv",
        "scatterv",
        "alltoallv",
    ]
)
