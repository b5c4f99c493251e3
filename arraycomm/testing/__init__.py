"""Tools for the tests of programs that communicate."""

from typing import TYPE_CHECKING, Any

from arraycomm.testing._arrays.array_case import ArrayCase
from arraycomm.testing._arrays.rank_values import RankValues
from arraycomm.testing._ranks.run import run
from arraycomm.testing._ranks.schedule import Schedule

if TYPE_CHECKING:
    from arraycomm.testing import conformance, strategies
    from arraycomm.testing._given import given
    from arraycomm.testing.strategies import per_rank

__all__ = [
    "ArrayCase",
    "RankValues",
    "Schedule",
    "conformance",
    "given",
    "per_rank",
    "run",
    "strategies",
]


def __getattr__(name: str) -> Any:
    """Import on first use what needs Hypothesis."""
    from importlib import import_module

    if name in ("conformance", "given", "per_rank", "strategies"):
        import_module("arraycomm.testing._extra")
    if name in ("conformance", "strategies"):
        return import_module(f"arraycomm.testing.{name}")
    if name == "given":
        return import_module("arraycomm.testing._given").given
    if name == "per_rank":
        return import_module("arraycomm.testing.strategies").per_rank
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
