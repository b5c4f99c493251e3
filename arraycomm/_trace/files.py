"""Where a trace lies: one file of all ranks, or beside it each rank's, if the job has failed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from arraycomm._trace.records import Part
from arraycomm._trace.timeline import timeline

_PART = ".rank"


def prepare(path: str) -> None:
    """Make the file empty, and remove what an earlier job has left beside it."""
    Path(path).write_bytes(b"")
    for part in _parts_beside(path):
        part.unlink()


def part_path(path: str, rank: int) -> str:
    """Return where one rank saves its own part."""
    return f"{path}{_PART}{rank}"


def merge(path: str) -> None:
    """Make one file of the ranks' own files, which are removed."""
    parts = read_parts(path)
    if parts:
        write(path, timeline(parts))
        for part in parts:
            remove(path, part.rank)


def write(path: str, content: dict[str, Any]) -> None:
    """Write JSON; a reader sees all of it or nothing."""
    partial = f"{path}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            os.unlink(partial)
        raise


def remove(path: str, rank: int) -> None:
    """Remove a rank's own file, if there is one."""
    with suppress(OSError):
        os.unlink(part_path(path, rank))


def read(path: str) -> dict[str, Any]:
    """Return the trace of a file, or what the ranks have saved beside it.

    Raises `ValueError` if that is no trace.
    """
    parts = read_parts(path)
    if parts:
        return timeline(parts)
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be a trace of arraycomm; got no JSON: {error}") from None
    if not isinstance(found, dict) or "arraycomm" not in found.get("otherData", {}):
        raise ValueError(f"{path} must be a trace of arraycomm; got JSON of something else")
    return found


def read_parts(path: str) -> list[Part]:
    """Return the parts that ranks have saved beside a trace, of one and the same job."""
    texts = [part.read_text(encoding="utf-8") for part in _parts_beside(path)]
    found = sorted((Part.of(json.loads(text)) for text in texts), key=lambda part: part.rank)
    return [part for part in found if part.run == found[0].run]


def _parts_beside(path: str) -> Iterator[Path]:
    folder, name = os.path.split(path)
    for entry in sorted(Path(folder or ".").iterdir()):
        number = entry.name.removeprefix(name + _PART)
        if number != entry.name and number.isdecimal():
            yield entry
