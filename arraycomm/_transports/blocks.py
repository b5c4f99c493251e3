"""Blocks of memory: what goes to each rank, or comes from each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

# One-dimensional, contiguous memory of a link: a NumPy array, or a `DeviceBuffer`.
Flat: TypeAlias = Any


class Blocks(NamedTuple):
    """One block of `buffer` for each rank: `counts[r]` bytes from `offsets[r]`."""

    buffer: Flat
    counts: Sequence[int]
    offsets: Sequence[int]

    def block(self, rank: int) -> Flat:
        """Return the bytes that belong to `rank`."""
        start = self.offsets[rank]
        return self.buffer[start : start + self.counts[rank]]
