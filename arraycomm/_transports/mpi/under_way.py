"""What MPI has begun, the memory that it reads or writes until that has finished, and what fails.

Python raises an interrupt between any two of its own instructions, also right behind MPI's part of
a call. So before MPI begins, the memory is kept alive, and the list that takes the request is where
it stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableSequence
from contextlib import suppress
from functools import cache
from itertools import starmap
from typing import Any, Final

import numpy as np
from mpi4py import MPI

from arraycomm._errors import TransportError
from arraycomm._transports.base import Bytes
from arraycomm._transports.shared_files import LONGEST, Agree, Tell, share_file

# The tag of notes between nodes, larger than those of users' messages and of their further pieces.
# A communicator may find notes of an earlier one.
NOTES_TAG: Final = 1 << 21
# What has memory that MPI reads or writes until it has finished, even if the caller has given it
# up: a message that comes too late must not be written into memory that has been used again.
KEPT_ALIVE: Final[set[Any]] = set()


def start(begun: MutableSequence[Any], begin: Callable[..., Any], *arguments: Any) -> None:
    """Begin an operation of MPI, and append its request; no interrupt comes between the two."""
    try:
        # One call of Python's, which makes both.
        begun.extend(starmap(begin, [arguments]))
    except MPI.Exception as error:
        raise translated(error) from error


class Movement:
    """A nonblocking MPI operation, and its arguments, of which it keeps the buffers alive.

    `begin` returns a request, or a tuple that ends with one.
    """

    def __init__(self, begin: Callable[..., Any], *arguments: Any) -> None:
        self._begun: list[Any] = []
        self._arguments = arguments
        KEPT_ALIVE.add(self)
        try:
            start(self._begun, begin, *arguments)
        except Exception:
            KEPT_ALIVE.discard(self)
            raise

    @property
    def begun(self) -> Any:
        """What `begin` returned."""
        return self._begun[0]

    def done(self) -> bool:
        begun = self._begun[0]
        request = begun[-1] if isinstance(begun, tuple) else begun
        try:
            finished: bool = request.Test()
        except MPI.Exception as error:
            raise translated(error) from error
        if finished:
            KEPT_ALIVE.discard(self)
        return finished


def finish(begin: Callable[..., Any], *arguments: Any) -> Any:
    """Make an operation, wait, and return what `begin` returned.

    Others have the core meanwhile: MPI's own wait would keep it from a rank that is late.
    """
    movement = Movement(begin, *arguments)
    while not movement.done():
        os.sched_yield()
    return movement.begun


# Memory that the ranks of one node share


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


# Messages that are begun repeatedly


class MpiRepeated:
    """See `Repeated`; `request` is that of the message begun last."""

    _request: MPI.Request

    def done(self) -> bool:
        try:
            return self._request.Test()
        except MPI.Exception as error:
            raise translated(error) from error

    def free(self, *, finished: bool) -> None:
        if not finished:
            KEPT_ALIVE.add(self)


class MpiSend(MpiRepeated):
    """A send, which is no persistent request: Open MPI finishes those later than others."""

    def __init__(self, comm: MPI.Intracomm, buffer: Bytes, dest: int, tag: int) -> None:
        self._start, self._arguments = comm.Isend, ([buffer, MPI.BYTE], dest, tag)

    def begin(self) -> bool:
        try:
            request = self._request = self._start(*self._arguments)
            return request.Test()
        except MPI.Exception as error:
            raise translated(error) from error


class MpiReceive(MpiRepeated):
    """A receive, whose request is made once and then started."""

    _request: MPI.Prequest

    def __init__(self, comm: MPI.Intracomm, buffer: Bytes, source: int, tag: int) -> None:
        self._request = comm.Recv_init([buffer, MPI.BYTE], source, tag)

    def begin(self) -> bool:
        try:
            self._request.Start()
            return self._request.Test()
        except MPI.Exception as error:
            raise translated(error) from error

    def free(self, *, finished: bool) -> None:
        super().free(finished=finished)
        if finished and not MPI.Is_finalized():
            self._request.Free()


# Errors of MPI as ours, dead ranks, and the communicator of the others (ULFM)


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
