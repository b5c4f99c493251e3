"""The floating-point mode of a thread: every fold runs in the IEEE default mode."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

_SMALLEST = math.ulp(0.0)
_SMALLEST_NORMAL = 2.0**-1022
_ONE = 1.0
_TIE = 2.0**-53
_ABOVE_TIE = 1.5 * 2.0**-53


def in_ieee_mode() -> bool:
    """Return whether this thread rounds to nearest even and keeps subnormal numbers."""
    return (
        _SMALLEST * _ONE != 0.0
        and _SMALLEST_NORMAL * 0.5 != 0.0
        and _ONE + _TIE == _ONE
        and _ONE + _ABOVE_TIE != _ONE
    )


@contextmanager
def ieee_mode() -> Iterator[None]:
    """Run a block in the IEEE default mode, then restore the thread's own mode."""
    if in_ieee_mode():
        yield
        return
    library = _math_library()
    saved = ctypes.create_string_buffer(256)
    library.fegetenv(saved)
    library.fesetenv(ctypes.c_void_p(-1))
    try:
        yield
    finally:
        library.fesetenv(saved)


@lru_cache(maxsize=1)
def _math_library() -> ctypes.CDLL:
    from ctypes.util import find_library

    return ctypes.CDLL(find_library("m"))
