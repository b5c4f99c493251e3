"""Reads the table of docs/semantics.md, and checks each of its cells."""

from __future__ import annotations

from itertools import permutations, product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._dtypes import BY_NAME, OPS, TABLE
from arraycomm.testing import run
from tests.support.oracle import expected, same_result, sample

PAGE = Path(__file__).parents[2] / "docs" / "semantics.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("|")
]
HEADING, _, *BODY = ROWS
CELLS = [
    (dtype, op, meaning)
    for names, *meanings in BODY
    for ops, meaning in zip(HEADING[1:], meanings, strict=True)
    for dtype, op in product(names.split(", "), ops.split(", "))
]


def _dtype(name: str) -> np.dtype[Any]:
    return BY_NAME[name].dtype if name in BY_NAME else np.dtype(name)


def _values(*values: Any, dtype: np.dtype[Any]) -> list[np.ndarray[Any, Any]]:
    """One array of one element for each rank."""
    return [np.array([value]).astype(dtype) for value in values]


def _reduced(arrays: list[np.ndarray[Any, Any]], op: str) -> np.ndarray[Any, Any]:
    first, *others = run(len(arrays), lambda comm: comm.allreduce(arrays[comm.rank], op))
    assert all(other.tobytes() == first.tobytes() for other in others)
    return first


def test_table_has_every_dtype_and_op() -> None:
    assert {(row.name, op) for row in TABLE for op in OPS} <= {cell[:2] for cell in CELLS}


@pytest.mark.parametrize(("name", "op", "meaning"), CELLS, ids=[f"{c[0]}-{c[1]}" for c in CELLS])
def test_cell(name, op, meaning) -> None:
    dtype = _dtype(name)
    if meaning == "TypeError":
        _check_refused(dtype, op)
        return
    arrays = [sample(dtype, 200, rank, op) for rank in range(3)]
    assert same_result(_reduced(arrays, op), expected(arrays, op), op)
    CHECKS[meaning](dtype, op)


def _check_refused(dtype: np.dtype[Any], op: str) -> None:
    x = np.zeros(3, dtype)

    def check(comm: Communicator) -> None:
        with pytest.raises(TypeError, match=f"op '{op}' is not defined for"):
            comm.allreduce(x, op)
        with pytest.raises(TypeError if comm.rank == 0 else ac.PeerError):
            comm.allreduce(x if comm.rank == 0 else 1, op if comm.rank == 0 else "sum")
        assert comm.allreduce(1) == 2

    run(2, check)


def _check_wraps(dtype: np.dtype[Any], op: str) -> None:
    largest = int(np.iinfo(dtype).max)
    other = 1 if op == "sum" else 2
    exact = largest + 1 if op == "sum" else largest * 2
    got = int(_reduced(_values(largest, other, dtype=dtype), op)[0])
    assert (got - exact) % 2 ** (8 * dtype.itemsize) == 0
    assert got != exact


def _check_rank_order(dtype: np.dtype[Any], op: str) -> None:
    big = float(2 / np.finfo(dtype).eps)
    values = (big, 1, -big) if op in ("sum", "mean") else (1e-30, 1e30, 3)
    straight = _reduced(_values(*values, dtype=dtype), op)
    want = expected(_values(*values, dtype=dtype), op)
    assert straight.tobytes() == want.tobytes()
    if op in ("sum", "mean"):
        assert straight[0] == 0
        assert _reduced(_values(big, -big, 1, dtype=dtype), op)[0] != 0


def _check_any_order(dtype: np.dtype[Any], op: str) -> None:
    limits = ml_dtypes.finfo(dtype)
    unit, largest = float(limits.eps), float(limits.max)
    for values in permutations((1.0, unit / 2, largest, -largest)):
        assert _reduced(_values(*values, dtype=dtype), op)[0] == 1
    for values in permutations((1.0, unit / 2, float(limits.smallest_subnormal))):
        assert _reduced(_values(*values, dtype=dtype), op)[0] == 1 + unit
    assert not np.signbit(_reduced(_values(-0.0, -0.0, dtype=dtype), op).real)[0]
    assert np.isnan(_reduced(_values(1.0, np.nan, dtype=dtype), op)[0])


def _check_parts(dtype: np.dtype[Any], op: str) -> None:
    got = _reduced(_values(*[complex(np.inf, 0)] * 3, dtype=dtype), op)
    assert got[0].real == np.inf
    assert got[0].imag == 0


def _check_product(dtype: np.dtype[Any], op: str) -> None:
    """Where the two products cancel, a fused one leaves what was rounded off."""
    x = complex(1 + np.finfo(dtype).eps, 1 + np.finfo(dtype).eps)
    assert _reduced(_values(x, x, dtype=dtype), op)[0].real == 0


def _check_one_rounding(dtype: np.dtype[Any], op: str) -> None:
    unit = float(ml_dtypes.finfo(dtype).eps)
    # Half a unit twice makes a whole one; rounded at each step, a tie goes to the even 1.
    values = (1.0, unit / 2, unit / 2)
    if op == "sum":
        assert float(_reduced(_values(*values, dtype=dtype), op)[0]) == 1 + unit
    if op == "mean":
        assert float(_reduced(_values(*values, 3 - unit, dtype=dtype), op)[0]) == 1
    largest = float(ml_dtypes.finfo(dtype).max)
    over = float(_reduced(_values(largest, largest, dtype=dtype), "sum")[0])
    assert np.isnan(over) if dtype == ml_dtypes.float8_e4m3fn else over == np.inf


def _check_exact(dtype: np.dtype[Any], op: str) -> None:
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
    else:
        limits = ml_dtypes.finfo(dtype)
        for rank in range(3):
            arrays = _values(*[1.0, 2.0, 3.0], dtype=dtype)
            arrays[rank][...] = np.nan
            assert np.isnan(_reduced(arrays, op).astype(float))[0]
    extremes = _values(limits.max, 1, limits.min, dtype=dtype)
    assert _reduced(extremes, op)[0] == (limits.min if op == "min" else limits.max)


def _check_truth(dtype: np.dtype[Any], op: str) -> None:
    name = {"min": "and", "max": "or"}.get(op, op)
    for a, b in product((False, True), repeat=2):
        want = {"and": a and b, "or": a or b, "xor": a != b}[name]
        assert _reduced(_values(a, b, dtype=dtype), op)[0] == want


def _check_bits(dtype: np.dtype[Any], op: str) -> None:
    want = {"and": 0b1000, "or": 0b1110, "xor": 0b0110}[op]
    assert _reduced(_values(0b1100, 0b1010, dtype=dtype), op)[0] == want


CHECKS = {
    "wraps": _check_wraps,
    "rank order": _check_rank_order,
    "any order": _check_any_order,
    "rank order, then divided": _check_rank_order,
    "part by part": _check_parts,
    "by its parts": _check_product,
    "one rounding": _check_one_rounding,
    "exact": _check_exact,
    "like and, or": _check_truth,
    "logical": _check_truth,
    "bitwise": _check_bits,
}
