"""Jobs of an MPI: how one is started, disturbed from outside, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.faults.disturbances import SHOW_STACK
from tests.support.launcher import SETTINGS

ROOT: Final = Path(__file__).parents[2]
MARK: Final = "ARRAYCOMM_FAULTS_JOB"
# Seconds in which the ranks of a job without a launcher have ended.
ORPHAN_LIMIT: Final = 10.0
# Seconds in which ranks have loaded what they need.
START_LIMIT: Final = 180.0
# Where ranks share memory, and how the library calls its files there.
_SHARED: Final = (Path("/dev/shm"), Path(tempfile.gettempdir()))
_FILES: Final = "arraycomm-*"


@dataclass
class Job:
    """How a job has ended: its status, what it printed, and what it has left behind."""

    status: int
    out: str
    err: str
    ended: float
    hung: bool
    left: int
    files: int


class Running:
    """A job that runs."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str) -> None:
        self._process = process
        self._mark = mark

    def suspend(self, pids: Sequence[int], seconds: float) -> None:
        """Stop processes, all at once, for some seconds."""
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            if number == signal.SIGSTOP:
                time.sleep(seconds)

    def kill_launcher(self) -> None:
        """Kill the launcher, and wait for the processes of the job to end."""
        self._process.kill()
        self._process.wait()
        _left(self._mark, ORPHAN_LIMIT)


# Disturbs a job; called now and then until it returns True.
Disturb = Callable[[Running], bool]


def launch(
    python: Path,
    ranks: int,
    limit: float,
    arguments: Sequence[str],
    disturb: Disturb = lambda job: True,
) -> Job:
    """Run the worker on some ranks; leave no process of the job behind, and count those there were."""
    mark, began = uuid.uuid4().hex, time.time()
    command = [
        *(str(python.with_name("mpiexec")), "-n", str(ranks), str(python)),
        *("-m", "tests.faults.worker", *arguments),
    ]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | SETTINGS | {MARK: mark, "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        hung = not _ended(process, Running(process, mark), limit, out.fileno(), disturb)
        ended = time.monotonic()
        left = 0 if hung else _left(mark)
        if hung:
            _show_stacks(mark)
        for pid in _marked(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        out.seek(0)
        err.seek(0)
        return Job(
            process.returncode, out.read(), err.read(), ended, hung, left, _left_files(began)
        )


def _ended(
    process: subprocess.Popen[bytes], running: Running, limit: float, out: int, disturb: Disturb
) -> bool:
    """Wait for a job to end; return whether it has, or prints nothing any more."""
    deadline, printed, quiet = time.monotonic() + limit + START_LIMIT, 0, False
    while time.monotonic() < deadline:
        quiet = quiet or disturb(running)
        try:
            process.wait(0.5 if quiet else 0.02)
        except subprocess.TimeoutExpired:
            if os.fstat(out).st_size > printed:
                deadline, printed = time.monotonic() + limit, os.fstat(out).st_size
            continue
        return True
    return False


def _show_stacks(mark: str) -> None:
    """Let the ranks of a job that hangs print where they are; see the worker."""
    for pid in _marked(mark):
        if b"tests.faults.worker" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2:3]:
            os.kill(pid, SHOW_STACK)
    time.sleep(1)


def _left(mark: str, patience: float = 1.0) -> int:
    """Return how many processes of a job are left, a moment after its launcher has ended."""
    deadline = time.monotonic() + patience
    while (left := len(_marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _marked(mark: str) -> list[int]:
    """Return the processes that have inherited a mark, wherever they are by now."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if wanted in environment:
                found.append(int(entry.name))
    return found


def _left_files(began: float, patience: float = 60.0) -> int:
    """Return how many files of shared memory were made since, and keep a name.

    Other jobs that run meanwhile make files as well; theirs have a name for a moment only, or, on a busy machine, for seconds.
    """
    deadline = time.monotonic() + patience
    left = {path for path in _shared_files() if _is_newer(path, began)}
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left.intersection_update(_shared_files())
    return len(left)


def _shared_files() -> list[Path]:
    """Return the files of that name; directories of it are of other programs."""
    found = [path for folder in dict.fromkeys(_SHARED) for path in folder.glob(_FILES)]
    return [path for path in found if not path.is_dir()]


def _is_newer(path: Path, began: float) -> bool:
    try:
        return path.stat().st_mtime >= began
    except OSError:
        return False


if sys.platform != "linux":
    raise ImportError("left processes are looked for in /proc, which only Linux has")
