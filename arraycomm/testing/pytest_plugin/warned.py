"""Warnings of all ranks, of which rank 0 writes the summary."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest


class Recorded(NamedTuple):
    """A warning as it travels: its class may not be known on another rank."""

    text: str
    category: str
    filename: str
    lineno: int
    nodeid: str

    @classmethod
    def of(cls, said: warnings.WarningMessage, nodeid: str) -> Recorded:
        """Return a warning of this process."""
        return cls(str(said.message), said.category.__name__, said.filename, said.lineno, nodeid)

    @property
    def place(self) -> tuple[str, str, int]:
        """What is the same for the warning of one line on all ranks."""
        return self.category, self.filename, self.lineno

    def repeat(self, config: pytest.Config, label: str = "") -> None:
        """Record a warning of another process here."""
        category = type(self.category, (Warning,), {})
        message = category(f"{label}{self.text}")
        made = warnings.WarningMessage(message, category, self.filename, self.lineno)
        arguments: dict[str, Any] = {
            "warning_message": made,
            "when": "runtest",
            "nodeid": self.nodeid,
            "location": None,
        }
        config.hook.pytest_warning_recorded.call_historic(kwargs=arguments)


class Warned:
    """The warnings of this rank, and on rank 0 those of others."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        # Those of this rank, by their places.
        self.recorded: dict[tuple[str, str, int], Recorded] = {}

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, nodeid: str
    ) -> None:
        """Keep a warning, one of each line."""
        made = Recorded.of(warning_message, nodeid)
        self.recorded.setdefault(made.place, made)

    def show(self, everyones: Sequence[Sequence[Recorded]]) -> None:
        """Record the warnings of lines that have not warned on this rank."""
        for rank, theirs in enumerate(everyones):
            for warning in theirs:
                if warning.place not in self.recorded:
                    warning.repeat(self._config, f"[rank {rank} of {len(everyones)}] ")
