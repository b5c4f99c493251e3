"""Shapes and elements to draw."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy as Strategy

from arraycomm._dtypes import DType
from arraycomm.testing._arrays.dtypes import (
    dtype_name,
    dtype_of,
    field_dtypes,
    kind_letter,
    real_dtype,
)
from arraycomm.testing._arrays.elements import round_to, specials
from arraycomm.testing._arrays.layouts import Shape


def shapes(*, large: bool = True) -> Strategy[Shape]:
    """Draw shapes of arrays.

    Parameters
    ----------
    large : bool
        Also draw shapes of up to 30,000 elements, which are too many for one small message.

    Returns
    -------
    SearchStrategy of tuple of int
        From 0 to 4 dimensions, with lengths of 1, and lengths of 0 anywhere; shrinks to `()`, and
        next to `(1,)`.
    """
    side = st.integers(1, 5)
    kinds: list[Strategy[Shape]] = [
        st.just(()),
        st.tuples(st.integers(1, 40)),
        *(st.tuples(*[side] * ndim) for ndim in (2, 3, 4)),
        st.tuples(st.integers(0, 3), st.lists(side, max_size=3)).map(_with_zero),
    ]
    if large:
        # Drawn number by number, as small ones are, so that they shrink to where a failure begins.
        kinds += [
            st.tuples(st.integers(1, 20_000)),
            st.tuples(st.integers(1, 300), st.integers(1, 100)),
        ]
    return st.one_of(kinds)


def _with_zero(drawn: tuple[int, list[int]]) -> Shape:
    place, sides = drawn
    return (*sides[:place], 0, *sides[place:])


def elements(dtype: Any) -> Strategy[Any]:
    """Draw elements of a dtype, as Python values that the dtype represents exactly.

    Parameters
    ----------
    dtype : str or numpy.dtype
        The dtype.

    Returns
    -------
    SearchStrategy
        bool, int, float or complex, including the extremes, NaN, infinities, zeros of both signs
        and subnormals; int for dates (the least is NaT), str or bytes for strings, tuples for
        structures. Shrinks to 0.
    """
    return _elements(dtype_of(dtype_name(dtype)))


@lru_cache(maxsize=256)
def _elements(dtype: DType) -> Strategy[Any]:
    ordinary = _ELEMENTS[kind_letter(dtype)](dtype)
    return st.one_of(ordinary, st.sampled_from(specials(dtype)))


def _integers(dtype: DType) -> Strategy[Any]:
    limits = np.iinfo(dtype)
    return st.integers(int(limits.min), int(limits.max))


def _floats(dtype: DType) -> Strategy[Any]:
    limits: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    if dtype.itemsize >= 4:
        drawn = st.floats(width=64 if dtype.itemsize == 8 else 32)
    else:
        largest = float(limits.max)
        drawn = st.floats(-largest, largest, width=32)
    return drawn.map(lambda value: round_to(value, dtype))


def _complex(dtype: DType) -> Strategy[Any]:
    part = _elements(real_dtype(dtype))
    return st.builds(complex, part, part)


def _records(dtype: DType) -> Strategy[Any]:
    if dtype.names is None:
        return st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize)
    return st.tuples(*map(_elements, field_dtypes(dtype)))


_ELEMENTS: Final[dict[str, Callable[[DType], Strategy[Any]]]] = {
    "b": lambda _: st.booleans(),
    "i": _integers,
    "f": _floats,
    "c": _complex,
    "m": lambda _: st.integers(-(2**63), 2**63 - 1),
    "S": lambda dtype: st.binary(max_size=dtype.itemsize),
    "U": lambda dtype: st.text(max_size=dtype.itemsize // 4),
    "V": _records,
}
