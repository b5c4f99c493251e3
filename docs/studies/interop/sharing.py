"""Does an array share memory with what `exchange` makes of it?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from arraycomm._arrays.buffer import allocate
from arraycomm._arrays.exchange import exchange
from arraycomm._arrays.views import view
from arraycomm._dtypes import BY_NAME

FRAMEWORKS = ("numpy", "torch", "jax", "array_api_strict")


def sample(name: str) -> Any:
    """Return a small NumPy array of a dtype."""
    array = allocate((4, 16), BY_NAME[name].dtype)
    array[...] = np.arange(64).reshape(4, 16) % 2
    return array


def same_memory(x: Any, y: Any) -> bool:
    """Return whether two arrays of any frameworks share memory."""
    return np.shares_memory(view(x, "interop").array, view(y, "interop").array)


def outcome(x: Any, to: Any) -> str | None:
    """Return "shares", the reason for a copy, or None if the framework lacks the dtype."""
    try:
        there = exchange(x, to, copy=False)
    except BufferError as error:
        assert not same_memory(exchange(x, to), x)
        return str(error).removeprefix("exchange: copy=False, but ").partition(";")[0]
    except TypeError:
        return None
    assert same_memory(there, x)
    return "shares"


def make(framework: str, name: str) -> Any:
    """Return a small array of a framework, or None if the framework lacks the dtype."""
    try:
        return exchange(sample(name), framework)
    except TypeError:
        return None


def _read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


MEMORY: dict[str, Callable[[Any], Any]] = {
    "every second column": lambda a: a[:, ::2],
    "transposed": lambda a: a.T,
    "one row, repeated": lambda a: np.lib.stride_tricks.as_strided(a, strides=(0, 4)),
    "reversed": lambda a: a[::-1],
    "read-only": _read_only,
    "contiguous, not aligned to 64 bytes": lambda a: a.reshape(-1)[1:],
    "big-endian": lambda a: a.astype(">f4"),
}
