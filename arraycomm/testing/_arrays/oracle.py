"""A second implementation of the reductions, with which results are compared.

It shares no code with the folds under test, so that it does not share their mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Final

import ml_dtypes
import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._dtypes import DType

NARROW: Final[list[DType]] = [
    np.dtype(t)
    for t in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
]
FLOAT: Final[list[DType]] = [np.dtype(t) for t in (np.float32, np.float64)]
COMPLEX: Final[list[DType]] = [np.dtype(t) for t in (np.complex64, np.complex128)]
INTEGER: Final[list[DType]] = [
    np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
]
BOOL: Final[list[DType]] = [np.dtype(bool)]
DTYPES: Final = [*BOOL, *INTEGER, *NARROW, *FLOAT, *COMPLEX]

OPS: Final = {
    "bool": ["min", "max", "and", "or", "xor"],
    "integer": ["sum", "prod", "min", "max", "and", "or", "xor"],
    "real": ["sum", "mean", "prod", "min", "max", "fsum"],
    "complex": ["sum", "mean", "prod", "fsum"],
}


def family(dtype: DType) -> str:
    """Return the key of `OPS` for the reductions that a dtype has."""
    if dtype in BOOL:
        return "bool"
    if dtype in INTEGER:
        return "integer"
    return "complex" if dtype in COMPLEX else "real"


CASES: Final = [(dtype, op) for dtype in DTYPES for op in OPS[family(dtype)]]


def expected(arrays: Sequence[Array], op: str) -> Array:
    """Fold arrays of one shape and dtype in their order; return a new array of that dtype."""
    dtype = arrays[0].dtype
    if op == "fsum":
        return _exactly(arrays)
    first, *others = (a.astype(np.float32) if dtype in NARROW else a for a in arrays)
    step = _STEPS[op]
    folded = first.copy()
    # On overflow NumPy warns; the contract wants infinity.
    with np.errstate(all="ignore"):
        for other in others:
            folded = np.asarray(step(folded, other))
        if op == "mean":
            folded = _divided(folded, len(arrays))
        return folded.astype(dtype)


def _exactly(arrays: Sequence[Array]) -> Array:
    """Sum element by element by `math.fsum`, but without its exceptions."""
    shape, dtype = arrays[0].shape, arrays[0].dtype
    part = np.empty(0, dtype).real.dtype
    columns = np.stack([np.ascontiguousarray(a).reshape(-1).view(part) for a in arrays], axis=-1)
    # By way of doubles and floats that are odd unless they are exact, so that nothing is rounded
    # twice.
    with np.errstate(all="ignore"):
        wide = [_exact_sum(column) for column in columns.astype(np.float64).tolist()]
        found, left = np.array([*wide, (0.0, 0.0)]).T
        if part != np.float64:
            found = _odd(found, left)
        if part in NARROW:
            single = found.astype(np.float32)
            found = _odd(single, found - single)
        return np.asarray(found[:-1].astype(part).view(dtype).reshape(shape))


def _exact_sum(numbers: list[float]) -> tuple[float, float]:
    """Return the rounded sum, and a number with the sign of what is left."""
    special = [number for number in numbers if not math.isfinite(number)]
    if special:
        return sum(special), 0.0
    try:
        found = math.fsum(numbers)
        return found, math.fsum([*numbers, -found])
    except OverflowError:
        exact = sum(map(Fraction, numbers))
    try:
        # Division of integers is rounded once.
        found = exact.numerator / exact.denominator
    except OverflowError:
        return math.inf if exact > 0 else -math.inf, 0.0
    return found, float((exact > found) - (exact < found))


def _odd(rounded: Array, left: Array) -> Array:
    bits = rounded.view(f"u{rounded.itemsize}")
    beside = np.nextafter(rounded, np.copysign(np.inf, left).astype(rounded.dtype))
    return np.where((left == 0) | np.isnan(left) | (bits & 1 == 1), rounded, beside)


def _smaller(a: Array, b: Array) -> Array:
    # If b is NaN, the comparison is false.
    return np.where(_is_nan(a) | (a <= b), a, b)


def _larger(a: Array, b: Array) -> Array:
    return np.where(_is_nan(a) | (a >= b), a, b)


def _is_nan(a: Array) -> Array:
    return np.asarray(a != a)  # noqa: PLR0124 - only NaN differs from itself


def _times(a: Array, b: Array) -> Array:
    if a.dtype not in COMPLEX:
        return np.asarray(a * b)
    # By parts, since NumPy's complex product may fuse a product with the sum.
    product = np.empty_like(a)
    product.real = a.real * b.real - a.imag * b.imag
    product.imag = a.real * b.imag + a.imag * b.real
    return product


def _divided(a: Array, count: int) -> Array:
    if a.dtype not in COMPLEX:
        return np.asarray(a / a.dtype.type(count))
    # By parts, since complex division turns an infinite part into NaN.
    quotient = np.empty_like(a)
    quotient.real = a.real / a.real.dtype.type(count)
    quotient.imag = a.imag / a.imag.dtype.type(count)
    return quotient


_STEPS: Final[dict[str, Callable[[Array, Array], Array]]] = {
    "sum": lambda a, b: a + b,
    "mean": lambda a, b: a + b,
    "prod": _times,
    "min": _smaller,
    "max": _larger,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}


def same_bits(a: Array, b: Array) -> bool:
    """Return whether arrays are equal bit for bit, except for the payload and sign of a NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype in COMPLEX:
        return same_bits(a.real.copy(), b.real.copy()) and same_bits(a.imag.copy(), b.imag.copy())
    if a.dtype not in (*NARROW, *FLOAT):
        return a.tobytes() == b.tobytes()
    nan = _is_nan(a)
    if not np.array_equal(nan, _is_nan(b)):
        return False
    return bool(a[~nan].tobytes() == b[~nan].tobytes())


def same_result(a: Array, b: Array, op: str) -> bool:
    """Tell the same as `same_bits`, except for the sign of a zero that min or max chose."""
    if op in ("min", "max") and a.dtype in (*NARROW, *FLOAT):
        a, b = (np.where(x == 0, np.zeros((), x.dtype), x) for x in (a, b))
    return same_bits(a, b)
