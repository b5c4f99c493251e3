"""What the tests of reductions compare with, and the values that they reduce."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from arraycomm.testing._arrays.oracle import (
    BOOL,
    CASES,
    COMPLEX,
    DTYPES,
    FLOAT,
    INTEGER,
    NARROW,
    OPS,
    expected,
    family,
    same_bits,
    same_result,
)
from tests.support.on_ranks import LAUNCH
from tests.support.pairwise import EVERY

__all__ = [
    "BOOL", "CASES", "COMPLEX", "DTYPES", "FLOAT", "IDS", "INTEGER", "NARROW", "OPS", "USUAL",
    "expected", "family", "same_bits", "same_result", "sample",
]  # fmt: skip

# Every transport moves every dtype's bytes alike. A digest of `test_reproducible` is over reductions of all
# dtypes on each transport, and the laws draw them; so under an MPI these stand for the others.
USUAL = [
    dtype
    for dtype in DTYPES
    if EVERY
    or LAUNCH is None
    or dtype.name in {"bool", "int8", "float32", "bfloat16", "complex128"}
]

IDS = [f"{dtype.name}-{op}" for dtype, op in CASES]


def sample(dtype: np.dtype[Any], count: int, rank: int, op: str = "sum") -> np.ndarray[Any, Any]:
    """Values that are different on each rank, and for which the order of a sum matters."""
    return _sample(dtype, count, rank, 2 if op == "prod" else 3).copy()


@lru_cache(maxsize=64)
def _sample(dtype: np.dtype[Any], count: int, rank: int, powers: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng((rank, count, dtype.itemsize))
    if dtype in BOOL:
        return rng.integers(0, 2, count).astype(bool)
    if dtype in INTEGER:
        return rng.integers(0, 256, (count, dtype.itemsize), np.uint8).view(dtype).reshape(count)
    values = rng.standard_normal(count) * 10.0 ** rng.integers(-2, powers, count)
    if dtype in COMPLEX:
        return (values + 1j * rng.standard_normal(count)).astype(dtype)
    array = values.astype(dtype)
    special = [np.nan, np.inf, -np.inf, 0.0, float(np.finfo(np.float32).smallest_subnormal)]
    for place, value in enumerate(special):
        if count > 16:
            array[(place * 3 + rank) % count] = value
    return array
