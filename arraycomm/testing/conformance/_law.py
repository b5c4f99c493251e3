"""The decorator of laws: each is a Hypothesis test that every rank runs in step."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Final, TypeVar, cast

import hypothesis
from hypothesis import HealthCheck

from arraycomm._communicator import Communicator
from arraycomm.testing._given import Ranks, given

F = TypeVar("F", bound=Callable[..., Any])

# How long a rank waits for others says nothing about the code under test.
_SETTINGS: Final = hypothesis.settings(
    deadline=None, suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large)
)

# Numbers of ranks with which ranks can differ.
SEVERAL: Final = range(2, 9)


def law(ranks: Ranks = None, **strategies: Any) -> Callable[[F], Any]:
    """Make a law of a method, with the arguments of `given`."""

    def decorate(test: F) -> Any:
        return _SETTINGS(given(ranks=ranks, **strategies)(_on_subject(test)))

    return decorate


def _on_subject(test: F) -> F:
    """Return the law with what the suite makes of a communicator in its place."""

    @functools.wraps(test)
    def on_subject(self: Any, comm: Communicator, **arguments: Any) -> Any:
        __tracebackhide__ = True
        subject = getattr(self, "subject", None)
        made: Any = comm if subject is None else subject(comm)
        # Before any call, so that no rank waits for one that another does not make.
        if lacking := missing(made, test):
            raise unittest.SkipTest(f"{type(made).__name__} has no {', '.join(lacking)}")
        return test(self, comm=made, **arguments)

    return on_subject  # type: ignore[return-value]


# What laws call on a communicator, and the functions that take no other object for one.
_FUNCTIONS: Final = ("allreduce_gradients", "allreduce_tree", "mean_metrics", "synchronize")
_CALLS: Final = {name for name in dir(Communicator) if name[0] != "_"}.union(_FUNCTIONS)


def missing(subject: Any, *functions: Callable[..., Any]) -> list[str]:
    """Return the calls in the code of functions that a subject does not have.

    A name that is in the code as a string as well is looked for there, as with `hasattr`.
    """
    if isinstance(subject, Communicator):
        return []
    codes = [cast("FunctionType", function).__code__ for function in functions]
    names: set[str] = set()
    strings: set[str] = set()
    for code in codes:
        names.update(code.co_names)
        strings.update(each for each in code.co_consts if isinstance(each, str))
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return sorted(name for name in (names & _CALLS) - strings if not hasattr(subject, name))


def requested(comm: Any, name: str, *args: Any, **options: Any) -> list[Any]:
    """Return what a request of this name gives, alone in a list; an empty one if there are none."""
    start = getattr(comm, name, None)
    return [] if start is None else [start(*args, **options).wait()]
