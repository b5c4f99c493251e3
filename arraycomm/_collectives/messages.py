"""Messages from one rank to another: what travels ahead of the elements, and what follows.

A message is an envelope (status, dtype, shape, and the elements where they are few), and further
pieces where they are many. The pieces have a tag of their own, which the envelope names, so that
receives under way at once never take one another's.
"""

from __future__ import annotations

import math
import operator
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.views import view
from arraycomm._collectives.movements import describe, parse, wanted_kind
from arraycomm._collectives.operation import UndeliveredError, check_rank, flatten
from arraycomm._collectives.placement import DeferredResultBuffer
from arraycomm._dtypes import BY_CODE, BY_DTYPE, DType, check_movable
from arraycomm._errors import PeerError, TransportError
from arraycomm._protocol.header import MAX_DIMS, Steps, in_header
from arraycomm._transports.base import MAX_BYTES, Bytes

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator

# Tags of the user's are below this, those of further pieces from it on.
TAGS: Final = 1 << 20
_ENVELOPE: Final = 4096
_HEAD: Final = struct.Struct(f"<{6 + MAX_DIMS}q")
_ROOM: Final = _ENVELOPE - _HEAD.size
_ELEMENTS, _RAISED = range(2)


class Message(NamedTuple):
    """One rank's part in a message: its steps, the other rank, and what it is, for errors."""

    steps: Steps
    peer: int
    doing: str
    nbytes: int
    copies: int


def send(comm: Communicator, x: Any, dest: int, tag: int) -> Message:
    """See `Communicator.send`."""
    dest, tag = check_rank(comm, dest, "send", "dest"), _check_tag(tag, "send")
    doing = f"send to rank {dest} with tag {tag}"
    try:
        source = view(x, "send")
        check_movable(source.dtype, "send")
        flat, copies = flatten(source)
        said = _description(source)
    except Exception as error:
        return Message(_send_error(comm, error, dest, tag), dest, doing, 0, 0)
    return Message(_send(comm, source, flat, said, dest, tag), dest, doing, flat.nbytes, copies)


def _send(
    comm: Communicator,
    source: BufferView,
    flat: np.ndarray[Any, Any],
    said: bytes,
    dest: int,
    tag: int,
) -> Steps:
    data = flat.view(np.uint8)
    inline = len(said) + len(data) <= _ROOM
    pieces = comm._next_message()
    head = _head(_ELEMENTS, pieces, len(data), source.dtype, source.shape, len(said))
    envelope = head + said + (data.tobytes() if inline else b"")
    handles = [comm._link.send(np.frombuffer(envelope, np.uint8), dest, tag)]
    if not inline:
        handles += [comm._link.send(piece, dest, TAGS + pieces) for piece in _cut(data)]
    yield from handles


def _description(source: BufferView) -> bytes:
    """Return what is said of dtype and shape where the head has no room for them."""
    said = (describe(source.dtype, source.shape, "send") or "").encode()
    if len(said) > _ROOM:
        raise TypeError(
            f"send: a dtype of {len(source.dtype.names or ())} fields and {source.array.ndim} dimensions "
            f"take {len(said)} bytes to describe, more than {_ROOM}; send fields one by one"
        )
    return said


def _send_error(comm: Communicator, error: Exception, dest: int, tag: int) -> Steps:
    """Tell the receiver why there is no message, and raise."""
    from arraycomm._callsite import describe_raise

    said = describe_raise(error).encode(errors="replace")[-_ROOM:]
    head = _head(_RAISED, 0, 0, None, (), len(said))
    yield comm._link.send(np.frombuffer(head + said, np.uint8), dest, tag)
    raise UndeliveredError(error)


def recv(comm: Communicator, source: int, tag: int, like: Any, out: Any) -> Message:
    """See `Communicator.recv`."""
    source, tag = check_rank(comm, source, "recv", "source"), _check_tag(tag, "recv")
    doing = f"recv from rank {source} with tag {tag}"
    return Message(_recv(comm, source, tag, like, out), source, doing, 0, 0)


def _recv(comm: Communicator, source: int, tag: int, like: Any, out: Any) -> Steps:
    kind, wrong = _wanted(like, out)
    envelope = np.empty(_ENVELOPE, np.uint8)
    yield comm._link.recv(envelope, source, tag)
    status, pieces, nbytes, code, ndim, length, *dims = _HEAD.unpack_from(envelope.data)
    body = envelope[_HEAD.size :]
    said = body[: min(max(length, 0), _ROOM)].tobytes().decode(errors="replace")
    if status == _RAISED:
        raise UndeliveredError(wrong or _sender_raised(source, said))
    dtype, shape = _array(code, dims[: max(ndim, 0)], said)
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise TransportError(f"recv: a malformed message came from rank {source}")
    target = DeferredResultBuffer(
        comm._host_placement, kind, shape, dtype, None if wrong else out, "recv"
    )
    data = target.flat.view(np.uint8)
    if length + nbytes <= _ROOM:
        data[...] = body[length : length + nbytes]
    else:
        yield from [comm._link.recv(piece, source, TAGS + pieces) for piece in _cut(data)]
    if wrong is not None:
        raise UndeliveredError(wrong)
    return target.deliver()


def _wanted(like: Any, out: Any) -> tuple[BufferView, Exception | None]:
    """Tell what the result is like, or what is wrong with that: the message is taken all the same."""
    try:
        return wanted_kind(None, like, out, "recv"), None
    except Exception as error:
        return wanted_kind(None, None, None, "recv"), error


def _sender_raised(source: int, traceback: str) -> PeerError:
    error = PeerError(
        f"recv: rank {source} raised instead of sending; its traceback:\n{traceback}",
        rank=source,
        traceback=traceback,
    )
    error.in_step = True
    return error


def _head(
    status: int,
    pieces: int,
    nbytes: int,
    dtype: DType | None,
    shape: tuple[int, ...],
    length: int,
) -> bytes:
    fits = dtype is not None and in_header(dtype, shape)
    code = BY_DTYPE[dtype].code if fits and dtype is not None else 0
    dims = shape if fits else ()
    return _HEAD.pack(
        *(status, pieces, nbytes, code, len(dims), length), *dims, *[0] * (MAX_DIMS - len(dims))
    )


def _array(code: int, dims: list[int], said: str) -> tuple[DType, tuple[int, ...]]:
    """Return the dtype and shape that an envelope names."""
    if code in BY_CODE:
        return BY_CODE[code].dtype, tuple(dims)
    return parse(said)


def _cut(data: Bytes) -> list[Bytes]:
    return [data[start : start + MAX_BYTES] for start in range(0, len(data), MAX_BYTES)]


def _check_tag(tag: Any, operation: str) -> int:
    try:
        found = operator.index(tag)
    except TypeError:
        raise TypeError(f"{operation}: tag must be an integer; got {tag!r}") from None
    if not 0 <= found < TAGS:
        raise ValueError(f"{operation}: tag must be 0 to {TAGS - 1}; got {tag}")
    return found
