"""Arrays in memory that all ranks share, made by `empty`: ranks reduce them where they lie.

`empty` makes a block of memory with a row for each rank, and every rank maps all of it. If the
arrays of all ranks lie at the same place of their rows, the ranks fold them straight out of one
another's rows. Each header carries that place, as a digest, in its free word. If not all words are
the same, or one is 0, the ranks reduce the arrays as they reduce others.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any, Final, NamedTuple
from weakref import finalize

import numpy as np

from arraycomm._arrays.buffer import CPU, Array, BufferView, allocate
from arraycomm._arrays.frameworks import BY_NAME as FRAMEWORKS
from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import result_prototype
from arraycomm._calls.arguments import check_several
from arraycomm._calls.operation import Context, Operation
from arraycomm._calls.runner import Runner
from arraycomm._dtypes import BY_NAME, DType, check_movable
from arraycomm._entries import entries
from arraycomm._native import compiled
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.announced import node_bytes
from arraycomm._protocol.header import Signature, digest
from arraycomm._reduce.segment import share
from arraycomm._transports.base import Bytes, Flat, Link, Steps, Transport

# Bytes that are folded at a time: they stay in the level-2 cache until they are copied to where
# they go.
_CHUNK_BYTES: Final = 512 << 10
# More ranks than these do not fold everything each.
_MAX_WHOLE_FOLDS: Final = 3


class _Block(NamedTuple):
    """The memory of one call of `empty`: bytes, shape (size, length of a row).

    `start` is the address of this rank's row, and `native` is whether all ranks have the native
    part.
    """

    rows: Bytes
    start: int
    native: bool


class _Blocks:
    """The blocks of one group."""

    def __init__(self) -> None:
        # Those of which this rank still has an array, by their number, which is the same on all
        # ranks.
        self.alive: dict[int, _Block] = {}
        self._made = 0

    def add(self, memory: Bytes, rank: int, size: int, *, native: bool) -> Any:
        """Return this rank's row of a new block, which is kept for as long as the row is."""
        rows = memory.reshape(size, -1)
        # Not an array: views would refer to the memory of all rows instead, and let go of this one.
        row = (ctypes.c_char * rows.shape[1]).from_buffer(rows[rank])
        self.alive[self._made] = _Block(rows, ctypes.addressof(row), native)
        finalize(row, self.alive.pop, self._made, None).atexit = False
        self._made += 1
        return row

    def find(self, flat: Flat) -> tuple[int, int] | None:
        """Return the block in whose row an array lies, and where; None if it lies in none."""
        if not flat.flags.c_contiguous:
            return None
        address = int(flat.__array_interface__["data"][0])
        for number, block in list(self.alive.items()):
            offset = address - block.start
            if 0 <= offset <= block.rows.shape[1] - flat.nbytes and not offset % flat.itemsize:
                return number, offset
        return None

    def rows(self, flat: Flat) -> list[Array]:
        """Return the memory of all ranks at the place of this rank's."""
        number, offset = self.find(flat) or (-1, 0)
        rows = self.alive[number].rows[:, offset : offset + flat.nbytes]
        return list(rows.view(flat.dtype))


def place_of(link: Link, source: Flat, target: Flat) -> int:
    """Return a digest of where an array and its result lie; 0 if they are reduced as others."""
    found = link.kept[_Blocks].find(source) if holds(link, source) else None
    if found is None:
        return 0
    into = link.kept[_Blocks].find(target)
    # Without a common result each rank folds everything.
    whole = link.size <= _MAX_WHOLE_FOLDS and link.kept[_Blocks].alive[found[0]].native
    return digest(found, into) if into is not None or whole else 0


def holds(link: Link, source: Flat) -> bool:
    """Return whether an array lies in memory that the ranks of this group share."""
    return link.shares_arrays and source.nbytes > 0 and link.kept[_Blocks].find(source) is not None


def same_place(place: int, agreement: Agreement) -> bool:
    """Return whether the arrays of all ranks lie at this place."""
    return all(other == place for other in agreement.free_words())


def allreduce(link: Link, source: Flat, target: Flat, op: str) -> Steps:
    """Fold all ranks' `source`, which lie at one place, into every rank's `target`.

    A rank folds one slice, for all ranks, if the targets lie at one place too, and everything if
    not. The headers have told it that all ranks are here; a step tells it that they need its memory
    no more.
    """
    blocks, dtype, count = link.kept[_Blocks], source.dtype, len(source)
    rows, outs, own = blocks.rows(source), [target], range(count)
    if blocks.find(target) is not None:
        outs = blocks.rows(target)
        own = range(count * link.rank // link.size, count * (link.rank + 1) // link.size)
    step = _CHUNK_BYTES // dtype.itemsize
    folded = link.take(min(step, count), dtype)
    for start in range(own.start, own.stop, step):
        part = slice(start, min(start + step, own.stop))
        chunk = folded[: part.stop - start]
        link.fold(op, dtype, [row[part] for row in rows], chunk)
        for out in outs:
            _copy(out[part].view(np.uint8), chunk.view(np.uint8))
    assert isinstance(link, Transport)
    link.control.post()
    yield link.control


_copy: Final = np.copyto if compiled is None else compiled.copy


class Empty(Operation):
    """See `MakesSharedArrays.empty`."""

    name, code = "empty", 40

    def __init__(self, context: Context, shape: Any, dtype: Any, like: Any) -> None:
        super().__init__(context)
        self._shape, self._dtype = _checked_shape(shape), _checked_dtype(dtype)
        self._like = None
        if like is not None:
            on_host = context.place(like) is context.host
            self._like = _checked_like(like, self._dtype, on_host=on_host)
        self._array: Array | None = None
        self._length = math.prod(self._shape) * self._dtype.itemsize
        if self._length > node_bytes():
            raise MemoryError(
                f"an array of shape {self._shape} is larger than the memory of the node"
            )
        self.signature = Signature(self.name, None, None, self._dtype, self._shape)

    def steps(self, agreement: Agreement) -> Steps:
        transport, page = self.group.transport, mmap.PAGESIZE
        # Smaller arrays travel with headers.
        if transport.size == 1 or self._length <= max(self.group.inline_bytes, 0):
            return
        nbytes = transport.size * (-(-self._length // page) * page)
        memory, native = yield from share(transport, nbytes if nbytes <= node_bytes() else 0)
        if memory is None:
            return
        transport.shares_arrays = True
        blocks = transport.kept.setdefault(_Blocks, _Blocks())
        row = blocks.add(memory, transport.rank, transport.size, native=native)
        self._array = np.ndarray(self._shape, self._dtype, row)

    def result(self, agreement: Agreement) -> Any:
        array, self._array = self._array, None
        array = allocate(self._shape, self._dtype) if array is None else array
        return array if self._like is None else to_framework(array, self._like)


# The runner trims errors itself.
@entries(trimmed=True)
class MakesSharedArrays:
    """The method of a communicator that makes arrays in memory that its ranks share."""

    _runner: Runner

    def empty(
        self, shape: Any, dtype: Any, like: Any = None, *, timeout: float | None = None
    ) -> Any:
        """Return a new array in memory that all ranks share, so that `allreduce` need not copy it.

        Collective. Use it like any other array: no rank sees the others' elements.

        Parameters
        ----------
        shape : int or tuple of int
            The shape; the same on every rank.
        dtype : dtype or str
            Such as `numpy.float32`, `torch.bfloat16` or "float8_e5m2"; the same on every rank.
        like : array, optional
            An array in host memory, whose framework the new one has; NumPy's by default. A JAX
            array cannot be written: take one of NumPy, and `arraycomm.exchange` once it is filled.

        Returns
        -------
        array
            Its elements are undefined. The memory is given back when no rank has an array in it any
            more, also if the processes are killed.

        Raises
        ------
        TypeError, ValueError, MemoryError
            An argument is wrong, `like` is on a device, its framework lacks the dtype, or the array
            is larger than the node's memory; the other ranks raise `PeerError`.
        MismatchError
            Shapes or dtypes differ between ranks.

        Notes
        -----
        If every rank passes such an array to `allreduce` or `iallreduce` of this communicator, or
        the same part of one, and its `out` lies in such an array too (which may be `x` itself),
        each rank folds a slice straight out of the memory of all ranks, into that of all. The
        result has the same bits as with other arrays. Without such an `out`, up to 3 ranks that
        have the native part fold straight out of shared memory as well. Other calls take these
        arrays as any.

        An array of up to 1 MiB (less with more than 3 ranks), which travels with the header, is
        ordinary memory. So is every array if the ranks cannot share memory: between nodes, or with
        one process alone. With `check=False`, ranks compare their calls of `allreduce` of large
        arrays from now on all the same. After an error in a call, its `out` may still be written by
        other ranks until their calls have ended too.
        """
        return self._runner.call_within(timeout, Empty, shape, dtype, like)


def _checked_shape(shape: Any) -> tuple[int, ...]:
    found = tuple(check_several(shape, "shape must be an integer, or a tuple of integers"))
    if min(found, default=0) < 0:
        raise ValueError(f"shape must not be negative; got {shape!r}")
    return found


def _checked_dtype(dtype: Any) -> DType:
    info = BY_NAME.get(str(dtype).removeprefix("torch."))
    found: DType = np.dtype(dtype).newbyteorder("=") if info is None else info.dtype
    check_movable(found)
    return found


def _checked_like(like: Any, dtype: DType, *, on_host: bool) -> BufferView:
    found = result_prototype(like, "like")
    if FRAMEWORKS[found.framework].number:
        raise TypeError(f"like must be an array; got {like!r}")
    if found.device != CPU or not on_host:
        raise ValueError(
            "like must be in host memory, since ranks share no other; leave it out, or pass an "
            "array on the host"
        )
    # Raises if the framework lacks the dtype.
    to_framework(allocate((0,), dtype), found)
    return found
