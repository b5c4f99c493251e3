"""Pictures that commands write: whether they can be drawn here."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

FORMATS: Final = (".png", ".svg", ".pdf")


def without_matplotlib(option: str) -> str:
    """Say that an option needs matplotlib, and how to install it; empty if it is there."""
    try:
        found = find_spec("matplotlib")
    except ValueError:
        found = None
    if found is not None:
        return ""
    return (
        f"{option} needs matplotlib; got no such module; install it with: "
        "pip install 'arraycomm[plot]'"
    )


def why_no_picture(option: str, path: Path) -> str:
    """Say why a picture cannot be drawn to a path, and what would help; empty if it can."""
    if reason := without_matplotlib(option):
        return reason
    if path.suffix not in FORMATS:
        return f"{option} must end in one of {', '.join(FORMATS)}; got {str(path)!r}"
    if not path.absolute().parent.is_dir():
        return f"{option} must be in a directory that is there; got {str(path)!r}"
    return ""
