"""Which files of the package a call enters, from the user's call to the result: the route that a reader follows.

`mpiexec -n 2 python -m tests.support.route` traces calls on rank 0, and fails if a limit is passed.
What the native part does in C is not seen here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np

import arraycomm as ac

PACKAGE = Path(ac.__file__).parent
# Entered only by a rank that waits for another one.
WAITS = (
    *("_protocol/waits/", "_exit/", "_callsite.py"),
    *("_transports/notes.py", "_transports/mpi/wait_replies.py"),
    *("_transports/lives.py", "_transports/mpi/transport.py"),
)
# As they were reached: a limit is never raised.
LIMITS = {
    "files of a first call of 8 bytes": 22,
    "files of a first call of 64 MB": 29,
    # One more if the other rank is late.
    "files of a repeated call of 64 MB": 12,
    "files of a repeated allgather of 8 bytes": 2,
    "files of a repeated send and receive of 8 bytes": 6,
}


def entered(call: Callable[[], object]) -> list[str]:
    """Return the files that a call enters, in the order in which it first enters each, but for `WAITS`."""
    found: dict[str, None] = {}

    def profile(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.setdefault(str(path.relative_to(PACKAGE)))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name in found if not name.startswith(WAITS)]


def lines(names: list[str]) -> int:
    """Return how many lines these files have together."""
    return sum((PACKAGE / name).read_text(encoding="utf-8").count("\n") for name in names)


def routes(comm: ac.Communicator) -> dict[str, list[str]]:
    """Return the files of a first call and of one like those before, of 8 bytes and of 64 MB; collective."""
    found = {}
    for size, count in (("8 bytes", 1), ("64 MB", 8_000_000)):
        x, out = np.ones(count), np.empty(count)
        for call in ("first", "second", "repeated"):
            found[f"{call} call of {size}"] = entered(
                lambda x=x, out=out: comm.allreduce(x, out=out)
            )
    few, other = np.ones(1), comm.rank ^ 1
    calls: dict[str, Callable[[], object]] = {
        "allgather": lambda: comm.allgather(few),
        "send and receive": lambda: (comm.send(few, other), comm.recv(other, like=few)),
    }
    for name, call in calls.items():
        # The shortest: Python waits if the other rank is late.
        ways = [entered(call) for _ in range(20)]
        found[f"repeated {name} of 8 bytes"] = min(ways, key=len)
    return found


def main() -> int:
    comm = ac.init(timeout=120)
    found = routes(comm)
    if comm.rank:
        return 0
    for name in (name.removeprefix("files of a ") for name in LIMITS):
        print(f"{name}: {', '.join(found[name])}")
    numbers = {name: len(found[name.removeprefix("files of a ")]) for name in LIMITS}
    print(f"lines of a first call of 64 MB: {lines(found['first call of 64 MB'])}")
    for name, number in numbers.items():
        over = " TOO MANY" if number > LIMITS[name] else ""
        print(f"{name}: {number} (at most {LIMITS[name]}){over}")
    return int(any(number > LIMITS[name] for name, number in numbers.items()))


if __name__ == "__main__":
    sys.exit(main())
