"""Starts ranks on this node if there is no MPI, as an mpiexec does if there is one.

A program of its own, with the standard library alone. Its arguments are the number of ranks, and
the command that each of them runs.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
from contextlib import suppress

_HOST = "127.0.0.1"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SIGNALLED = 128


def main(count: str, *command: str) -> int:
    """Start the ranks, wait for all of them, and return the status of the first that failed."""
    ranks: list[int] = []

    def forward(number: int, _: object) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, number)

    for number in _FORWARDED:
        # One that is ignored when the job starts, as under nohup, stays so.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    with socket.socket() as place:
        # Bound, so that nobody else gets its port; rank 0 listens there.
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((_HOST, 0))
        environment = {
            **os.environ,
            "ARRAYCOMM_COORDINATOR_ADDRESS": f"{_HOST}:{place.getsockname()[1]}",
            "ARRAYCOMM_NUM_PROCESSES": count,
            "ARRAYCOMM_COORDINATOR_SECRET": secrets.token_hex(16),
        }
        for rank in range(int(count)):
            own = {**environment, "ARRAYCOMM_PROCESS_ID": str(rank)}
            # In a group of its own, with what it starts.
            ranks.append(os.posix_spawnp(command[0], command, own, setpgroup=0))
        failed = 0
        for _ in range(int(count)):
            pid, status = os.wait()
            ranks.remove(pid)
            code = os.waitstatus_to_exitcode(status)
            failed = failed or (code if code >= 0 else _SIGNALLED - code)
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
