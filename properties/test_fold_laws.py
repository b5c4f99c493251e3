"""Laws of folds: neither blocks nor conversions by bits show in any result."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arraycomm._dtypes import name_of
from arraycomm._folds import by_numpy
from arraycomm._folds.float16 import round_to_half, widen_half
from arraycomm.testing import ArrayCase
from arraycomm.testing._arrays.oracle import CASES, expected
from arraycomm.testing.conformance._checks import check_elements


@given(
    case=st.sampled_from(CASES),
    count=st.integers(1, 60),
    ranks=st.integers(1, 4),
    seed=st.integers(1, 2**24 - 1),
    block=st.integers(1, 20),
)
def test_block_size_does_not_matter(case, count, ranks, seed, block) -> None:
    dtype, op = case
    rows = [ArrayCase(name_of(dtype), (count,), seed=seed + r).numpy() for r in range(ranks)]
    whole, outs = np.empty(count, dtype), [np.empty(count, dtype) for _ in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_numpy, "block_length", lambda _: block)
        by_numpy.fold(op, dtype, rows, whole)
        by_numpy.prefixes(op, dtype, rows, outs)
        # In two parts, if there are as many rows.
        few = ranks // 2 if by_numpy.goes_on(op) else 0
        total = np.empty(count, by_numpy.total_dtype(dtype)) if few else None
        if total is not None:
            by_numpy.fold_on(op, dtype, None, 0, rows[:few], total, more=True)
        by_numpy.fold_on(op, dtype, total, few, rows[few:], result := whole.copy(), more=False)
    check_elements(result, expected(rows, op), op)
    check_elements(whole, expected(rows, op), op)
    for number, out in enumerate(outs, 1):
        check_elements(out, expected(rows[:number], op), op)


@given(seed=st.integers(0, 2**24 - 1), large=st.booleans())
def test_halves_are_converted_as_numpy_does(seed, large) -> None:
    """Random bits have every exponent; with one number too large, whole rows are converted otherwise."""
    bits = np.random.default_rng(seed).integers(0, 2**32, 500, np.uint32)
    wide = bits.view(np.float32)
    with np.errstate(all="ignore"):
        wide = wide if large else np.ldexp(wide, -np.frexp(wide)[1] - (bits % 40).astype(np.int32))
        wide = np.where(np.isnan(wide), 0, wide).astype(np.float32)
        want, got = wide.astype(np.float16), np.empty(500, np.float16)
        round_to_half(got, wide.copy())
    assert got.tobytes() == want.tobytes()
    back = np.empty(500, np.float32)
    widen_half(back, want)
    assert back.tobytes() == want.astype(np.float32).tobytes()
