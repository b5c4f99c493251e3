"""What tests/cuda/on_device assumes of the machine it runs on, tried here, where there is no device."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from tests.cuda.on_device import __main__ as runner

_TESTS = """
import os, time

def test_passes(): pass
def test_fails(): assert 1 + 1 == 3, "one and one"
"""
_HANGS = """
import time

def test_hangs(): time.sleep(600)
"""


def test_parts_go_on_behind_what_fails_or_hangs(tmp_path: Path) -> None:
    """The summary says what became of each, and names what failed."""
    (tmp_path / "conftest.py").touch()
    parts = []
    for name, text in (("fails", _TESTS), ("hangs", _HANGS), ("late", _TESTS)):
        (tmp_path / f"test_{name}.py").write_text(text)
        options = ["-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}"]
        parts.append(runner.Part(name, [*options, str(tmp_path / f"test_{name}.py")]))
    fails, hangs, late = parts
    runner.run(fails, tmp_path, time.monotonic() + 120)
    runner.run(hangs, tmp_path, time.monotonic() + runner.GRACE + 3)
    runner.run(late, tmp_path, time.monotonic())
    assert (fails.passed, hangs.passed, late.passed) == (False, False, False)
    text = "\n".join(runner.summary(parts))
    assert re.search(r"fails .*1 failed, 1 passed in .*, status 1", text)
    assert re.search(r"FAILED .*test_fails - AssertionError: one and one", text)
    assert "cut off by the time: its last test had not ended" in text
    assert re.search(r"late +not run: the time was up", text)
    assert text.endswith("FAILED")
    assert {"fails.log", "hangs.log"} <= set(os.listdir(tmp_path))


def test_every_file_of_tests_is_in_a_part() -> None:
    arguments = " ".join(" ".join(part.arguments) for part in runner.parts(4))
    for name in runner.ON_RANKS:
        assert (runner.FOLDER / name).exists()
        assert arguments.count(name) == 2
    for name in (runner.PROGRAMS, runner.LEAKS):
        assert f"--ignore={runner.FOLDER / name}" in arguments
        assert arguments.count(name) == 2
