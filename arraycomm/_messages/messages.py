"""Messages from one rank to another: each call finds its fast path, or is made in full.

In full, a look at the arguments makes a `Message`, which `delivery.py` takes to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

from arraycomm._calls.requests import Request
from arraycomm._calls.runner import Runner
from arraycomm._callsite import trim
from arraycomm._errors import (
    PeerError,
    TransportError,
    forgiving,
    is_interrupt,
    name_operation,
    raise_interrupt,
)
from arraycomm._messages.delivery import Delivery, Message
from arraycomm._messages.fast_messages import FastMessages, FastReceive, FastSend
from arraycomm._messages.matching import TAGS, Matcher, Status
from arraycomm._messages.probing import Prober
from arraycomm._messages.receiving import Receiver
from arraycomm._messages.sending import Outgoing, Sender
from arraycomm._protocol.agreement import UndeliveredError
from arraycomm._transports.base import Steps

T = TypeVar("T")

# The last tag, which is neither a user's nor one of further pieces.
_TRADED: Final = 2 * TAGS - 1


class Messenger:
    """Sends and receives the messages of one group.

    `place` returns the place of the calling thread's call in its program, 0 outside of programs.
    Sender and receiver must be at the same one if both are in programs.
    """

    def __init__(self, runner: Runner, place: Callable[[], int] = int) -> None:
        self._group = group = runner.group
        matcher = Matcher(group.transport)
        self._sender, self._receiver = Sender(group, place), Receiver(group, matcher, place)
        self._prober = Prober(group, matcher)
        self._delivery = delivery = Delivery(group, runner.statistics)
        self._fast = FastMessages(runner.fast_paths, delivery, self._receiver)
        # See `Sender.read`.
        self.read = self._sender.read

    def isend(self, x: Any, dest: Any, tag: int) -> Request:
        """Start to send an array."""
        key, fast = self._fast.find_send(x, dest, tag)
        if fast is not None and (begun := fast.start(x)) is not NotImplemented:
            return cast(Request, begun)
        request = self._delivery.start(self._checked("send", self._sender.message, x, dest, tag))
        self._fast.keep(key)
        return request

    def irecv(self, source: Any, tag: Any, like: Any, out: Any, status: Any) -> Request:
        """Start to receive an array."""
        key, fast = self._fast.find_recv(source, tag, like, out, status)
        if fast is not None and (begun := fast.start(out, status)) is not NotImplemented:
            return cast(Request, begun)
        arguments = source, tag, like, out, status
        request = self._delivery.start(self._checked("recv", self._receiver.message, *arguments))
        self._fast.keep(key)
        return request

    def send(self, x: Any, dest: Any, tag: int, *, timeout: float | None) -> None:
        """Send an array."""
        key, fast = self._fast.find_send(x, dest, tag)
        if fast is not None and timeout is None and fast(x) is not NotImplemented:
            return
        message = self._checked("send", self._sender.message, x, dest, tag, timeout)
        self._delivery.make("send", message)
        self._fast.keep(key)

    def recv(
        self, source: Any, tag: Any, like: Any, out: Any, status: Any, *, timeout: float | None
    ) -> Any:
        """Receive an array; the arguments are those of `irecv`."""
        key, fast = self._fast.find_recv(source, tag, like, out, status)
        if fast is not None and timeout is None:
            result = fast(out, status)
            if result is not NotImplemented:
                return result
        arguments = source, tag, like, out, status, timeout
        message = self._checked("recv", self._receiver.message, *arguments)
        result = self._delivery.make("recv", message)
        self._fast.keep(key)
        return result

    def sendrecv(
        self,
        x: Any,
        dest: Any,
        source: Any,
        tag: Any,
        like: Any,
        out: Any,
        status: Any,
        *,
        timeout: float | None,
    ) -> Any:
        """Send and receive at the same time; return what was received."""
        send_key, send = self._fast.find_send(x, dest, tag)
        recv_key, recv = self._fast.find_recv(source, tag, like, out, status)
        if type(send) is FastSend and type(recv) is FastReceive and timeout is None:
            result = recv(out, status, send, x)
            if result is not NotImplemented:
                return result
        sending = self._checked("send", self._sender.message, x, dest, tag, timeout, out)
        arguments = source, tag, like, out, status, timeout
        try:
            receiving = self._checked("recv", self._receiver.message, *arguments)
        except Exception as error:
            raise_interrupt(error)
            # What the other rank sends is taken all the same, so that no later call gets it.
            with suppress(PeerError):
                self._delivery.make("send", sending, *self._taken(source, tag))
            raise
        # What is wrong with its own argument is raised before what another rank has raised.
        result = self._delivery.make("recv", sending, receiving)
        self._fast.keep(send_key)
        self._fast.keep(recv_key)
        return result

    def probe(self, source: Any, tag: Any, *, timeout: float | None) -> Status:
        """Wait for a message that can be received, and say which."""
        message = self._checked("probe", self._prober.message, source, tag, timeout)
        found: Status = self._delivery.make("probe", message)
        return found

    def iprobe(self, source: Any, tag: Any) -> Status | None:
        """Say which message can be received, None without one."""
        return self._checked("iprobe", self._prober.look, source, tag)

    def refuse(self, error: Exception, dest: int, source: int, tag: int) -> None:
        """Raise the error of an array of `sendrecv`, and tell the rank that would have got it."""
        name_operation(error, "sendrecv")
        refusing = self._checked(
            "sendrecv", self._sender.message, None, dest, tag, None, None, error
        )
        receiving = self._checked("recv", self._receiver.message, source, tag)
        self._delivery.make("sendrecv", refusing._replace(operation="sendrecv"), receiving)

    def trade(
        self, sends: list[tuple[Outgoing, int]], receives: list[tuple[int, Any, Any]]
    ) -> Steps:
        """Send and receive as the ranks agreed to, beside users' messages; return what came.

        Each is a message and its rank, and a rank with `like` and `out`. Several with one rank come
        in the order in which they go. An error of one is raised once all are through.
        """
        results, undelivered, tags = list[Any](), list[UndeliveredError](), range(_TRADED, 2 * TAGS)
        receive, begin = self._receiver.steps, self._sender.begin
        coming = [receive(rank, tags, like, out, Status()) for rank, like, out in receives]
        begun = [next(each) for each in coming]
        sent = [handle for each, rank in sends for handle in begin(each, rank, _TRADED)]
        for handle, rest in zip(begun, coming, strict=True):
            yield handle
            try:
                results.append((yield from rest))
            except UndeliveredError as error:
                undelivered.append(error)
        yield from sent
        if undelivered:
            raise undelivered.pop(0)
        return results

    def leave_by(self, error: BaseException) -> None:
        """Trim the error that a call raises; end the group if it was interrupted, or MPI failed.

        Nobody knows then which messages have gone, and the next one would be taken for this one.
        """
        if isinstance(error, TransportError) or is_interrupt(error):
            self._delivery.fail(error)
        trim(error)

    def _checked(self, operation: str, look: Callable[..., T], *arguments: Any) -> T:
        """Look at the arguments of a call; raise what is wrong with them, if no rank is told."""
        group = self._group
        if group.closed is not None:
            raise group.closed_error(operation)
        try:
            return look(*arguments)
        except Exception as error:
            name_operation(error, operation)
            raise

    def _taken(self, source: Any, tag: Any) -> list[Message]:
        """Return a message that nobody gets; none if there is no such rank or tag."""
        with forgiving:
            return [self._checked("recv", self._receiver.message, source, tag)]
        return []
