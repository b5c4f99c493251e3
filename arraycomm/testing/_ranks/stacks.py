"""Stacks of other processes of this node, also of one that holds Python's lock outside Python."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Final, NamedTuple

from arraycomm._launch.places import known_by, proc_is_own

_SIGNAL: Final = getattr(signal, "SIGRTMAX", signal.SIGUSR2 + 4) - 4
# Below these a test runs.
_RANKS: Final = os.path.dirname(__file__)
_RUNS: Final = (
    os.path.join(os.path.dirname(_RANKS), "_example.py"),
    os.path.join(_RANKS, "plain_worlds.py"),
)
# Seconds in which a process that has been asked writes its stack.
_WRITING: Final = 0.3


class Address(NamedTuple):
    """Where a process writes its stack if it is asked: a file of its, and what that is known by."""

    pid: int
    descriptor: int
    known: str

    @property
    def path(self) -> str:
        """Where the file is, if the process is seen from here."""
        return f"/proc/{self.pid}/fd/{self.descriptor}"

    def is_seen(self) -> bool:
        """Return whether that process has its number here: others would not stand the signal."""
        try:
            return proc_is_own() and known_by(os.stat(self.path)) == self.known
        except OSError:
            return False


@cache
def own_stack() -> Address:
    """Have this process write its stack when a signal asks, which needs no lock of Python's."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as it may be asked
    faulthandler.register(_SIGNAL, file, all_threads=True)
    atexit.register(file.close)
    return Address(os.getpid(), file.fileno(), known_by(os.fstat(file.fileno())))


def stacks_of(addresses: Sequence[Address]) -> list[str]:
    """Return the stacks of processes, an empty text for each that cannot be asked from here."""
    here = [address for address in addresses if address.is_seen()]
    for address in here:
        with suppress(OSError):
            os.kill(address.pid, _SIGNAL)
    time.sleep(_WRITING)
    return [_read(address) if address in here else "" for address in addresses]


def _read(address: Address) -> str:
    """Return the test thread's stack, from the test's frames on, the innermost first."""
    try:
        with open(address.path, encoding="utf-8") as file:
            threads = file.read().split("\n\n")
    except OSError:
        return ""
    for lines in map(str.splitlines, threads):
        inside = [n for n, line in enumerate(lines) if any(path in line for path in _RUNS)]
        if inside:
            return "\n".join(lines[1 : inside[0]])
    return threads[-1].strip()
