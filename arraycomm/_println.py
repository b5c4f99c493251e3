"""Lines of all ranks in order."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any

from arraycomm._collectives import allgather_object
from arraycomm._communicator import Communicator
from arraycomm._runtime import is_initialized, world


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
    line = " ".join(map(str, values))
    if comm is None and not is_initialized():
        print(line, flush=True)
        return
    comm = comm or world()
    now = datetime.now().astimezone().isoformat(timespec="milliseconds")[:23]
    lines = comm._call(
        "println", allgather_object, f"{now} [{comm.rank}/{comm.size}] {line}\n", "println"
    )
    if comm.rank == 0:
        sys.stdout.write("".join(lines))
        sys.stdout.flush()
