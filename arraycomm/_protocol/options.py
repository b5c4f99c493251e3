"""The options of a communicator, checked."""

from __future__ import annotations

from dataclasses import dataclass

from arraycomm._protocol.watchdog import checked_timeout


@dataclass(frozen=True, slots=True)
class Options:
    """What holds for every call on a communicator; the same on every rank."""

    check: bool = True
    reproducible: bool = True
    timeout: float | None = 1800.0

    def __post_init__(self) -> None:
        for name in ("check", "reproducible"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False; got {getattr(self, name)!r}")
        object.__setattr__(self, "timeout", checked_timeout(self.timeout))
