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

__all__ = [
    "BOOL", "CASES", "COMPLEX", "DTYPES", "FLOAT", "IDS", "INTEGER", "NARROW", "OPS",
    "expected", "family", "same_bits", "same_result", "sample",
]  # fmt: skip

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
