"""Drives the programs of one communicator, first in, first out, and does all the waiting.

A program is a generator that yields what it waits for. With nothing outstanding a blocking call is
driven by its own thread; requests are driven by whoever tests or waits, and meanwhile by the
progress thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import Any, NoReturn

from arraycomm._errors import (
    CommunicatorClosedError,
    ConcurrentUseError,
    TransportError,
    raise_interrupt,
    text_of,
)
from arraycomm._native import compiled
from arraycomm._protocol.task import Task
from arraycomm._protocol.waits import clock
from arraycomm._protocol.waits.outcomes import Outcome, Outcomes
from arraycomm._protocol.waits.progress import GLANCE, ProgressThread
from arraycomm._protocol.waits.waiting import (
    NAP,
    PATIENCE,
    Watch,
    beside_own_work,
    done_after_all,
    wait_for,
)
from arraycomm._transports.base import Handle, Steps
from arraycomm._transports.control import ControlChannel


class NotFinishedError(Exception):
    """The time of a wait is over. Not a `TimeoutError`: a program's function may raise that too."""


def _refuse() -> NoReturn:
    raise ConcurrentUseError(
        "two threads called one communicator at the same time, or a function that a call runs, a "
        "finalizer or a signal's handler called it once more; give each a communicator of its own "
        "with dup()"
    )


class Turn:
    """What the native part has under this name; here an interrupt may leave it taken."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._refuse, lock = refuse, threading.Lock()
        self.acquire, self.release, self.locked = lock.acquire, lock.release, lock.locked

    def __enter__(self) -> None:
        if not self.acquire(False):
            self._refuse()

    def __exit__(self, *_: object) -> None:
        self.release()


class Outstanding:
    """A queue of programs, and messages, which wait for nobody in the queue.

    `watch(seconds waited)` is called for a task that has none of its own, and raises if waiting on
    makes no sense; `after_wait` is called when a wait is over.
    """

    def __init__(self, watch: Watch, after_wait: Callable[[], None]) -> None:
        self._watch, self._after_wait = watch, after_wait
        # What a call was waiting for when it was given up.
        self.interrupted: Handle | None = None
        # Why no use is possible in a forked child.
        self.refusal = ""
        # A list, not a deque: one thread may copy it while another one changes it, also without the
        # GIL.
        self.queue: list[Task] = []
        self.messages: list[Task] = []
        self.follower: Task | None = None
        # Held by the thread that pushes on.
        self._driving = threading.Lock()

    @property
    def idle(self) -> bool:
        """Whether nothing is outstanding."""
        return not self.queue and not self.messages

    def active(self) -> list[Task]:
        """Return the programs that do not wait for another one; none if it is idle."""
        return [*self.queue[:1], *self.messages]

    def moved(self) -> float:
        """Return when one of the active programs began to wait for what it waits for now."""
        return max((task.since for task in self.active()), default=0.0)

    def follow(self, program: Steps) -> None:
        """Put a program right behind the one that is running: what comes next waits for it.

        It may be pushed on beside that one, whose thread may wait outside Python for what fails
        here.
        """
        self.follower = Task(program)
        self.queue.insert(1 if self.queue else 0, self.follower)

    def end_follower(self, is_over: Callable[[], bool]) -> bool:
        """End the follower if `is_over`, and nothing else is outstanding; return True if so.

        What it would check, `is_over` has checked.
        """
        task = self.follower
        if task is None or len(self.queue) != 1 or self.queue[0] is not task:
            return False
        with task.pushing:
            if not task.finished:
                if not is_over():
                    return False
                task.finish(None, None)
        with self._driving:
            if self.queue and self.queue[0] is task:
                self.queue.pop(0)
        return True

    def advance(self, polls: int = 1) -> None:
        """Push the programs on as far as they go without waiting; poll each so often."""
        if self.refusal:
            raise CommunicatorClosedError(self.refusal)
        if self._driving.locked():
            if (follower := self.follower) is not None and not follower.pushing.locked():
                self._advance(follower, polls)
            return
        # An interrupt right after an acquire() that succeeded would leave the lock held for ever.
        with self._driving:
            if self.messages:
                for message in [task for task in self.messages if self._advance(task, polls)]:
                    self.messages.remove(message)
            while self.queue and self._advance(self.queue[0], polls):
                self.queue.pop(0)

    def push_follower(self) -> None:
        """Push on what follows, and nothing that may wait outside Python."""
        follower = self.follower
        if follower is None or follower.pushing.locked() or not self._advance(follower, 1):
            return
        # Not in a main thread, in which an interrupt might leave it held.
        if self._driving.acquire(False):
            if self.queue and self.queue[0] is follower:
                self.queue.pop(0)
            self._driving.release()

    def end(self, task: Task, error: BaseException) -> None:
        with self._driving, task.pushing:
            if not task.finished:
                self.interrupted = task.waiting
                task.fail(error)

    def _advance(self, task: Task, polls: int) -> bool:
        """Push one task on; return whether it is finished."""
        with task.pushing:
            while not task.finished:
                try:
                    waiting, watch = task.waiting, task.watch or self._watch
                    if waiting is not None and not (
                        waiting.done() or any(waiting.done() for _ in range(polls - 1))
                    ):
                        now = clock.now()
                        if getattr(waiting, "local", False):
                            task.since = now
                        waited = now - task.since
                        if waited < GLANCE or not done_after_all(waiting.done, watch, waited):
                            return False
                    self._after_wait()
                except Exception as error:
                    raise_interrupt(error)
                    if not _withdrawn(task.waiting):
                        return False
                    self.interrupted = task.waiting
                    task.fail(error)
                    return True
                task.step()
            return True


class Engine(Outstanding):
    """Waits for what one communicator has under way, or leaves it to a thread.

    A `with` block of its `turn` is one call of the user's. While it waits, it calls `push_others`
    if no thread pushes on the requests of other queues, and `close(error)` if the thread that makes
    progress has failed.
    """

    def __init__(
        self,
        spins: int,
        threaded: bool,
        watch: Watch,
        after_wait: Callable[[], None],
        push_others: Callable[[], None],
        close: Callable[[BaseException], None],
    ) -> None:
        super().__init__(watch, after_wait)
        self._spins = spins
        # How often a wait for a task polls before it looks at the peers, and gives up the core.
        self._polls = max(2 * spins, 1)
        self.threaded = threaded
        # Seconds for which a wait does not sleep.
        self.patience = PATIENCE
        self._push_others, self._close = push_others, close
        self.outcomes = Outcomes()
        self.progress = ProgressThread(self.advance, self.active, self._lose_thread)
        # The thread that waits for as long as it takes, if it looks after the wait just now.
        self.blocked: int | None = None
        # Held by the thread that is calling; the fast path of small reductions takes it too.
        self.turn: Any = (Turn if compiled is None else compiled.Turn)(_refuse)

    def _has_thread(self) -> bool:
        """Return whether a thread pushes on what is outstanding."""
        return self.threaded and not ProgressThread.refused

    def run(self, program: Steps, watch: Watch | None = None) -> Any:
        """Drive a program to its end in this thread, behind what is outstanding.

        `watch` is called while waiting, in place of the engine's own.
        """
        if self.queue:
            # Most often that is the header of the call before, which all ranks have shown by now.
            self.advance()
        if self.queue:
            return self.finish(self.submit(program))
        watch_here = self._watch_call if watch is None else partial(self._watch_call, watch=watch)
        try:
            while True:
                waiting = next(program)
                try:
                    if not waiting.done():
                        self.wait_for(waiting.done, beside_own_work(waiting, watch_here), waiting)
                except BaseException as error:
                    self.interrupted = waiting
                    # The program raises it, after what it has to tidy up.
                    program.throw(error)
        except StopIteration as stop:
            return stop.value

    def submit(self, program: Steps, site: str = "unknown") -> Task:
        """Put a program at the end of the queue, and start it if it is alone there."""
        task = Task(program, None, Outcome(self.outcomes, site))
        if self.queue or self.refusal or self._driving.locked():
            self.queue.append(task)
            return self._begin(task)
        # Its first wait is not looked at: most callers wait for it in a moment.
        with self._driving:
            self.queue.append(task)
            task.step()
            if task.finished:
                self.queue.remove(task)
        if not task.finished:
            self._leave()
        return task

    def submit_message(
        self,
        program: Steps,
        site: str,
        watch: Watch,
        *,
        awaited: bool = False,
        looked: bool = False,
    ) -> Task:
        """Start a program that goes its own way, beside the queue.

        One that is `awaited` is driven by the wait that follows, and needs no thread. If its first
        wait has been `looked` at, it is left to the thread.
        """
        task = Task(program, watch, Outcome(self.outcomes, site))
        # Begun here, so that messages begin in the order of the calls.
        task.step()
        self.messages.append(task)
        if looked:
            self._leave()
        return task if awaited or looked else self._begin(task)

    def give_up(self, task: Task, error: BaseException) -> None:
        """End a program whose caller was interrupted: nobody is left who could wait for it."""
        task.outcome.claim()
        self.end(task, error)

    def _lose_thread(self, cause: BaseException) -> None:
        """End everything outstanding, and the group: the thread that makes progress has failed."""
        raised = f"{type(cause).__name__}: {text_of(cause)}"
        error = TransportError(
            f"the thread that makes progress on requests must not fail; it raised {raised}; go on "
            "with another communicator, for example one that dup() made before"
        )
        error.__cause__ = cause
        for task in [*self.queue, *self.messages]:
            self.end(task, error)
        self._close(error)

    def give_up_all(self, error: BaseException) -> None:
        """End everything outstanding: the program that could have waited for it has failed."""
        for task in [*self.queue, *self.messages]:
            self.give_up(task, error)

    def _begin(self, task: Task) -> Task:
        self.advance()
        self._leave()
        return task

    def _leave(self) -> None:
        """Leave what is outstanding to the thread."""
        if not self.idle and self._has_thread():
            self.progress.start()

    def test(self, task: Task) -> bool:
        """Push the programs on, and return whether that of a task is finished."""
        if not task.finished:
            self.progress.take_over()
            try:
                self.advance()
            finally:
                self._leave()
        return task.finished

    def drain(self, *, at_end: bool = False) -> None:
        """Wait for everything outstanding; at the program's end but for what ends with a thread."""
        left = [t for t in [*self.queue, *self.messages] if at_end and t.ends_with_thread()]
        for task in left:
            task.outcome.claim()
        queue = takewhile(lambda task: task not in left, self.queue)
        for task in [*queue, *(task for task in self.messages if task not in left)]:
            self._wait_for(task, None)

    def _absent(self, handle: Handle | None) -> bool:
        """Return whether only absent ranks are awaited: by the handle and by what is under way."""
        waiting = [*([handle] if handle else []), *(task.waiting for task in self.active())]
        return self._has_thread() and {isinstance(one, ControlChannel) for one in waiting} == {True}

    def wait_for(
        self, done: Callable[[], bool], watch: Watch | None = None, handle: Handle | None = None
    ) -> None:
        """Poll until `done`, and push on what else this rank has outstanding if nobody does.

        `handle` is what is done then, if it is a handle.
        """

        def done_or_pushed() -> bool:
            if done():
                return True
            self.advance()
            self._push_others()
            return False

        def watch_or_go_on(waited: float) -> None:
            try:
                (watch or self._watch_call)(waited)
            except Exception as error:
                raise_interrupt(error)
                if _withdrawn(handle):
                    raise

        done_here = done if self._has_thread() else done_or_pushed
        absent = partial(self._absent, handle)
        wait_for(done_here, self._spins, watch_or_go_on, self.moved, absent, self.patience)
        self._after_wait()

    def _watch_call(self, waited: float, watch: Watch | None = None) -> None:
        self.blocked = threading.get_ident()
        try:
            (watch or self._watch)(waited)
        finally:
            self.blocked = None

    def _pushed(self, task: Task, polls: int = 1) -> bool:
        self.advance(polls)
        if not task.finished and self._driving.locked():
            # The thread is at it. It may need the interpreter, which a caller that polls keeps.
            time.sleep(NAP)
        return task.finished

    def finish(self, task: Task, timeout: float | None = None) -> Any:
        """Wait for a task, and return its result or raise its error."""
        self.complete(task, timeout)
        task.outcome.claim()
        return task.result if task.error is None else task.take()

    def complete(self, task: Task, timeout: float | None = None) -> None:
        """Wait for a task; its result or error stays there."""
        if not task.finished:
            self.progress.take_over()
            try:
                if not self._pushed(task, self._polls):
                    self._wait_for(task, timeout)
            finally:
                self._leave()

    def _wait_for(self, task: Task, timeout: float | None) -> None:
        deadline = None if timeout is None else clock.now() + timeout

        def watch(waited: float) -> None:
            if deadline is not None and clock.now() > deadline:
                raise NotFinishedError

        self.blocked = threading.get_ident() if timeout is None else None
        try:
            self.wait_for(partial(self._pushed, task, self._polls), watch)
        finally:
            self.blocked = None


def _withdrawn(waiting: Handle | None) -> bool:
    """Take back what this rank waits in; return False if all ranks have come to it, so go on."""
    return not isinstance(waiting, ControlChannel) or waiting.withdraw()
