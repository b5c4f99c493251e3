"""Dtypes and reductions to draw."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy as Strategy

from arraycomm._dtypes import OPS, TABLE, check_reducible
from arraycomm.testing._arrays.dtypes import MOVABLE, dtype_name, dtype_of

# Examples shrink to the first of them.
NAMES: Final = ("float32", *(row.name for row in TABLE if row.name != "float32"))


def dtypes(op: str | None = None, *, movable: bool = False) -> Strategy[str]:
    """Draw the names of dtypes.

    Parameters
    ----------
    op : str, optional
        Draw only dtypes that have this reduction.
    movable : bool
        Draw dtypes without arithmetic as well: dates, fixed-width strings, structures.

    Returns
    -------
    SearchStrategy of str
        "bool", "int8" … "uint64", "float16" … "float64", "bfloat16", "float8_e4m3fn",
        "float8_e5m2", "complex64", "complex128"; shrinks to "float32".

    Examples
    --------
    >>> from arraycomm.testing.strategies import dtypes
    >>> dtypes("mean")  # doctest: +NORMALIZE_WHITESPACE
    sampled_from(['float32', 'float16', 'float64', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2',
    'complex64', 'complex128'])
    """
    if op is not None:
        return st.sampled_from([name for name in NAMES if _is_reduction(name, _known_op(op))])
    return st.sampled_from((*NAMES, *MOVABLE) if movable else NAMES)


def ops(dtype: Any = None) -> Strategy[str]:
    """Draw the names of reductions: all of them, or those that a dtype has.

    Parameters
    ----------
    dtype : str or numpy.dtype, optional
        The dtype that must have the reduction.

    Returns
    -------
    SearchStrategy of str
        Shrinks to "sum", or to the first that the dtype has.
    """
    if dtype is None:
        return st.sampled_from(OPS)
    name = dtype_name(dtype)
    found = [op for op in OPS if _is_reduction(name, op)]
    if not found:
        raise InvalidArgument(f"{name} has no reductions; it can only be moved")
    return st.sampled_from(found)


def reductions() -> Strategy[tuple[str, str]]:
    """Draw pairs of a dtype and a reduction that it has.

    Returns
    -------
    SearchStrategy of (str, str)
        The names of dtype and reduction; shrinks to `("float32", "sum")`.
    """
    return st.sampled_from([(name, op) for name in NAMES for op in OPS if _is_reduction(name, op)])


def _is_reduction(name: str, op: str) -> bool:
    try:
        check_reducible(dtype_of(name), op)
    except TypeError:
        return False
    return True


def _known_op(op: str) -> str:
    if op not in OPS:
        raise InvalidArgument(f"op must be one of {', '.join(OPS)}; got {op!r}")
    return op
