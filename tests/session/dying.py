"""A program whose ranks die one after the other, while those that are left do something; see `test_deaths.py`."""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraycomm as ac


def _is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    # Process 1 of a namespace cannot kill itself.
    os._exit(9)


def _exits() -> None:
    os._exit(0)


def _crashes() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def _leaves_a_child() -> None:
    if os.fork() == 0:
        for stream in range(3):
            os.close(stream)
        time.sleep(5)
        os._exit(0)
    _is_killed()


DEATHS = [_is_killed, _exits, _crashes, _leaves_a_child]


# What the others do: they are in a call, which may be large, receive, wait for a request, or work and then call.
STATES: list[Callable[[Any], Any]] = [
    lambda comm: comm.allreduce(1),
    lambda comm: comm.allreduce(np.ones(1_000_000)),
    lambda comm: comm.recv(comm.size - 1),
    lambda comm: comm.iallreduce(np.ones(10)).wait(),
    lambda comm: (time.sleep(1.0), comm.dup()),
]
# The last one to die does so while rank 0 is at the end of its program.
RANKS = 5
# Seconds in which a rank sees a death: a second, and what a busy machine takes.
SOON = 8.0


def _lack_pidfds() -> None:
    """Have the kernel refuse `pidfd_open`, as those before 5.3 do."""
    refused, missing = 434, 0x50000 | 38
    rules = [
        (0x20, 0, 0, 0),
        (0x15, 0, 1, refused),
        (0x06, 0, 0, missing),
        (0x06, 0, 0, 0x7FFF0000),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    filters = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code))
    assert libc.prctl(22, 2, filters, 0, 0) == 0


def main(kernel: str, first: int, said: Path) -> None:
    """Say in files what is seen: launchers lose what ranks print after a death."""
    if kernel == "no pidfds":
        _lack_pidfds()
    comm = ac.init(timeout=60)
    groups = [comm.split(None if comm.rank > last else 0) for last in range(RANKS - 1, 0, -1)]
    for number, group in enumerate(groups, first):
        group.barrier()
        if comm.rank == group.size - 1:
            DEATHS[number % len(DEATHS)]()
        if group is not groups[-1]:
            begun = time.monotonic()
            with pytest.raises(ac.PeerError, match=f"rank {group.size - 1} has died without"):
                STATES[number % len(STATES)](group)
            assert time.monotonic() < begun + SOON
            (said / f"{comm.rank} saw {group.size - 1}").touch()
    atexit.register((said / "ended").touch)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
