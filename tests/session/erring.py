"""Errors of each kind on communicators of their own: nothing that they take is kept. `python -m tests.session.erring [messages] [repetitions]`."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

import arraycomm as ac
from arraycomm import Communicator
from tests.support import internals
from tests.support.launched import checks_in, perform

X = np.ones(3)
LARGE = np.ones(200_000)
EXPECTED = (ac.ArrayCommError, TypeError, ValueError, ZeroDivisionError)


def _mismatch(c: Communicator, world: Communicator) -> None:
    c.allreduce(np.ones(3 + c.rank))


def _mismatch_after_much(c: Communicator, world: Communicator) -> None:
    c.allreduce(LARGE)
    c.sendrecv(X, 1 - c.rank, 1 - c.rank)
    _mismatch(c, world)


def _wrong_argument(c: Communicator, world: Communicator) -> None:
    c.allreduce(object() if c.rank == 0 else X)


def _limit(c: Communicator, world: Communicator) -> None:
    if c.rank == 0:
        with suppress(ac.CommTimeoutError):
            c.allreduce(X, timeout=1e-3)
        world.barrier()
    else:
        world.barrier()
        c.allreduce(X)


def _op(c: Communicator, world: Communicator) -> None:
    c.allreduce(X, ac.op(lambda a, b: a / (1 // 0)))


def _request(c: Communicator, world: Communicator) -> None:
    if c.rank == 0:
        c.iallreduce(X).wait()
    else:
        c.barrier()


def _split(c: Communicator, world: Communicator) -> None:
    c.split("a" if c.rank == 0 else 0)  # type: ignore[arg-type]


def _dup(c: Communicator, world: Communicator) -> None:
    c.dup(timeout=-1.0 if c.rank == 0 else None)


def _grid(c: Communicator, world: Communicator) -> None:
    _mismatch(c.grid([c.size]), world)


def _node(c: Communicator, world: Communicator) -> None:
    _mismatch(c.split_by_node() if internals.is_shared(c) else c.split(0), world)


def _block(c: Communicator, world: Communicator) -> None:
    with c:
        c.allreduce(X)
        raise ZeroDivisionError


def _nothing(c: Communicator, world: Communicator) -> None:
    c.iallreduce(X).wait()


Kind = Callable[[Communicator, Communicator], None]
KINDS: list[Kind] = [_mismatch, _mismatch_after_much, _wrong_argument, _limit, _op, _request]
KINDS += [_split, _dup, _grid, _node, _block, _nothing]


def _fail(kind: Kind, world: Communicator, *, frees: bool) -> None:
    made = world.dup()
    with suppress(*EXPECTED):
        kind(made, world)
    if frees:
        made.free()


def used() -> dict[str, int]:
    """Return what this process has: descriptors, maps of shared memory and their MiB, threads."""
    # Threads stay for a moment, for the next request.
    time.sleep(0.2)
    gc.collect()
    count, kib, ours = 0, 0, False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            ours = "arraycomm" in (rest[-1] if len(rest) < 6 else " ".join(rest[4:]))
            count += ours
        elif ours and first == "Rss:":
            kib += int(rest[0])
    descriptors = len(os.listdir("/proc/self/fd"))
    return {"fd": descriptors, "maps": count, "MiB": kib >> 10, "threads": threading.active_count()}


def growth(world: Communicator, repetitions: int) -> dict[str, int]:
    """Return by how much this process grows over this many errors of each kind, and print it."""
    seen = []
    for count in (2, repetitions):
        for kind in KINDS:
            for turn in range(count):
                _fail(kind, world, frees=turn % 2 == 0)
        world.barrier()
        seen.append(used())
        world.barrier()
    print(*seen, flush=True)
    return {name: seen[1][name] - number for name, number in seen[0].items()}


REPETITIONS = int(sys.argv[-1]) if sys.argv[-1].isdigit() else 6


def errors_of_each_kind_leave_nothing_behind() -> None:
    # Each kind that leaves something adds as much as its repetitions; a few threads linger.
    assert max(growth(ac.world(), REPETITIONS).values()) < REPETITIONS


def what_one_rank_gave_up_raises_on_others_that_begin_later() -> None:
    """Data may have come that moves without a header, and a message that its sender gave up."""
    calls: dict[str, tuple[Kind, Kind]] = {
        "header": (lambda c, _: c.allreduce(X), lambda c, _: c.allreduce(X)),
        "bcast": (lambda c, _: c.bcast(LARGE), lambda c, _: c.bcast(LARGE)),
        "allgather": (
            lambda c, _: c.allgather(LARGE[:2000]),
            lambda c, _: c.allgather(LARGE[:2000]),
        ),
        "message": (lambda c, _: c.send(LARGE, 1), lambda c, _: c.recv(0)),
    }
    for first, second in calls.values():
        for check in (True, False):
            made = ac.world().dup(timeout=0.2, check=check)
            if made.rank == 0:
                with suppress(ac.CommTimeoutError):
                    first(made, made)
            ac.world().barrier()
            raised = made.rank == 0
            if made.rank == 1:
                try:
                    second(made, made)
                except (ac.PeerError, ac.CommTimeoutError):
                    raised = True
            assert raised, (check, first)


if __name__ == "__main__":
    if "messages" in sys.argv:
        from arraycomm._transports.mpi import control

        internals.refuse_shared_memory()
        # As among many ranks: little travels with a header.
        control.message_slot = lambda size: 256
    ac.init(timeout=20)
    perform(checks_in(globals()))
