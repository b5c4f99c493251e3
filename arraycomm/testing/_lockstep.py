"""Tests that every process of a job runs in step: rank 0 drives, the others follow.

Each example is told to all ranks on a communicator that is kept apart, played on one of as many
ranks as it wants, and answered with how each rank ended. Before that every rank takes part in one
last step of the example's own communicators, whatever has happened on it, so that no rank is left
waiting in a call that the others do not make.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from arraycomm._callsite import describe_exception
from arraycomm._communicator import Communicator, Options
from arraycomm._errors import CommTimeoutError, MismatchError
from arraycomm._protocol.engine import give_up_core
from arraycomm._protocol.header import Steps, all_left_well, leave_in_step
from arraycomm._transports.base import Transport
from arraycomm.testing import _failures
from arraycomm.testing._example import Draw, Example, Part, play
from arraycomm.testing._hypothesis import Record, deterministic_PRNG, uncaptured
from arraycomm.testing._interrupt import Interruptible, Interruption
from arraycomm.testing._ranks import AGAIN, HOPELESS, SLACK

# Seconds in which the ranks come to the last step of an example once one of them has ended it.
_ENDING: Final = 5.0
# Seconds in which ranks that wait for one another have all waited in vain.
_TOGETHER: Final = 1.0
# Seconds in which a launcher forwards what was printed.
_FORWARDING: Final = 0.2

Test = Callable[..., Any]


@dataclass
class _Ended:
    """What a rank tells the others at the end of an example."""

    record: Record = field(default_factory=Record)
    error: bytes | None = None
    step: int = 0
    # Whether every rank ended well, in the same step, and whether nothing is left under way.
    in_step: bool = True
    clean: bool = True
    # Messages sent more than received: in later examples those would be received.
    unmatched: int = 0


@dataclass
class Verdict:
    """What rank 0 tells the others at the end of the test."""

    error: bytes | None = None


class Lockstep:
    """This process's part in tests that all ranks of a communicator run in step."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.usual = comm.size
        self.name = f"the processes of mpiexec -n {comm.size}"
        self._control = comm.dup(timeout=None, check=True)
        self._links: dict[int, Transport | None] = {}
        self._met: set[str] = set()

    def meet(self, test: str) -> None:
        """Make sure that all ranks run the same test; raise on all of those where they do not.

        A rank that has left out a test waits here until the others have reached the one it runs.
        """
        while True:
            tests = self._control.allgather_object(test)
            if len(set(tests)) == 1:
                self._met.add(test)
                return
            ahead = any(other in self._met for other in tests)
            everyone = self._control.allgather_object(ahead)
            if not ahead or all(everyone):
                break
        self._met.add(test)
        said = "; ".join(f"rank {rank} runs {other}" for rank, other in enumerate(tests))
        raise MismatchError(f"given: ranks run different tests, some have left one out: {said}")

    # On rank 0

    def run(self, example: Example, test: Test, draw: Draw | None) -> list[Part]:
        """Play an example on its ranks, and return how each of them ended."""
        __tracebackhide__ = True
        self._control.bcast_object(example)
        part, ended = self._take_part(example, test, draw)
        parts: list[Part] = []
        for rank, other in enumerate(ended[: example.size]):
            if rank == 0 and part is not None:
                parts.append(part)
                continue
            error = None if other.error is None else _failures.unpack(other.error)
            parts.append(Part(rank, other.record, error, other.step))
        return parts

    def finish(self, error: BaseException | None) -> None:
        """End the test on all ranks, with the error that rank 0 ends it with."""
        packed = None if error is None else _failures.pack(error)
        self._control.bcast_object(Verdict(packed))

    # On the others

    def follow(self, test: Test) -> None:
        """Play the examples that rank 0 tells, until the test ends; end it as it ends there."""
        __tracebackhide__ = True
        while True:
            said = self._control.bcast_object()
            if isinstance(said, Verdict):
                break
            self._take_part(said, test, None)
        if said.error is not None:
            error = _failures.unpack(said.error).with_traceback(None)
            error.__cause__ = error.__context__ = None
            error.__notes__ = ["found by rank 0, whose report shows the example"]
            raise error

    # On all

    def _take_part(
        self, example: Example, test: Test, draw: Draw | None
    ) -> tuple[Part | None, list[_Ended]]:
        link = self._link(example.size)
        if link is None:
            ended = self._control.allgather_object(_Ended())
            self._let_go(None, example.size, ended)
            return None, ended
        comm = Communicator(link, Options(timeout=example.timeout))
        part = self._play(comm, example, test, draw)
        if isinstance(part.error, CommTimeoutError):
            # The others that wait are to find out themselves where they wait.
            time.sleep(min(example.timeout, _TOGETHER))
        in_step, clean = _end(comm, part.error)
        error = None if part.error is None else _failures.pack(part.error)
        unmatched = sum(member._unmatched for member in comm._related)
        mine = _Ended(part.record, error, part.step, in_step, clean, unmatched)
        ended = self._control.allgather_object(mine)
        self._let_go(comm, example.size, ended)
        return part, ended

    def _link(self, size: int) -> Transport | None:
        """Return the transport of the first `size` ranks; None on the others."""
        if size not in self._links:
            color = 0 if self.rank < size else None
            self._links[size] = self._control._link.split(color, range(size))
        return self._links[size]

    def _let_go(self, comm: Communicator | None, size: int, ended: list[_Ended]) -> None:
        """Keep the transport for the next example where all ranks ended in step, else free it."""
        matched = sum(other.unmatched for other in ended) == 0
        in_step = matched and all(other.in_step for other in ended)
        if not in_step:
            del self._links[size]
        if comm is None or not matched or not all(other.clean for other in ended):
            return
        for member in comm._related[1:] if in_step else comm._related:
            member._forget_short()
            member._link.free()

    def _play(self, comm: Communicator, example: Example, test: Test, draw: Draw | None) -> Part:
        __tracebackhide__ = True
        part = Part(comm.rank, Record())
        stuck = Interruptible(comm.rank, threading.get_ident())
        limit = 2 * example.timeout + SLACK
        watch = threading.Timer(limit, self._rescue, (stuck, example, uncaptured()))
        watch.daemon = True
        watch.start()
        try:
            try:
                with nullcontext() if draw is not None else deterministic_PRNG():
                    part.result = play(comm, example, test, draw, part.record)
                stuck.end()
            except BaseException as error:
                stuck.end()
                part.error = stuck.error() if isinstance(error, Interruption) else error
        except Interruption:
            # It was under way when the rank ended by itself.
            pass
        watch.cancel()
        part.step = comm._completed
        return part

    def _rescue(self, stuck: Interruptible, example: Example, show: Callable[[str], None]) -> None:
        """End this rank's part in an example that takes too long, or else the whole job."""
        deadline = time.monotonic() + HOPELESS
        while not stuck.ended and time.monotonic() < deadline:
            stuck.interrupt()
            time.sleep(AGAIN)
        if not stuck.ended:
            show(f"{stuck.hopeless()}\nThe job ends. The example was: {example.said}\n")
            time.sleep(_FORWARDING)
            self._control.abort()


def _end(comm: Communicator, error: BaseException | None) -> tuple[bool, bool]:
    """Take part in one last step of the example's communicators, so that nobody waits for this rank.

    Returns whether every rank came to it from a test that went well, and whether nothing is left
    under way.
    """
    text = "" if error is None else describe_exception(error)
    last = []
    for member in comm._related:
        member._engine._threaded = False
        if member._closed is None:
            last.append(member._engine.submit(member._guarded(_leave(member, text))))
    deadline = time.monotonic() + _ENDING
    while not all(member._engine.idle for member in comm._related):
        for member in comm._related:
            member._engine.advance()
        if time.monotonic() > deadline:
            break
        give_up_core()
    in_step = len(last) == len(comm._related) and all(task.result is True for task in last)
    clean = all(member._at_rest() for member in comm._related)
    return in_step and clean, clean


def _leave(comm: Communicator, text: str) -> Steps:
    yield from leave_in_step(comm._control, text)
    return all_left_well(comm._control)
