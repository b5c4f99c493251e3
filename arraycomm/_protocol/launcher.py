"""Ends this process if its launcher has died: a job that nobody can end any more would go on for ever.

Some launchers take their ranks along even if they are killed, and some do not. A rank may never come back
from a call of MPI then: Open MPI can lock itself out when a connection breaks. So a thread watches.
"""

from __future__ import annotations

import _thread
import os
import select
import signal
import sys
import time
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
# Seconds that a program has to act on the signal.
_PATIENCE: Final = 10.0


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


def watch_launcher() -> None:
    """Begin to watch the launcher, if there is one and this system can watch it.

    The thread is none of the `threading` module's, since it never communicates: no rank waits for it.
    """
    launcher = find_launcher(os.getppid())
    if launcher is not None and hasattr(os, "pidfd_open"):
        with suppress(OSError, RuntimeError):
            # Readable once the process has ended; its number may go to another one.
            ended = select.poll()
            ended.register(os.pidfd_open(launcher.pid), select.POLLIN)
            _thread.start_new_thread(_end_with, (launcher, ended))


def _end_with(launcher: Ancestor, ended: select.poll) -> None:
    """Do as launchers do once this one has ended: ask the process to end, and end it if it goes on."""
    ended.poll()
    remove_mpi_files()
    with suppress(Exception):
        # Nobody may read it any more.
        sys.stderr.write(f"arraycomm: the launcher has died ({launcher}); so this rank ends\n")
        sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE)
    remove_mpi_files()
    os.kill(os.getpid(), signal.SIGKILL)
