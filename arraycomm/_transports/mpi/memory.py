"""Memory that the processes of one MPI communicator share, if they are on one node."""

from __future__ import annotations

import os
from typing import Final

import numpy as np
from mpi4py import MPI

from arraycomm._transports.base import Bytes
from arraycomm._transports.shared_files import close_file, make_file, need_names, open_file

# The longest path of a file.
_PATH: Final = 4096


def shared_memory(comm: MPI.Intracomm, nbytes: int) -> Bytes | None:
    """Map one zeroed file on all ranks, or return None on all if one of them cannot."""
    memory = _share_file(comm, nbytes)
    if memory is None:
        need_names()
        memory = _share_file(comm, nbytes)
    return memory


def _share_file(comm: MPI.Intracomm, nbytes: int) -> Bytes | None:
    own = make_file(nbytes) if comm.rank == 0 else ""
    path = np.frombuffer(own.encode().ljust(_PATH, b"\0"), np.uint8).copy()
    finish(comm.Ibcast([path, MPI.BYTE]))
    memory = open_file(path.tobytes().rstrip(b"\0").decode(), nbytes)
    opened = np.array([memory is not None], np.int32)
    finish(comm.Iallreduce(MPI.IN_PLACE, opened, MPI.MIN))
    if own:
        close_file(own)
    return memory if opened[0] else None


def finish(request: MPI.Request) -> None:
    """Wait, and let others have the core: MPI's own wait would keep it from a rank that is late."""
    while not request.Test():
        os.sched_yield()
