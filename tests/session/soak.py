"""Many collectives, and many communicators made and given back: what a rank holds stays flat.

``python -m tests.session.soak`` runs it on two threads, ``mpiexec -n 2 python -m tests.session.soak`` over MPI.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

import arraycomm as ac
from arraycomm import Communicator
from arraycomm.testing import run

PAGE: Final = os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else 1
# Bytes that the allocators of Python, NumPy and MPI may keep for later, whatever the number of calls.
SLACK: Final = 8 << 20
# Bytes that MPICH keeps of every thread that has ended in its process, whatever that did; requests
# are pushed on by such threads.
ENDED_THREAD: Final = 320
# Files that are open for a moment: the one in /proc that another rank's thread is just reading.
SPARE: Final = 2


@dataclass(frozen=True)
class Held:
    """What this process holds: bytes in memory, open files, mapped files of communicators, threads."""

    memory: int
    files: int
    maps: int
    threads: int

    def __str__(self) -> str:
        return (
            f"{self.memory / 2**20:.1f} MiB, {self.files} files, {self.maps} maps, "
            f"{self.threads} threads"
        )


def held() -> Held:
    """Measure this process, as Linux sees it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = len(re.findall(r"/(memfd:)?arraycomm[- ]", Path("/proc/self/maps").read_text()))
    files = len(os.listdir("/proc/self/fd"))
    return Held(pages * PAGE, files, maps, threading.active_count())


def calls(comm: Communicator, number: int) -> None:
    """Make `number` small collectives of several kinds, and look at their results."""
    size, rank = comm.size, comm.rank
    x, row = np.arange(4.0), np.arange(float(size))
    # What requests, messages and objects hold differs from what blocking calls do.
    for turn in range(-(-number // 8)):
        x[0] = turn
        assert comm.allreduce(x)[0] == turn * size
        assert comm.bcast(x if rank == 0 else None)[0] == turn
        assert comm.allgather(turn).tolist() == [turn] * size
        assert comm.reduce_scatter(row) == rank * size
        assert comm.iallreduce(x, "max").wait()[0] == turn
        assert comm.sendrecv(x, (rank + 1) % size, (rank - 1) % size)[0] == turn
        assert comm.allgather_object(turn) == [turn] * size
        comm.barrier()


def made_and_freed(comm: Communicator, number: int) -> None:
    """Make and free communicators, by `dup` and by `split`."""
    for turn in range(number):
        made = comm.split(0, -comm.rank) if turn % 2 else comm.dup()
        assert made is not None
        assert made.allreduce(1) == comm.size
        assert made.iallreduce(np.ones(3)).wait()[0] == comm.size
        made.free()


def closed(comm: Communicator, number: int) -> None:
    """Make communicators that end by an error, and free them all the same."""
    for _ in range(number):
        made = comm.dup()
        with suppress(ac.MismatchError):
            made.allreduce(np.ones(3 + made.rank))
            raise AssertionError("no MismatchError")
        made.free()


def dropped(comm: Communicator, number: int) -> None:
    """Make communicators and forget them."""
    for _ in range(number):
        assert comm.dup().allreduce(1) == comm.size


def grown(comm: Communicator, act: Callable[[Communicator, int], None], number: int) -> list[Held]:
    """Return what this process holds before and after `act(comm, number)`.

    Open files and maps are counted before Python's collector of cycles has run: what is given back
    must not wait for it.
    """
    collects = act is calls
    if not collects:
        gc.disable()
    try:
        # So much that the allocators have what they will ever keep.
        act(comm, number // 10 if collects else number)
        gc.collect()
        comm.barrier()
        before = held()
        act(comm, number)
        comm.barrier()
        after = held()
    finally:
        gc.enable()
    gc.collect()
    return [before, replace(after, memory=held().memory)]


def flat(before: Held, after: Held, allowance: int = 0) -> bool:
    """Return whether nothing has grown, apart from `allowance` bytes."""
    return (
        after.memory <= before.memory + SLACK + allowance
        and after.files <= before.files + SPARE
        and after.maps <= before.maps
    )


def _over_mpich() -> bool:
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and "MPICH" in module.Get_library_version()


def main() -> int:
    """Run it all once, and print what was held before and after."""
    parser = argparse.ArgumentParser(prog="python -m tests.session.soak", description=__doc__)
    parser.add_argument("--collectives", type=int, default=1_000_000)
    parser.add_argument("--communicators", type=int, default=1000)
    parser.add_argument("--more", action="store_true", help="also some closed and some forgotten")
    arguments = parser.parse_args()

    acts: list[tuple[Callable[[Communicator, int], None], int, bool]] = [
        (calls, arguments.collectives, True),
        (made_and_freed, arguments.communicators, True),
    ]
    if arguments.more:
        # These keep what they hold until the end: their number alone is looked at.
        acts += [(closed, arguments.communicators // 10, False)]
        acts += [(dropped, arguments.communicators // 10, False)]

    def soak(comm: Communicator) -> bool:
        good = True
        for act, number, gives_back in acts:
            started = time.monotonic()
            before, after = grown(comm, act, number)
            # One in eight calls is a request.
            allowance = number // 8 * ENDED_THREAD if act is calls and _over_mpich() else 0
            good = good and (flat(before, after, allowance) or not gives_back)
            if comm.rank == 0:
                seconds = time.monotonic() - started
                print(f"{act.__name__}, {number}: {before} -> {after}, {seconds:.0f} s", flush=True)
        return good

    world = ac.init(timeout=60.0)
    return int(not (soak(world) if world.size > 1 else all(run(2, soak, timeout=60.0))))


if __name__ == "__main__":
    sys.exit(main())
