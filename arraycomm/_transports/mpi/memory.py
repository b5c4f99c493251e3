"""Memory that the processes of one MPI communicator share, if they are on one node."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from arraycomm._transports.base import Bytes
from arraycomm._transports.mpi.under_way import finish
from arraycomm._transports.shared_files import LONGEST, Agree, Tell, share_file


def shared_memory(comm: MPI.Intracomm, nbytes: int) -> Bytes | None:
    """Map one zeroed file on all ranks, or return None on all if one of them cannot."""
    return share_file(nbytes, *tell_and_agree(comm), makes=comm.rank == 0)


def tell_and_agree(comm: MPI.Intracomm) -> tuple[Tell, Agree]:
    """Return how the ranks tell one another of a file of rank 0's."""

    def tell(told: str) -> str:
        text = np.frombuffer(told.encode().ljust(LONGEST, b"\0"), np.uint8).copy()
        finish(comm.Ibcast, [text, MPI.BYTE])
        return text.tobytes().rstrip(b"\0").decode()

    return tell, lambda opened: on_all(comm, opened)


def on_all(comm: MPI.Intracomm, fact: bool) -> bool:
    """Return whether something holds on all ranks; collective."""
    found = np.array([fact], np.int32)
    finish(comm.Iallreduce, MPI.IN_PLACE, found, MPI.MIN)
    return bool(found[0])
