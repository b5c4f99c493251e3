"""Tests that take `comm`, on threads of this process: each rank runs the test in its own thread.

pytest makes fixtures once, in its own thread. A fixture that takes `comm` has to be made by each
rank, and so has one that takes such a fixture. Their place in pytest's own thread is taken by a
`Deferred`.
"""

from __future__ import annotations

import contextlib
import inspect
import queue
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from _pytest.fixtures import resolve_fixture_function
from _pytest.skipping import xfailed_key

from arraycomm._callsite import trim
from arraycomm._communicator import Communicator
from arraycomm._errors import CommTimeoutError
from arraycomm._transports.threads import make_group
from arraycomm.testing._failures import ON_RANK, first_failure, is_skip
from arraycomm.testing._internals import communicator_over, left_behind
from arraycomm.testing._ranks.rank_links import Left, fault_of
from arraycomm.testing._ranks.threads import SLACK, Events, RankThread, run_threads
from arraycomm.testing.pytest_plugin import counts
from arraycomm.testing.pytest_plugin.outcomes import show_rank

# On one rank alone, ranks cannot differ.
_USUAL = 2
# The attribute of an error with what the other ranks did.
_OTHERS = "other_ranks"


class OnThreads:
    """The part of the plugin that runs tests on threads."""

    def __init__(self, config: pytest.Config) -> None:
        self._usual = config.getoption("ranks") or _USUAL

    def communicator(self, request: pytest.FixtureRequest) -> Iterator[Any]:
        """Give what stands for the communicators of all ranks."""
        item = request.node
        if "comm" not in item.fixturenames:
            raise pytest.UsageError(
                f"comm: name it among the arguments of {item.name}; without mpiexec a test cannot "
                "ask for it by getfixturevalue, since the ranks begin with the test"
            )
        yield _Deferred(lambda rank: rank.comm, getattr(request, "param", self._usual))

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        """Defer a fixture that takes what is deferred."""
        values = {name: request.getfixturevalue(name) for name in fixturedef.argnames}
        if not any(isinstance(value, _Deferred) for value in values.values()):
            return None
        function = resolve_fixture_function(fixturedef, request)
        deferred = _Deferred(lambda rank: rank.make_fixture(function, values))
        fixturedef.cached_result = (deferred, fixturedef.cache_key(request), None)
        return deferred

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool | None:
        """Run a test whose arguments are deferred on its ranks."""
        __tracebackhide__ = True
        made = pyfuncitem.funcargs
        if not isinstance(made.get("comm"), _Deferred):
            return None
        _refuse_async(pyfuncitem.obj)
        names = pyfuncitem._fixtureinfo.argnames

        def body(comm: Communicator) -> None:
            __tracebackhide__ = True
            with contextlib.ExitStack() as stack:
                rank = _Rank(comm, stack)
                values = {name: rank.value(value) for name, value in made.items()}
                result = pyfuncitem.obj(**{name: values[name] for name in names})
            _warn_of_result(pyfuncitem.nodeid, result)

        _run(made["comm"].count, body, counts.timeout_of(pyfuncitem), _expected_by(pyfuncitem))
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Name the rank that failed."""
        report = yield
        label = getattr(call.excinfo and call.excinfo.value, ON_RANK, None)
        if label is not None and call.excinfo is not None:
            show_rank(report, label)
            others = getattr(call.excinfo.value, _OTHERS, None)
            if others and report.failed:
                title = f"{label.strip('[]')} failed; the other ranks"
                report.sections.append((title, "\n".join(others)))
        return report


def _refuse_async(function: Any) -> None:
    __tracebackhide__ = True
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        pytest.fail(
            "async def functions that take comm do not run on threads; call asyncio.run in the "
            "test, or run it under mpiexec with a plugin for async tests",
            pytrace=False,
        )


def _warn_of_result(name: str, result: Any) -> None:
    if result is not None:
        text = f"Test functions should return None, but {name} returned {type(result)!r}"
        warnings.warn(pytest.PytestReturnNotNoneWarning(text), stacklevel=2)


@dataclass(eq=False)
class _Deferred:
    """A fixture's value that each rank makes for itself."""

    make: Callable[[_Rank], Any]
    count: int = 0

    def __repr__(self) -> str:
        return "<one for each rank>"


@dataclass
class _Rank:
    """One rank of a test, and the fixtures that it has made."""

    comm: Communicator
    _stack: contextlib.ExitStack
    _made: dict[_Deferred, Any] = field(default_factory=dict)

    def value(self, value: Any) -> Any:
        """Return a fixture's value on this rank."""
        if not isinstance(value, _Deferred):
            return value
        if value not in self._made:
            self._made[value] = value.make(self)
        return self._made[value]

    def make_fixture(self, function: Callable[..., Any], values: dict[str, Any]) -> Any:
        """Call a fixture's function on this rank; what follows its `yield` runs after the test."""
        arguments = {name: self.value(value) for name, value in values.items()}
        if not inspect.isgeneratorfunction(function):
            return function(**arguments)
        return self._stack.enter_context(contextlib.contextmanager(function)(**arguments))


def _expected_by(item: pytest.Item) -> Callable[[BaseException], bool]:
    """Return whether a test's mark xfail expects an error, if it names some."""
    found = item.stash.get(xfailed_key, None)
    raises: Any = None if found is None else found.raises
    if raises is None or hasattr(raises, "matches"):
        return lambda error: raises is not None and raises.matches(error)
    return lambda error: isinstance(error, raises)


def _run(
    count: int,
    body: Callable[[Communicator], None],
    timeout: float,
    expected: Callable[[BaseException], bool],
) -> None:
    """Run a test on ranks, and raise the error that caused those of the others."""
    __tracebackhide__ = True
    ranks = [RankThread(communicator_over(link, timeout), body) for link in make_group(count)]
    events: Events = queue.SimpleQueue()
    seconds = min(timeout + SLACK, threading.TIMEOUT_MAX)
    limit = threading.Timer(seconds, events.put, (_ends_in_time,))
    limit.daemon = True
    limit.start()
    try:
        run_threads(ranks, timeout + SLACK, events=events)
    except _TimeIsUpError:
        for rank in ranks:
            rank.join(0.0)
    finally:
        limit.cancel()
    first = first_failure(ranks, expected)
    if first is None:
        left = [Left(True, True, *left_behind(rank.comm)) for rank in ranks]
        if fault := fault_of(left):
            pytest.fail(fault, pytrace=False)
        return
    trim(first)
    # What the others did gets a section of its own.
    vars(first)[_OTHERS] = [first.__notes__.pop() for _ in ranks[1:]][::-1]
    first.__notes__.pop()
    if is_skip(first) and all(is_skip(rank.error) for rank in ranks):
        del vars(first)[ON_RANK]
    raise first


class _TimeIsUpError(CommTimeoutError):
    """The test has taken its time; what each rank did is in the error of that rank."""


def _ends_in_time() -> None:
    raise _TimeIsUpError("the test has not ended in time")
