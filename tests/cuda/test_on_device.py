"""What tests/cuda/on_device assumes of the machine it runs on, tried here, where there is no device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cuda.on_device import __main__ as runner
from tests.support import launcher

ROOT = Path(__file__).parents[2]

# An older pytest, in which a library warns while tests are collected.
_FOREIGN = """
import sys, warnings, pytest
pytest.__version__ = "8.0.0"

class Warning:
    def pytest_collectstart(self):
        warnings.warn("from a library of CUDA", DeprecationWarning)

folder = "tests/cuda/on_device/"
arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", folder + "test_leaks.py"]
sys.exit(pytest.main(arguments, plugins=[Warning()]))
"""


def test_tests_are_collected_in_an_environment_of_other_versions() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FOREIGN],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_leaks.py::test_calls_hold_nothing[" in done.stdout


def test_mpiexec_is_found_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "bin" / "mpiexec"
    there.parent.mkdir()
    there.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(there.parent))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert launcher.find_launcher() == there
    (tmp_path / "mpiexec").touch(mode=0o755)
    assert launcher.find_launcher() == tmp_path / "mpiexec"


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
    """Each part has a report, whatever becomes of it, and the summary names what failed."""
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
    assert "1 passed, 1 failed, 0 skipped, status 1" in text
    assert "test_fails: AssertionError: one and one" in text
    assert "cut off by the time: its last test had not ended" in text
    assert re.search(r"late +not run: the time was up", text)
    assert text.endswith("FAILED")
    assert {"fails.xml", "hangs.xml", "fails.log", "hangs.log"} <= set(os.listdir(tmp_path))


def test_every_file_of_tests_is_in_a_part() -> None:
    arguments = " ".join(" ".join(part.arguments) for part in runner.parts(4))
    for name in runner.ON_RANKS:
        assert (runner.FOLDER / name).exists()
        assert arguments.count(name) == 2
    for name in (runner.PROGRAMS, runner.LEAKS):
        assert f"--ignore={runner.FOLDER / name}" in arguments
        assert arguments.count(name) == 2
