"""`println`: lines of all ranks, in rank order."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any

from arraycomm._collectives.objects import AllgatherObject
from arraycomm._collectives.operation import Context
from arraycomm._communicator import Communicator, runner_of
from arraycomm._protocol.exit import refuse_forked_child
from arraycomm._session import is_initialized, world


class Println(AllgatherObject):
    """See `println`."""

    name, code = "println", 16

    def __init__(self, context: Context, values: tuple[Any, ...]) -> None:
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")[:23]
        place = f"{context.group.rank}/{context.group.size}"
        super().__init__(context, f"{now} [{place}] {' '.join(map(str, values))}\n")


def println(*values: Any, comm: Communicator | None = None) -> None:
    """Print every rank's values, in the order of the ranks.

    Collective once arraycomm is initialized: rank 0 writes all lines to standard output, each as
    `2026-01-31T12:00:00.000 [rank/size] values`. Before `init` the values are printed at once.

    Parameters
    ----------
    *values : object
        What would be passed to `print`; may differ between ranks.
    comm : Communicator, optional
        `world()` by default.
    """
    if comm is None and not is_initialized():
        refuse_forked_child("println")
        print(*values, flush=True)
        return
    comm = comm or world()
    lines = runner_of(comm).call(Println, values)
    if comm.rank == 0:
        sys.stdout.write("".join(lines))
        sys.stdout.flush()
