"""Which build of arraycomm this is: ranks whose builds differ would misread one another.

Ranks that see the same files, by what the file system says of them, have the same build. Otherwise
the contents decide, wherever they lie and however they were installed. The part in C knows from
which sources it was built.
"""

# setup.py runs this file by itself, so nothing of arraycomm is imported here.
from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

# The directories that are no part of the package where it is installed.
_APART = ("__pycache__", "adapters", "pytest_start")
_CODE = (".py", ".pyc", ".cu")


def native_sources(place: str) -> dict[str, str]:
    """Return what the C part is built from, by name."""
    return dict(_files_under(place, (".c", ".h")))


def digest(files: dict[str, str]) -> str:
    """Return a digest of the names and contents of files; an empty text if there are none."""
    found = blake2b(digest_size=6)
    for name, path in sorted(files.items()):
        content = Path(path).read_bytes()
        found.update(f"{name}\n{len(content)}\n".encode() + content)
    return found.hexdigest() if files else ""


def seen() -> str:
    """Return what is equal for the same files: what the file system says of them, and `native`."""
    stats = [(name, os.stat(path)) for name, path in sorted(_code().items())]
    found = [(name, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, at in stats]
    return " ".join([blake2b(repr(found).encode(), digest_size=8).hexdigest(), *native()])


def build() -> tuple[str, str, str, str]:
    """Return where this build lies, and digests: of its code, and those of `native`."""
    return f"{installed_version()} in {Path(__file__).parents[1]}", digest(_code()), *native()


def native() -> tuple[str, str]:
    """Return digests of what the C part was built from, and of its sources that lie here."""
    from arraycomm._native import compiled

    built_from = getattr(compiled, "sources", "unknown") if compiled else ""
    return built_from, digest(native_sources(os.path.dirname(__file__)))


def _code() -> dict[str, str]:
    """Return the files of the package and of its adapters, by name."""
    found = dict(_files_under(str(Path(__file__).parents[1]), _CODE))
    spec = find_spec("arraycomm.adapters")
    for place in (spec and spec.submodule_search_locations) or ():
        found |= _files_under(place, _CODE, "adapters/")
    # In an archive, or frozen into a program, there are none.
    return found or {"archive": getattr(__spec__.loader, "archive", sys.executable)}


def _files_under(
    place: str, endings: tuple[str, ...], within: str = ""
) -> Iterator[tuple[str, str]]:
    for entry in os.scandir(place) if os.path.isdir(place) else ():
        if not entry.is_dir():
            if entry.name.endswith(endings):
                yield f"{within}{entry.name}", entry.path
        elif entry.name not in _APART and not entry.name.startswith("."):
            yield from _files_under(entry.path, endings, f"{within}{entry.name}/")


def installed_version() -> str:
    """Return the version of this package, also of one that is not installed."""
    # Takes long to import.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("arraycomm")
    except PackageNotFoundError:
        return "0+unknown"
