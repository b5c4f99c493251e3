"""The file of measured crossovers: `arraycomm bench --tune` writes it, and `init` reads it on rank 0.

It is JSON, with an entry for each number of ranks and nodes that has been measured:

    {"arraycomm": "tuning", "format": 1, "measured": [{"ranks": 4, "nodes": 2, "gather": 131072, "slices": 0, "chunk": null}]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from arraycomm._transports.crossovers import NOT_MEASURED, Crossovers

VARIABLE: Final = "ARRAYCOMM_TUNING"
_HEAD: Final = {"arraycomm": "tuning", "format": 1}
# The least and the largest number of each kind. What all ranks together gather is one movement.
_LIMITS: Final = {
    "steps": (0, 1 << 30),
    "gather": (0, 1 << 30),
    "slices": (0, 1 << 40),
    "chunk": (64 << 10, 256 << 20),
}
_MOST_GATHERED: Final = 1 << 30

# The crossovers by the numbers of ranks and of nodes.
Entries = Mapping[tuple[int, int], Crossovers]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was measured of a cluster, and the file that says so; the path may differ between ranks."""

    path: str = field(default="", compare=False, repr=False)
    entries: tuple[tuple[int, int, Crossovers], ...] = ()

    def of(self, ranks: int, nodes: int) -> Crossovers:
        """Return the crossovers that were measured between so many ranks on so many nodes."""
        for *shape, found in self.entries:
            if shape == [ranks, nodes]:
                return found
        return NOT_MEASURED


UNTUNED: Final = Tuning()


def tuning_of(environment: Mapping[str, str]) -> Tuning:
    """Return what the file has that the environment names; nothing without one."""
    path = environment.get(VARIABLE, "")
    if not path:
        return UNTUNED
    try:
        entries = read(Path(path))
    except ValueError as error:
        raise ValueError(f"init: {VARIABLE}: {error}") from None
    return Tuning(path, tuple((*shape, entries[shape]) for shape in sorted(entries)))


def read(path: Path) -> dict[tuple[int, int], Crossovers]:
    """Return the entries of a file, or raise `ValueError` that says what is wrong with it."""
    try:
        return _entries(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(
            f"{str(path)!r} is no file of measured crossovers: {reason}; write one with: "
            "arraycomm bench --tune FILE"
        ) from None


def write(path: Path, entries: Entries) -> None:
    """Write a file of these entries."""
    measured = [
        {"ranks": ranks, "nodes": nodes, **found._asdict()}
        for (ranks, nodes), found in sorted(entries.items())
    ]
    text = json.dumps(_HEAD | {"measured": measured}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def _entries(found: Any) -> dict[tuple[int, int], Crossovers]:
    if not isinstance(found, dict) or {name: found.get(name) for name in _HEAD} != _HEAD:
        raise ValueError(f"it does not begin with {json.dumps(_HEAD)}")
    if not isinstance(found.get("measured"), list):
        raise ValueError("it has no list 'measured'")
    return dict(map(_entry, found["measured"]))


def _entry(found: Any) -> tuple[tuple[int, int], Crossovers]:
    if not isinstance(found, dict):
        raise ValueError(f"{json.dumps(found)} is no entry")
    unknown = found.keys() - {"ranks", "nodes", *_LIMITS}
    if unknown:
        raise ValueError(f"an entry has {min(unknown)!r}, which is unknown")
    ranks = _number(found, "ranks", 2, 1 << 30)
    nodes = _number(found, "nodes", 1, ranks)
    numbers = {
        name: _number(found, name, *limits)
        for name, limits in _LIMITS.items()
        if found.get(name) is not None
    }
    if numbers.get("gather", 0) * ranks > _MOST_GATHERED:
        raise ValueError(f"'gather' of {ranks} ranks is more than {_MOST_GATHERED} bytes in all")
    return (ranks, nodes), Crossovers(**numbers)


def _number(found: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = found.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"{name!r} is {json.dumps(value)}, and must be a whole number from {least} to {most}"
        )
    return value
