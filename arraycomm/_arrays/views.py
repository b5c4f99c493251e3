"""Any array as a `BufferView`: every array that the library reads enters here."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import BufferView, Reader
from arraycomm._arrays.frameworks import BY_READER, find_reader
from arraycomm._arrays.frameworks.base import ByAddress
from arraycomm._arrays.protocols import read_foreign

# Readers of the types met so far. A type that no framework claims is not kept: ctypes and others
# create such types at run time, and this table would keep them alive for ever.
_READERS: Final[dict[type, Reader]] = {}

# The elements of a view of which only framework and device are known.
NOTHING: Final = np.empty(0)


def view(x: Any, name: str = "x") -> BufferView:
    """Return `x` as host memory: its own if it is on the host and readable as it is, else a copy.

    Raises `TypeError`, `ValueError`, `OverflowError` or `BufferError`. Messages call `x` by `name`,
    and do not name the operation: the caller does that.
    """
    return (_READERS.get(type(x)) or reader_of(x))(x, name)


def reader_of(x: Any) -> Reader:
    """Return what reads arrays of this type; the protocols, if no framework claims it."""
    kind = type(x)
    reader = _READERS.get(kind) or find_reader(kind)
    if reader is None:
        return read_foreign
    _READERS[kind] = reader
    return reader


def by_address(x: Any) -> ByAddress | None:
    """Return how prepared calls read and make arrays like x; None if they do by views."""
    framework = BY_READER.get(reader_of(x))
    return None if framework is None else framework.by_address(type(x))


def result_prototype(x: Any, name: str) -> BufferView:
    """Return a view of `x` from which only a result's framework and device are taken.

    Its elements are `NOTHING` if the framework can tell the device without them. Then nothing is
    copied from a device, and a tensor that requires gradients is accepted.
    """
    reader = reader_of(x)
    framework = BY_READER.get(reader)
    if framework is None or framework.device_of is None:
        return reader(x, name)
    return BufferView(NOTHING, framework.name, x, True, True, framework.device_of(x))
