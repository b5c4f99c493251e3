"""Ends this process if its launcher has died: a job that nobody can end any more would go on for ever.

Some launchers take their ranks along even if they are killed, and some do not.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from arraycomm._transports.mpi_files import remove_mpi_files

# The processes that start ranks on their node, by the names that the kernel cuts to 15 letters.
_LAUNCHERS: Final = frozenset(
    (
        *("prterun", "prted", "orterun", "orted", "mpirun", "mpiexec"),
        *("mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_pr", "slurmstepd"),
    )
)
# Seconds between two looks, and those that a program has to act on the signal.
_INTERVAL: Final = 1.0
_PATIENCE: Final = 4.0


class Ancestor(NamedTuple):
    """A process that this one descends from, and its name."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}, process {self.pid}"


def find_launcher(pid: int) -> Ancestor | None:
    """Return the closest ancestor of a process that is a launcher."""
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        # The name stands in parentheses, and may itself contain some.
        name, rest = stat[stat.index("(") + 1 :].rsplit(")", 1)
        if name in _LAUNCHERS:
            return Ancestor(pid, name)
        pid = int(rest.split()[1])
    return None


class LauncherWatch:
    """Looks now and then whether the launcher lives: in calls, and throughout waits.

    Attributes
    ----------
    due : float
        When to look again, by `time.perf_counter`; infinite if there is no launcher to watch.
    """

    def __init__(self) -> None:
        self.due = math.inf
        self._launcher: Ancestor | None = None
        self._poll = select.poll()
        self._ended_at = math.inf

    def start(self) -> None:
        """Begin to watch the launcher, if there is one and this system can watch it."""
        self._launcher = find_launcher(os.getppid())
        if self._launcher is not None and hasattr(os, "pidfd_open"):
            with suppress(OSError):
                # Readable once the process has ended; its number may go to another one.
                self._poll.register(os.pidfd_open(self._launcher.pid), select.POLLIN)
                self.due = 0.0

    def stop(self) -> None:
        """Watch no more, in a forked child: it is its parent's to end."""
        self.due = math.inf

    def look(self, now: float) -> None:
        """End this process if the launcher has ended; looks once a second at most."""
        if now > self.due:
            self.due = now + _INTERVAL
            if self._poll.poll(0):
                self._end(now)

    def _end(self, now: float) -> None:
        """Do as launchers do: ask the process to end, and end it if it goes on."""
        remove_mpi_files()
        if now > self._ended_at + _PATIENCE:
            os.kill(os.getpid(), signal.SIGKILL)
        self._ended_at = min(self._ended_at, now)
        with suppress(Exception):
            # Nobody may read it any more.
            sys.stderr.write(
                f"arraycomm: the launcher has died ({self._launcher}); so this rank ends\n"
            )
            sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGTERM)


watch: Final = LauncherWatch()
