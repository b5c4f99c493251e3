"""Parts of the native part that several threads run, without Python, under a sanitizer for threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_NATIVE = _HERE.parents[1] / "arraycomm" / "_native"

_COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)

# Each with what it is made of.
_PARTS = {"slots": ["slots"], "pool": ["pool"], "chunks": ["chunks", "slots"]}


def _build(folder: Path, part: str, *options: str) -> Path | None:
    program = folder / part
    sources = [_HERE / f"{part}.c", *(_NATIVE / f"{name}.c" for name in _PARTS[part])]
    # Not inlined, so that the sanitizer sees what memcmp reads.
    command = [
        *(_COMPILER, "-std=c11", "-O2", "-g", "-fno-builtin"),
        *(*options, f"-I{_NATIVE}", *sources),
    ]
    built = subprocess.run([*command, "-o", program, "-lpthread"], check=False)
    return None if built.returncode else program


@pytest.mark.parametrize("part", _PARTS)
def test_no_races(tmp_path: Path, part: str) -> None:
    if _COMPILER is None or not _NATIVE.is_dir():
        pytest.skip("needs a C compiler and the sources")
    program = _build(tmp_path, part, "-fsanitize=thread") or _build(tmp_path, part)
    assert program is not None
    # Another sanitizer may have been loaded into this process.
    environment = {**os.environ, "LD_PRELOAD": ""}
    run = subprocess.run(
        [program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (run.stdout, run.stderr, run.returncode) == ("done\n", "", 0)
