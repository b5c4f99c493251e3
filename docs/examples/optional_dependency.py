"""A library to which arraycomm is an optional dependency, with types that strict checkers accept."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arraycomm import Communicator

HAS_RANKS = find_spec("arraycomm") is not None


def mean(x: list[float], *, comm: Communicator | None = None) -> float:
    """Return the mean of all ranks' numbers; without arraycomm, of these alone."""
    if not HAS_RANKS:
        if comm is not None:
            raise ImportError("comm needs arraycomm: pip install 'yourlibrary[ranks]'")
        return sum(x) / len(x)
    import arraycomm as ac

    with ac.borrow(comm) as ranks:
        total, count = ranks.allreduce(sum(x)), ranks.allreduce(len(x))
    return total / count


if __name__ == "__main__":
    assert mean([0.0, 1.0, 2.0, 3.0]) == 1.5
