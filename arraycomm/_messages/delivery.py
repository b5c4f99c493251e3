"""How messages are made: in the caller's thread if nothing else is under way, else as requests."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from arraycomm._calls.requests import Request, wait_for_each
from arraycomm._calls.statistics import Statistics
from arraycomm._callsite import call_site
from arraycomm._errors import is_interrupt
from arraycomm._messages.matching import Status
from arraycomm._protocol.agreement import UndeliveredError
from arraycomm._protocol.group import Group
from arraycomm._protocol.task import Finished, Task
from arraycomm._protocol.waits.deadlock import MANY, Wait
from arraycomm._transports.base import Steps


class Message(NamedTuple):
    """One rank's part in a message: its steps, the other rank, and what it is, for errors.

    `peer` is None for a message from any rank or to none, and there are several `tags` for one with
    any tag; the `status` says what has come. `unmatched` is how many messages it sends, less those
    it receives. `wrong` is whether it only tells the other rank of an error.
    """

    operation: str
    steps: Steps
    peer: int | None = None
    tags: range = range(1)
    unmatched: int = 0
    nbytes: int = 0
    copies: int = 0
    status: Status | None = None
    timeout: float | None = None
    wrong: bool = False

    def __str__(self) -> str:
        doing = {0: "probe from", 1: "send to", -1: "recv from"}[self.unmatched]
        who = "any rank" if self.peer is None else f"rank {self.peer}"
        tag = "any tag" if len(self.tags) > 1 else f"tag {self.tags[0]}"
        return f"{doing} {who} with {tag}"

    def peers(self, group: Group, *, blocks: bool) -> list[int]:
        """Return the ranks of which one is needed: another, or itself if it `blocks` no thread."""
        if self.peer is not None:
            return [self.peer]
        alone = blocks and group.size > 1
        return [rank for rank in range(group.size) if rank != group.rank or not alone]

    def told(self, group: Group, site: str = "", *, blocks: bool = True) -> Wait:
        """Return what is told of a wait for it."""
        peers, sends, tag = self.peers(group, blocks=blocks), self.unmatched > 0, self.tags[0]
        counted: tuple[int, ...] = ()
        copied = sends and (self.nbytes <= group.transport.copied or tag >= MANY)
        exact = self.unmatched and self.peer is not None and len(self.tags) == 1
        # A request under way may get the message that is counted next.
        if exact and not copied and not group.engine.messages:
            [count] = (group.sent if sends else group.received)[peers[0], tag]
            counted = int(sends), tag, count
        return Wait(lambda: peers, str(self), site or call_site(), self.timeout, blocks, counted)


class Delivery:
    """Makes the messages of one group."""

    def __init__(self, group: Group, statistics: Statistics) -> None:
        self.group, self.statistics = group, statistics

    def make(self, operation: str, *messages: Message) -> Any:
        """Make a message, or one beside another that begins before; return what the last gives."""
        group, started = self.group, time.perf_counter()
        if (
            group.tracer is None
            and group.engine.idle
            and (len(messages) == 1 or all(map(self._is_plain, messages)))
        ):
            with group.turn():
                try:
                    self._count(*messages)
                    return self.drive(*messages)
                finally:
                    self.statistics.add_seconds(operation, time.perf_counter() - started)
        requests = [self.start(message, awaited=True) for message in messages]
        try:
            return wait_for_each(requests)[-1]
        except BaseException as error:
            if is_interrupt(error):
                for request in requests:
                    request.give_up(error)
            raise
        finally:
            self.statistics.add_seconds(operation, time.perf_counter() - started)

    def start(self, message: Message, *, awaited: bool = False) -> Request:
        """Start a message that goes on beside the caller."""
        with self.group.turn():
            self._count(message)
            return self.request(message, awaited=awaited)

    def drive(self, *messages: Message) -> Any:
        """Take the steps of a message, or of a receive beside those of a send, in this thread."""
        group, waits = self.group, list(messages)
        steps = messages[0].steps if len(messages) == 1 else _beside(waits)
        return group.engine.run(
            self._delivered(messages[-1].operation, steps),
            lambda waited: group.check_message(waits[-1].told(group), waited),
        )

    def request(self, message: Message, *, awaited: bool = False, looked: bool = False) -> Request:
        """Return the request of a message; see `Engine.submit_message`."""
        # That of who has called the communicator's method.
        group, site = self.group, call_site(5)
        task: Task | None = None

        def watch(waited: float) -> None:
            blocks = task is None or task.waited_for
            group.check_message(message.told(group, site, blocks=blocks), waited)

        steps = self._delivered(message.operation, message.steps)
        if group.tracer is not None and message.unmatched:
            steps = group.tracer.message(group, message, steps, site, awaited=awaited)
        task = group.engine.submit_message(steps, site, watch, awaited=awaited, looked=looked)
        return Request(group, task, site, awaited=awaited)

    def finished(self, result: Any) -> Request:
        """Return the request of a message that is complete."""
        group, site = self.group, call_site(5)
        return Request(group, Finished(result, group.engine.outcomes, site), site)

    def fail(self, error: BaseException) -> None:
        """End the group, for a message has failed in the middle of its steps."""
        self.group.close(error)
        # Also if it was closed before: the transport may still hold this message's memory.
        self.group.unfinished = True

    def _is_plain(self, message: Message) -> bool:
        """Return whether an error of the other message may be raised before one of this."""
        exact = message.peer not in (None, self.group.rank) and len(message.tags) == 1
        return exact and message.timeout is None and not message.wrong

    def _count(self, *messages: Message) -> None:
        for message in messages:
            self.statistics.count(message.operation, message.nbytes, message.copies)
            self.group.unmatched += message.unmatched

    def _delivered(self, operation: str, steps: Steps) -> Steps:
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
            self.fail(error)
            raise
        # Not kept here: its traceback has this frame, and with it the arrays.
        raise undelivered.pop()


def _beside(waits: list[Message]) -> Steps:
    """Begin to send, receive, and wait for what is sent; only then raise an error of the receive.

    The last of `waits` is the one that is waited for.
    """
    sending, receiving = waits
    result, undelivered, begun = None, list[UndeliveredError](), next(sending.steps)
    try:
        result = yield from receiving.steps
    except UndeliveredError as error:
        undelivered.append(error)
    waits.pop()
    yield begun
    yield from sending.steps
    if undelivered:
        raise undelivered.pop()
    return result


def nothing(result: Any = None) -> Steps:
    """Return the steps of a message with no rank."""
    yield from ()
    return result
