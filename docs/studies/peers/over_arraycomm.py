"""arraycomm through the same wrapper, which shows that the wrapper itself breaks no law."""

from __future__ import annotations

from typing import Any

from arraycomm._communicator import Communicator
from docs.studies.peers.wrapper import ARRAYS, Call


class Arraycomm:
    """One rank's part."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.comm, name)
        if name not in ARRAYS:
            return method

        def call(x: Any, *args: Any, later: bool, out: Any = None, **options: Any) -> Call:
            if out is not None:
                options["out"] = out
            if counted := name in ("allgatherv", "gatherv", "alltoallv"):
                options["return_counts"] = True
            made = Call()

            def take(result: Any) -> None:
                made.result, made.counts = result if counted and result else (result, None)

            if later:
                request = getattr(self.comm, f"i{name}")(x, *args, **options)
                made.test, made.wait = request.test, lambda: take(request.wait())
            else:
                take(method(x, *args, **options))
            return made

        return call

    def split(self, color: int | None, key: int) -> Arraycomm | None:
        """Split the group."""
        made = self.comm.split(color, key)
        return None if made is None else Arraycomm(made)

    def dup(self) -> Arraycomm:
        """Return the same ranks."""
        return Arraycomm(self.comm.dup())
