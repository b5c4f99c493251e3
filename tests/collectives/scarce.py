"""Ranks of which one has too little memory for the result of a call: run by `test_memory.py`."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

import arraycomm as ac
from tests.support.launched import perform

# Every result is larger than what `malloc` may have reserved for a thread, which is 64 MiB.
COUNT: Final = 9 << 20
_ROOM: Final = 24 << 20
# A communicator needs less.
_SMALL_ROOM: Final = 1 << 20


@contextmanager
def too_little_memory(room: int) -> Iterator[None]:
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _joined(comm: ac.Communicator, x: Any) -> None:
    ac.allreduce_gradients([x if comm.rank == 0 else None, 1.0], comm=comm)


# Each with the rank that has too little memory.
CASES: dict[str, tuple[int, Callable[[ac.Communicator, Any], Any]]] = {
    "tree": (1, lambda c, x: ac.allreduce_tree([x, x[::2]], comm=c)),
    "gradients": (1, _joined),
    "plan": (1, lambda c, x: c.plan([x], "sum")([x])),
    "metrics": (1, lambda c, x: ac.mean_metrics([x], 1.0, comm=c)),
    "synchronize": (1, lambda c, x: ac.synchronize(None if c.rank else [x], comm=c)),
    "bcast": (1, lambda c, x: c.bcast(None if c.rank else x)),
    "scatter": (1, lambda c, x: c.scatter(None if c.rank else np.stack([x] * c.size))),
    "allgatherv": (0, lambda c, x: c.allgatherv(x)),
    "gatherv": (0, lambda c, x: c.gatherv(x)),
    "alltoallv": (1, lambda c, x: c.alltoallv(x, [COUNT // c.size] * c.size)),
    "allreduce": (1, lambda c, x: c.allreduce(x)),
    "own op": (0, lambda c, x: c.reduce(x, ac.op(np.add))),
    "bcast_object": (1, lambda c, x: c.bcast_object(None if c.rank else x)),
    "allgather_object": (0, lambda c, x: c.allgather_object(x)),
    "gather_object": (0, lambda c, x: c.gather_object(x)),
    "split": (1, lambda c, x: c.split(0)),
    "dup": (0, lambda c, x: c.dup()),
}


def _check(name: str) -> Callable[[], None]:
    culprit, call = CASES[name]

    def check() -> None:
        comm = ac.world()
        x = np.ones(COUNT)
        expected: type[Exception] = MemoryError if comm.rank == culprit else ac.PeerError
        try:
            if comm.rank == culprit:
                with too_little_memory(_SMALL_ROOM if name in ("split", "dup") else _ROOM):
                    call(comm, x)
            else:
                call(comm, x)
        except expected:
            assert comm.allreduce(1) == comm.size
            call(comm, x[: 2 * comm.size] if name != "alltoallv" else x)
        else:
            raise AssertionError(f"{name} raised nothing")

    check.__name__ = name
    return check


if __name__ == "__main__":
    ac.init(timeout=20).barrier()
    perform(map(_check, CASES))
