"""What other ranks announce, checked before memory is taken for it or anything is made of it."""

from __future__ import annotations

import math
import os
import pickle
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from arraycomm._errors import TransportError

# What the unpickler itself raises of bytes that are no pickle.
_NO_PICKLE: Final = (pickle.UnpicklingError, EOFError, ValueError, LookupError, OverflowError)
# No pickle of fewer bytes takes all memory.
_SMALL: Final = 1 << 20


def malformed(rank: int, what: str) -> TransportError:
    """Return the error for something that a rank cannot have meant."""
    return TransportError(
        f"rank {rank} announced {what}: its message is malformed; check that all ranks run the "
        "same version of arraycomm, and the memory and network of its node"
    )


def check_size(rank: int, shape: Sequence[int], itemsize: int = 1) -> None:
    """Raise if no array of this shape can be received."""
    if any(length < 0 for length in shape):
        raise malformed(rank, f"the shape {tuple(shape)}")
    nbytes = math.prod(shape) * itemsize
    if nbytes > node_bytes():
        raise malformed(rank, f"{nbytes} bytes, more than the memory of this machine")
    # NumPy multiplies the other lengths also if one is 0.
    if math.prod(filter(None, shape)) * itemsize > sys.maxsize:
        raise malformed(rank, f"the shape {tuple(shape)}")


def check_payload(rank: int, length: int, expected: int) -> None:
    """Raise if more or less came with a rank's header than its array needs."""
    if length != expected:
        raise malformed(rank, f"{length} bytes of an array that has {expected}")


def check_table(rank: int, counts: Sequence[int], rows: int) -> None:
    """Raise if the counts by which a rank shares out its rows cannot be."""
    if min(counts) < 0 or sum(counts) != rows:
        raise malformed(rank, f"counts {list(counts)} of {rows} rows")


def check_pickle(rank: int, data: Any, error: Exception) -> None:
    """Raise in place of an error of the unpickler, unless it is one of the object's own code."""
    trace = error.__traceback__
    by_unpickler = trace is not None and trace.tb_next is None
    kinds = (*_NO_PICKLE, MemoryError) if len(data) < _SMALL else _NO_PICKLE
    # Of a method that the unpickler calls; a class that is not found is another error.
    lacks_method = isinstance(error, AttributeError) and "object has no attribute" in str(error)
    if by_unpickler and (lacks_method or isinstance(error, kinds)):
        raise malformed(rank, f"an object that is no pickle ({error})") from None


@cache
def node_bytes() -> int:
    """Return the bytes of memory of this node."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
