"""What MPI has begun, and the memory that it reads or writes until that has finished.

Python raises an interrupt between any two of its own instructions, also right behind MPI's part of
a call. So before MPI begins, the memory is kept alive, and the list that takes the request is where
it stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableSequence
from itertools import starmap
from typing import Any, Final

from mpi4py import MPI

from arraycomm._transports.mpi.failures import translated

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
