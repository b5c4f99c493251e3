"""Lines of all ranks in order."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any

from arraycomm._collectives.objects import allgather_object
from arraycomm._collectives.operation import Call
from arraycomm._communicator import Communicator
from arraycomm._session import is_initialized, world


def _line(comm: Communicator, values: tuple[Any, ...]) -> Call:
    now = datetime.now().astimezone().isoformat(timespec="milliseconds")[:23]
    line = f"{now} [{comm.rank}/{comm.size}] {' '.join(map(str, values))}\n"
    return allgather_object(comm, line, "println")


def println(*values: Any, comm: Communicator | None = None) -> None:
    """Print every rank's values, in the order of the ranks.

    Collective once arraycomm is initialized: rank 0 writes all lines to standard output, each as
    `2026-01-31T12:00:00.000 [rank/size] values`. Before `init` the values are printed at once.

    Parameters
    ----------
    *values : object
        What `print` would be given; may differ between ranks.
    comm : Communicator, optional
        `world()` by default.
    """
    if comm is None and not is_initialized():
        print(*values, flush=True)
        return
    comm = comm or world()
    lines = comm._call("println", _line, values)
    if comm.rank == 0:
        sys.stdout.write("".join(lines))
        sys.stdout.flush()
