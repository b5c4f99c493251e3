"""What tests/cuda/on_device assumes of the machine it runs on, tried here, where there is no device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.cuda.on_device import __main__ as runner
from tests.cuda.on_device import test_leaks as leaks
from tests.cuda.on_device import test_stream_order as stream_order
from tests.support import launcher

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

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


# Programs of on_device over a device that is none -------------------------------------------------


def _cupy(**runtime: Any) -> Any:
    return SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(**runtime)))


def _run_alone(comm: Any) -> Any:
    return lambda check: check(comm)


class _Streams:
    """Streams that are destroyed when nobody refers to them, as CuPy's are."""

    def __init__(self) -> None:
        self.there: set[int] = set()
        self.current = 0

    def side(self) -> Any:
        streams, number = self, len(self.there) + 1
        streams.there.add(number)

        class Stream:
            def __enter__(self) -> None:
                streams.current = number

            def __exit__(self, *_: object) -> None:
                streams.current = 0

            def __del__(self) -> None:
                streams.there.discard(number)

        return Stream()

    def synchronize(self, stream: int) -> None:
        assert stream in self.there, "the stream was destroyed"


def test_streams_are_kept_until_they_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _Streams()
    monkeypatch.setitem(sys.modules, "cupy", _cupy(streamSynchronize=streams.synchronize))
    monkeypatch.setattr(stream_order, "begun", lambda *_: None)
    monkeypatch.setattr(stream_order, "spin", lambda *_: None)
    monkeypatch.setattr(stream_order, "stream_of", lambda _: streams.current)
    comm = SimpleNamespace(rank=0, size=1, allreduce=lambda x: x.copy())
    writable: Any = SimpleNamespace(make=np.array, back=np.asarray, side=streams.side)
    run: Any = _run_alone(comm)
    stream_order.test_calls_in_several_streams_come_in_their_order(run, writable)


def _stream(*, non_blocking: bool) -> Any:
    assert non_blocking
    return nullcontext()


class _Loading:
    """A device on which CUDA loads something in some call, and calls may hold what they took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
        self.calls = 0
        self.held = held
        pool = SimpleNamespace(total_bytes=lambda: 0)
        found = _cupy(deviceSynchronize=lambda: None, memGetInfo=self.info)
        found.get_default_memory_pool = lambda: pool
        found.cuda.Device = lambda: SimpleNamespace(id=0)
        found.cuda.Stream = _stream
        monkeypatch.setitem(sys.modules, "cupy", found)

    def info(self) -> tuple[int, int]:
        loaded = 6 * MIB if self.calls > 2000 else 0
        return 1000 * MIB - loaded - self.calls * self.held, 1000 * MIB

    def small_calls(self, _comm: Any, _framework: Any, number: int) -> None:
        self.calls += number


@pytest.mark.parametrize("held", [0, 2048])
@pytest.mark.parametrize(
    "test", [leaks.test_calls_hold_nothing, leaks.test_side_streams_hold_nothing]
)
def test_a_leak_is_told_from_what_cuda_loads(
    monkeypatch: pytest.MonkeyPatch, held: int, test: Any
) -> None:
    device = _Loading(monkeypatch, held if test is leaks.test_calls_hold_nothing else held * 8)
    monkeypatch.setattr(leaks, "small_calls", device.small_calls)
    if test is leaks.test_side_streams_hold_nothing:
        device.calls = 1000
    comm, framework = SimpleNamespace(barrier=lambda: None), SimpleNamespace(name="cupy")
    if not held:
        test(_run_alone(comm), framework)
        return
    with pytest.raises(AssertionError):
        test(_run_alone(comm), framework)


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
