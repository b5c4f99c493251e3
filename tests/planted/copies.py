"""A copy of the checkout that can be imported as it stands, and into which faults are put."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.planted.fault import Fault

ROOT = Path(__file__).parents[2]
_COPIED = ("arraycomm", "properties", "tests", "docs", "pyproject.toml", "setup.py", "README.md")
_NATIVE = "arraycomm/_native/compiled.abi3.so"
_SKIPPED = shutil.ignore_patterns("__pycache__", "*.so", "node_modules")


class Copy:
    """One copy; one fault at a time is in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Python takes a compiled module for up to date by the seconds of its source.
        self._seconds = itertools.count(1_000_000_000)
        for name in _COPIED:
            source, to = ROOT / name, folder / name
            if source.is_dir():
                shutil.copytree(source, to, ignore=_SKIPPED, dirs_exist_ok=True)
            else:
                shutil.copy2(source, to)
        adapters = folder / "arraycomm" / "adapters"
        shutil.rmtree(adapters, ignore_errors=True)
        shutil.copytree(ROOT / "adapters", adapters, ignore=_SKIPPED)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Have a fault in the copy inside the block."""
        path = self.folder / fault.file
        right = path.read_text(encoding="utf-8")
        self._write(path, fault.applied(right))
        try:
            if path.suffix == ".c":
                # Without --force, what an earlier fault was built from would be newer than this one's source.
                build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--force"]
                subprocess.run(build, cwd=self.folder, check=True, capture_output=True)
            elif fault.native:
                shutil.copy2(ROOT / _NATIVE, self.folder / _NATIVE)
            yield
        finally:
            self._write(path, right)
            (self.folder / _NATIVE).unlink(missing_ok=True)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        seconds = next(self._seconds)
        os.utime(path, (seconds, seconds))
