"""`given`: a Hypothesis test that ranks run in step, as threads or as the processes of a job."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import queue
import sys
import threading
import time
import unittest
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

import hypothesis
from hypothesis import strategies as st

from arraycomm import _launch, _session
from arraycomm._communicator import Communicator, Options
from arraycomm._errors import CommTimeoutError
from arraycomm._transports.base import Transport
from arraycomm._transports.threads import make_group
from arraycomm.testing._example import Draw, Example, Part, play
from arraycomm.testing._failures import first_failure
from arraycomm.testing._hypothesis import (
    DataObject,
    Draws,
    Record,
    ends_example,
    replay,
    should_note,
)
from arraycomm.testing._lockstep import Lockstep
from arraycomm.testing._ranks import SLACK, Events, RankThread, run_threads
from arraycomm.testing._values import dump, set_rank_count

# After a first wait in vain, how many times longer than the slowest good example others may take.
_FACTOR: Final = 10.0
_LEAST_TIMEOUT: Final = 1.0

_USUAL_DEADLINE: Final = timedelta(milliseconds=200)
# Characters of an example that are sent along for a report of a rank that cannot be interrupted.
_LONG: Final = 2000

F = TypeVar("F", bound=Callable[..., Any])
Test = Callable[..., Any]
Ranks = int | Sequence[int] | st.SearchStrategy[int] | None


def given(
    ranks: Ranks = None, *, timeout: float = 20.0, **strategies: st.SearchStrategy[Any]
) -> Callable[[F], Any]:
    """Make a Hypothesis test of a function that every rank runs in step.

    The function has a parameter `comm`, the communicator of its rank, and one for each strategy;
    what is left are fixtures. Alone, ranks are threads of this process; under `mpiexec` every
    process runs the test, rank 0 draws the examples and decides, and the others follow.

    Parameters
    ----------
    ranks : int, sequence of int, strategy, or None
        How many ranks: always so many, or drawn like the other arguments, and named first, so that
        a failure shrinks to few of them. None draws from 1 up to the ranks of the job, or to 4
        threads. A number of ranks that the job does not have is left out; where none is left, the
        test is skipped.
    timeout : float
        Seconds that a rank waits for another in an example. A rank that takes twice that long in
        Python is interrupted.
    **strategies : SearchStrategy
        What to draw, by the name of the parameter. Every rank gets its own copy of what was drawn;
        from `strategies.per_rank` its own value; an `ArrayCase` arrives as the array that it
        describes. `st.data()` draws in step: every rank calls it, and each gets the value.

    Returns
    -------
    callable
        A decorator. `hypothesis.settings`, `example`, `seed` and `reproduce_failure` apply to what
        it returns; in `example(ranks=…, x=…)`, `ranks` may be left out, and is then all there are.

    Raises
    ------
    BaseException
        From the decorated test: what the rank raised from which the failure of the others
        followed, in the smallest example found, with notes that name the rank and tell how the
        others ended. Raised on every rank; rank 0 shows the example.

    Notes
    -----
    `hypothesis.note`, `event`, `target` and `assume` may be called on any rank: notes are shown
    with their rank where ranks differ, targets count as the largest of all ranks, and an assumption
    that fails on one rank fails.
    The deadline of Hypothesis counts the time of rank 0. Its default of 200 ms, made for one process,
    does not apply.

    Examples
    --------
    >>> from arraycomm.testing import given, strategies as ranked
    >>> @given(x=ranked.rank_arrays(dtypes="int32"))
    ... def test_sum_does_not_depend_on_the_root(comm, x):
    ...     total = comm.allreduce(x)
    ...     assert (comm.bcast(comm.reduce(x)) == total).all()
    >>> test_sum_does_not_depend_on_the_root()
    """

    def decorate(test: F) -> Any:
        return _Given(test, ranks, timeout, strategies).wrapped()

    return decorate


class _Given:
    """One decorated test."""

    def __init__(
        self,
        test: Callable[..., Any],
        ranks: Ranks,
        timeout: float,
        strategies: dict[str, st.SearchStrategy[Any]],
    ) -> None:
        self.test = test
        self.ranks = ranks
        self.timeout = timeout
        self.strategies = strategies
        # The run under way, of each thread that runs the test.
        self._now = threading.local()

    def wrapped(self) -> Callable[..., Any]:
        """Return the test as its runner calls it."""
        hypothesis_test = hypothesis.given(ranks=_rank_counts(self), **self.strategies)(
            self._driver()
        )

        def run(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            return self.run(hypothesis_test, args, kwargs)

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(run, name, getattr(self.test, name))
        hypothesis_test.__dict__["__signature__"] = inspect.signature(hypothesis_test)
        hypothesis_test.__dict__["__wrapped__"] = self.test
        # One dictionary of attributes: what a decorator sets on one, such as settings, holds for both.
        run.__dict__ = hypothesis_test.__dict__
        return run

    def _driver(self) -> Callable[..., Any]:
        """Return what Hypothesis calls for each example: the test with `ranks` for `comm`."""

        @functools.wraps(self.test)
        def driver(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            return self.play(dict(accepted.bind(*args, **kwargs).arguments))

        signature = inspect.signature(self.test)
        parameters = dict(signature.parameters)
        if "comm" not in parameters or "ranks" in parameters:
            raise TypeError(
                f"given: {self.test.__name__} must have a parameter named comm, which each rank "
                "gets its communicator in, and none named ranks: that is comm.size"
            )
        del parameters["comm"]
        ranks = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
        kinds = [*parameters.values(), ranks]
        kinds.sort(key=lambda parameter: parameter.kind)
        accepted = signature.replace(parameters=kinds)
        driver.__signature__ = accepted  # type: ignore[attr-defined]
        return driver

    def run(self, hypothesis_test: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the whole test where this process drives it; elsewhere follow."""
        __tracebackhide__ = True
        group = _group_of(args)
        name = f"{self.test.__module__}.{self.test.__qualname__}"
        group.meet(os.environ.get("PYTEST_CURRENT_TEST", name))
        self._now.run = _Run(group, self.timeout)
        if self.counts() == []:
            raise unittest.SkipTest(f"needs {self.ranks} ranks; there are {group.size}")
        if group.rank:
            return group.follow(functools.partial(self.test, *args, **kwargs))
        self._complete_examples(hypothesis_test)
        hypothesis_test._hypothesis_internal_use_settings = _adapted(
            hypothesis_test._hypothesis_internal_use_settings
        )
        error: BaseException | None = None
        try:
            return hypothesis_test(*args, **kwargs)
        except BaseException as raised:
            error = raised
            error.add_note(f"found on {group.name}")
            raise
        finally:
            group.finish(error)

    def counts(self) -> st.SearchStrategy[int] | list[int]:
        """Return from which the number of ranks is drawn: those that there are, or a strategy."""
        group = self._now.run.group
        match self.ranks:
            case None:
                return list(range(1, group.usual + 1))
            case int():
                return [self.ranks] if 1 <= self.ranks <= group.size else []
            case st.SearchStrategy():
                return self.ranks.filter(lambda count: 1 <= count <= group.size)
            case _:
                return [count for count in self.ranks if 1 <= count <= group.size]

    def _complete_examples(self, hypothesis_test: Any) -> None:
        """Give the explicit examples that name no number of ranks all that there are."""
        counts = self.counts()
        most = max(counts) if isinstance(counts, list) else self._now.run.group.usual
        hypothesis_test.hypothesis_explicit_examples = tuple(
            example
            if example.args or "ranks" in example.kwargs
            else dataclasses.replace(example, kwargs={"ranks": most, **example.kwargs})
            for example in getattr(hypothesis_test, "hypothesis_explicit_examples", ())
        )

    def play(self, arguments: dict[str, Any]) -> Any:
        """Play one example on its ranks, and end it as it ended there."""
        __tracebackhide__ = True
        run, ranks = self._now.run, arguments.pop("ranks")
        if not 1 <= ranks <= run.group.size:
            hypothesis.reject()
        drawn = {name: arguments.pop(name) for name in self.strategies}
        data = [name for name, value in drawn.items() if isinstance(value, DataObject)]
        draws = Draws(drawn[data[0]]) if data else None
        said = ", ".join(f"{name}={value!r}" for name, value in {"ranks": ranks, **drawn}.items())
        for name in data:
            del drawn[name]
        example = Example(
            *(ranks, dump(drawn), tuple(data), should_note(), run.timeout),
            f"{self.test.__name__}({said})"[:_LONG],
        )
        set_rank_count(ranks)
        started = time.monotonic()
        parts = run.group.run(example, functools.partial(self.test, **arguments), draws)
        replay([part.record for part in parts])
        if draws is not None and draws.ended is not None:
            raise draws.ended
        for part in parts:
            if part.error is not None and ends_example(part.error):
                raise part.error
        error = first_failure(parts)
        run.learn(error, time.monotonic() - started)
        if error is not None:
            raise error
        return parts[0].result


def _adapted(settings: hypothesis.settings) -> hypothesis.settings:
    """Show how to reproduce a failure; leave out the deadline that nobody has chosen."""
    deadline = None if settings.deadline == _USUAL_DEADLINE else settings.deadline
    return hypothesis.settings(settings, print_blob=True, deadline=deadline)


@st.composite
def _rank_counts(draw: st.DrawFn, test: _Given) -> int:
    counts = test.counts()
    count: int = draw(st.sampled_from(counts) if isinstance(counts, list) else counts)
    set_rank_count(count)
    return count


class Group(Protocol):
    """The ranks that a test is run on."""

    rank: int
    # How many ranks an example may have at most, and how many where nobody says.
    size: int
    usual: int
    # How to have these ranks again.
    name: str

    def meet(self, test: str) -> None: ...
    def run(self, example: Example, test: Test, draw: Draw | None) -> list[Part]: ...
    def follow(self, test: Test) -> None: ...
    def finish(self, error: BaseException | None) -> None: ...


class _Run:
    """One run of a test, and what its examples have taught about time."""

    def __init__(self, group: Group, timeout: float) -> None:
        self.group = group
        self.timeout = timeout
        self._slowest = 0.0

    def learn(self, error: BaseException | None, seconds: float) -> None:
        """After a first wait in vain wait less, since shrinking may need many of them."""
        if error is None:
            self._slowest = max(self._slowest, seconds)
        elif isinstance(error, CommTimeoutError):
            self.timeout = min(self.timeout, max(_FACTOR * self._slowest, _LEAST_TIMEOUT))


class Threads:
    """Ranks as threads, over the transports that `links(size)` returns."""

    rank, size, usual = 0, sys.maxsize, 4
    name = "threads of one process"

    def __init__(self, links: Callable[[int], Sequence[Transport]] = make_group) -> None:
        self._links = links

    def meet(self, test: str) -> None:
        """Nothing to do: one process runs the test."""

    def finish(self, error: BaseException | None) -> None:
        """Nothing to do."""

    def follow(self, test: Test) -> None:
        """Nobody follows."""
        raise AssertionError("the ranks are threads of one process, which drives them")

    def run(self, example: Example, test: Test, draw: Draw | None) -> list[Part]:
        """Play an example, each rank in a thread; this thread draws."""
        __tracebackhide__ = True
        options = Options(timeout=example.timeout)
        events: Events = queue.SimpleQueue()
        asking = None if draw is None else _from_another_thread(draw, events)
        records = [Record() for _ in range(example.size)]

        def body(comm: Communicator) -> Any:
            return play(comm, example, test, asking, records[comm.rank])

        ranks = [
            RankThread(Communicator(link, options), body) for link in self._links(example.size)
        ]
        run_threads(ranks, example.timeout + SLACK, together=True, events=events)
        return [Part(r.rank, records[r.rank], r.error, r.step, r.result) for r in ranks]


def _from_another_thread(draw: Draw, events: Events) -> Draw:
    """Return `draw` for a thread that is not the one which serves `events`."""

    def ask(strategy: Any, label: str | None) -> bytes:
        reply: queue.SimpleQueue[tuple[bytes, Exception | None]] = queue.SimpleQueue()

        def answer() -> None:
            try:
                reply.put((draw(strategy, label), None))
            except Exception as error:
                reply.put((b"", error))

        events.put(answer)
        data, error = reply.get()
        if error is not None:
            raise error
        return data

    return ask


_worlds: dict[int, Lockstep] = {}


def _group_of(args: tuple[Any, ...]) -> Group:
    """Return the ranks that the test is run on: those of its suite, or of the job, or threads."""
    chosen = getattr(args[0], "_group", None) if args else None
    if chosen is not None:
        group: Group = chosen()
        return group
    if _launch.detect(os.environ) is None and not _session.is_initialized():
        return Threads()
    world = _session.init()
    if world.backend == "self":
        return Threads()
    return lockstep_over(world)


def lockstep_over(comm: Communicator) -> Lockstep:
    """Return this process's part in tests over a communicator; made once for each."""
    key = id(comm)
    if key not in _worlds or _worlds[key].comm is not comm:
        _worlds[key] = Lockstep(comm)
    return _worlds[key]
