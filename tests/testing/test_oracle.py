"""What tests and laws compare reductions with is itself what the contract says, number by number."""

from __future__ import annotations

import itertools
from functools import reduce
from typing import Any

import numpy as np
import pytest

from arraycomm.testing._elements import as_array, random_elements, specials
from arraycomm.testing._oracle import BOOL, CASES, FLOAT, NARROW, expected, same_bits, same_result

IDS = [f"{dtype.name}-{op}" for dtype, op in CASES]


def _smaller(a: Any, b: Any) -> Any:
    return a if np.isnan(a) or a <= b else b


def _larger(a: Any, b: Any) -> Any:
    return a if np.isnan(a) or a >= b else b


def _times(a: Any, b: Any) -> Any:
    if not np.iscomplexobj(a):
        return a * b
    part = a.real.dtype.type
    real = part(part(a.real * b.real) - part(a.imag * b.imag))
    imag = part(part(a.real * b.imag) + part(a.imag * b.real))
    return _of_parts(type(a), real, imag)


def _of_parts(kind: type, real: Any, imag: Any) -> Any:
    # Not complex(real, imag), which goes by way of float64.
    return np.array([real, imag]).view(kind)[0]


_STEPS = {
    "sum": lambda a, b: a + b,
    "mean": lambda a, b: a + b,
    "prod": _times,
    "min": _smaller,
    "max": _larger,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}


def _one_by_one(arrays: list[np.ndarray[Any, Any]], op: str) -> np.ndarray[Any, Any]:
    """Fold numbers in the order of their arrays, each as a scalar of its own."""
    dtype = arrays[0].dtype
    wide = [a.astype(np.float32) if dtype in NARROW else a for a in arrays]
    if dtype in BOOL:
        op = {"min": "and", "max": "or"}.get(op, op)
    result = np.empty(arrays[0].shape, wide[0].dtype)
    with np.errstate(all="ignore"):
        for index in np.ndindex(result.shape):
            value = reduce(_STEPS[op], [a[index] for a in wide])
            if op == "mean" and np.iscomplexobj(value):
                count = value.real.dtype.type(len(arrays))
                value = _of_parts(type(value), value.real / count, value.imag / count)
            elif op == "mean":
                value = value / type(value)(len(arrays))
            result[index] = value
        return result.astype(dtype)


def _all_pairs(dtype: np.dtype[Any]) -> list[np.ndarray[Any, Any]]:
    """Every special element with every other, and a third of them in turn."""
    pairs = list(itertools.product(specials(dtype), repeat=2))
    columns = [*zip(*pairs, strict=True)]
    return [as_array(c, dtype) for c in (*columns, columns[0][::-1])]


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=IDS)
def test_fold_of_arrays_is_the_fold_of_their_elements(dtype, op) -> None:
    for shape in ((), (0,), (2, 0), (1, 3)):
        found = expected([np.ones(shape, dtype)] * 3, op)
        assert (found.shape, found.dtype) == (shape, dtype)
    rng = np.random.default_rng(dtype.itemsize)
    random = [random_elements(dtype, 200, rng) for _ in range(5)]
    before = [array.tobytes() for array in random]
    for arrays in (_all_pairs(dtype), random, random[:2], random[:1]):
        assert same_bits(expected(arrays, op), _one_by_one(arrays, op))
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
