"""`given`: a Hypothesis test that ranks run in step, as threads or as the processes of a job."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import time
import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Final, TypeVar

import hypothesis
from hypothesis import strategies as st

from arraycomm._checks import check_seconds
from arraycomm._errors import CommTimeoutError
from arraycomm.testing._arrays.array_case import DRAWN
from arraycomm.testing._arrays.frameworks import installed_frameworks
from arraycomm.testing._arrays.rank_values import set_rank_count
from arraycomm.testing._example import Example
from arraycomm.testing._failures import CAUSED, first_failure, is_skip, priority
from arraycomm.testing._hypothesis import (
    DataObject,
    Draws,
    adapt_settings,
    ends_example,
    replay,
    should_note,
)
from arraycomm.testing._ranks.rank_groups import RankGroup, group_of
from arraycomm.testing._ranks.transfer import dump

# The timeout after a first one, as a multiple of the slowest good example's seconds.
_FACTOR: Final = 10.0
_LEAST_TIMEOUT: Final = 1.0

# Characters of an example that are sent along, to be reported if a rank cannot be interrupted.
_LONG: Final = 2000

F = TypeVar("F", bound=Callable[..., Any])
Ranks = int | Sequence[int] | st.SearchStrategy[int] | None


def given(
    *,
    ranks: Ranks = None,
    world: Any = None,
    timeout: float | None = 20.0,
    **strategies: st.SearchStrategy[Any],
) -> Callable[[F], Any]:
    """Make a Hypothesis test of a function that every rank runs in step.

    The function has a parameter `comm`, the communicator of its rank, and one for each strategy;
    all other parameters are fixtures. Without a launcher, ranks are threads of this process. Under
    `mpiexec` every process runs the test: rank 0 draws the examples and decides, the others follow.

    Parameters
    ----------
    ranks : int, sequence of int, strategy, or None
        How many ranks: a fixed number, or one drawn like the other arguments. It is drawn first, so
        that a failure shrinks to few ranks. None draws from 1 up to the ranks of the job, or to 4
        threads. A number of ranks that the job does not have is left out; if none is left, the test
        is skipped.
    world : mpi4py.MPI.Intracomm, callable, or None
        For code that does not use arraycomm: an mpi4py communicator, or a function that returns
        one. `comm` is then a plain mpi4py communicator of the first ranks of this one. The ranks
        are processes, whether there is a launcher or not.
    timeout : float or None
        Seconds that a rank waits for another in an example. A rank that takes twice that long in
        Python is interrupted. None means never.
    **strategies : SearchStrategy
        What to draw, by the name of the parameter. Every rank gets its own copy of what was drawn,
        and its own value from `strategies.per_rank`; an `ArrayCase` arrives as the array that it
        describes. `st.data()` draws in step: every rank calls it, and each gets the value.

    Returns
    -------
    callable
        A decorator. `hypothesis.settings`, `example`, `seed` and `reproduce_failure` apply to what
        it returns. In `example(ranks=…, x=…)`, `ranks` may be left out, and is then the largest
        number of ranks.

    Raises
    ------
    BaseException
        The decorated test raises the error that caused those of the other ranks, in the smallest
        example found, with notes that name its rank and say how the others ended. It is raised on
        every rank; rank 0 shows the example.

    Notes
    -----
    With `world`, arraycomm cannot end what a rank waits for in MPI. If the failure of one rank
    leaves another one waiting there, the ranks show the error, the example and where they wait, and
    the job ends; nothing shrinks. An example that leaves a message unreceived fails.
    `hypothesis.note`, `event`, `target` and `assume` may be called on any rank: notes are shown
    with their rank if ranks differ, a target is the largest of all ranks', and an assumption that
    fails on one rank fails. The deadline of Hypothesis counts the time of rank 0. Its default of
    200 ms is meant for one process, and does not apply.

    Examples
    --------
    >>> from arraycomm.testing import given, strategies as ranked
    >>> @given(x=ranked.rank_arrays(dtypes="int32"))
    ... def test_sum_does_not_depend_on_the_root(comm, x):
    ...     total = comm.allreduce(x)
    ...     assert (comm.bcast(comm.reduce(x)) == total).all()
    >>> test_sum_does_not_depend_on_the_root()
    """
    limit = check_seconds(timeout, "given: timeout")

    def decorate(test: F) -> Any:
        return _Given(test, ranks, world, inf if limit is None else limit, strategies).wrapped()

    return decorate


@dataclass(eq=False, repr=False)
class _Given:
    """One decorated test."""

    test: Callable[..., Any]
    ranks: Ranks
    world: Any
    timeout: float
    strategies: dict[str, st.SearchStrategy[Any]]
    # The numbers of ranks of pytest's marker, for a test without some of its own.
    _marked: Sequence[int] = ()
    # The current run of each thread that runs the test.
    _current: threading.local = field(default_factory=threading.local)

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
        # They share their attributes: settings that a decorator sets on one apply to both.
        run.__dict__ = hypothesis_test.__dict__
        # Each example has limits of its own; both are read by the pytest plugin.
        run.__dict__["has_own_limits"] = True
        run.__dict__["set_ranks"] = self.set_ranks
        return run

    def set_ranks(self, counts: Sequence[int]) -> None:
        """Draw the number of ranks from those of the item's marker, unless `given` has some."""
        self._marked = counts

    def _driver(self) -> Callable[..., Any]:
        """Return the function that Hypothesis calls for each example, with `ranks` for `comm`."""

        @functools.wraps(self.test)
        def driver(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            return self.play(dict(accepted.bind(*args, **kwargs).arguments))

        signature = inspect.signature(self.test)
        parameters = dict(signature.parameters)
        if "comm" not in parameters or "ranks" in parameters:
            raise TypeError(
                f"given: {self.test.__name__} must have a parameter named comm, which each rank "
                "gets its communicator in, and none named ranks, which is comm.size; got "
                f"{', '.join(parameters) or 'none'}"
            )
        del parameters["comm"]
        ranks = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
        kinds = [*parameters.values(), ranks]
        kinds.sort(key=lambda parameter: parameter.kind)
        accepted = signature.replace(parameters=kinds)
        driver.__signature__ = accepted  # type: ignore[attr-defined]
        return driver

    def run(self, hypothesis_test: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the whole test if this process is rank 0; otherwise follow rank 0."""
        __tracebackhide__ = True
        group = self._group(args)
        name = f"{self.test.__module__}.{self.test.__qualname__}"
        group.meet(os.environ.get("PYTEST_CURRENT_TEST", name))
        self._current.run = _Run(group, self.timeout)
        if self.counts() == []:
            raise unittest.SkipTest(
                f"needs {self.ranks or self._marked} ranks; there are {group.size}"
            )
        if group.rank:
            return group.follow(functools.partial(self.test, *args, **kwargs))
        self._complete_examples(hypothesis_test)
        adapt_settings(hypothesis_test)
        error: BaseException | None = None
        try:
            return hypothesis_test(*args, **kwargs)
        except BaseException as raised:
            error = raised
            error.add_note(f"found on {group.name}")
            raise
        finally:
            group.finish(error)

    def _group(self, args: tuple[Any, ...]) -> RankGroup:
        if self.world is None:
            return group_of(args)
        from arraycomm.testing._ranks.plain_worlds import plain_group

        return plain_group(self.world)

    def counts(self) -> st.SearchStrategy[int] | list[int]:
        """Return the possible numbers of ranks, or a strategy for them."""
        group = self._current.run.group
        match wanted := self._marked or None if self.ranks is None else self.ranks:
            case None:
                return list(range(1, group.usual + 1))
            case int():
                return [wanted] if 1 <= wanted <= group.size else []
            case st.SearchStrategy():
                return wanted.filter(lambda count: 1 <= count <= group.size)
            case _:
                return [count for count in wanted if 1 <= count <= group.size]

    def _complete_examples(self, hypothesis_test: Any) -> None:
        """Give explicit examples without a number of ranks the largest one."""
        counts = self.counts()
        most = max(counts) if isinstance(counts, list) else self._current.run.group.usual
        hypothesis_test.hypothesis_explicit_examples = tuple(
            example
            if example.args or "ranks" in example.kwargs
            else replace(example, kwargs={"ranks": most, **example.kwargs})
            for example in getattr(hypothesis_test, "hypothesis_explicit_examples", ())
        )

    def play(self, arguments: dict[str, Any]) -> Any:
        """Run one example on its ranks; return what rank 0 returned, or raise the first failure."""
        __tracebackhide__ = True
        run, ranks = self._current.run, arguments.pop("ranks")
        if not 1 <= ranks <= run.group.size:
            hypothesis.reject()
        drawn = {name: arguments.pop(name) for name in self.strategies}
        data = [name for name, value in drawn.items() if isinstance(value, DataObject)]
        draws = Draws(drawn[data[0]]) if data else None
        words = ", ".join(f"{name}={value!r}" for name, value in {"ranks": ranks, **drawn}.items())
        for name in data:
            del drawn[name]
        example = Example(
            *(ranks, dump(drawn), tuple(data), should_note(), run.timeout),
            f"{self.test.__name__}({words})"[:_LONG],
            sorted(DRAWN.intersection(installed_frameworks())),
        )
        set_rank_count(ranks)
        started = time.monotonic()
        parts = run.group.run(example, functools.partial(self.test, **arguments), draws)
        replay([part.record for part in parts])
        if draws is not None and draws.ended is not None:
            raise draws.ended
        errors = [part.error for part in parts if part.error is not None]
        # An assumption ends the example for all ranks; a skipped test hides no failure of another.
        fails = any(not ends_example(error) and priority(error) != CAUSED for error in errors)
        for error in errors:
            if ends_example(error) and not (fails and is_skip(error)):
                raise error
        first = first_failure(parts)
        run.learn(first, time.monotonic() - started)
        if first is not None:
            raise first
        return parts[0].result


@st.composite
def _rank_counts(draw: st.DrawFn, test: _Given) -> int:
    counts = test.counts()
    count: int = draw(st.sampled_from(counts) if isinstance(counts, list) else counts)
    set_rank_count(count)
    return count


@dataclass
class _Run:
    """One run of a test, and its timeout, which its examples may shorten."""

    group: RankGroup
    timeout: float
    _slowest: float = 0.0

    def learn(self, error: BaseException | None, seconds: float) -> None:
        """Shorten the timeout after a first one, since shrinking may run into many of them."""
        if error is None:
            self._slowest = max(self._slowest, seconds)
        elif isinstance(error, CommTimeoutError):
            self.timeout = min(self.timeout, max(_FACTOR * self._slowest, _LEAST_TIMEOUT))
