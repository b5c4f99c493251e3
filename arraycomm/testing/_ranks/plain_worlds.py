"""Tests of code that communicates by mpi4py itself: each example gets a plain communicator.

The ranks run in step as they do otherwise. Beside the plain communicator of an example there is one
of arraycomm, which the test does not see: it carries draws, and tells the ranks how the example
ended.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from arraycomm._callsite import describe_exception
from arraycomm._communicator import Communicator
from arraycomm._errors import MismatchError
from arraycomm._transports.base import Transport
from arraycomm.testing._example import Draw, Example, Part, Test
from arraycomm.testing._hypothesis import uncaptured
from arraycomm.testing._internals import drain, end_test
from arraycomm.testing._ranks.lockstep import Ended, Lockstep

# Seconds after which a rank that failed shows its error, since the others are stuck in MPI.
_SILENCE: Final = 5.0

_groups: dict[int, PlainLockstep] = {}


def plain_group(world: Any) -> PlainLockstep:
    """Return the ranks of an mpi4py communicator, or of the one that a function returns."""
    comm = world if hasattr(world, "Get_size") else world()
    # A group keeps its communicator, whose id therefore stays its own.
    if id(comm) not in _groups:
        _groups[id(comm)] = PlainLockstep(comm)
    return _groups[id(comm)]


class PlainLockstep(Lockstep):
    """This process's part in tests over plain communicators."""

    def __init__(self, world: Any) -> None:
        super().__init__(Communicator.from_mpi(world, timeout=None))
        self.world = world
        self._plain: dict[int, Any] = {}

    def _link(self, size: int) -> Transport | None:
        if size not in self._plain:
            from mpi4py import MPI

            color = 0 if self.rank < size else MPI.UNDEFINED
            self._plain[size] = self.comm.mpi_comm.Split(color, self.rank)
        return super()._link(size)

    def _let_go(self, comm: Communicator | None, size: int, ended: list[Ended]) -> None:
        super()._let_go(comm, size, ended)
        if size not in self._links:
            plain = self._plain.pop(size)
            if comm is not None and drain(plain):
                # MPI keeps it for as long as a request of the test is under way there.
                plain.Free()

    def _take_part(
        self, example: Example, test: Test, draw: Draw | None
    ) -> tuple[Part | None, list[Ended]]:
        return super()._take_part(example, functools.partial(self._on_plain, test, example), draw)

    def _on_plain(self, test: Test, example: Example, comm: Communicator, **arguments: Any) -> Any:
        """Call the test with the plain communicator; `comm` is the one that it does not see."""
        __tracebackhide__ = True
        plain = self._plain[example.size]
        try:
            result = test(comm=plain, **arguments)
        except BaseException as error:
            self._tell(example, error)
            raise
        end_test(comm)
        _refuse_messages(plain, example.timeout)
        return result

    def _tell(self, example: Example, error: BaseException) -> None:
        """Show an error unless the example ends: no rank can be called back from a call of MPI."""
        text = (
            f"rank {self.rank} failed, and other ranks do not end the example, which was: "
            f"{example.call}\n{describe_exception(error)}"
        )
        show: Callable[[str], None] = uncaptured()
        self._telling = threading.Timer(_SILENCE, show, (text,))
        self._telling.daemon = True
        self._telling.start()

    _telling: threading.Timer | None = None

    def _ended(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None


def _refuse_messages(plain: Any, timeout: float) -> None:
    """Raise if the test has left a message or a receive: the next example would get it.

    Each rank sends a last message to each. Messages do not overtake one another, so what comes
    before it is one of the test.
    """
    from mpi4py import MPI

    last: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    sends = [plain.isend(None, dest, last) for dest in range(plain.size)]
    left = [_first_of(plain, source, last, timeout) for source in range(plain.size)]
    for send in sends:
        send.wait()
    found = [(source, tag) for source, tag in enumerate(left) if tag != last]
    if found:
        source, tag = found[0]
        raise MismatchError(
            f"given: rank {plain.rank} has not received a message from rank {source} with tag "
            f"{tag}; every message of a test must be received before it ends"
        )


def _first_of(plain: Any, source: int, last: int, timeout: float) -> int:
    """Return the tag of the first message from a rank; receive it if it is the last one."""
    from mpi4py import MPI

    status, deadline = MPI.Status(), time.monotonic() + timeout
    while not plain.Iprobe(source, MPI.ANY_TAG, status):
        if time.monotonic() > deadline:
            raise MismatchError(
                f"given: rank {plain.rank} has begun a receive from rank {source} that no message "
                "of the test has ended; wait for every receive, or cancel it, before the test ends"
            )
        time.sleep(0)
    if status.Get_tag() == last:
        plain.recv(source=source, tag=last)
    return int(status.Get_tag())
