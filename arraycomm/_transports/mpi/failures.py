"""What fails in MPI: its errors as ours, dead ranks, and the communicator of the others (ULFM)."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache

from mpi4py import MPI

from arraycomm._errors import TransportError


def translated(error: MPI.Exception) -> TransportError:
    """Return MPI's error as one of ours."""
    found = TransportError(f"MPI reported: {error.Get_error_string()}")
    # Another rank has called `shrink`.
    found.revoked = error.Get_error_class() == MPI.ERR_REVOKED
    return found


@cache
def survives_failures() -> bool:
    """Return whether MPI was started so that the other processes survive the death of one."""
    enabled = os.environ.get("OMPI_MCA_mpi_ft_enable", "")  # noqa: SIM112 - Open MPI's own name
    return enabled.lower() in ("1", "true", "ulfm")


def failed_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of a communicator whose process has died."""
    try:
        # MPI finds out about failures when it makes progress.
        try:
            comm.Iprobe()
        except MPI.Exception as error:
            if error.Get_error_class() == MPI.ERR_REVOKED:
                raise
        ranks = comm.Get_failed().Translate_ranks(group=comm.Get_group())
        return [rank for rank in ranks if rank != MPI.UNDEFINED]
    except MPI.Exception as error:
        raise translated(error) from error


def shrunk(comm: MPI.Intracomm, between: MPI.Intracomm | None) -> MPI.Intracomm:
    """Return a communicator of the ranks that live; neither of these can be used afterwards."""
    for revoked in filter(None, (comm, between)):
        with suppress(MPI.Exception):
            revoked.Revoke()
    made = comm.Shrink()
    assert isinstance(made, MPI.Intracomm)
    return made
