"""Messages between programs: the place of the call, dtype and shape, and the elements behind them if they are few."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

import arraycomm as ac
from arraycomm._training.programs import ProgramCalls

# The place, the bytes of the elements, and the bytes of the text with dtype and shape.
_HEAD: Final = struct.Struct("<3q")
# To copy more elements into the message takes longer than a message of their own.
_FEW: Final = 64 << 10
# Dtypes and shapes take less than the rest of it.
_ROOM: Final = _FEW + (4 << 10)
# The place that a rank shows if it cannot make the call.
_REFUSED: Final = -1


def exchange(calls: ProgramCalls, x: Any, dest: int, source: int, tag: int, out: Any) -> Any:
    """Send an array to one rank, and return that of another, which must be alike and from the same place."""
    comm, array = calls.comm, np.asarray(x)
    if dest == source == comm.rank:
        return _delivered(array, out)
    room, text = np.empty(_ROOM, np.uint8), _text(array.dtype, array.shape)
    calls.swap(_message(calls.place, array, text), room, dest, source, tag)
    place, nbytes, length = _HEAD.unpack_from(room.data)
    theirs = room[_HEAD.size : _HEAD.size + length].tobytes()
    followed = None
    if array.nbytes > _FEW < nbytes:
        followed = comm.sendrecv(array, dest, source, tag, out=out if text == theirs else None)
    elif array.nbytes > _FEW:
        comm.send(array, dest, tag)
    elif nbytes > _FEW:
        comm.recv(source, tag)
    _check(calls, array, place, theirs, source)
    if followed is None:
        followed = np.ndarray(array.shape, array.dtype, room, _HEAD.size + length)
    return followed if out is followed else _delivered(followed, out)


def take_no_part(calls: ProgramCalls, dest: int, source: int, tag: int) -> None:
    """Tell `dest` that this rank's argument is wrong; take what `source` sends, lest a later call gets it."""
    room = np.empty(_ROOM, np.uint8)
    calls.swap(np.frombuffer(_HEAD.pack(_REFUSED, 0, 0), np.uint8), room, dest, source, tag)
    _, nbytes, _ = _HEAD.unpack_from(room.data)
    if nbytes > _FEW:
        calls.comm.recv(source, tag)


def _message(place: int, array: Any, text: bytes) -> Any:
    head = _HEAD.pack(place, array.nbytes, len(text)) + text
    few = array.nbytes <= _FEW
    message = np.empty(len(head) + few * array.nbytes, np.uint8)
    message[: len(head)] = np.frombuffer(head, np.uint8)
    if few:
        np.ndarray(array.shape, array.dtype, message, len(head))[...] = array
    return message


@lru_cache(maxsize=256)
def _text(dtype: Any, shape: tuple[int, ...]) -> bytes:
    return f"{dtype} {shape}".encode()


def _delivered(array: Any, out: Any) -> Any:
    if out is None:
        return jnp.array(array)
    out[...] = array
    return out


def _check(calls: ProgramCalls, array: Any, place: int, text: bytes, source: int) -> None:
    """Raise if the other rank has sent from another place of its program, or another kind of array."""
    if place == _REFUSED:
        raise _source_raised(source)
    if place and calls.place and place != calls.place:
        raise ac.MismatchError(
            f"sendrecv: ranks must send and receive at the same place of their programs; rank "
            f"{calls.comm.rank} receives in call {calls.place} of its program what rank {source} "
            f"sends in call {place}"
        )
    if text != _text(array.dtype, array.shape):
        raise ac.MismatchError(
            f"sendrecv: ranks must send arrays of the shape and dtype that they receive; got "
            f"{text.decode()} from rank {source}, and sent {array.dtype} {array.shape}"
        )


def _source_raised(source: int) -> ac.PeerError:
    error = ac.PeerError(
        f"sendrecv: rank {source} raised instead of sending, since its argument is wrong",
        rank=source,
    )
    error.in_step = True
    return error
