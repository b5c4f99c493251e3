"""Tests that every process of a job runs in step: rank 0 drives, the others follow.

Rank 0 sends each example to all ranks on a communicator that tests do not see. The example runs on
a communicator of as many ranks as it asks for. Whatever has happened there, every rank then takes
part in one last step on it, so that no rank is left waiting in a call that the others do not make.
Finally all ranks exchange how they ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Final

from arraycomm._callsite import describe_exception
from arraycomm._communicator import Communicator
from arraycomm._errors import CommTimeoutError, MismatchError
from arraycomm._protocol.mismatch import name_ranks
from arraycomm._transports.base import Transport
from arraycomm.testing._example import Draw, Example, Part, Test, import_framework, play
from arraycomm.testing._failures import FOUND_BY_RANK_0, pack, unpack
from arraycomm.testing._hypothesis import Record, deterministic_PRNG, uncaptured
from arraycomm.testing._internals import (
    LastStep,
    communicator_over,
    completed_step,
    leave_cores,
    left_behind,
    missing_ranks,
    unseen_error,
)
from arraycomm.testing._ranks.interrupt import Interruptible, Interruption
from arraycomm.testing._ranks.rank_links import Left, RankLinks
from arraycomm.testing._ranks.stacks import Address, own_stack, stacks_of
from arraycomm.testing._ranks.threads import HOPELESS, RETRY, SLACK

# Seconds in which the ranks come to the last step of an example once one of them has ended it.
_ENDING: Final = 5.0
# Seconds after which ranks that wait for one another have all timed out, if one has.
_TOGETHER: Final = 1.0
# Seconds in which a launcher forwards what was printed.
_FORWARDING: Final = 0.2
# Seconds for which a rank waits longer than any other one needs that ends its example by itself;
# and those in which all show what they have raised.
_LATER: Final = 5.0
_TURN: Final = 5.0


@dataclass
class Ended:
    """What a rank sends to the others at the end of an example."""

    record: Record = field(default_factory=Record)
    error: bytes | None = None
    step: int = 0
    left: Left = field(default_factory=Left)


class Lockstep:
    """This process's part in tests that all ranks of a communicator run in step."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.usual = comm.size
        self.name = f"the processes of mpiexec -n {comm.size}"
        self._control = comm.dup(timeout=None, check=True)
        leave_cores(self._control)
        self._links = RankLinks(self._control)
        self._met: set[str] = set()
        self._imported = {"numpy", "buffer", "dlpack"}
        self._stacks: list[Address] = self._control.allgather_object(own_stack())

    def meet(self, test: str) -> None:
        """Raise `MismatchError` on every rank unless all of them run the same test.

        A rank that has left out a test waits here until the others have reached the one it runs.
        """
        while True:
            tests = self._control.allgather_object(test)
            if len(set(tests)) == 1:
                self._met.add(test)
                return
            # This rank has already run the test of another one, and waits until that one catches
            # up.
            is_ahead = any(other in self._met for other in tests)
            everyone = self._control.allgather_object(is_ahead)
            if not is_ahead or all(everyone):
                break
        self._met.add(test)
        text = "; ".join(f"rank {rank} runs {other}" for rank, other in enumerate(tests))
        raise MismatchError(f"given: ranks run different tests, some have left one out: {text}")

    # On rank 0

    def run(self, example: Example, test: Test, draw: Draw | None) -> list[Part]:
        """Run an example on its ranks, and return how each of them ended."""
        __tracebackhide__ = True
        self._control.bcast_object(example)
        part, ended = self._take_part(example, test, draw)
        assert part is not None, "rank 0 takes part in every example"
        parts = [part]
        for rank, other in enumerate(ended[1 : example.size], 1):
            error = None if other.error is None else unpack(other.error)
            parts.append(Part(rank, other.record, error, other.step))
        return parts

    def finish(self, error: BaseException | None) -> None:
        """End the test on all ranks, with the error that rank 0 ends it with."""
        self._control.bcast_object(None if error is None else pack(error))

    # On the others

    def follow(self, test: Test) -> None:
        """Run the examples that rank 0 sends until the test ends; raise what rank 0 raises."""
        __tracebackhide__ = True
        while isinstance(message := self._control.bcast_object(), Example):
            self._take_part(message, test, None)
        if message is not None:
            error = unpack(message).with_traceback(None)
            error.__cause__ = error.__context__ = None
            vars(error)[FOUND_BY_RANK_0] = True
            error.__notes__ = ["found by rank 0, whose report shows the example"]
            raise error

    # On all

    def _take_part(
        self, example: Example, test: Test, draw: Draw | None
    ) -> tuple[Part | None, list[Ended]]:
        self._import(example.frameworks)
        link = self._link(example.size)
        if link is None:
            ended = self._exchange(Ended(), example)
            self._let_go(None, example.size, ended)
            return None, ended
        comm = communicator_over(link, example.timeout)
        leave_cores(comm)
        part = self._play(comm, example, test, draw)
        if isinstance(part.error, CommTimeoutError):
            # The other ranks that wait are to time out as well, and show where they wait.
            time.sleep(min(example.timeout, _TOGETHER))
        text = "" if part.error is None else describe_exception(part.error)
        in_step, clean = LastStep(comm, text).complete(_ENDING)
        part.error = part.error or unseen_error(comm)
        error = None if part.error is None else pack(part.error)
        left = Left(in_step, clean, *left_behind(comm))
        local = Ended(part.record, error, part.step, left)
        ended = self._exchange(local, example)
        self._ended()
        self._let_go(comm, example.size, ended)
        return part, ended

    def _import(self, frameworks: list[str]) -> None:
        """Import what the example needs, and wait until all ranks have."""
        if self._imported.issuperset(frameworks):
            return
        for name in frameworks:
            import_framework(name)
        self._imported.update(frameworks)
        self._control.barrier()

    def _exchange(self, ended: Ended, example: Example) -> list[Ended]:
        """Return how every rank has ended the example; if one does not, end the job.

        Such a rank would interrupt itself, or end the job, unless it holds Python's lock outside
        Python.
        """
        limit = 2 * example.timeout + SLACK + HOPELESS + _LATER
        watch = threading.Timer(limit, self._end_job, (ended, example, uncaptured()))
        watch.daemon = True
        watch.start()
        try:
            return self._control.allgather_object(ended)
        finally:
            watch.cancel()

    def _end_job(self, ended: Ended, example: Example, show: Callable[[str], None]) -> None:
        missing = missing_ranks(self._control)
        lowest = all(rank in missing for rank in range(self.rank))
        lines = []
        if lowest:
            who = name_ranks(missing)
            lines.append(f"{who} did not end the example in time, and cannot be interrupted")
            stacks = stacks_of([self._stacks[rank] for rank in missing])
            lines += [f"rank {r} is here:\n{s}" for r, s in zip(missing, stacks, strict=True) if s]
        if ended.error is not None:
            lines.append(f"rank {self.rank} raised:\n{describe_exception(unpack(ended.error))}")
        if lowest:
            lines.append(f"The job ends. The example was: {example.call}\n")
        show("\n".join(lines))
        # The others show what they have raised, and the lowest ends the job.
        time.sleep(_TURN if lowest else 2 * _TURN)
        self._control.abort()

    def _ended(self) -> None:
        """Take note that all ranks have ended the example."""

    def _link(self, size: int) -> Transport | None:
        """Return the transport of the first `size` ranks, or None on the others."""
        return self._links.of(size)

    def _let_go(self, comm: Communicator | None, size: int, ended: list[Ended]) -> None:
        """Keep the transport for the next example if all ranks ended in step, or else free it."""
        self._links.let_go(comm, size, [other.left for other in ended])

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
            # It was begun before the rank ended by itself.
            pass
        watch.cancel()
        part.step = completed_step(comm)
        return part

    def _rescue(self, stuck: Interruptible, example: Example, show: Callable[[str], None]) -> None:
        """Interrupt an example that takes too long; if that fails, abort the job."""
        deadline = time.monotonic() + HOPELESS
        while not stuck.ended and time.monotonic() < deadline:
            stuck.interrupt()
            time.sleep(RETRY)
        if not stuck.ended:
            show(f"{stuck.hopeless()}\nThe job ends. The example was: {example.call}\n")
            time.sleep(_FORWARDING)
            self._control.abort()
