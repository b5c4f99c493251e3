"""The layouts of drawn arrays: where in memory their elements lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import Array, allocate
from arraycomm._dtypes import DType

Shape = tuple[int, ...]


class Position(NamedTuple):
    """The offset of an array's first element in its memory, and its strides, in bytes."""

    start: int
    strides: Shape


class _Layout(NamedTuple):
    """How a shape and an itemsize give an array's position, and which dtypes the layout suits."""

    place: Callable[[Shape, int], Position]
    # With fewer dimensions, this layout is the same as the contiguous one.
    least_ndim: int = 0
    fits: Callable[[DType], bool] = lambda _: True


def _steps(lengths: Sequence[int], itemsize: int) -> Shape:
    """Return the strides of a C-contiguous array of these lengths."""
    steps = [itemsize]
    for length in reversed(lengths[1:]):
        steps.append(steps[-1] * max(length, 1))
    return tuple(reversed(steps[: len(lengths)]))


def _contiguous(shape: Shape, itemsize: int) -> Position:
    return Position(0, _steps(shape, itemsize))


def _fortran(shape: Shape, itemsize: int) -> Position:
    return Position(0, _steps(shape[::-1], itemsize)[::-1])


def _transposed(shape: Shape, itemsize: int) -> Position:
    """Put the first axis last in memory."""
    steps = _steps(shape[1:] + shape[:1], itemsize)
    return Position(0, steps[-1:] + steps[:-1])


def _sliced(shape: Shape, itemsize: int) -> Position:
    larger = _steps([2 * length for length in shape], itemsize)
    return Position(0, tuple(2 * step for step in larger))


def _offset(shape: Shape, itemsize: int) -> Position:
    """Surround the array with a frame of one element; put one before it if it has no axes."""
    larger = _steps([length + 2 for length in shape], itemsize)
    return Position(sum(larger) or itemsize, larger)


def _negative(shape: Shape, itemsize: int) -> Position:
    strides = tuple(-step for step in _steps(shape, itemsize))
    return Position(-reach(shape, strides)[0], strides)


def _broadcast(shape: Shape, itemsize: int) -> Position:
    return Position(0, (0,) * len(shape[:1]) + _steps(shape[1:], itemsize))


def reach(shape: Shape, strides: Shape) -> tuple[int, int]:
    """Return the smallest and the largest distance of an element from the first, in bytes."""
    if 0 in shape:
        return 0, 0
    ends = [(length - 1) * step for length, step in zip(shape, strides, strict=True)]
    return sum(end for end in ends if end < 0), sum(end for end in ends if end > 0)


LAYOUTS: Final = {
    "contiguous": _Layout(_contiguous),
    "fortran": _Layout(_fortran, 2),
    "transposed": _Layout(_transposed, 2),
    "sliced": _Layout(_sliced, 1),
    "offset": _Layout(_offset),
    "negative": _Layout(_negative, 1),
    "broadcast": _Layout(_broadcast, 1),
    "unaligned": _Layout(
        lambda shape, itemsize: Position(1, _steps(shape, itemsize)),
        fits=lambda dtype: dtype.alignment > 1,
    ),
    "swapped": _Layout(
        _contiguous, fits=lambda dtype: dtype.itemsize > 1 and dtype.newbyteorder() != dtype
    ),
}


def laid_out(values: Array, dtype: DType, position: Position) -> Array:
    """Return a copy of the values at this position in new memory; the gaps are filled with 0xA5."""
    start, strides = position
    end = reach(values.shape, strides)[1] + dtype.itemsize
    memory = allocate((start + (end if values.size else 0),), np.dtype(np.uint8))
    memory[...] = 0xA5
    array: Array = np.ndarray(values.shape, dtype, memory, start, strides)
    array[...] = values
    return array


def address_of(array: Array) -> int:
    """Return the address of an array's first element."""
    return int(array.__array_interface__["data"][0])
