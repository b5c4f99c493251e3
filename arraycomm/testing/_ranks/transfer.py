"""How a drawn value reaches the ranks: pickled once for each of them, with that rank's values."""

from __future__ import annotations

import io
import pickle
from dataclasses import astuple
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._dtypes import DType
from arraycomm.testing._arrays.array_case import ArrayCase
from arraycomm.testing._arrays.layouts import Position, Shape, address_of, laid_out, reach
from arraycomm.testing._arrays.rank_values import RankValues


def dump(value: Any) -> bytes:
    """Return a drawn value as bytes for all ranks, from which `load` takes one rank's part.

    Raises `TypeError` if the value cannot be pickled, and if it has `RankValues` of different
    lengths.
    """
    first, counts = _dump_for(0, value)
    parts = [first, *(_dump_for(rank, value)[0] for rank in range(1, max(counts, default=1)))]
    return pickle.dumps(parts, pickle.HIGHEST_PROTOCOL)


def load(data: bytes, rank: int) -> Any:
    """Return the value for this rank, with arrays in place of their descriptions.

    The values of other ranks are neither unpickled nor built.
    """
    parts = pickle.loads(data)
    if len(parts) > 1 and rank >= len(parts):
        raise ValueError(f"the value was drawn for {len(parts)} ranks, and rank {rank} gets none")
    return pickle.loads(parts[rank if len(parts) > 1 else 0])


def _dump_for(rank: int, value: Any) -> tuple[bytes, set[int]]:
    stream = io.BytesIO()
    pickler = _Pickler(stream, rank)
    try:
        pickler.dump(value)
    except MemoryError:
        raise
    except Exception as error:  # of any class, since pickling calls methods of the value
        raise TypeError(
            f"{type(value).__name__} cannot be sent to the other ranks: {error}; draw a "
            "description of it, and build it in the test"
        ) from error
    return stream.getvalue(), pickler.counts


class _Pickler(pickle.Pickler):
    """Writes what one rank gets; an object that occurs twice stays one object."""

    def __init__(self, stream: io.BytesIO, rank: int) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._rank = rank
        # The lengths of all `RankValues` in the value.
        self.counts: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ArrayCase):
            return _built, astuple(obj)
        if isinstance(obj, RankValues):
            return _same, (self._own(obj),)
        if type(obj) is np.ndarray and obj.dtype.itemsize and not obj.dtype.hasobject:
            return _restored, _described(obj)
        return NotImplemented

    def _own(self, values: RankValues[Any]) -> Any:
        self.counts.add(len(values))
        if len(self.counts) > 1 or self._rank >= len(values):
            raise ValueError(f"{len(values)} values do not fit the number of ranks")
        return values[self._rank]


def _built(*description: Any) -> Any:
    return ArrayCase(*description).build()


def _same(value: Any) -> Any:
    return value


_ALIGNMENT: Final = 64  # the alignment of memory from `allocate`


def _described(array: Array) -> tuple[Any, ...]:
    """Return what `_restored` needs; along strides of 0, elements are included once."""
    once = array[(*(slice(0, 1) if not step else slice(None) for step in array.strides), ...)]
    position = Position(address_of(array) % _ALIGNMENT, array.strides)
    return array.dtype, array.shape, position, array.flags.writeable, once.shape, once.tobytes()


def _restored(
    dtype: DType, shape: Shape, position: Position, writeable: bool, once: Shape, data: bytes
) -> Array:
    before = -reach(shape, position.strides)[0]
    start = before + (position.start - before) % _ALIGNMENT
    values: Array = np.broadcast_to(np.ndarray(once, dtype, data), shape)
    array = laid_out(values, dtype, Position(start, position.strides))
    array.flags.writeable = writeable
    return array
