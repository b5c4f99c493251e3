"""The ranks that a test is run on: threads of this process, or the processes of a job."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any, Protocol

from arraycomm import _launch, _session
from arraycomm._communicator import Communicator
from arraycomm._transports.base import Transport
from arraycomm._transports.threads import make_group
from arraycomm.testing._example import Draw, Example, Part, Test, import_framework, play
from arraycomm.testing._hypothesis import Record
from arraycomm.testing._internals import communicator_over
from arraycomm.testing._ranks.lockstep import Lockstep
from arraycomm.testing._ranks.threads import SLACK, Events, RankThread, run_threads


class RankGroup(Protocol):
    """The ranks that a test is run on, as this process sees them."""

    rank: int
    # The largest number of ranks of an example, and the largest that is drawn by default.
    size: int
    usual: int
    # How to get these ranks again, for reports.
    name: str

    def meet(self, test: str) -> None: ...
    def run(self, example: Example, test: Test, draw: Draw | None) -> list[Part]: ...
    def follow(self, test: Test) -> None: ...
    def finish(self, error: BaseException | None) -> None: ...


class Threads:
    """Ranks as threads, over the transports that `links(size)` returns."""

    rank, size, usual = 0, sys.maxsize, 4
    name = "threads of one process"

    def __init__(self, links: Callable[[int], Sequence[Transport]] = make_group) -> None:
        self._links = links

    def meet(self, test: str) -> None:
        """Do nothing, since one process runs the test."""

    def finish(self, error: BaseException | None) -> None:
        """Do nothing, since one process runs the test."""

    def follow(self, test: Test) -> None:
        """Raise an error: there is no rank 1 in another process."""
        raise AssertionError("the ranks are threads of one process, which drives them")

    def run(self, example: Example, test: Test, draw: Draw | None) -> list[Part]:
        """Run an example, each rank in a thread; this thread draws."""
        __tracebackhide__ = True
        events: Events = queue.SimpleQueue()
        asking = None if draw is None else _from_another_thread(draw, events)
        records = [Record() for _ in range(example.size)]
        for name in example.frameworks:
            import_framework(name)

        def body(comm: Communicator) -> Any:
            return play(comm, example, test, asking, records[comm.rank])

        ranks = [
            RankThread(communicator_over(link, example.timeout), body)
            for link in self._links(example.size)
        ]
        run_threads(ranks, example.timeout + SLACK, together=True, events=events)
        return [Part(r.rank, records[r.rank], r.error, r.step, r.result) for r in ranks]


def _from_another_thread(draw: Draw, events: Events) -> Draw:
    """Return a function that has the thread that serves `events` call `draw`."""

    def ask(strategy: Any, label: str | None) -> bytes:
        reply: Future[bytes] = Future()

        def answer() -> None:
            try:
                reply.set_result(draw(strategy, label))
            except Exception as error:
                reply.set_exception(error)

        events.put(answer)
        return reply.result()

    return ask


def group_of(args: tuple[Any, ...]) -> RankGroup:
    """Return the ranks for a test with these arguments.

    They are those that its suite chooses by a method `_group`, or else those of the job, or else
    threads.
    """
    chosen = getattr(args[0], "_group", None) if args else None
    if chosen is not None:
        group: RankGroup = chosen()
        return group
    if _launch.detect(os.environ) is None and not _session.is_initialized():
        return Threads()
    world = _session.init()
    if world.backend == "self":
        return Threads()
    return lockstep_over(world)


@cache
def lockstep_over(comm: Communicator) -> Lockstep:
    """Return the ranks of a communicator, which run tests in step; the same object at each call."""
    return Lockstep(comm)
