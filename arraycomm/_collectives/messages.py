"""Messages from one rank to another: what travels ahead of the elements, and what follows.

A message is an envelope (status, dtype, shape, and the elements if they are few), and further pieces
if they are many. The pieces have a tag of their own, which the envelope names, so that receives under
way at the same time never take one another's.
"""

from __future__ import annotations

import math
import operator
import struct
import time
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.views import view
from arraycomm._callsite import call_site, describe_raise
from arraycomm._collectives.arguments import check_rank
from arraycomm._collectives.blocks import cut
from arraycomm._collectives.matching import ANY_SOURCE, ANY_TAG, Matcher, Status
from arraycomm._collectives.placement import (
    DeferredResultBuffer,
    Destination,
    HostPlacement,
    flatten,
)
from arraycomm._collectives.refusals import wanted_kind
from arraycomm._collectives.requests import Request, wait_for_each
from arraycomm._collectives.statistics import Statistics
from arraycomm._dtypes import BY_CODE, BY_DTYPE, DType, check_movable
from arraycomm._errors import PeerError, name_operation
from arraycomm._protocol.announced import check_payload, check_size, malformed
from arraycomm._protocol.details import Description
from arraycomm._protocol.engine import Task
from arraycomm._protocol.group import Group
from arraycomm._protocol.header import MAX_DIMS, has_room_for
from arraycomm._protocol.undelivered import UndeliveredError
from arraycomm._protocol.waiting import Watch
from arraycomm._protocol.watchdog import MessageWait, checked_timeout
from arraycomm._transports.base import Bytes, Flat, Handle, Steps, Transport

# Tags of the user's are below this, those of further pieces from it on.
TAGS: Final = 1 << 20
_ENVELOPE: Final = 4096
_HEAD: Final = struct.Struct(f"<{6 + MAX_DIMS}q")
_ROOM: Final = _ENVELOPE - _HEAD.size
_ELEMENTS, _RAISED = range(2)


class Message(NamedTuple):
    """One rank's part in a message: its steps, the other rank, and what it is, for errors.

    `peer` is None for a message from any rank, which the `status` names once it has come, together with
    the tag and the bytes. `brief` is a message to send that is no more than an envelope with elements.
    """

    steps: Steps
    peer: int | None
    tag: int | None
    doing: str
    nbytes: int = 0
    copies: int = 0
    status: Status | None = None
    brief: bool = False


class _Finished(NamedTuple):
    """A message that needed no request."""

    result: Any = None

    def wait(self) -> Any:
        """Return what it gave."""
        return self.result


class _Both:
    """Two messages under way: some transports move one only if it is asked for."""

    def __init__(self, first: Handle, second: Handle) -> None:
        self._first: Handle | None = first
        self._second = second

    def done(self) -> bool:
        if self._first is not None and self._first.done():
            self._first = None
        return self._second.done() and self._first is None


_Pending = Request | _Finished


def _request(pending: _Pending) -> Request:
    assert isinstance(pending, Request)
    return pending


def _until(handle: Handle) -> Steps:
    yield handle


def _resumed(waiting: Handle, steps: Steps) -> Steps:
    """Return steps that have begun already, up to what they wait for; they raise what ends the wait."""
    try:
        yield waiting
    except BaseException as error:
        steps.throw(error)
        raise
    return (yield from steps)


class Messenger:
    """Sends and receives the messages of one group."""

    def __init__(self, group: Group, statistics: Statistics) -> None:
        self._group = group
        self._statistics = statistics
        self._host = HostPlacement(group)
        self._matcher = Matcher(group.transport)
        self._pieces = 0

    def isend(self, x: Any, dest: int, tag: int) -> Request:
        """Start to send an array."""
        return _request(self._post("send", self._sending, x, dest, tag, awaited=False))

    def irecv(self, source: Any, tag: Any, like: Any, out: Any, status: Any) -> Request:
        """Start to receive an array."""
        arguments = (source, tag, like, out, status)
        return _request(self._post("recv", self._receiving, *arguments, awaited=False))

    def send(self, x: Any, dest: int, tag: int, *, timeout: float | None) -> None:
        """Send an array."""
        self._wait("send", self._send_awaited(x, dest, tag, timeout))

    def recv(self, *arguments: Any, timeout: float | None) -> Any:
        """Receive an array; the arguments are those of `irecv`."""
        return self._wait("recv", self._recv_awaited(*arguments, timeout=timeout))[0]

    def sendrecv(
        self, x: Any, dest: int, source: Any, tag: Any, *arguments: Any, timeout: float | None
    ) -> Any:
        """Send and receive at the same time; return what was received."""
        sending = self._send_awaited(x, dest, tag, timeout)
        try:
            receiving = self._recv_awaited(source, tag, *arguments, timeout=timeout)
        except Exception:
            self._wait("send", sending)
            raise
        # What is wrong with its own argument is raised before what another rank has raised.
        return self._wait("recv", sending, receiving)[1]

    def _send_awaited(self, x: Any, dest: int, tag: int, timeout: float | None) -> _Pending:
        return self._post("send", self._sending, x, dest, tag, awaited=True, timeout=timeout)

    def _recv_awaited(self, *arguments: Any, timeout: float | None) -> _Pending:
        return self._post("recv", self._receiving, *arguments, awaited=True, timeout=timeout)

    def swap(self, data: Bytes, room: Bytes, dest: int, source: int, tag: int) -> None:
        """Send bytes to one rank, and receive as many as `room` has, or fewer, from another.

        They have no envelope: the other ranks take part by `swap` as well.
        """
        group, doing = self._group, f"sendrecv to rank {dest} and from rank {source} with tag {tag}"
        if group.closed is not None:
            raise group.closed_error("sendrecv")
        started = time.perf_counter()
        with group.turn():
            self._statistics.count("sendrecv", data.nbytes, 0)
            steps = self._delivered(self._swap(data, room, dest, source, tag), "sendrecv")

            def watch(waited: float) -> None:
                peers = self._peers(source, alone=True)
                group.check_message(MessageWait(peers, doing, call_site(), None), waited)

            try:
                group.engine.run(steps, watch)
            finally:
                self._statistics.add_seconds("sendrecv", time.perf_counter() - started)

    def _swap(self, data: Bytes, room: Bytes, dest: int, source: int, tag: int) -> Steps:
        group, transport = self._group, self._group.transport
        sent, received = transport.send(data, dest, tag), transport.recv(room, source, tag)
        receiving, sending = _until(_Both(sent, received)), _until(sent)
        if group.tracer is not None:
            site = call_site()
            to = Message(sending, dest, tag, f"send to rank {dest} with tag {tag}", data.nbytes)
            by = Message(receiving, source, tag, f"recv from rank {source} with tag {tag}")
            sending = group.tracer.message(group, "send", to, sending, site, awaited=True)
            receiving = group.tracer.message(group, "recv", by, receiving, site, awaited=True)
        yield from receiving
        yield from sending

    def _wait(self, operation: str, *requests: _Pending) -> list[Any]:
        """Wait for messages; what interrupts the wait ends them."""
        started = time.perf_counter()
        try:
            return wait_for_each(requests)
        except Exception:
            raise
        except BaseException as error:
            for request in requests:
                if isinstance(request, Request):
                    request.give_up(error)
            raise
        finally:
            self._statistics.add_seconds(operation, time.perf_counter() - started)

    def _post(
        self,
        operation: str,
        prepare: Any,
        *args: Any,
        awaited: bool,
        timeout: float | None = None,
    ) -> _Pending:
        group = self._group
        if group.closed is not None:
            raise group.closed_error(operation)
        # With nothing outstanding a blocking call is made in this thread, and needs no request.
        alone = awaited and group.tracer is None and group.engine.idle
        site = "" if alone else call_site()
        with group.turn():
            try:
                timeout = checked_timeout(timeout)
                message: Message = prepare(*args)
            except Exception as error:
                name_operation(error, operation)
                raise
            self._statistics.count(operation, message.nbytes, message.copies)

            task: Task | None = None

            def watch(waited: float) -> None:
                # A rank that waits cannot send to itself meanwhile.
                peers = self._peers(message.peer, alone=task is None or task.waited_for)
                wait = MessageWait(peers, message.doing, site or call_site(), timeout)
                group.check_message(wait, waited)

            group.unmatched += 1 if operation == "send" else -1
            steps = self._delivered(message.steps, operation)
            if alone and operation == "recv":
                return self._received(steps, watch)
            if alone and message.brief:
                if (waiting := next(steps)).done():
                    return _Finished(group.engine.run(steps))
                steps = _resumed(waiting, steps)
            site = site or call_site()
            if group.tracer is not None:
                steps = group.tracer.message(
                    group, operation, message, steps, site, awaited=awaited
                )
            task = group.engine.submit_message(steps, site, watch, awaited=awaited)
        return Request(group, task, site, awaited=awaited)

    def _received(self, steps: Steps, watch: Watch) -> _Finished:
        """Receive a message in this thread."""
        started = time.perf_counter()
        try:
            return _Finished(self._group.engine.run(steps, watch))
        finally:
            self._statistics.add_seconds("recv", time.perf_counter() - started)

    def _peers(self, peer: int | None, *, alone: bool) -> list[int]:
        """Return the ranks with which a message may be: another one, or itself if not waiting."""
        rank, size = self._group.rank, self._group.size
        if peer is not None:
            return [peer]
        return [each for each in range(size) if each != rank or not alone or size == 1]

    def _delivered(self, steps: Steps, operation: str) -> Steps:
        """Close the group if a message fails in the middle of its steps."""
        undelivered: list[Exception] = []
        try:
            return (yield from steps)
        except UndeliveredError as raised:
            raised.name(operation)
            undelivered.append(raised.error)
        except GeneratorExit:
            raise
        except BaseException as error:
            self._group.close(error)
            # Also if it was closed before: the transport may still hold this message's memory.
            self._group.unfinished = True
            raise
        # Not kept here: its traceback has this frame, and with it the arrays.
        raise undelivered.pop()

    # Sending

    def _sending(self, x: Any, dest: int, tag: int) -> Message:
        transport = self._group.transport
        dest, tag = check_rank(dest, self._group.size, "dest"), _check_tag(tag)
        doing = f"send to rank {dest} with tag {tag}"
        try:
            source = view(x)
            check_movable(source.dtype)
            flat, copies = flatten(source)
            described = _described(source)
        except Exception as error:
            name_operation(error, "send")
            return Message(_send_error(transport, error, dest, tag), dest, tag, doing)
        inline = len(described) + flat.nbytes <= _ROOM
        steps = self._send(source, flat, described, dest, tag, inline=inline)
        return Message(steps, dest, tag, doing, flat.nbytes, copies, brief=inline)

    def _send(
        self, source: BufferView, flat: Flat, described: bytes, dest: int, tag: int, *, inline: bool
    ) -> Steps:
        data, transport = flat.view(np.uint8), self._group.transport
        # A number for the further pieces, which no message under way has.
        self._pieces = pieces = (self._pieces + 1) % TAGS
        head = _head(_ELEMENTS, pieces, len(data), source.dtype, source.shape, len(described))
        envelope = head + described + (data.tobytes() if inline else b"")
        handles = [transport.send(np.frombuffer(envelope, np.uint8), dest, tag)]
        if not inline:
            handles += [transport.send(piece, dest, TAGS + pieces) for piece in cut(data)]
        yield from handles

    # Receiving

    def _receiving(self, source: Any, tag: Any, like: Any, out: Any, status: Any) -> Message:
        rank = None if source is ANY_SOURCE else check_rank(source, self._group.size, "source")
        tags = range(TAGS) if tag is ANY_TAG else range(found := _check_tag(tag), found + 1)
        if not isinstance(status, Status | None):
            raise TypeError(f"status must be an arraycomm.Status; got {status!r}")
        who = "any rank" if rank is None else f"rank {rank}"
        doing = f"recv from {who} with {'any tag' if tag is ANY_TAG else f'tag {tags[0]}'}"
        status = status or Status()
        steps = self._recv(rank, tags, like, out, status)
        return Message(steps, rank, None, doing, status=status)

    def _recv(self, rank: int | None, tags: range, like: Any, out: Any, status: Status) -> Steps:
        wanted = _wanted(like, out)
        envelope = np.empty(_ENVELOPE, np.uint8)
        receive = self._matcher.recv(envelope, rank, tags)
        try:
            yield receive
        finally:
            self._matcher.drop(receive)
        assert receive.source is not None
        status.source, status.tag = receive.source, receive.tag
        status.dtype, status.shape, status.nbytes = None, None, 0
        return (yield from self._take(envelope, receive.source, wanted, out, status))

    def _take(
        self,
        envelope: Bytes,
        source: int,
        wanted: tuple[BufferView, Exception | None],
        out: Any,
        status: Status,
    ) -> Steps:
        """Read an envelope, and receive what follows it."""
        transport, (kind, wrong) = self._group.transport, wanted
        state, pieces, nbytes, code, ndim, length, *dims = _HEAD.unpack_from(envelope.data)
        body = envelope[_HEAD.size :]
        if not 0 <= length <= _ROOM:
            raise malformed(source, f"a text of {length} bytes")
        text = body[:length].tobytes().decode(errors="replace")
        if state == _RAISED:
            raise UndeliveredError(wrong or _sender_raised(source, text))
        dtype, shape = _array(source, code, dims[: max(ndim, 0)], text)
        check_payload(source, math.prod(shape) * dtype.itemsize, nbytes)
        if not 0 <= pieces < TAGS:
            raise malformed(source, f"pieces with tag {pieces}")
        status.dtype, status.shape, status.nbytes = dtype, shape, nbytes
        to = Destination(kind, None if wrong else out)
        target = DeferredResultBuffer(self._host, to, shape, dtype)
        data = target.flat.view(np.uint8)
        if length + nbytes <= _ROOM:
            data[...] = body[length : length + nbytes]
        else:
            yield from [transport.recv(piece, source, TAGS + pieces) for piece in cut(data)]
        if wrong is not None:
            raise UndeliveredError(wrong)
        try:
            return target.deliver()
        except UndeliveredError:
            raise
        except Exception as error:
            raise UndeliveredError(error) from error


def _described(source: BufferView) -> bytes:
    """Return what the receiver is told of dtype and shape if the head has no room for them."""
    description = Description.if_needed(source.dtype, source.shape)
    described = b"" if description is None else description.array.encode()
    if len(described) > _ROOM:
        raise TypeError(
            f"a dtype of {len(source.dtype.names or ())} fields and {source.array.ndim} dimensions "
            f"take {len(described)} bytes to describe, more than {_ROOM}; send fields one by one"
        )
    return described


def _send_error(transport: Transport, error: Exception, dest: int, tag: int) -> Steps:
    """Tell the receiver why there is no message, and raise."""
    text = describe_raise(error).encode(errors="replace")[-_ROOM:]
    head = _head(_RAISED, 0, 0, None, (), len(text))
    yield transport.send(np.frombuffer(head + text, np.uint8), dest, tag)
    raise UndeliveredError(error)


def _wanted(like: Any, out: Any) -> tuple[BufferView, Exception | None]:
    """Tell what the result is like, or what is wrong with that: the message is taken all the same."""
    try:
        return wanted_kind(None, like, out), None
    except Exception as error:
        return wanted_kind(None, None, None), error


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
    fits = dtype is not None and has_room_for(dtype, shape)
    code = BY_DTYPE[dtype].code if fits and dtype is not None else 0
    dims = shape if fits else ()
    return _HEAD.pack(
        *(status, pieces, nbytes, code, len(dims), length), *dims, *[0] * (MAX_DIMS - len(dims))
    )


def _array(rank: int, code: int, dims: list[int], described: str) -> tuple[DType, tuple[int, ...]]:
    """Return the dtype and shape that an envelope names."""
    if code not in BY_CODE:
        return Description(described).parse(rank)
    dtype = BY_CODE[code].dtype
    check_size(rank, dims, dtype.itemsize)
    return dtype, tuple(dims)


def _check_tag(tag: Any) -> int:
    try:
        found = operator.index(tag)
    except TypeError:
        raise TypeError(f"tag must be an integer; got {tag!r}") from None
    if not 0 <= found < TAGS:
        raise ValueError(f"tag must be 0 to {TAGS - 1}; got {tag}")
    return found
