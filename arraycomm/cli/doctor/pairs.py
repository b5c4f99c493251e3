"""An allreduce between every two ranks of a job: whether it works, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any, Final

import numpy as np

from arraycomm import ArrayCommError, Communicator

_CALLS: Final = 200
_LARGE: Final = 1 << 20


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs with each rank at most once: all pairs, as in a tournament."""
    ranks: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    for _ in range(len(ranks) - 1):
        pairs = zip(ranks[: len(ranks) // 2], reversed(ranks[len(ranks) // 2 :]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        ranks.insert(1, ranks.pop())


def try_pairs(comm: Communicator) -> list[dict[str, Any]]:
    """Return a line for each pair: its ranks, and an allreduce's seconds or error; collective.

    All pairs of a round are tried at the same time.
    """
    found = []
    for pairs in rounds(comm.size):
        mine = next((pair for pair in pairs if comm.rank in pair), None)
        with_other = comm.split(None if mine is None else pairs.index(mine))
        line = None if with_other is None or mine is None else _tried(with_other, mine)
        found += [other for other in comm.allgather_object(line) if other is not None]
        if with_other is not None:
            with_other.free()
    # Both ranks of a pair have measured it; the slower one counts.
    by_seconds = sorted(found, key=lambda line: float(line.get("seconds", "inf")))
    slowest = {tuple(line["ranks"]): line for line in by_seconds}
    return [slowest[pair] for pair in sorted(slowest)]


def _tried(comm: Communicator, pair: tuple[int, int]) -> dict[str, Any]:
    ranks = list(pair)
    try:
        return {"ranks": ranks, "seconds": _seconds(comm)}
    except (ArrayCommError, AssertionError) as error:
        return {"ranks": ranks, "error": f"{type(error).__name__}: {error}"}


def _seconds(comm: Communicator) -> float:
    """Return the median seconds of an allreduce of 8 bytes; also tries a large one."""
    large = np.full(_LARGE, comm.rank + 1, np.float32)
    if not (comm.allreduce(large) == 3).all():
        raise AssertionError("allreduce of a large array gave a wrong sum")
    x = np.ones(1)
    samples = []
    for _ in range(_CALLS):
        begun = time.perf_counter()
        comm.allreduce(x)
        samples.append(time.perf_counter() - begun)
    return median(samples)
