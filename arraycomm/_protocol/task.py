"""A program that goes on beside its caller: a request, a message, or a check that follows."""

from __future__ import annotations

import copy
import threading
from typing import Any

from arraycomm._callsite import CallSite
from arraycomm._errors import forgiving, is_interrupt
from arraycomm._protocol.waits import clock
from arraycomm._protocol.waits.outcomes import Outcome, Outcomes
from arraycomm._protocol.waits.waiting import Watch
from arraycomm._transports.base import Handle, Steps


def without_traceback(error: BaseException) -> BaseException:
    """Return a copy of an error that keeps no frames alive, or the error if it cannot be copied."""
    with forgiving:
        copied = copy.copy(error)
        return copied if type(copied) is type(error) else error
    return error


class Task:
    """One program under way, and in the end its result or its error."""

    # Whether the caller does nothing else until it is finished.
    waited_for = False
    finished = False
    result: Any = None
    error: BaseException | None = None

    def __init__(
        self, program: Steps, watch: Watch | None = None, outcome: Outcome | None = None
    ) -> None:
        self._program = program
        # What is kept of it if it is a request, in case that nobody waits for it.
        self.outcome = outcome or Outcome()
        self._thread = threading.current_thread()
        # Called while waiting, in place of the engine's own.
        self.watch = watch
        self.waiting: Handle | None = None
        # Held by the thread that pushes it on.
        self.pushing = threading.Lock()
        self.since = 0.0

    def ends_with_thread(self) -> bool:
        """Return whether the program's end leaves it alone: another thread waits, or a daemon's."""
        # Threads that Python has not started make requests too, which are the program's.
        foreign = type(self._thread).__name__ == "_DummyThread"
        return self.waited_for or (self._thread.daemon and not foreign)

    def step(self) -> None:
        """Run the program up to the next thing it waits for."""
        try:
            self.waiting = next(self._program)
            self.since = clock.now()
        except StopIteration as stop:
            self.finish(stop.value, None)
        except BaseException as error:
            # Also an interrupt behind the program's part of this; if that has ended, nothing more.
            self.fail(error)
            if is_interrupt(error):
                # Its caller hears of it now.
                self.outcome.claim()
                raise

    def finish(self, result: Any, error: BaseException | None) -> None:
        """Record how the program ended."""
        self.result, self.error, self.waiting = result, error, None
        self.finished = True
        self.outcome.finish(error)

    def take(self) -> Any:
        """Return the result, or raise the error; once more if asked again."""
        if self.error is None:
            return self.result
        error, self.error = self.error, without_traceback(self.error)
        try:
            raise error
        finally:
            # Its traceback has this frame, and so has that of the caller's own request.
            del error

    def fail(self, error: BaseException) -> None:
        """Raise `error` inside the program, so that it can clean up."""
        try:
            self._program.throw(error)
        except BaseException as raised:
            self.finish(None, raised)
        else:
            self.finish(None, error)


class Finished(Task):
    """The task of a program that ended where it was begun."""

    finished = True

    def __init__(self, result: Any, outcomes: Outcomes, site: str | CallSite) -> None:
        self.result, self.outcome = result, Outcome(outcomes, site)
        self.outcome.finished = True
