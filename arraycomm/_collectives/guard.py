"""What may stand between calls and operations: see `Runner.set_guard`."""

from __future__ import annotations

from typing import Any, Protocol


class Guard(Protocol):
    """What stands between calls and operations for a while, as `join` does."""

    def check(self, name: str) -> None:
        """Raise on this rank alone if the other ranks cannot take part in a call of this name."""

    def substitute(self, operation: Any) -> Any:
        """Return the class of operations to use for this one, or raise, so that all ranks hear of it."""

    def note_error(self, error: Exception) -> None:
        """Take note of an error that the other ranks hear of."""
