"""What tests and laws compare reductions with: it changes nothing, and tells results apart."""

from __future__ import annotations

import numpy as np
import pytest

from arraycomm.testing._arrays.elements import random_elements
from arraycomm.testing._arrays.oracle import CASES, FLOAT, NARROW, expected, same_bits, same_result

IDS = [f"{dtype.name}-{op}" for dtype, op in CASES]


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=IDS)
def test_fold_keeps_shapes_and_what_it_gets(dtype, op) -> None:
    """Laws compare its numbers with those of the library, and test_semantics with some by hand."""
    for shape in ((), (0,), (2, 0), (1, 3)):
        found = expected([np.ones(shape, dtype)] * 3, op)
        assert (found.shape, found.dtype) == (shape, dtype)
    random = [random_elements(dtype, 200, np.random.default_rng(rank)) for rank in range(3)]
    before = [array.tobytes() for array in random]
    expected(random, op)
    assert [array.tobytes() for array in random] == before
    assert not np.shares_memory(expected(random[:1], op), random[0])


@pytest.mark.parametrize("dtype", [*FLOAT, *NARROW], ids=str)
def test_every_nan_is_the_same_and_nothing_else_is(dtype) -> None:
    nan = np.full(2, np.nan, dtype)
    assert same_bits(nan, nan.copy())
    assert same_bits(nan, -nan)
    assert not same_bits(nan, np.ones(2, dtype))
    assert not same_bits(np.zeros(1, dtype), -np.zeros(1, dtype))
    assert not same_bits(np.zeros(1, dtype), np.zeros((), dtype))
    assert not same_bits(np.zeros(1, np.float32), np.zeros(1, np.int32))


def test_only_min_and_max_may_choose_among_zeros() -> None:
    for op, same in (("min", True), ("max", True), ("sum", False)):
        assert same_result(np.zeros(1), -np.zeros(1), op) is same
