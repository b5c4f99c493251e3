"""What a group needs to know of the recorder of a trace; see `_trace`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from arraycomm._transports.base import Steps


class Tracer(Protocol):
    """Records calls and messages by wrapping their steps."""

    def call(
        self, group: Any, begin: Callable[..., Steps], name: str, prepare: Any, site: str | None
    ) -> Steps:
        """Return the steps of `begin(name, prepare, site)`, recorded; `site` is that of a request."""

    def message(
        self, group: Any, operation: str, message: Any, steps: Steps, site: str, *, awaited: bool
    ) -> Steps:
        """Return the steps of a message, recorded; `awaited` if the caller does nothing else."""

    def wait(self, group: Any, site: str) -> AbstractContextManager[None]:
        """Record how long the program is held up by a request that was made at `site`."""
