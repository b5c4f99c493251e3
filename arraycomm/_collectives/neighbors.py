"""The exchange between the neighbors of a grid; see `operation.py`."""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView
from arraycomm._arrays.results import allocate_like, check_out, commit_out, to_framework, view_out
from arraycomm._arrays.views import view
from arraycomm._calls.operation import NO_SHARE, Context, Operation, Share
from arraycomm._dtypes import BY_CODE, BY_DTYPE, DType
from arraycomm._messages.messages import Messenger
from arraycomm._messages.sending import Outgoing
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.announced import check_payload, check_size, malformed
from arraycomm._protocol.header import MAX_DIMS, Signature, has_room_for
from arraycomm._transports.base import Bytes, Steps
from arraycomm._transports.control import PAYLOAD

# How many places there are around a rank, two for each axis, and the ranks at those that have one.
Around = tuple[int, dict[int, int]]
# The dtype and the shape of a block.
Form = tuple[DType, tuple[int, ...]]
# A NumPy array whose elements are read and written as they are, or a view of another one.
Viewed = Array | BufferView
# Of a block: where its elements begin, its dtype, its dimensions and its shape; zeros if there is
# none.
_HEAD: Final = struct.Struct(f"<3q{MAX_DIMS}q")
_NOTHING: Final = bytes(_HEAD.size)
# In bytes.
_ALIGNED: Final = 16


class Heads(NamedTuple):
    """The heads of a rank's blocks, where the elements of each begin, and where the last end."""

    text: Bytes
    starts: list[int]
    end: int


class Blocks:
    """What a rank sends to its neighbors in a call, and where what comes from them goes.

    They are looked at once: a prepared call and the full one in its place have them in common. What
    travels with the header is a head for each place around the rank, and then the elements.
    """

    # Those of an array, by which calls with arrays are found again.
    dtype, shape = None, None

    def __init__(self, messenger: Messenger, around: Around, blocks: Any, out: Any) -> None:
        self._messenger, self._given = messenger, (blocks, out)
        self._count, self._there = around
        self._packed: Bytes | None = None
        # What the call returns, with exceptions in the place of what could not be delivered.
        self.results: list[Any] = []
        self.nbytes = self.copies = 0

    def look(self) -> None:
        """Look at the arrays."""
        if self.results:
            return
        count, (blocks, out) = self._count, self._given
        blocks, out = list(blocks), [None] * count if out is None else list(out)
        # If one is wrong, the full call looks again, and an iterator has nothing left.
        self._given = blocks, out
        if not len(blocks) == len(out) == count:
            name, given = ("out", out) if len(blocks) == count else ("blocks", blocks)
            raise ValueError(
                f"{name} must be {count} arrays, two for each dimension; got {len(given)}"
            )
        into = {at: _view_into(memory) for at, memory in enumerate(out) if memory is not None}
        if len(into) > 1:
            _check_apart([_elements(memory) for memory in into.values()])
        sources = [_view(blocks[at]) for at in self._there]
        self._into, self._sources = into, sources
        self._arrays = arrays = [_elements(source) for source in sources]
        self.nbytes = sum([array.nbytes for array in arrays])
        self.copies = sum([isinstance(each, BufferView) and each.copied for each in sources])
        self._blocks, self.results = blocks, out

    def packed(self, room: int) -> Bytes | None:
        """Return the bytes that travel with the header; None if there are more than `room`."""
        self.look()
        if self.nbytes > room or self._packed is not None:
            return self._packed
        arrays = self._arrays
        forms = tuple([(array.dtype, array.shape) for array in arrays])
        heads = _heads(self._count, tuple(self._there), forms)
        if heads is None or heads.end > room:
            return None
        self._packed = data = np.empty(heads.end, np.uint8)
        data[: len(heads.text)] = heads.text
        for start, array in zip(heads.starts, arrays, strict=True):
            np.ndarray(array.shape, array.dtype, data, start)[...] = array
        return data

    def taken(self, received: list[bytes], exchange: Any, rows: Bytes) -> list[Any]:
        """Deliver the blocks of a call in which all have come with the headers."""
        self.take(exchange.lengths(), rows)
        return self.results

    def take(self, lengths: list[int], rows: Bytes) -> None:
        """Deliver the blocks that have come with the headers; the lengths of others are -1."""
        for source, (at, rank) in zip(self._sources, self._there.items(), strict=True):
            if (nbytes := lengths[rank]) < 0:
                continue
            try:
                payload = rows[rank, PAYLOAD : PAYLOAD + nbytes]
                elements = _block(rank, payload, at ^ 1, self._count)
                self.results[at] = self._delivered(self._into.get(at), source, elements)
            except Exception as error:
                self.results[at] = error

    def _delivered(self, into: Viewed | None, like: Viewed, elements: Array) -> Any:
        if into is None:
            if not isinstance(like, BufferView):
                return elements.copy()
            target = allocate_like(elements.shape, elements.dtype, like)
            target[...] = elements
            return to_framework(target, like)
        memory = _elements(into)
        if (memory.dtype, memory.shape) != (elements.dtype, elements.shape):
            check_out(view(memory), elements.shape, elements.dtype)
        memory[...] = elements
        return commit_out(into) if isinstance(into, BufferView) else into

    def outgoing(self) -> list[Outgoing]:
        """Return the blocks on their way in messages."""
        outs = [out for at, out in enumerate(self.results) if at in self._into]
        return [self._messenger.read(array, *outs) for array in self._arrays]

    def trade(self, outgoing: list[Outgoing], lengths: list[int]) -> Steps:
        """Send blocks in messages, and receive those that have not come with headers."""
        there, blocks, results = self._there, self._blocks, self.results
        sends = list(zip(outgoing, there.values(), strict=True)) if outgoing else []
        # In the order in which a neighbor sends, to which what lies before this rank lies after it.
        back = [at for at in sorted(there, key=lambda at: at ^ 1) if lengths[there[at]] < 0]
        receives = [(there[at], blocks[at], results[at]) for at in back]
        received = yield from self._messenger.trade(sends, receives)
        for at, result in zip(back, received, strict=True):
            results[at] = result


class NeighborAlltoall(Operation):
    """See `GridCommunicator.neighbor_alltoall`; blocks travel with the header, or in messages.

    A rank whose blocks are too large sends all of them in messages, whatever the others do. Without
    a check every rank does, since it waits for its neighbors alone.
    """

    name, code = "neighbor_alltoall", 46
    sends = True
    root: int | None = None

    def __init__(self, context: Context, blocks: Blocks) -> None:
        super().__init__(context)
        self.signature = Signature(self.name)
        self.header_independent = not self.group.options.check
        blocks.look()
        self._blocks, self._outgoing = blocks, list[Outgoing]()
        self.nbytes, self.copies = blocks.nbytes, blocks.copies

    def pack(self, room: int) -> Bytes | None:
        data = self._blocks.packed(-1 if self.header_independent else room)
        if data is None:
            self._outgoing = self._blocks.outgoing()
            self.copies = self._blocks.copies + sum(each.copies for each in self._outgoing)
        self.word = 0 if data is None else len(data)
        return data

    def share(self) -> Share:
        return NO_SHARE

    def steps(self, agreement: Agreement) -> Steps:
        blocks, lengths = self._blocks, [-1] * self.group.size
        if not self.header_independent:
            lengths = [agreement.payload_bytes(rank) for rank in range(self.group.size)]
            blocks.take(lengths, agreement.rows)
        yield from blocks.trade(self._outgoing, lengths)

    def result(self, agreement: Agreement) -> Any:
        return self.loaded(None, self._blocks.results)

    @staticmethod
    def loaded(root: int | None, received: list[Any]) -> list[Any]:
        """Return the results of a call, or raise what one could not be delivered for."""
        for each in received:
            if isinstance(each, Exception):
                raise each
        return received


def _view(x: Any) -> Viewed:
    """Return a NumPy array as it is, and anything else as a view."""
    return x if type(x) is np.ndarray and x.dtype in BY_DTYPE else view(x)


def _view_into(out: Any) -> Viewed:
    """Return memory for a result, if it can be written; as it is if that is simple."""
    if type(out) is np.ndarray and out.dtype in BY_DTYPE and out.flags.carray:
        return out
    found = view(out, "out")
    return view_out(out, found.shape, found.dtype)


def _elements(viewed: Viewed) -> Array:
    return viewed.array if isinstance(viewed, BufferView) else viewed


def _check_apart(arrays: list[Array]) -> None:
    """Raise if arrays share elements, of which one alone could arrive."""
    for after, array in enumerate(arrays):
        for before in range(after):
            if np.shares_memory(arrays[before], array):
                raise ValueError("arrays of out share elements, as rows and columns do at a corner")


@lru_cache(maxsize=256)
def _heads(count: int, places: tuple[int, ...], forms: tuple[Form, ...]) -> Heads | None:
    """Return the heads of the blocks that go from some of `count` places; None if one has none."""
    heads, starts, end = [_NOTHING] * count, list[int](), count * _HEAD.size
    for at, (dtype, shape) in zip(places, forms, strict=True):
        if not has_room_for(dtype, shape):
            return None
        dims = *shape, *[0] * (MAX_DIMS - len(shape))
        heads[at] = _HEAD.pack(end, BY_DTYPE[dtype].code, len(shape), *dims)
        starts.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
    return Heads(np.frombuffer(b"".join(heads), np.uint8), starts, end)


def _block(rank: int, payload: Bytes, at: int, count: int) -> Array:
    """Return the block that a rank sends from one of `count` places."""
    heads = payload[: count * _HEAD.size].tobytes()
    (dtype, shape), start = _found(rank, heads, at, len(payload))
    return np.ndarray(shape, dtype, payload, start)


@lru_cache(maxsize=256)
def _found(rank: int, heads: bytes, at: int, nbytes: int) -> tuple[Form, int]:
    """Return what a rank announces of the block from one place, and where its elements begin."""
    if len(heads) < (at + 1) * _HEAD.size:
        raise malformed(rank, f"blocks of {nbytes} bytes")
    start, code, ndim, *dims = _HEAD.unpack_from(heads, at * _HEAD.size)
    if code not in BY_CODE or not 0 <= ndim <= MAX_DIMS or start < len(heads):
        raise malformed(rank, f"a block of dtype {code} at byte {start}")
    dtype, shape = BY_CODE[code].dtype, tuple(dims[:ndim])
    check_size(rank, shape, dtype.itemsize)
    size = math.prod(shape) * dtype.itemsize
    check_payload(rank, min(nbytes - start, size), size)
    return (dtype, shape), start
