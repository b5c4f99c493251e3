"""What the laws are checked on: dtypes with their extremes, layouts, and numbers of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.collectives.oracle import CASES, COMPLEX, DTYPES, FLOAT, NARROW

Array = np.ndarray[Any, Any]

sizes = st.integers(1, 5)
cases = st.sampled_from(CASES)
dtypes = st.sampled_from(DTYPES)
# Empty, one element, what travels in a header, and what takes the ways of large messages.
counts = st.sampled_from([0, 1, 2, 7, 33, 5_000, 20_000])
layouts = st.sampled_from(["contiguous", "sliced", "negative", "transposed"])

_SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 5e-324, 1e-40, 3e38, 1e308, 1 / 3]


@st.composite
def per_rank_arrays(draw: st.DrawFn, size: int, dtype: np.dtype[Any]) -> list[Array]:
    """One array for each rank, of one shape, with values that differ between ranks."""
    count = draw(counts)
    seed = draw(st.integers(0, 2**32 - 1))
    return [_fill(count, dtype, np.random.default_rng((seed, rank))) for rank in range(size)]


def _fill(count: int, dtype: np.dtype[Any], rng: np.random.Generator) -> Array:
    if dtype in (*FLOAT, *NARROW, *COMPLEX):
        values = np.where(
            rng.random(count) < 0.3,
            rng.choice(_SPECIAL, count),
            rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count),
        )
        with np.errstate(all="ignore"):
            if dtype in COMPLEX:
                return (values + 1j * rng.permutation(values)).astype(dtype)
            return values.astype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    return rng.integers(0, 256, (count, dtype.itemsize), np.uint8).view(dtype).reshape(count)


def laid_out(array: Array, layout: str) -> Array:
    """Return the same logical array in another layout."""
    if layout == "sliced":
        return np.repeat(array, 3)[::3]
    if layout == "negative":
        return array[::-1].copy()[::-1]
    if layout == "transposed":
        return np.stack([array, array], axis=1)[:, 1]
    return array.copy()
