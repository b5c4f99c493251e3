"""Which algorithm a reduction takes: one decision for the call and for `explain`."""

from __future__ import annotations

import enum
from typing import Final

from arraycomm._dtypes import DType
from arraycomm._reduce import chain
from arraycomm._reduce.segment import is_preferred
from arraycomm._transports.base import Link, Transport

# Up to this many bytes in all, every device gathers everything and folds it by itself.
GATHER_BYTES: Final = 64 << 10
# Larger reductions go chunk by chunk, small enough for the cache that cores share.
CHUNK_BYTES: Final = 4 << 20


class Algorithm(enum.StrEnum):
    """How the elements of a reduction move."""

    LOCAL = "local"
    HEADER = "header"
    GATHER = "gather"
    SLICES = "slices"
    CHAIN = "chain"
    SEGMENT = "segment"
    NATIVE = "native"
    FUNCTION = "function"


def select(link: Link, op: object, dtype: DType, nbytes: int) -> Algorithm:
    """Decide how a link reduces bytes; the same arguments give the same answer on every rank.

    `op` is a name, or a function of the caller's.
    """
    algorithm = without_segment(link, nbytes)
    if algorithm is Algorithm.LOCAL:
        return algorithm
    if not isinstance(op, str):
        return Algorithm.FUNCTION
    if link.reduces(op, dtype):
        return Algorithm.NATIVE
    if algorithm is Algorithm.SLICES and isinstance(link, Transport):
        if is_preferred(link, nbytes):
            return Algorithm.SEGMENT
        if chain.is_preferred(link, op, [dtype], nbytes):
            return Algorithm.CHAIN
    return algorithm


def without_segment(link: Link, nbytes: int) -> Algorithm:
    """Return the algorithm without a segment: ranks cannot map it, or lack the native part."""
    if link.size == 1:
        return Algorithm.LOCAL
    payload, _ = link.slot
    if nbytes <= payload:
        return Algorithm.HEADER
    # Between devices, which have no slots.
    return (
        Algorithm.GATHER
        if payload < 0 and nbytes <= GATHER_BYTES // link.size
        else Algorithm.SLICES
    )
