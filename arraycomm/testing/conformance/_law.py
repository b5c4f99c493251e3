"""The decorator of laws: each is a Hypothesis test that every rank runs in step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import hypothesis
from hypothesis import HealthCheck

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
        return _SETTINGS(given(ranks, **strategies)(test))

    return decorate
