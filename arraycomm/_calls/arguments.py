"""The rules for the arguments of collectives: roots, counts, and rows for each rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._checks import check_integer, check_several


def check_counts(counts: Any, size: int, rows: int) -> list[int]:
    """Return `counts` as one length for each rank, which make up the rows of an array."""
    wanted = "counts must be a sequence of integers, one for each rank"
    if not np.iterable(counts):
        raise TypeError(f"{wanted}; got {counts!r}")
    found = check_several(counts, wanted)
    if len(found) != size or min(found) < 0 or sum(found) != rows:
        raise ValueError(
            f"counts must be one length for each of the {size} ranks, {rows} in all, as x has "
            f"rows; got {found}"
        )
    return found


def check_shares(source: BufferView, counts: Any, size: int) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of the rows of an array, and how many of them belong to each rank."""
    if not source.shape:
        raise ValueError("x must have an axis 0, whose rows counts shares out; got a 0-d array")
    return source.shape[1:], check_counts(counts, size, source.shape[0])


def check_rows(source: BufferView, size: int) -> tuple[int, ...]:
    """Return the shape of the rows of an array that has one for each rank."""
    shape = source.shape
    if not shape or shape[0] != size:
        raise ValueError(
            f"x must have one row for each of the {size} ranks, shape ({size}, …); got shape "
            f"{shape}"
        )
    return shape[1:]


def check_axis(source: BufferView, otherwise: str) -> tuple[int, ...]:
    """Return the shape of the rows of an array that may have any number of them."""
    if not source.shape:
        raise ValueError(
            "x must have an axis 0, whose length may differ between ranks; got a 0-d array, for "
            f"which there is {otherwise}"
        )
    return source.shape[1:]


def check_root(root: Any, size: int) -> int:
    """Return `root` as a rank, or raise."""
    return check_rank(root, size, "root", "an integer")


def check_rank(rank: Any, size: int, name: str, wanted: str = "a rank") -> int:
    """Return an argument that names a rank, or raise."""
    if type(rank) is int and 0 <= rank < size:
        return rank
    found = check_integer(rank, f"{name} must be {wanted}")
    if not 0 <= found < size:
        raise ValueError(f"{name} must be a rank of the communicator, 0 to {size - 1}; got {rank}")
    return found
