"""Tests that all ranks run: what most tests of adapters are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from arraycomm.testing import run


def of_ranks(*sizes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let each rank of so many threads run a test, which takes its communicator as `comm`."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_all(**arguments: Any) -> None:
            for size in sizes:
                run(size, lambda comm: test(comm=comm, **arguments))

        # Of what pytest passes.
        signature = inspect.signature(test)
        others = [each for each in signature.parameters.values() if each.name != "comm"]
        on_all.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return on_all

    return decorate
