"""Memory for packed leaves: a pool that reuses it, and the leaves in it as arrays."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Container, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView, allocate
from arraycomm._transports.base import Bytes
from arraycomm._trees.layout import ALIGNMENT, Bucket, LeafSlot

BYTE: Final = np.dtype(np.uint8)
# Of this many buffers results may be in use at once; with more, some are new in each call. If
# nothing refers to the results in them any more, this many are kept: those of one step are often
# dropped once those of the next are there.
_MAX_KEPT: Final = 8
_MAX_IDLE: Final = 2

Sources: TypeAlias = Sequence[BufferView | None]
# Dead once no array of any framework aliases the buffer.
Lease: TypeAlias = "weakref.ref[Any]"


class BufferPool:
    """Buffers of one size, which are used again once nothing refers to the results in them.

    Every array that aliases a buffer, in any framework, keeps its lease alive. So a buffer is never
    written while an array in it can still be read.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._kept: list[tuple[Bytes, Lease]] = []

    def acquire(self) -> tuple[Bytes, bool]:
        """Return memory that nothing else uses, and whether it is new."""
        used, idle = list[tuple[Bytes, Lease]](), list[tuple[Bytes, Lease]]()
        for kept in self._kept:
            # Looked at once: a lease may end at any time.
            (idle if kept[1]() is None else used).append(kept)
        new = not idle
        memory = allocate((self._nbytes,), BYTE) if new else idle.pop()[0]
        if not len(memory):
            return memory, True
        # Not a NumPy view: the base of that would be `memory`, which the pool keeps alive.
        kind: Any = ctypes.c_char * len(memory)
        owner = kind.from_buffer(memory)
        self._kept = [*used, (memory, weakref.ref(owner)), *idle[: _MAX_IDLE - 1]][:_MAX_KEPT]
        return np.ndarray(memory.shape, BYTE, owner), new


class Packed:
    """Leaves in buckets, which lie one after another in one buffer."""

    def __init__(
        self, buckets: tuple[Bucket, ...], slots: tuple[LeafSlot, ...], buffer: Bytes | None = None
    ) -> None:
        self.buckets = buckets
        self._slots = slots
        self.nbytes = sum(bucket.nbytes for bucket in buckets)
        self.buffer = allocate((self.nbytes,), BYTE) if buffer is None else buffer
        self.memory = self.split(self.buffer)

    def leaves(self) -> list[Array]:
        """Return each leaf's slot, as an array of its dtype and shape."""
        flats = {bucket.dtype: self.buffer.view(bucket.dtype) for bucket in self.buckets}
        return [
            flats[dtype][elements] if len(shape) == 1 else flats[dtype][elements].reshape(shape)
            for dtype, elements, shape in self._slots
        ]

    def pack(self, sources: Sources, without: Container[int] = ()) -> None:
        """Copy the leaves in, but for those `without`; None stands for zeros."""
        for leaf, (slot, source) in enumerate(zip(self.leaves(), sources, strict=True)):
            if leaf not in without:
                copy_into(slot, None if source is None else source.array)

    def clear_gaps(self) -> None:
        """Zero the bytes between leaves: they are sent and reduced too, though never read."""
        for bucket, memory in zip(self.buckets, self.memory, strict=True):
            for _, offset, nbytes in bucket.pieces:
                memory[offset + nbytes : offset + nbytes + -nbytes % ALIGNMENT] = 0

    def split(self, buffer: Bytes) -> list[Bytes]:
        """Return the buckets in such a buffer, without a copy."""
        parts, start = [], 0
        for bucket in self.buckets:
            parts.append(buffer[start : start + bucket.nbytes])
            start += bucket.nbytes
        return parts


def copy_into(slot: Array, array: Array | None) -> Array:
    """Copy a leaf into its slot, whose dtype may be narrower; None stands for zeros."""
    if array is None or array.dtype == slot.dtype:
        slot[...] = 0 if array is None else array
    else:
        # Compression: values that are too large for the narrower dtype become infinite.
        with np.errstate(all="ignore"):
            slot[...] = array
    return slot
