"""The envelope of a message: a head, a text, and the elements if they are few.

The head says whether the sender raised, what the array is, and from which place of a program it
comes. The text is the sender's traceback, or describes dtype and shape if the head has no room for
them.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView
from arraycomm._dtypes import BY_CODE, BY_DTYPE, DType
from arraycomm._messages.matching import Status
from arraycomm._protocol.announced import check_payload, check_size, malformed
from arraycomm._protocol.details import Description
from arraycomm._protocol.header import MAX_DIMS, has_room_for
from arraycomm._transports.base import Bytes

# State, tag of the pieces, bytes, dtype, dimensions, bytes of text, place in a program; then the
# shape.
_HEAD: Final = struct.Struct(f"<7q8x{MAX_DIMS}q")
_WORD: Final = struct.Struct("<q")
_PIECES_AT: Final = 8
_PLACE_AT: Final = 48
_ELEMENTS, _RAISED, _PICKLE = range(3)
# Bytes behind the head: to copy more elements into an envelope takes longer than a message of their
# own.
ROOM: Final = 64 << 10
HEAD: Final = _HEAD.size
NBYTES: Final = HEAD + ROOM


class Pickled(NamedTuple):
    """A Python object that is sent as its pickle; or, as what a receive is like, any."""

    obj: Any = None


class Contents(NamedTuple):
    """An array by its envelope: its elements, or None and the number of pieces that follow.

    A Python object is the array of the bytes of its pickle.
    """

    dtype: DType
    shape: tuple[int, ...]
    elements: Bytes | None
    pieces: int
    pickled: bool


# To send


@lru_cache(maxsize=256)
def short_head(dtype: DType, shape: tuple[int, ...], place: int) -> Bytes | None:
    """Return the envelope's head of an array; None if it needs a text, or has too many elements."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not has_room_for(dtype, shape) or nbytes > ROOM:
        return None
    return np.frombuffer(_head(_ELEMENTS, nbytes, dtype, shape, 0, place), np.uint8)


def start_of(source: BufferView, place: int) -> bytes:
    """Return the head and the text of any array."""
    described = _described(source)
    nbytes = source.array.nbytes
    return _head(_ELEMENTS, nbytes, source.dtype, source.shape, len(described), place) + described


def start_of_pickle(nbytes: int) -> bytes:
    """Return the head of a Python object."""
    return _head(_PICKLE, nbytes, np.dtype(np.uint8), (nbytes,), 0, 0)


def has_room(start: bytes, nbytes: int) -> bool:
    """Return whether elements of this size follow head and text in the envelope."""
    return len(start) + nbytes <= NBYTES


def set_pieces(envelope: Bytes, pieces: int) -> None:
    """Write the number of the pieces that follow."""
    _WORD.pack_into(envelope.data, _PIECES_AT, pieces)


def of_error(traceback: str) -> Bytes:
    """Return the envelope of a rank that raised instead of sending."""
    text = traceback.encode(errors="replace")[-ROOM:]
    return np.frombuffer(_head(_RAISED, 0, None, (), len(text), 0) + text, np.uint8)


def _described(source: BufferView) -> bytes:
    """Return what the receiver is told of dtype and shape if the head has no room for them."""
    description = Description.if_needed(source.dtype, source.shape)
    described = b"" if description is None else description.array.encode()
    if len(described) > ROOM:
        raise TypeError(
            f"a dtype of {len(source.dtype.names or ())} fields and {source.array.ndim} dimensions "
            f"take {len(described)} bytes to describe, more than {ROOM}; send fields one by one"
        )
    return described


def _head(
    state: int, nbytes: int, dtype: DType | None, shape: tuple[int, ...], length: int, place: int
) -> bytes:
    fits = dtype is not None and has_room_for(dtype, shape)
    code = BY_DTYPE[dtype].code if fits and dtype is not None else 0
    dims = shape if fits else ()
    return _HEAD.pack(
        *(state, 0, nbytes, code, len(dims), length, place), *dims, *[0] * (MAX_DIMS - len(dims))
    )


# To receive


def empty() -> Bytes:
    """Return memory for any envelope."""
    return np.empty(NBYTES, np.uint8)


def place_of(envelope: Bytes) -> int:
    """Return the place in its program from which a message comes; 0 outside of programs."""
    (place,) = _WORD.unpack_from(envelope.data, _PLACE_AT)
    return int(place)


def note(status: Status, dtype: DType, shape: tuple[int, ...]) -> None:
    """Say in a status what has come."""
    nbytes = math.prod(shape) * dtype.itemsize
    status.dtype, status.shape, status.nbytes = dtype, shape, nbytes


def short_result(envelope: Bytes, out: Array | None, status: Status) -> Array | None:
    """Return an envelope's elements for NumPy; None if they are not there, or do not fit `out`."""
    _, elements = short_elements(envelope)
    return None if elements is None else taken(elements, out, status)


def short_elements(envelope: Bytes) -> tuple[bytes, Array | None]:
    """Return an envelope's head, and its elements where they are, None if they are not there."""
    head = envelope[: _HEAD.size].tobytes()
    short = _read_short(head)
    if short is None or short[-1]:
        return head, None
    dtype, shape, _, _ = short
    return head, np.ndarray(shape, dtype, envelope, HEAD)


def taken(elements: Array, out: Array | None, status: Status | None) -> Array | None:
    """Return elements that have come, outside of their envelope; None if they do not fit `out`."""
    if out is None:
        out = elements.copy()
    elif out.dtype == elements.dtype and out.shape == elements.shape and out.flags.carray:
        out[...] = elements
    else:
        return None
    if status is not None:
        note(status, elements.dtype, elements.shape)
    return out


@lru_cache(maxsize=256)
def _read_short(head: bytes) -> tuple[DType, tuple[int, ...], int, bool] | None:
    """Return the dtype, shape and bytes of what lies in an envelope, and whether it is a pickle."""
    state, _, nbytes, code, ndim, length, _, *dims = _HEAD.unpack(head)
    shape = tuple(dims[: max(ndim, 0)])
    if state == _RAISED or length or code not in BY_CODE or not 0 <= nbytes <= ROOM:
        return None
    dtype = BY_CODE[code].dtype
    sound = min(shape, default=0) >= 0 and math.prod(shape) * dtype.itemsize == nbytes
    return (dtype, shape, nbytes, state == _PICKLE) if sound else None


def read(envelope: Bytes, source: int, tags: int) -> Contents | str:
    """Return what a rank sent, or its traceback if it raised; piece numbers are below `tags`."""
    (pieces,) = _WORD.unpack_from(envelope.data, _PIECES_AT)
    # The number of pieces that follow is another one each time.
    short = None if pieces else _read_short(envelope[:HEAD].tobytes())
    if short is not None:
        dtype, shape, nbytes, pickled = short
        return Contents(dtype, shape, envelope[HEAD : HEAD + nbytes], 0, pickled)
    state, pieces, nbytes, code, ndim, length, _, *dims = _HEAD.unpack_from(envelope.data)
    body = envelope[_HEAD.size :]
    if not 0 <= length <= ROOM:
        raise malformed(source, f"a text of {length} bytes")
    text = body[:length].tobytes().decode(errors="replace")
    if state == _RAISED:
        return text
    dtype, shape = _array(source, code, dims[: max(ndim, 0)], text)
    check_payload(source, math.prod(shape) * dtype.itemsize, nbytes)
    if not 0 <= pieces < tags:
        raise malformed(source, f"pieces with tag {pieces}")
    elements = body[length : length + nbytes] if length + nbytes <= ROOM else None
    return Contents(dtype, shape, elements, pieces, state == _PICKLE)


def _array(rank: int, code: int, dims: list[int], described: str) -> tuple[DType, tuple[int, ...]]:
    """Return the dtype and shape that an envelope names."""
    if code not in BY_CODE:
        return Description(described).parse(rank)
    dtype = BY_CODE[code].dtype
    check_size(rank, dims, dtype.itemsize)
    return dtype, tuple(dims)
