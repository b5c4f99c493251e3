"""What happens to a rank besides its calls: forks, signals, and too little memory."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import arraycomm as ac
from arraycomm import Communicator

# Of malloc.h.
_MMAP_THRESHOLD: Final = -3
# Seconds: for which a rank is stopped, after at most how many; and those that a child may take.
_STOPPED: Final = 0.4
_SOON: Final = 0.015
_CHILD: Final = 15
# The signal at which a rank prints its stack.
SHOW_STACK: Final = signal.SIGUSR1


def map_arrays() -> None:
    """Have each large array in memory of its own, so that none takes what another has left free."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 64 << 10)


@contextmanager
def disturbed(wrong: str) -> Iterator[None]:
    """Take away what a call needs, if that is what is wrong with it."""
    if wrong == "memory":
        # What is free in the process goes back first.
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        with _limit(resource.RLIMIT_AS, pages * resource.getpagesize()):
            yield
    elif wrong == "files":
        with _limit(resource.RLIMIT_FSIZE, 0):
            yield
    else:
        yield


@contextmanager
def _limit(what: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


def fork(comms: Sequence[Communicator], how: int) -> str | None:
    """Fork, let the child call on all communicators, and say what is wrong with how it ended.

    None in the child, which is to end at once.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_CHILD)
        calls = [comms[how % len(comms)].barrier, lambda: comms[0].allreduce(1), ac.world, ac.init]
        os.write(writing, " ".join(map(_error_of, calls)).encode())
        os.close(writing)
        if how % 2:
            os._exit(0)
        return None
    os.close(writing)
    status = _wait_for(pid)
    said = os.read(reading, 4096).decode()
    os.close(reading)
    right = " ".join(["CommunicatorClosedError"] * 4)
    return "" if (said, status) == (right, 0) else f"the child said {said}, and ended with {status}"


def _error_of(call: object) -> str:
    try:
        assert callable(call)
        call()
    except BaseException as error:
        return type(error).__name__
    return "nothing"


def _wait_for(pid: int) -> int:
    deadline = time.monotonic() + _CHILD + 1
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(5e-3)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGKILL


class Signals:
    """Signals that reach this process a little later, wherever it is by then."""

    def __init__(self) -> None:
        self._stopping: list[subprocess.Popen[bytes]] = []
        self._interrupted: threading.Timer | None = None

    def stop(self, how: int) -> None:
        """Be stopped soon, and continued."""
        pid, soon = os.getpid(), _SOON * how / 12
        script = f"sleep {soon}; kill -STOP {pid}; sleep {_STOPPED}; kill -CONT {pid}"
        self._stopping.append(subprocess.Popen(["sh", "-c", script]))

    def interrupt(self, how: int) -> None:
        """Be interrupted soon, as by Ctrl-C."""
        arguments = (os.getpid(), signal.SIGINT)
        self._interrupted = threading.Timer(_SOON * how / 12, os.kill, arguments)
        self._interrupted.daemon = True
        self._interrupted.start()

    def wait(self) -> None:
        """Wait until all have come."""
        for process in self._stopping:
            process.wait()
        if self._interrupted is not None:
            time.sleep(2 * _SOON + 1)

    def close(self) -> None:
        """Wait for those that only stop this process."""
        with suppress(KeyboardInterrupt):
            for process in self._stopping:
                process.wait()
