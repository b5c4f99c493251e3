"""A program that goes on beside its caller: a request, a message, or a check that follows."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from arraycomm._callsite import CallSite, describe_exception, user_level
from arraycomm._errors import CommunicatorClosedError
from arraycomm._protocol.waits import clock
from arraycomm._protocol.waits.waiting import Watch
from arraycomm._transports.base import Handle, Steps


def without_traceback(error: BaseException) -> BaseException:
    """Return a copy of an error that keeps no frames alive, or the error if it cannot be copied."""
    try:
        copied = copy.copy(error)
        return copied if type(copied) is type(error) else error
    except Exception:
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
            if not isinstance(error, Exception):
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


# What became of requests: at the end, those that nobody has waited for are told of


class Outcome:
    """How one request ended; it outlives the request, and holds none of its arrays."""

    __slots__ = ("_outcomes", "dropped", "error", "finished", "site")

    def __init__(self, outcomes: Outcomes | None = None, site: str | CallSite = "unknown") -> None:
        self._outcomes = outcomes
        self.site = site
        self.finished = False
        self.error: BaseException | None = None
        # Whether the program has no reference to the request any more.
        self.dropped = False
        if outcomes is not None:
            outcomes.open[self] = None

    def finish(self, error: BaseException | None) -> None:
        """Note how the request has ended."""
        self.finished, self.error = True, error
        if self.dropped and self._outcomes is not None:
            self._outcomes.lose(self)

    def drop(self) -> None:
        """Note that the program can wait for the request no more."""
        self.dropped = True
        if self.finished and self._outcomes is not None:
            self._outcomes.lose(self)

    def claim(self) -> None:
        """Forget the request: its caller knows how it ended."""
        if self._outcomes is not None:
            self._outcomes.open.pop(self, None)
            self._outcomes = None
        # Its traceback has the frames of a call, and with them the arrays.
        self.error = None


class Outcomes:
    """The requests of one group on this rank that nobody has waited for."""

    def __init__(self) -> None:
        # Of those whose callers do not know how they ended.
        self.open: dict[Outcome, None] = {}
        # Of those that ended well and that nobody can wait for any more, how many were made where.
        self._lost: Counter[str] = Counter()
        self._freed = False

    def lose(self, outcome: Outcome) -> None:
        """Note that a request has ended, and that nobody can wait for it any more."""
        if outcome not in self.open:
            return
        if outcome.error is None:
            self.open.pop(outcome)
            self._lost[str(outcome.site)] += 1
        if self._freed:
            # Nobody asks for a report any more.
            self._tell([outcome] if outcome.error is not None else [])

    def take(self, other: Outcomes) -> None:
        """Report those of another group, which is freed, as one's own."""
        for outcome in other.open:
            outcome._outcomes = self
        self.open |= other.open
        self._lost += other._lost
        other.open = {}

    def free(self) -> None:
        """Report the requests that nobody can wait for any more, and later ones at once."""
        self._freed = True
        self._tell([outcome for outcome in self.open if outcome.dropped])

    def report(self) -> bool:
        """Report all requests that nobody has waited for; return whether none has failed."""
        return self._tell(list(self.open))

    def errors(self) -> list[Outcome]:
        """Return the requests that have failed without anybody having seen it."""
        return _failed(self.open)

    def _tell(self, outcomes: Sequence[Outcome]) -> bool:
        """Print the errors of requests, and warn of those that have none."""
        for outcome in outcomes:
            self.open.pop(outcome, None)
        failed = _failed(outcomes)
        for outcome in failed:
            assert outcome.error is not None
            text = describe_exception(outcome.error)
            sys.stderr.write(
                f"the request made at {outcome.site} failed, and nobody waited for it:\n{text}"
            )
        sites = self._lost + Counter(str(o.site) for o in outcomes if o.error is None)
        self._lost = Counter()
        for site, count in sites.items():
            made = "the request" if count == 1 else f"{count} requests"
            warnings.warn(
                f"{made} made at {site} {'was' if count == 1 else 'were'} never waited for; keep "
                "requests, and wait for each of them",
                RuntimeWarning,
                stacklevel=user_level(),
            )
        return not failed


def _failed(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return those with an error, but those that only came behind another one with an error."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    return [o for o in failed if not isinstance(o.error, CommunicatorClosedError)]
