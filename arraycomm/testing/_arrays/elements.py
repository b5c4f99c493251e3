"""The elements of drawn arrays: given, special, or random from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import ml_dtypes
import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._dtypes import DType
from arraycomm.testing._arrays.dtypes import field_dtypes, kind_letter, real_dtype
from arraycomm.testing._arrays.layouts import Shape

_INT64: Final[DType] = np.dtype(np.int64)


@lru_cache(maxsize=256)
def specials(dtype: DType) -> tuple[Any, ...]:
    """Return the elements most likely to reveal errors, as Python values, the simplest first."""
    return _SPECIALS[kind_letter(dtype)](dtype)


def _special_integers(dtype: DType) -> tuple[Any, ...]:
    limits = np.iinfo(dtype)
    return tuple(dict.fromkeys((0, 1, max(-1, limits.min), int(limits.max), int(limits.min))))


def _special_floats(dtype: DType) -> tuple[Any, ...]:
    limits: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    largest, step = float(limits.max), float(limits.eps)
    normal, subnormal = float(limits.smallest_normal), float(limits.smallest_subnormal)
    wanted = (1 + step, 1 - step / 2, normal, subnormal, largest, math.inf)
    found = [0.0, -0.0, 1.0, -1.0, math.nan]
    for value in wanted:
        # float8_e4m3fn has no infinity.
        if round_to(value, dtype) == value:
            found += [value, -value]
    return tuple(found)


def _special_complex(dtype: DType) -> tuple[Any, ...]:
    parts = _special_floats(real_dtype(dtype))
    return (
        *(complex(part, 0.0) for part in parts),
        *(complex(parts[-number], part) for number, part in enumerate(parts)),
    )


def _special_records(dtype: DType) -> tuple[Any, ...]:
    if dtype.names is None:
        return (b"\0" * dtype.itemsize, b"\xff" * dtype.itemsize)
    columns = [specials(field) for field in field_dtypes(dtype)]
    return tuple(
        tuple(column[row % len(column)] for column in columns)
        for row in range(max(map(len, columns), default=0))
    )


_SPECIALS: Final[dict[str, Callable[[DType], tuple[Any, ...]]]] = {
    "b": lambda _: (False, True),
    "i": _special_integers,
    "f": _special_floats,
    "c": _special_complex,
    "m": lambda _: _special_integers(_INT64),  # the least is NaT
    "S": lambda dtype: (b"", b"a", b"\xff" * dtype.itemsize),
    "U": lambda dtype: ("", "a", "\U0010ffff" * (dtype.itemsize // 4)),
    "V": _special_records,
}


def round_to(value: float, dtype: DType) -> float:
    """Return the nearest number of this floating dtype."""
    if math.isnan(value):
        return math.nan  # without payload and sign, which repr does not show
    with np.errstate(all="ignore"):
        return float(np.asarray(value).astype(dtype))


def as_array(elements: Sequence[Any], dtype: DType) -> Array:
    """Return Python values as an array of one dimension."""
    if dtype.kind in "mM":
        return np.array(list(elements), _INT64).view(dtype)
    with np.errstate(all="ignore"):
        return np.array(list(elements), dtype)  # a structure's elements are tuples


def filled(dtype: DType, shape: Shape, elements: tuple[Any, ...], seed: int) -> Array:
    """Return an array that begins with the elements, and repeats them or continues at random."""
    count = math.prod(shape)
    if not count or not (elements or seed):
        return np.zeros(shape, dtype)
    first = as_array(elements[:count], dtype)
    if not seed:
        return np.resize(first, shape)
    array = random_elements(dtype, count, np.random.default_rng(seed))
    array[: len(first)] = first
    return array.reshape(shape)


def random_elements(dtype: DType, count: int, rng: np.random.Generator) -> Array:
    """Return random elements of the whole range, a quarter of them special."""
    if dtype.names is not None:
        return _random_records(dtype, count, rng)
    array = _RANDOM[kind_letter(dtype)](dtype, count, rng)
    special = as_array(specials(dtype), dtype)
    chosen = rng.random(count) < 0.25
    array[chosen] = special[rng.integers(0, len(special), int(chosen.sum()))]
    return array


def _random_bits(dtype: DType, count: int, rng: np.random.Generator) -> Array:
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()


def _random_floats(dtype: DType, count: int, rng: np.random.Generator) -> Array:
    """Return floats, half of any exponent, half of magnitudes at which summation order matters."""
    bits = _random_bits(dtype, count, rng)
    near = rng.standard_normal(count) * 10.0 ** rng.integers(-2, 3, count)
    with np.errstate(all="ignore"):
        chosen = np.isnan(bits) | (rng.random(count) < 0.5)
        bits[chosen] = near.astype(dtype)[chosen]
    return bits


def _random_records(dtype: DType, count: int, rng: np.random.Generator) -> Array:
    array = np.zeros(count, dtype)
    for name in dtype.names or ():
        field = array[name]
        field[...] = random_elements(dtype[name].base, field.size, rng).reshape(field.shape)
    return array


def _random_text(dtype: DType, count: int, rng: np.random.Generator) -> Array:
    width = dtype.itemsize // 4
    return rng.integers(0, 0x250, (count, width), np.uint32).view(dtype).reshape(count)


_RANDOM: Final[dict[str, Callable[[DType, int, np.random.Generator], Array]]] = {
    "b": lambda _, count, rng: rng.integers(0, 2, count).astype(bool),
    "i": _random_bits,
    "f": _random_floats,
    "c": lambda dtype, count, rng: _random_floats(real_dtype(dtype), 2 * count, rng).view(dtype),
    "m": _random_bits,
    "S": _random_bits,
    "U": _random_text,
    "V": _random_bits,
}
