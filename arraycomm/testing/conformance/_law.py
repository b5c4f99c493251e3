"""The decorator of laws: each is a Hypothesis test that every rank runs in step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

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
        return test(self, comm=comm if subject is None else subject(comm), **arguments)

    return on_subject  # type: ignore[return-value]
