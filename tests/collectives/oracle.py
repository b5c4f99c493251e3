"""The reductions once more, written as the contract says them: element by element, slowly."""

from __future__ import annotations

from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np

NARROW = [
    np.dtype(t)
    for t in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
]
FLOAT = [np.dtype(t) for t in (np.float32, np.float64)]
COMPLEX = [np.dtype(t) for t in (np.complex64, np.complex128)]
INTEGER = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
BOOL = [np.dtype(bool)]
DTYPES = [*BOOL, *INTEGER, *NARROW, *FLOAT, *COMPLEX]

OPS = {
    "bool": ["min", "max", "and", "or", "xor"],
    "integer": ["sum", "prod", "min", "max", "and", "or", "xor"],
    "real": ["sum", "mean", "prod", "min", "max"],
    "complex": ["sum", "mean", "prod"],
}


def family(dtype: np.dtype[Any]) -> str:
    if dtype in BOOL:
        return "bool"
    if dtype in INTEGER:
        return "integer"
    return "complex" if dtype in COMPLEX else "real"


CASES = [(dtype, op) for dtype in DTYPES for op in OPS[family(dtype)]]
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
    return type(a)(complex(real, imag))


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


def expected(arrays: list[np.ndarray[Any, Any]], op: str) -> np.ndarray[Any, Any]:
    """Fold arrays of one shape and dtype in their order."""
    dtype = arrays[0].dtype
    wide = [a.astype(np.float32) if dtype in NARROW else a for a in arrays]
    if dtype in BOOL:
        op = {"min": "and", "max": "or"}.get(op, op)
    result = np.empty(arrays[0].shape, wide[0].dtype)
    with np.errstate(all="ignore"):
        for index in np.ndindex(result.shape):
            value = reduce(_STEPS[op], [a[index] for a in wide])
            if op == "mean" and np.iscomplexobj(value):
                part = value.real.dtype.type
                count = part(len(arrays))
                value = complex(part(value.real / count), part(value.imag / count))
            elif op == "mean":
                value = value / type(value)(len(arrays))
            result[index] = value
        return result.astype(dtype)


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Tell whether arrays are equal bit for bit, but for the payload and sign of a NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype in (*NARROW, *FLOAT):
        nan = np.isnan(a.astype(np.float64))
        if not np.array_equal(nan, np.isnan(b.astype(np.float64))):
            return False
        return a[~nan].tobytes() == b[~nan].tobytes()
    if a.dtype in COMPLEX:
        return same_bits(a.real.copy(), b.real.copy()) and same_bits(a.imag.copy(), b.imag.copy())
    return a.tobytes() == b.tobytes()


def same_result(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], op: str) -> bool:
    """`same_bits`, but for the sign of a zero that min or max chose."""
    if op in ("min", "max") and a.dtype in (*NARROW, *FLOAT):
        a, b = (np.where(x == 0, np.zeros((), x.dtype), x) for x in (a, b))
    return same_bits(a, b)


def sample(dtype: np.dtype[Any], count: int, rank: int, op: str = "sum") -> np.ndarray[Any, Any]:
    """Values that are different on each rank, and for which the order of a sum matters."""
    rng = np.random.default_rng((rank, count, dtype.itemsize))
    if dtype in BOOL:
        return rng.integers(0, 2, count).astype(bool)
    if dtype in INTEGER:
        return rng.integers(0, 256, (count, dtype.itemsize), np.uint8).view(dtype).reshape(count)
    values = rng.standard_normal(count) * 10.0 ** rng.integers(-2, 2 if op == "prod" else 3, count)
    if dtype in COMPLEX:
        return (values + 1j * rng.standard_normal(count)).astype(dtype)
    array = values.astype(dtype)
    special = [np.nan, np.inf, -np.inf, 0.0, float(np.finfo(np.float32).smallest_subnormal)]
    for place, value in enumerate(special):
        if count > 16:
            array[(place * 3 + rank) % count] = value
    return array
