"""Which algorithm a reduction takes: every threshold, and one decision for the call and for `explain`."""

from __future__ import annotations

import enum
from typing import Final

from arraycomm._collectives import chain
from arraycomm._collectives.custom_ops import Op
from arraycomm._collectives.segment import is_preferred
from arraycomm._dtypes import DType
from arraycomm._transports.base import Link, Transport
from arraycomm._transports.crossovers import NOT_MEASURED, Crossovers

# Slots of the control channel that are shown one after another, and folded by every rank: up to so many,
# with up to so many bytes in all.
MAX_STEPS: Final = 16
STEPS_BYTES: Final = 512 << 10
# Up to this many bytes in all, every rank gathers everything and folds it by itself.
GATHER_BYTES: Final = 64 << 10
# Larger reductions go chunk by chunk, small enough for the cache that cores share.
CHUNK_BYTES: Final = 4 << 20


class Algorithm(enum.StrEnum):
    """How the elements of a reduction move."""

    LOCAL = "local"
    HEADER = "header"
    STEPS = "steps"
    GATHER = "gather"
    SLICES = "slices"
    EXCHANGE = "exchange"
    CHAIN = "chain"
    SEGMENT = "segment"
    SHARED = "shared"
    NATIVE = "native"
    FUNCTION = "function"
    FUNCTION_BY_SLICES = "function by slices"


def select(link: Link, op: str | Op, dtype: DType, nbytes: int) -> Algorithm:
    """Decide how a link reduces so many bytes; the same arguments give the same answer on every rank."""
    algorithm = without_segment(link, nbytes)
    if algorithm is Algorithm.LOCAL:
        return algorithm
    if isinstance(op, Op):
        sliced = op.elementwise and algorithm is not Algorithm.HEADER
        return Algorithm.FUNCTION_BY_SLICES if sliced else Algorithm.FUNCTION
    if link.native(op, dtype):
        return Algorithm.NATIVE
    stepwise = algorithm is Algorithm.STEPS and link.crossovers.steps is None
    if (stepwise or algorithm is Algorithm.SLICES) and is_preferred(link, nbytes):
        return Algorithm.SEGMENT
    if algorithm is Algorithm.SLICES and isinstance(link, Transport):
        if link.exchange_pairs is not None:
            return Algorithm.EXCHANGE
        if chain.is_preferred(link, [dtype], nbytes):
            return Algorithm.CHAIN
    return algorithm


def without_segment(link: Link, nbytes: int) -> Algorithm:
    """Return the algorithm of ranks that have no segment, since they cannot map it or lack the native part."""
    return choose(nbytes, link.size, *link.slot, link.crossovers)


def choose(
    nbytes: int, size: int, payload: int, shared: bool, measured: Crossovers = NOT_MEASURED
) -> Algorithm:
    """Return the algorithm for `nbytes` on `size` ranks.

    `payload` is what fits in a slot of the control channel, which is memory of all ranks if `shared`.
    What was `measured` takes the place of thresholds.
    """
    if size == 1:
        return Algorithm.LOCAL
    if nbytes <= payload:
        return Algorithm.HEADER
    if shared and nbytes <= _or(measured.steps, most_in_steps(payload)):
        return Algorithm.STEPS
    if nbytes <= _or(measured.gather, GATHER_BYTES // size):
        return Algorithm.GATHER
    return Algorithm.SLICES


def most_in_steps(payload: int) -> int:
    """Return how many bytes go step by step at most, if a slot has room for `payload` of them."""
    return max(payload, min(MAX_STEPS * payload, STEPS_BYTES))


def _or(measured: int | None, otherwise: int) -> int:
    return otherwise if measured is None else measured
