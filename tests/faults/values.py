"""What ranks pass to the calls of a program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import numpy as np

# NumPy loads it when it is first used, for which a rank with too little memory has none.
import numpy.random

from arraycomm.testing._arrays.oracle import BOOL
from tests.faults.programs import DTYPES, Call

Array = np.ndarray[Any, Any]

ON_PURPOSE: Final = "on purpose"


class OnPurposeError(Exception):
    """What a rank raises that fails by itself."""


def argument(call: Call, rank: int, size: int) -> Any:
    """Return the array, tree or object that a rank passes."""
    if call.wrong == "list":
        return [1.0, 2.0]
    if call.wrong == "object dtype":
        return np.array([{}, {}])
    if call.wrong == "unpicklable":
        return threading.Lock()
    if call.operation.endswith("_object"):
        return {"number": call.number, "rank": rank, "text": "x" * (call.number * 7919 % 40_000)}
    if passes_nothing(call, rank) or not call.dtype:
        return None
    rows: tuple[int, ...] = ()
    if call.operation in ("scatter", "alltoall", "reduce_scatter"):
        rows = (size,)
    elif call.operation in ("allgatherv", "gatherv"):
        rows = ((call.number + rank) % 4,)
    elif call.operation == "alltoallv":
        rows = (sum(counts_of(call, rank, size)),)
    return values(call, (*rows, *call.shape), rank)


def passes_nothing(call: Call, rank: int) -> bool:
    """Return whether a rank passes no array to a call that takes it from the root."""
    if call.operation == "synchronize":
        return rank != call.root and (call.number + rank) % 3 == 0
    return call.operation in ("bcast", "scatter") and rank != call.root


def values(call: Call, shape: tuple[int, ...], rank: int) -> Array:
    """Return values that no other rank and no other call passes."""
    return _values(call.number, call.dtype, shape, rank)


@lru_cache(64)
def _values(number: int, name: str, shape: tuple[int, ...], rank: int) -> Array:
    dtype = DTYPES[name]
    random = np.random.default_rng((number, rank, dtype.itemsize))
    raw = random.integers(0, 2 if dtype in BOOL else 120, shape)
    if dtype.kind == "c":
        return np.asarray(raw + 1j * random.integers(0, 120, shape), dtype)
    scale = 1 if dtype.kind in "biu" else 0.37
    return np.asarray(raw * scale).astype(dtype)


def counts_of(call: Call, rank: int, size: int) -> list[int]:
    return [(call.number + rank + 2 * other) % 3 for other in range(size)]


def custom_op(*, raises: bool) -> Callable[[Any, Any], Any]:
    """Return a reduction of the program's own: under one name, whether it raises or not."""

    def fold(a: Any, b: Any) -> Any:
        if raises:
            raise OnPurposeError(ON_PURPOSE)
        return 2 * a + b

    return fold
