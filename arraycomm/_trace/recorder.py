"""Records the calls of one rank while a trace is on, by wrapping the generators of their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Final
from weakref import WeakKeyDictionary

from arraycomm._calls.operation import Operation
from arraycomm._calls.placement import HostPlacement
from arraycomm._calls.runner import Prepare
from arraycomm._callsite import call_site
from arraycomm._collectives.reductions import Allreduce, Reduce
from arraycomm._errors import chain_of
from arraycomm._messages.delivery import Message
from arraycomm._protocol.group import Group
from arraycomm._protocol.header import Signature
from arraycomm._reduce import chain, selection
from arraycomm._reduce.segment import opened
from arraycomm._reduce.selection import Algorithm
from arraycomm._trace.clocks import now
from arraycomm._trace.records import CALL, MAX_RECORDS, REQUEST, WAIT, Record
from arraycomm._transports.base import Handle, Steps

# How elements have moved, if that is not an algorithm of a reduction: by the link's own movement.
_MOVEMENT: Final = "movement"
# Those of a call whose elements need not be what movements have moved.
_WITHOUT_MOVEMENTS: Final = ("", Algorithm.SEGMENT, Algorithm.HEADER)
# The attribute of an error that a call has raised, which the other ranks know of.
_KNOWN: Final = "_arraycomm_known"

_repeated: Final = lru_cache(maxsize=1024)(str)


def _described(signature: Signature) -> str:
    """Return a call in words. To look up the many leaves of a tree would take longer than that."""
    return _repeated(signature) if signature.leaves is None else str(signature)


class _Call:
    """A call under way."""

    def __init__(self, kind: str, operation: str, site: str) -> None:
        self.kind, self.operation, self.site = kind, operation, site
        self.started, self.posted, self.agreed = now(), 0, 0
        self.step, self.nbytes = -1, 0
        self.described = operation
        self.algorithm = self.error = ""
        self.peer = self.tag = -1
        # What was waited for after the header: steps of the control channel, and other movements.
        self.stepped = self.moved = False

    def note(self, made: Operation) -> None:
        """Note what is known once the arguments have been looked at."""
        self.nbytes, self.described = made.nbytes, _described(made.signature)
        self.algorithm = _algorithm(made)

    def note_handle(self, handle: Handle, group: Group) -> None:
        """Note what is about to be waited for."""
        on_control = getattr(handle, "control", handle) is group.control
        if self.step < 0:
            self.step = group.control.step
            if on_control:
                self.posted = now()
                return
        self.stepped |= on_control
        self.moved |= not on_control

    def note_waited(self) -> None:
        """Note that what was waited for is there."""
        if self.posted and not self.agreed:
            self.agreed = now()

    def used(self, group: Group) -> str:
        """Return how the elements have moved."""
        if self.moved:
            by_movement = self.algorithm not in _WITHOUT_MOVEMENTS
            slices = self.operation == Allreduce.name
            if self.algorithm is Algorithm.CHAIN and not chain.opened(group.transport):
                return Algorithm.SLICES
            return self.algorithm if by_movement else Algorithm.SLICES if slices else _MOVEMENT
        if self.algorithm or not self.stepped:
            return self.algorithm or Algorithm.HEADER
        through = self.nbytes > group.inline_bytes and opened(group.transport) is not None
        return Algorithm.SEGMENT if through else Algorithm.HEADER


class Recorder:
    """Records the calls of one rank on a family of groups."""

    def __init__(self) -> None:
        # The names and ranks of the groups that records refer to by their numbers.
        self.groups: list[tuple[str, list[int]]] = []
        # In the order in which calls have ended.
        self.records: list[Record] = []
        # How many records were not kept because there were too many.
        self.dropped = 0
        # How many traces take their records from here.
        self.traces = 0
        self._numbers: WeakKeyDictionary[Group, int] = WeakKeyDictionary()

    def call(
        self,
        group: Group,
        begin: Callable[..., Steps],
        name: str,
        prepare: Prepare,
        site: str | None,
    ) -> Steps:
        """Return `begin(name, prepare, site)`'s steps, recorded; `site` is that of a request."""
        call = _Call(CALL if site is None else REQUEST, name, site or call_site())

        def noted(given: HostPlacement | None) -> Operation:
            made = prepare(given)
            call.note(made)
            return made

        return self._recorded(group, call, begin(name, noted, site))

    def message(
        self, group: Group, message: Message, steps: Steps, site: str, *, awaited: bool
    ) -> Steps:
        """Return the steps of a message, recorded."""
        operation = message.operation
        call = _Call(operation if awaited else f"i{operation}", operation, site)
        call.described, call.nbytes = str(message), message.nbytes
        call.peer = -1 if message.peer is None else message.peer
        call.tag = message.tags[0] if message.status is None else -1
        call.algorithm = "message"
        return self._recorded(group, call, _received(call, message, steps))

    @contextmanager
    def wait(self, group: Group, site: str) -> Iterator[None]:
        """Record how long the program is held up by a request that was made at `site`."""
        call = _Call(WAIT, WAIT, call_site())
        call.described = f"wait for the request made at {site}"
        call.algorithm = "–"
        try:
            yield
        finally:
            self._add(group, call)

    def _recorded(self, group: Group, call: _Call, steps: Steps) -> Steps:
        """Take the steps of a call, and note the times."""
        try:
            handle = next(steps)
            while True:
                call.note_handle(handle, group)
                try:
                    yield handle
                except GeneratorExit:
                    steps.close()
                    raise
                except BaseException as error:
                    handle = steps.throw(error)
                else:
                    call.note_waited()
                    handle = next(steps)
        except StopIteration as stop:
            return stop.value
        except BaseException as error:
            call.error = type(error).__name__
            vars(error)[_KNOWN] = True
            raise
        finally:
            self._add(group, call)

    def _add(self, group: Group, call: _Call) -> None:
        ended = now()
        if len(self.records) >= MAX_RECORDS:
            self.dropped += 1
            return
        step = group.control.step if call.step < 0 else call.step
        self.records.append(
            Record(
                *(call.operation, call.kind, call.described, self._number(group), step),
                *(call.started, call.posted, call.agreed, ended, call.nbytes),
                *(call.used(group), call.site, call.error, call.peer, call.tag),
            )
        )

    def _number(self, group: Group) -> int:
        number = self._numbers.get(group)
        if number is None:
            number = self._numbers[group] = len(self.groups)
            self.groups.append((group.name, list(group.family_ranks)))
        return number


def is_known(error: BaseException | None) -> bool:
    """Return whether a call that was recorded has raised an error, or one that led to it."""
    return any(_KNOWN in vars(link) for link in chain_of(error))


def _received(call: _Call, message: Message, steps: Steps) -> Steps:
    """Note what a message turned out to be."""
    result = yield from steps
    if message.status is not None:
        source, tag = message.status.source, message.status.tag
        assert source is not None
        assert tag is not None
        call.peer, call.tag, call.nbytes = source, tag, message.status.nbytes or 0
    return result


def _algorithm(made: Operation) -> str:
    """Return the algorithm of a reduction by the decision that its call makes; empty for others."""
    if made.payload is not None:
        return Algorithm.HEADER
    if isinstance(made, Allreduce):
        link, dtype = made.placement.link, made.source.dtype
        return selection.select(link, made.op, dtype, made.nbytes)
    if isinstance(made, Reduce):
        return selection.without_segment(made.placement.link, made.nbytes)
    return ""
