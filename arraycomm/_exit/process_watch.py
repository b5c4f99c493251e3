"""A thread that ends this process if nothing else would: the launcher died, or a call of MPI hangs.

Some launchers end their ranks even if they are killed. Others do not, and then nobody could end the
job. A rank that waits raises errors between its calls of MPI, but Open MPI may never return from
one of these calls once a connection to another host has broken.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final

from arraycomm import _transports
from arraycomm._launch import Ancestor, find_launcher
from arraycomm._protocol.waits import clock
from arraycomm._protocol.waits.still_waiting import say
from arraycomm._transports.base import Handle

# Seconds between two looks.
_INTERVAL: Final = 1.0
# The calls of MPI by which a rank polls return at once. One that takes this many seconds never
# returns.
_FOR_EVER: Final = 60.0
# Seconds that a program has to act on the signal.
_PATIENCE: Final = 10.0
_MPI_FILES: Final = ("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.", "/dev/shm/vader_segment.")
_TRANSPORTS: Final = str(Path(str(_transports.__file__)).parent)


def start(*, over_mpi: bool) -> None:
    """Begin to watch, if there is a launcher, or if this process communicates over MPI.

    The thread is none of the `threading` module's, since it never communicates: no rank waits for
    it.
    """
    launcher = find_launcher(os.getppid())
    if launcher is None and not over_mpi:
        return
    with suppress(RuntimeError):
        _thread.start_new_thread(_watch, (launcher,))


def _watch(launcher: Ancestor | None) -> None:
    """Look now and then, until this process has to end."""
    looked, stuck = clock.last_look(), 0.0
    while launcher is None or launcher.lives():
        time.sleep(_INTERVAL)
        if (last := clock.last_look()) != looked or not _stuck_in_mpi():
            looked, stuck = last, 0.0
            continue
        # Counted, and not measured: this process may have been stopped.
        stuck += _INTERVAL
        if stuck >= _FOR_EVER:
            _end(f"a call of MPI has not returned for {_FOR_EVER:g} s", _stuck_in_mpi())
    _end(f"the launcher has died ({launcher})")


def _stuck_in_mpi() -> list[str]:
    """Return the stack of a thread in which a handle polls MPI; empty if there is none."""
    for frame in sys._current_frames().values():
        if _polls(frame):
            return traceback.format_stack(frame)
    return []


def _polls(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.startswith(_TRANSPORTS):
        if frame.f_code.co_name == Handle.done.__name__:
            return True
        frame = frame.f_back
    return False


def _end(reason: str, stack: Sequence[str] = ()) -> None:
    """Do as launchers do: ask the process to end, and end it if it goes on."""
    remove_mpi_files()
    say("".join([f"arraycomm: {reason}; so this rank ends\n", *stack]))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE)
    remove_mpi_files()
    os.kill(os.getpid(), signal.SIGKILL)


def remove_mpi_files() -> None:
    """Remove the files of this job's MPI; for a process that ends without MPI_Finalize.

    Every rank maps those of all ranks of its node.
    """
    for path in _mapped_files():
        with suppress(OSError):
            os.unlink(path)


def _mapped_files() -> set[str]:
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return {line.split()[-1] for line in maps.splitlines() if _is_mpi_file(line)}


def _is_mpi_file(line: str) -> bool:
    return any(prefix in line for prefix in _MPI_FILES) and not line.endswith("(deleted)")
