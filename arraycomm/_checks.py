"""What a number that is passed may be: NumPy's are taken as Python's own are."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any, Final

import numpy as np

# Python writes no longer integers in decimal, as errors do.
_MOST_BITS: Final = 14_000
# Virtual ranks: a step of more has more rounds than anybody waits for.
MOST_RANKS: Final = 1 << 20


def check_integer(value: Any, wanted: str) -> int:
    """Return a value as an integer, or raise an error that begins with what is wanted."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{wanted}; got {value!r}") from None
    if (bits := number.bit_length()) > _MOST_BITS:
        raise ValueError(f"{wanted} of at most {_MOST_BITS} bits; got one of {bits}")
    return number


def check_at_least(value: Any, least: int, name: str, most: int | None = None) -> int:
    """Return a number of something, within limits, or raise; True would be meant otherwise."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer; got {value!r}")
    number = check_integer(value, f"{name} must be an integer")
    if number < least or (most is not None and number > most):
        limits = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} must be {limits}; got {number}")
    return number


def check_several(value: Any, wanted: str) -> list[int]:
    """Return an integer, or several, as integers, or raise; see `check_integer`."""
    try:
        return [check_integer(each, wanted) for each in (value if np.iterable(value) else [value])]
    except TypeError:
        raise TypeError(f"{wanted}; got {value!r}") from None


def check_bool(value: Any, name: str) -> bool:
    """Return a value as a bool, or raise; that of any other object might not be what is meant."""
    if not isinstance(value, bool | np.bool):
        raise TypeError(f"{name} must be True or False; got {value!r}")
    return bool(value)


def check_seconds(value: Any, name: str = "timeout", *, or_zero: bool = False) -> float | None:
    """Return a number of seconds as it may be waited for, or None, which is for ever; or raise."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds or None; got {value!r}")
    try:
        seconds = float(value)
    except OverflowError:
        kind = type(value).__name__
        raise ValueError(
            f"{name} must be a number of seconds or None; got a {kind} that no float can hold"
        ) from None
    if not (seconds > 0 or (or_zero and seconds == 0)):
        raise ValueError(f"{name} must be positive, or None; got {value!r}")
    return seconds
