"""`fsum`: the exact sum of all rows of all ranks, rounded once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._calls.custom_ops import Op
from arraycomm._calls.operation import Context, Operation
from arraycomm._calls.placement import Destination
from arraycomm._checks import check_integer
from arraycomm._dtypes import check_reducible
from arraycomm._folds import add_rows, fold, round_words, words_of
from arraycomm._folds.exact import WORD
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.header import ANY, Signature
from arraycomm._reduce import algorithms
from arraycomm._reduce.chunks import reserve
from arraycomm._transports.base import Bytes, Steps

# Like a reduction by a function, it is computed on the host.
_ON_HOST: Final = Op(np.add)
# The elements of the result that are reduced at a time, and elements copied to lie side by side.
_PIECE: Final = 4096
_COPIED: Final = 1 << 17


class Fsum(Operation):
    """See `arraycomm.fsum`."""

    name, code = "fsum", 45

    def __init__(self, context: Context, x: Any, axis: Any) -> None:
        super().__init__(context, context.place(x, _ON_HOST))
        source = self.placement.view(x)
        self._dtype, shape = source.dtype, source.shape
        check_reducible(self._dtype, "fsum")
        axis = None if axis is None else _checked_axis(axis, len(shape))
        rest = () if axis is None else shape[:axis] + shape[axis + 1 :]
        self._rows = _rows(source.array, axis, math.prod(rest))
        self.signature = Signature(self.name, f"axis={axis}", None, self._dtype, (ANY, *rest))
        self.target = self.buffer_for(Destination(source), rest, self._dtype, deferred=False)
        self._words = words_of(self._dtype)
        self.nbytes = source.array.nbytes
        self.copies = source.copied + (not np.may_share_memory(self._rows, source.array))

    def pack(self, room: int) -> Bytes | None:
        count = self._rows.shape[1]
        nbytes = self._words * WORD.itemsize * min(count, _PIECE)
        if count > _PIECE or nbytes > room:
            reserve(self.group.transport, nbytes)
            return None
        return self._sum(slice(count)).view(np.uint8)

    def steps(self, agreement: Agreement) -> Steps:
        if self.payload is not None:
            words = np.empty(len(self.payload) // WORD.itemsize, WORD)
            fold("sum", WORD, agreement.payloads(len(self.payload)).view(WORD), words)
            round_words(self._dtype, words, self.into)
            return
        for piece in _slices(self._rows.shape[1], _PIECE):
            words = self._sum(piece)
            yield from algorithms.allreduce(self.placement.link, words, words, "sum")
            round_words(self._dtype, words, self.into[piece])

    def _sum(self, piece: slice) -> Array:
        """Return the words of the sums of some columns of this rank's rows."""
        rows = self._rows[:, piece]
        words = np.zeros(rows.shape[1] * self._words, WORD)
        step = len(rows) if rows.flags.c_contiguous else max(_COPIED // rows.shape[1], 1)
        for some in _slices(len(rows), step):
            add_rows(self._dtype, np.ascontiguousarray(rows[some]), words)
        return words


def _checked_axis(axis: Any, ndim: int) -> int:
    number = check_integer(axis, "axis must be an integer or None")
    if not -ndim <= number < ndim:
        raise ValueError(f"axis must be an axis of x, which has {ndim} dimensions; got {axis}")
    return number % ndim


def _rows(array: Array, axis: int | None, count: int) -> Array:
    """Return the array with a row for each index of an axis, or for each element if it is None."""
    if axis is None:
        return array.ravel(order="K").reshape(-1, 1)
    return np.moveaxis(array, axis, 0).reshape(array.shape[axis], count)


def _slices(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, step or 1))
