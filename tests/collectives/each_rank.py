"""`@each_rank_of(3)`: a test that each of three ranks runs, with its communicator as the first argument."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest


def each_rank_of(number: int | str, *modules: str) -> Callable[[Callable[..., None]], Any]:
    """Make a test of what each rank does; other arguments are fixtures, and the same on all ranks.

    Parameters
    ----------
    number : int or str
        How many ranks, or the fixture that tells: `size`, `several` or `few`.
    *modules : str
        Without one of these the test is skipped; they are arguments as well.
    """

    def decorate(does: Callable[..., None]) -> Any:
        own = inspect.signature(does).parameters.values()
        bound = [parameter for parameter in own if parameter.name == "self"]
        known = ("self", "comm", *modules)
        wanted = [parameter.name for parameter in own if parameter.name not in known]

        @functools.wraps(does)
        def test(*self: Any, on_ranks: Any, **fixtures: Any) -> None:
            count = number if isinstance(number, int) else fixtures[number]
            given = {name: fixtures[name] for name in wanted}
            given |= {name: pytest.importorskip(name) for name in modules}
            on_ranks(count, lambda comm: does(*self, comm, **given))

        names = ["on_ranks", *([number] if isinstance(number, str) else []), *wanted]
        asked = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in dict.fromkeys(names)
        ]
        test.__signature__ = inspect.Signature([*bound, *asked])  # type: ignore[attr-defined]
        return test

    return decorate
