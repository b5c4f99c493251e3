"""Messages from one rank to another.

A message is an envelope (see `envelopes.py`), and further pieces if its elements are many. The
pieces have a tag of their own, which the envelope names, so that receives under way at the same
time never take one another's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final, NamedTuple, cast
from weakref import WeakValueDictionary

import numpy as np

from arraycomm._arrays.views import view
from arraycomm._calls.arguments import check_rank
from arraycomm._calls.pickles import dumps, loads
from arraycomm._calls.placement import DeferredResultBuffer, Destination, HostPlacement, flatten
from arraycomm._calls.refusals import Wanted, wanted_kind, wanted_like
from arraycomm._calls.requests import Request, wait_for_each
from arraycomm._calls.runner import Runner
from arraycomm._callsite import call_site, describe_raise, trim
from arraycomm._checks import check_at_least, check_seconds
from arraycomm._errors import (
    MismatchError,
    PeerError,
    TransportError,
    forgiving,
    is_interrupt,
    name_operation,
    naming,
    raise_interrupt,
)
from arraycomm._messages import envelopes
from arraycomm._messages.fast_messages import FastReceive, FastSend, MessageWait, beside
from arraycomm._messages.matching import ANY_SOURCE, ANY_TAG, PROC_NULL, Matcher, Probe, Status
from arraycomm._prepared.fast_paths import FastPath
from arraycomm._protocol.agreement import UndeliveredError
from arraycomm._protocol.group import Group
from arraycomm._protocol.task import Finished, Task
from arraycomm._protocol.waits import clock
from arraycomm._protocol.waits.deadlock import Wait
from arraycomm._protocol.waits.watchdog import LAST_MESSAGE
from arraycomm._reduce.blocks import cut
from arraycomm._transports.base import Bytes, Handle, Steps

# Tags of the user's are below this, those of further pieces from it on; the last is for `trade`.
TAGS: Final = 1 << 20
_TRADED: Final = 2 * TAGS - 1


class Message(NamedTuple):
    """One rank's part in a message: its steps, the other rank, and what it is, for errors.

    `peer` is None for a message from any rank, which the `status` names once it has come, together
    with the tag and the bytes. `unmatched` is how many messages it sends, less those it receives.
    """

    steps: Steps
    peer: int | None
    tag: int | None
    doing: str
    nbytes: int = 0
    copies: int = 0
    status: Status | None = None
    unmatched: int = 1


class Pickled(NamedTuple):
    """A Python object that is sent as its pickle; or, as what a receive is like, any."""

    obj: Any = None


class _Finished(NamedTuple):
    """A message that needed no request."""

    result: Any = None

    def wait(self) -> Any:
        """Return what it gave."""
        return self.result


class Outgoing(NamedTuple):
    """An array on its way: its envelope, with few elements inside it or many behind it.

    Bytes and copies are counted.
    """

    envelope: Bytes
    data: Bytes | None
    nbytes: int
    copies: int


_Pending = Request | _Finished
# The key of a call, and its fast path, if there are any.
_Found = tuple[tuple[Any, ...] | None, FastPath | None]


class Messenger:
    """Sends and receives the messages of one group.

    `place` returns the place of the calling thread's call in its program, 0 outside of programs.
    Sender and receiver must be at the same one if both are in programs.
    """

    def __init__(self, runner: Runner, place: Callable[[], int] = int) -> None:
        self._group = group = runner.group
        self._place = place
        self._statistics, self._fast_paths = runner.statistics, runner.fast_paths
        self._host = HostPlacement(group)
        self._matcher = Matcher(group.transport)
        # The numbers of further pieces: of the last ones, and of messages under way.
        self._pieces, self._under_way = count(1), WeakValueDictionary[int, Handle]()
        # When `iprobe` last asked ranks where they are, or began to find nothing, and first saw
        # that all of some had left.
        self._asked: float | None = None
        self._gone_since: dict[tuple[int, ...], float] = {}

    def isend(self, x: Any, dest: Any, tag: int) -> Request:
        """Start to send an array."""
        key, fast = self._find_send(x, dest, tag)
        if fast is not None and (request := fast.start(x)) is not NotImplemented:
            return cast(Request, request)
        request = self._post("send", self._sending, x, dest, tag, awaited=False)
        self._keep_send(key, x)
        return cast(Request, request)

    def irecv(self, source: Any, tag: Any, like: Any, out: Any, status: Any) -> Request:
        """Start to receive an array."""
        key, fast = self._find_recv(source, tag, like, out, status)
        if fast is not None and (request := fast.start(out, status)) is not NotImplemented:
            return cast(Request, request)
        arguments = (source, tag, like, out, status)
        request = self._post("recv", self._receiving, *arguments, awaited=False)
        self._keep_recv(key)
        return cast(Request, request)

    def send(self, x: Any, dest: Any, tag: int, *, timeout: float | None) -> None:
        """Send an array."""
        key, fast = self._find_send(x, dest, tag)
        if fast is not None and timeout is None and fast(x) is not NotImplemented:
            return
        outgoing = self._outgoing(x) if self._is_plain((dest,), tag, None, timeout) else None
        if outgoing is not None:
            wait = MessageWait("send to", dest, tag, outgoing.nbytes)
            self._run(self._send_here(outgoing, wait), wait, "send")
        else:
            self._wait("send", self._send_awaited(x, dest, tag, timeout))
        self._keep_send(key, x)

    def recv(
        self, source: Any, tag: Any, like: Any, out: Any, status: Any, *, timeout: float | None
    ) -> Any:
        """Receive an array; the arguments are those of `irecv`."""
        key, fast = self._find_recv(source, tag, like, out, status)
        if fast is not None and timeout is None:
            result = fast(out, status)
            if result is not NotImplemented:
                return result
        if self._is_plain((source,), tag, status, timeout):
            wait = MessageWait("recv from", source, tag)
            steps = self._recv_here(wait, like, out, status or Status())
            result = self._run(steps, wait, "recv")
        else:
            arguments = (source, tag, like, out, status)
            result = self._wait("recv", self._recv_awaited(*arguments, timeout=timeout))[0]
        self._keep_recv(key)
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
        (send_key, send), (recv_key, recv) = (
            self._find_send(x, dest, tag),
            self._find_recv(source, tag, like, out, status),
        )
        if type(send) is FastSend and type(recv) is FastReceive and timeout is None:
            result = recv.exchange(send, x, out, status)
            if result is not NotImplemented:
                return result
        plain = self._is_plain((dest, source), tag, status, timeout)
        outgoing = self._outgoing(x, out) if plain else None
        if outgoing is not None:
            wait = MessageWait("recv from", source, tag, outgoing.nbytes)
            result = self._run(
                self._exchange(outgoing, dest, wait, like, out, status or Status()), wait, "recv"
            )
            self._keep_send(send_key, x)
            self._keep_recv(recv_key)
            return result
        sending = self._send_awaited(x, dest, tag, timeout, out)
        try:
            receiving = self._recv_awaited(source, tag, like, out, status, timeout=timeout)
        except Exception as error:
            raise_interrupt(error)
            # What the other rank sends is taken all the same, so that no later call gets it.
            with suppress(PeerError):
                self._wait("send", sending, *self._taken(source, tag))
            raise
        # What is wrong with its own argument is raised before what another rank has raised.
        return self._wait("recv", sending, receiving)[1]

    def probe(self, source: Any, tag: Any, *, timeout: float | None) -> Status:
        """Wait for a message that can be received, and say which."""
        probing = self._post("probe", self._probing, source, tag, awaited=True, timeout=timeout)
        found: Status = self._wait("probe", probing)[0]
        return found

    def iprobe(self, source: Any, tag: Any) -> Status | None:
        """Say which message can be received, None without one."""
        group = self._group
        if group.closed is not None:
            raise group.closed_error("iprobe")
        with naming("iprobe"), group.turn():
            rank, tags, what = self._named(source, tag)
            if source is PROC_NULL:
                return Status()
            group.engine.advance()
            found = self._matcher.probe(rank, tags)
            if found is not None:
                self._asked = None
                return Status(*found, nbytes=None)
            self._look_for(self._peers(rank, alone=False), what)
            return None

    def _look_for(self, peers: list[int], what: str) -> None:
        """Raise once the ranks from one of which a message may come have left."""
        notes, now = self._group.control.notes, clock.now()
        if not set(peers) <= notes.exit_notices().keys():
            self._asked = self._asked or now
            if now > self._asked + LAST_MESSAGE:
                self._asked = now
                notes.ask_wait_status(peers)
                self._group.watchdog.check_for_deaths()
            return
        # What they have sent before still comes.
        since = self._gone_since.setdefault(tuple(peers), now)
        wait = Wait(lambda: peers, f"probe {what}", call_site(), None)
        self._group.check_message(wait, now - since)

    def _taken(self, source: Any, tag: Any) -> list[_Pending]:
        """Begin to receive a message that nobody gets; none if there is no such rank or tag."""
        with forgiving:
            return [self._recv_awaited(source, tag, None, None, None, timeout=None)]
        return []

    def _send_awaited(
        self, x: Any, dest: Any, tag: int, timeout: float | None, out: Any = None
    ) -> _Pending:
        try:
            found, wrong = check_seconds(timeout), None
        except Exception as error:
            found, wrong = None, error
        arguments = (x, dest, tag, out, wrong)
        return self._post("send", self._sending, *arguments, awaited=True, timeout=found)

    def _recv_awaited(self, *arguments: Any, timeout: float | None) -> _Pending:
        return self._post("recv", self._receiving, *arguments, awaited=True, timeout=timeout)

    def refuse(self, error: Exception, dest: int, source: int, tag: int) -> None:
        """Raise the error of an array of `sendrecv`, and tell the rank that would have got it."""
        name_operation(error, "sendrecv")
        sending = self._post("sendrecv", self._sending, None, dest, tag, None, error, awaited=True)
        receiving = self._recv_awaited(source, tag, None, None, None, timeout=None)
        self._wait("sendrecv", sending, receiving)

    def _run(self, steps: Steps, wait: MessageWait, operation: str) -> Any:
        """Make a call in this thread, without a request."""
        with self._group.turn():
            return self._timed(operation, self._drive, steps, wait, operation)

    def _timed(self, operation: str, run: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return run(*arguments)
        finally:
            self._statistics.add_seconds(operation, time.perf_counter() - started)

    def _drive(self, steps: Steps, wait: MessageWait, operation: str) -> Any:
        group, delivered = self._group, self._delivered(steps, operation)
        return group.engine.run(delivered, lambda s: group.check_message(wait.told(group), s))

    def _wait(self, operation: str, *requests: _Pending) -> list[Any]:
        """Wait for messages; what interrupts the wait ends them."""
        try:
            return list(self._timed(operation, wait_for_each, requests))
        except BaseException as error:
            for request in requests:
                if is_interrupt(error) and isinstance(request, Request):
                    request.give_up(error)
            raise

    def _post(
        self, operation: str, prepare: Any, *args: Any, awaited: bool, timeout: float | None = None
    ) -> _Pending:
        group = self._group
        if group.closed is not None:
            raise group.closed_error(operation)
        # With nothing outstanding a receive that is awaited is made in this thread, and needs no
        # request.
        alone = awaited and operation == "recv" and group.tracer is None and group.engine.idle
        site = "" if alone else call_site()
        with group.turn():
            try:
                timeout = check_seconds(timeout)
                message: Message = prepare(*args)
            except Exception as error:
                name_operation(error, operation)
                raise
            self._statistics.count(operation, message.nbytes, message.copies)

            task: Task | None = None

            def watch(waited: float) -> None:
                # A rank that waits cannot send to itself meanwhile.
                blocks = task is None or task.waited_for
                peers = self._peers(message.peer, alone=blocks)
                wait = Wait(lambda: peers, message.doing, site or call_site(), timeout, blocks)
                group.check_message(wait, waited)

            group.unmatched += message.unmatched
            steps = self._delivered(message.steps, operation)
            if alone:
                return _Finished(self._timed("recv", group.engine.run, steps, watch))
            if group.tracer is not None and message.unmatched:
                steps = group.tracer.message(
                    group, operation, message, steps, site, awaited=awaited
                )
            task = group.engine.submit_message(steps, site, watch, awaited=awaited)
        return Request(group, task, site, awaited=awaited)

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
            self._fail(error)
            raise
        # Not kept here: its traceback has this frame, and with it the arrays.
        raise undelivered.pop()

    # In the calling thread

    def _is_plain(self, peers: tuple[Any, ...], tag: Any, status: Any, timeout: Any) -> bool:
        """Return whether a call with these ranks needs no request: nothing is pending or traced."""
        group = self._group
        for peer in peers:
            if type(peer) is not int or not 0 <= peer < group.size or peer == group.rank:
                return False
        return (
            timeout is None
            and type(tag) is int
            and 0 <= tag < TAGS
            and (status is None or type(status) is Status)
            and group.closed is None
            and group.tracer is None
            and group.engine.idle
        )

    def _send_here(self, outgoing: Outgoing, wait: MessageWait) -> Steps:
        """Send a message."""
        self._statistics.count("send", outgoing.nbytes, outgoing.copies)
        self._group.unmatched += 1
        yield from self._send(outgoing, wait.peer, wait.tag)

    def _recv_here(self, wait: MessageWait, like: Any, out: Any, status: Status) -> Steps:
        """Receive a message."""
        self._statistics.count("recv")
        self._group.unmatched -= 1
        wanted, place, envelope = (
            _wanted_of(like, out),
            self._place(),
            np.empty(envelopes.NBYTES, np.uint8),
        )
        # Nothing is outstanding, so no receive comes before this one.
        yield self._group.transport.recv(envelope, wait.peer, wait.tag)
        status.source, status.tag = wait.peer, wait.tag
        result = yield from self.arrived(envelope, place, wanted, out, status)
        return result

    def _exchange(
        self, outgoing: Outgoing, dest: int, wait: MessageWait, like: Any, out: Any, status: Status
    ) -> Steps:
        """Receive a message beside one that is sent."""
        self._statistics.count("send", outgoing.nbytes, outgoing.copies)
        self._group.unmatched += 1
        sent = self._begin(outgoing, dest, wait.tag)
        receiving = self._recv_here(wait, like, out, status)
        result = yield from beside(sent, receiving, wait, dest)
        return result

    # The fast paths, and what goes on with their messages

    def _find_send(self, x: Any, dest: Any, tag: Any) -> _Found:
        if type(x) is not np.ndarray or type(dest) is not int or type(tag) is not int:
            return None, None
        key = (FastSend, dest, tag, self._place(), x.dtype, x.shape)
        return key, self._fast_paths.find(key)

    def _find_recv(self, source: Any, tag: Any, like: Any, out: Any, status: Any) -> _Found:
        plain = (
            type(source) is int
            and type(tag) is int
            and (like is None or (type(like) is np.ndarray and not like.dtype.hasobject))
            and (out is None or type(out) is np.ndarray)
            and (status is None or type(status) is Status)
        )
        if not plain:
            return None, None
        key = (FastReceive, source, tag, self._place())
        return key, self._fast_paths.find(key)

    def _keep_send(self, key: tuple[Any, ...] | None, x: Any) -> None:
        """Keep the fast path of sends with this key, if they have one."""
        if key is None:
            return
        _, dest, tag, place, dtype, shape = key

        def make() -> FastPath:
            head = envelopes.short_head(dtype, shape, place)
            if head is None or dest == self._group.rank:
                return FastPath()
            return FastSend(self._group, self._statistics, self, dest, tag, head, x)

        self._fast_paths.keep_second(key, make)

    def _keep_recv(self, key: tuple[Any, ...] | None) -> None:
        """Keep the fast path of receives with this key, if they have one."""
        if key is None:
            return
        _, source, tag, place = key

        def make() -> FastPath:
            if source == self._group.rank:
                return FastPath()
            at = self._group, self._statistics, self, self._matcher
            return FastReceive(*at, source, tag, place)

        self._fast_paths.keep_second(key, make)

    def go_on(self, steps: Steps, wait: MessageWait, operation: str) -> Any:
        """Take the rest of a call's steps in this thread."""
        return self._drive(steps, wait, operation)

    def request(self, steps: Steps, wait: MessageWait, operation: str) -> Request:
        """Return a request of steps that go on beside the caller."""
        # That of who has called the communicator's method.
        group, site = self._group, call_site(5)
        task: Task | None = None

        def watch(waited: float) -> None:
            blocks = task is None or task.waited_for
            told = Wait(lambda: [wait.peer], str(wait), site, None, certain=blocks)
            group.check_message(told, waited)

        steps = self._delivered(steps, operation)
        task = group.engine.submit_message(steps, site, watch, looked=True)
        return Request(group, task, site)

    def finished(self, result: Any) -> Request:
        """Return the request of a message that is complete."""
        group, site = self._group, call_site(5)
        return Request(group, Finished(result, group.engine.outcomes, site), site)

    def leave_by(self, error: BaseException) -> None:
        """Trim the error that a call raises; end the group if it was interrupted, or MPI failed.

        Nobody knows then which messages have gone, and the next one would be taken for this one.
        """
        if isinstance(error, TransportError) or is_interrupt(error):
            self._fail(error)
        trim(error)

    def _fail(self, error: BaseException) -> None:
        """End the group, for a message has failed in the middle of its steps."""
        self._group.close(error)
        # Also if it was closed before: the transport may still hold this message's memory.
        self._group.unfinished = True

    # Sending

    def _sending(
        self, x: Any, dest: Any, tag: int, out: Any = None, wrong: Exception | None = None
    ) -> Message:
        """Return a message to send; the receiver is told what is `wrong` with another argument."""
        if dest is PROC_NULL:
            self.read(x)
            return Message(_nothing(), None, _check_tag(tag), "send to no rank", unmatched=0)
        dest, tag = check_rank(dest, self._group.size, "dest"), _check_tag(tag)
        doing = f"send to rank {dest} with tag {tag}"
        try:
            if wrong is not None:
                raise wrong
            outgoing = self.read(x, out)
        except Exception as error:
            name_operation(error, "send")
            return Message(_send_error(self._group, error, dest, tag), dest, tag, doing)
        steps = self._send(outgoing, dest, tag)
        return Message(steps, dest, tag, doing, outgoing.nbytes, outgoing.copies)

    def _outgoing(self, x: Any, out: Any = None) -> Outgoing | None:
        """Return `read`, or None if there is something wrong with the array."""
        with forgiving:
            return self.read(x, out)
        return None

    def read(self, x: Any, *outs: Any) -> Outgoing:
        """Return an array on its way, which may be written to as one of `outs` meanwhile."""
        if isinstance(x, Pickled):
            data = dumps(x.obj)
            return self._outgoing_of(envelopes.start_of_pickle(len(data)), data, 0)
        source, place = view(x), self._place()
        start, (flat, copies) = envelopes.start_of(source, place), flatten(source)
        data = flat.view(np.uint8)
        if not envelopes.has_room(start, len(data)) and any(_may_change(data, out) for out in outs):
            data, copies = data.copy(), copies + 1
        return self._outgoing_of(start, data, copies)

    def _outgoing_of(self, start: bytes, data: Bytes, copies: int) -> Outgoing:
        """Return bytes on their way, behind the head and the text of their envelope."""
        if envelopes.has_room(start, len(data)):
            envelope = np.frombuffer(start + data.tobytes(), np.uint8)
            return Outgoing(envelope, None, len(data), copies)
        envelope = np.frombuffer(bytearray(start), np.uint8)
        return Outgoing(envelope, data, len(data), copies)

    def _begin(self, outgoing: Outgoing, dest: int, tag: int) -> list[Handle]:
        """Begin to send an envelope and what follows it, which is to be waited for first."""
        transport, envelope, data = self._group.transport, outgoing.envelope, outgoing.data
        self._group.sent[dest, tag][0] += 1
        if data is None:
            return [transport.send(envelope, dest, tag)]
        # A number for the further pieces, which no message under way has.
        numbers = (number % (TAGS - 1) for number in self._pieces)
        pieces = next(number for number in numbers if number not in self._under_way)
        envelopes.set_pieces(envelope, pieces)
        self._under_way[pieces] = begun = transport.send(envelope, dest, tag)
        return [*(transport.send(piece, dest, TAGS + pieces) for piece in cut(data)), begun]

    def _send(self, outgoing: Outgoing, dest: int, tag: int) -> Steps:
        yield from self._begin(outgoing, dest, tag)

    def trade(
        self, sends: list[tuple[Outgoing, int]], receives: list[tuple[int, Any, Any]]
    ) -> Steps:
        """Send and receive as the ranks agreed to, beside users' messages; return what came.

        Each is a message and its rank, and a rank with `like` and `out`. Several with one rank come
        in the order in which they go. An error of one is raised once all are through.
        """
        results, undelivered, tags = list[Any](), list[UndeliveredError](), range(_TRADED, 2 * TAGS)
        coming = [self._recv(rank, tags, like, out, Status()) for rank, like, out in receives]
        begun = [next(each) for each in coming]
        sent = [handle for each, rank in sends for handle in self._begin(each, rank, _TRADED)]
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

    # Receiving

    def _receiving(self, source: Any, tag: Any, like: Any, out: Any, status: Any) -> Message:
        rank, tags, what = self._named(source, tag)
        if not isinstance(status, Status | None):
            raise TypeError(f"status must be an arraycomm.Status; got {status!r}")
        status = status or Status()
        if source is PROC_NULL:
            return Message(_nothing(out), None, None, "recv from no rank", unmatched=0)
        steps = self._recv(rank, tags, like, out, status)
        return Message(steps, rank, None, f"recv {what}", status=status, unmatched=-1)

    def _probing(self, source: Any, tag: Any) -> Message:
        rank, tags, what = self._named(source, tag)
        steps = _nothing(Status()) if source is PROC_NULL else self._probe(rank, tags)
        return Message(steps, rank, None, f"probe {what}", unmatched=0)

    def _named(self, source: Any, tag: Any) -> tuple[int | None, range, str]:
        """Return the rank and tags that a receive names, None for any rank, and words for them."""
        anyone = source is ANY_SOURCE or source is PROC_NULL
        rank = None if anyone else check_rank(source, self._group.size, "source")
        tags = range(TAGS) if tag is ANY_TAG else range(found := _check_tag(tag), found + 1)
        who = "any rank" if rank is None else f"rank {rank}"
        return rank, tags, f"from {who} with {'any tag' if tag is ANY_TAG else f'tag {tags[0]}'}"

    def _probe(self, rank: int | None, tags: range) -> Steps:
        probe = Probe(self._matcher, rank, tags)
        yield probe
        assert probe.found is not None
        return Status(*probe.found, nbytes=None)

    def _recv(self, rank: int | None, tags: range, like: Any, out: Any, status: Status) -> Steps:
        wanted, place, envelope = (
            _wanted_of(like, out),
            self._place(),
            np.empty(envelopes.NBYTES, np.uint8),
        )
        receive = self._matcher.recv(envelope, rank, tags)
        try:
            yield receive
        finally:
            self._matcher.drop(receive)
        status.source, status.tag = receive.source, receive.tag
        result = yield from self.arrived(envelope, place, wanted, out, status)
        return result

    def arrived(
        self, envelope: Bytes, place: int, wanted: Wanted | None, out: Any, status: Status
    ) -> Steps:
        """Read a message whose envelope has come."""
        assert status.source is not None
        counted = self._group.received[status.source, status.tag or 0]
        status.dtype, status.shape, status.nbytes = None, None, 0
        if place and (wrong := self._misplaced(place, envelope, status.source)) is not None:
            wanted = Wanted(wanted_kind(None, None, None), wrong)
        try:
            result = envelopes.short_result(envelope, out, status) if wanted is None else None
            if result is None:
                wanted = wanted or wanted_like(None, out)
                result = yield from self._take(envelope, status.source, wanted, out, status)
            return result
        finally:
            counted[0] += 1

    def _misplaced(self, place: int, envelope: Bytes, source: int) -> MismatchError | None:
        """Return what is raised if the sender is at another place of its program."""
        theirs = envelopes.place_of(envelope)
        if theirs in (0, place):
            return None
        return MismatchError(
            f"sendrecv: ranks must send and receive at the same place of their programs; rank "
            f"{self._group.rank} receives in call {place} of its program what rank {source} sends "
            f"in call {theirs}"
        )

    def _take(
        self, envelope: Bytes, source: int, wanted: Wanted, out: Any, status: Status
    ) -> Steps:
        """Read an envelope, and receive what follows it."""
        transport, (kind, wrong, pickled) = self._group.transport, wanted
        found = envelopes.read(envelope, source, TAGS)
        if isinstance(found, str):
            raise UndeliveredError(wrong or _sender_raised(source, found))
        envelopes.note(status, found.dtype, found.shape)
        if found.pickled is not pickled:
            what, by = ("an object", "recv_object") if found.pickled else ("an array", "recv")
            wrong = wrong or TypeError(f"recv: rank {source} has sent {what}; receive it by {by}")
        to = Destination(kind, None if wrong else out)
        target = DeferredResultBuffer(self._host, to, found.shape, found.dtype)
        data = target.flat.view(np.uint8)
        if found.elements is not None:
            data[...] = found.elements
        else:
            tag = TAGS + found.pieces
            self._group.watchdog.check_sender(source, len(data))
            yield from [transport.recv(piece, source, tag) for piece in cut(data)]
            self._group.watchdog.check_sender(source, len(data))
        if wrong is not None:
            raise UndeliveredError(wrong)
        try:
            return loads(source, target.deliver()) if pickled else target.deliver()
        except UndeliveredError:
            raise
        except Exception as error:
            raise UndeliveredError(error) from error


def _may_change(data: Bytes, out: Any) -> bool:
    """Return whether elements may change when `out` is written to."""
    # What is wrong with it is raised by the receive, which writes nothing then.
    with forgiving:
        into = None if out is None else view(out, "out")
        return into is not None and (into.copied or np.may_share_memory(data, into.array))
    return False


def _send_error(group: Group, error: Exception, dest: int, tag: int) -> Steps:
    """Tell the receiver why there is no message, and raise."""
    group.sent[dest, tag][0] += 1
    yield group.transport.send(envelopes.of_error(describe_raise(error)), dest, tag)
    raise UndeliveredError(error)


def _wanted_of(like: Any, out: Any) -> Wanted | None:
    """Return `wanted_like`; None for NumPy arrays, which can be checked later."""
    if isinstance(like, Pickled):
        return Wanted(wanted_kind(None, None, None), None, pickled=True)
    plain = like is None and (out is None or type(out) is np.ndarray)
    return None if plain else wanted_like(like, out)


def _nothing(result: Any = None) -> Steps:
    """Return the steps of a message with no rank."""
    yield from ()
    return result


def _sender_raised(source: int, traceback: str) -> PeerError:
    error = PeerError(
        f"recv: rank {source} raised instead of sending; its traceback:\n{traceback}",
        rank=source,
        traceback=traceback,
    )
    error.in_step = True
    return error


def _check_tag(tag: Any) -> int:
    return check_at_least(tag, 0, "tag", TAGS - 1)
