"""The runner: makes the calls of one communicator.

It alone decides where the arrays of a call are communicated from, whether they travel with the
header, and whether there is a header at all; and it begins the message of every argument error with
the name of the operation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any, Final, ParamSpec, Protocol

from arraycomm._calls.operation import Context, Operation
from arraycomm._calls.placement import HostPlacement, Placements
from arraycomm._calls.requests import Ended, Request, noting
from arraycomm._calls.statistics import Statistics
from arraycomm._callsite import call_site, describe_raise, find_call_site, trim
from arraycomm._errors import is_interrupt, name_operation
from arraycomm._prepared.fast_paths import FastPaths
from arraycomm._protocol.agreement import Agreement, UndeliveredError, agree, fail_in_step
from arraycomm._protocol.engine import Engine
from arraycomm._protocol.group import Group
from arraycomm._protocol.header import ALL_ON_DEVICE, Signature, digest_of, encode, show, with_words
from arraycomm._protocol.task import Task
from arraycomm._transports.base import Handle, Steps

# Headers of calls that are made again and again.
_encoded: Final = lru_cache(maxsize=1024)(encode)

P = ParamSpec("P")


class Guard:
    """What stands between calls and operations for a while, as `join` does; this lets all pass."""

    def check(self, name: str) -> None:
        """Raise on this rank alone if the other ranks cannot take part in a call of this name."""

    def substitute(self, operation: Any) -> Any:
        """Return the class of operations to use instead, or raise, so that all ranks hear of it."""
        return operation

    def place(self) -> int | None:
        """Return what tells a call from others like it that may have fast paths.

        None if the guard has to see it.
        """
        return None

    def sign(self, signature: Signature, place: int) -> Signature:
        """Return what ranks compare of such a call."""
        return signature

    def note_error(self, error: Exception) -> None:
        """Take note of an error that the other ranks hear of."""


class OperationClass(Protocol[P]):
    """A class of operations: makes one of a context and the call's arguments."""

    @property
    def name(self) -> str:
        """The operation's name."""

    def __call__(self, context: Context, /, *args: P.args, **kwargs: P.kwargs) -> Operation:
        """Check the arguments of a call."""


# Prepares an operation, for a placement that is given or for that of its arrays.
Prepare = Callable[[HostPlacement | None], Operation]


class Runner:
    """Makes the calls of one group; `placements` says where their arrays are communicated from."""

    def __init__(self, group: Group, placements: Placements) -> None:
        self.group = group
        self.placements = placements
        self.statistics = Statistics()
        self.fast_paths = FastPaths(group, self.statistics)
        # Asked before every call; see `set_guard`.
        self.guard: Guard | None = None
        # That of the communicator that this one is a duplicate of.
        self.original: Runner | None = None

    def call(self, operation: OperationClass[P], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Make a blocking call."""
        return self.call_within(None, operation, *args, **kwargs)

    def call_within(
        self, timeout: float | None, operation: OperationClass[P], *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        """Make a blocking call with a timeout of its own, or with the group's if that is None."""
        try:
            started = time.perf_counter()
            engine = self.group.engine
            with engine.turn:
                try:
                    prepare = self._preparing(False, operation, *args, **kwargs)
                    if timeout is not None:
                        prepare = self.group.watchdog.limited(timeout, prepare)
                    result = engine.run(self._program(operation.name, prepare, None))
                    self.follow()
                finally:
                    self.group.watchdog.unlimit()
        except BaseException as error:
            self.leave_by(error)
            raise
        self.statistics.add_seconds(operation.name, time.perf_counter() - started)
        return result

    def start(self, operation: OperationClass[P], *args: P.args, **kwargs: P.kwargs) -> Request:
        """Start a call that goes on while the caller does something else."""
        in_order: list[bool] = []

        def prepare(given: HostPlacement | None) -> Operation:
            made = prepare_anew(given)
            in_order.append(made.placement.in_order)
            return made

        try:
            site, ended = call_site(), Ended()
            engine = self.group.engine
            with engine.turn:
                prepare_anew = self._preparing(True, operation, *args, **kwargs)
                program = self._program(operation.name, prepare, site)
                program = noting(program, self.placements.after, self.group.control, ended)
                waits = any(in_order)
                task = engine.submit(program, site)
                if waits:
                    _complete(engine, task)
        except BaseException as error:
            self.leave_by(error)
            raise
        return Request(self.group, task, site, ended)

    def follow(self) -> None:
        """Let this thread use the result of the call that has just finished."""
        follow = self.placements.after()
        if follow is not None:
            follow()

    def leave_by(self, error: BaseException) -> None:
        """Trim the error that a call raises; end the group if that was interrupted.

        The call may have been at any point, so that the next one would not fit those of the others.
        """
        if is_interrupt(error):
            self.group.close(error)
        trim(error)

    def set_guard(self, guard: Guard | None) -> None:
        """Have a guard asked before every call, or none."""
        self.guard = guard
        for hook in self.group.on_watch:
            hook()

    def fail(self, name: str, error: Exception) -> None:
        """Make the other ranks' calls raise, in step, because of an error that is raised here."""
        with self.group.turn():
            self.group.engine.run(self._tell(name, error, describe_raise(error)))

    def settling(
        self,
        agreeing: Generator[Handle, None, Agreement],
        site: str | None,
        placement: HostPlacement | None,
        operation: OperationClass[P],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Steps:
        """Go on with a call whose header has been shown, and differs from that of other ranks.

        `site` is that of a request, `placement` that of the arrays if it is known.
        """
        prepare = self._preparing(site is not None, operation, *args, **kwargs)
        agreement = yield from agreeing
        made = prepare(placement)
        self.statistics.count(made.name, made.nbytes, made.copies)
        return (yield from self._go_on(made, prepare, agreement, site))

    def _preparing(
        self, is_request: bool, operation: OperationClass[P], *args: P.args, **kwargs: P.kwargs
    ) -> Prepare:
        def prepare(given: HostPlacement | None) -> Operation:
            make = operation if self.guard is None else self.guard.substitute(operation)
            made = make(Context(self.group, self.placements, given, is_request), *args, **kwargs)
            made.payload = made.pack(made.placement.inline_bytes)
            return made

        return prepare

    def _program(self, name: str, prepare: Prepare, site: str | None) -> Steps:
        """Look at the arguments now; return the steps of the call, which may run later."""
        tracer = self.group.tracer
        if tracer is None:
            return self._untraced(name, prepare, site)
        return tracer.call(self.group, self._untraced, name, prepare, site)

    def _untraced(self, name: str, prepare: Prepare, site: str | None) -> Steps:
        group = self.group
        if group.closed is not None:
            return _refused(group, name)
        if self.guard is not None:
            self.guard.check(name)
        try:
            operation = prepare(None)
        except BaseException as error:
            if not isinstance(error, Exception) or is_interrupt(error):
                group.close(error)
                raise
            self.statistics.count(name)
            if self.guard is not None:
                self.guard.note_error(error)
            name_operation(error, name)
            return self._failing(name, [error], describe_raise(error))
        self.statistics.count(name, operation.nbytes, operation.copies)
        # What waits behind other calls may be begun by another thread.
        site = site or (call_site() if group.engine.queue else None)
        return group.guarded(self._steps(operation, prepare, site))

    def _steps(self, operation: Operation, prepare: Prepare, site: str | None) -> Steps:
        group, placement = self.group, operation.placement
        if group.closed is not None:
            raise group.closed_error(operation.name)
        group.watchdog.current = (operation.name, site)
        if operation.is_independent and not group.options.check:
            # Counted as two steps, so that exit notices tell before from after.
            group.control.step += 2
            return (yield from self._finish(operation, NO_HEADERS))
        deferred = placement.async_check and operation.may_go_ahead
        # The header may be checked later, in whichever thread.
        where = (site or find_call_site()) if deferred else site
        show(group.control, prefix_of(operation), operation.payload)
        signature, negotiable = operation.signature, operation.negotiable
        agreeing = agree(group.control, signature, negotiable=negotiable, site=where)
        if deferred:
            # What the device is to do waits there for the other ranks.
            group.engine.follow(group.guarded(agreeing, deferred=True))
            return (yield from self._finish(operation, NO_HEADERS))
        agreement = yield from agreeing
        return (yield from self._go_on(operation, prepare, agreement, site))

    def _go_on(
        self, operation: Operation, prepare: Prepare, agreement: Agreement, site: str | None
    ) -> Steps:
        """Finish a call to which all ranks have come, wherever their arrays are."""
        placement, placements = operation.placement, self.placements
        if agreement.mixed or placement.device_flag:
            if not placements.negotiated:
                yield from placements.negotiate()
                with placement.here():
                    again = prepare(None)
                return (yield from self._steps(again, prepare, site))
            if placement.tree and agreement.mixed:
                with placement.here():
                    other = placements.of_mixed_tree(agreement)
                    operation = prepare(other)
                if other.of_device is None:
                    # All ranks see that, and show their trees once more as host memory.
                    return (yield from self._steps(operation, prepare, site))
            elif placement.host and not placement.tree:
                with placement.here():
                    joining = None if placement.device_flag else placements.joining_devices()
                    operation = prepare(joining)
        return (yield from self._finish(operation, agreement))

    def _finish(self, operation: Operation, agreement: Agreement) -> Steps:
        placement, digest = operation.placement, 0
        if placement.in_order and self.group.options.check and operation.may_go_ahead:
            # That of ranks which go ahead, also on one that takes part from its host.
            digest = digest_of(_encoded(operation.signature, -1, device_flag=ALL_ON_DEVICE))
        return placement.run(_finished(operation, agreement), digest)

    def _failing(self, name: str, errors: list[Exception], traceback: str) -> Steps:
        """Join the others' call by raising in it; no frame of the traceback keeps the error."""
        yield from self._tell(name, errors[0], traceback)
        raise errors.pop()

    def _tell(self, name: str, error: Exception, traceback: str) -> Steps:
        group = self.group
        if group.closed is not None:
            raise group.closed_error(name) from error
        if not group.options.check:
            # Others may be in a call without a header, in which nothing can be told in step.
            group.close(error)
            return
        group.watchdog.current = (name, None)
        try:
            together = len(group.open_together) if name == "raise_together" else 0
            in_step = yield from fail_in_step(group.control, name, error, traceback, together)
        except BaseException as lost:
            group.close(lost)
            raise error from lost
        group.control.completed = group.control.step
        if not in_step:
            group.close(error)


def _complete(engine: Engine, task: Task) -> None:
    """Wait until all work of a request is on the device."""
    try:
        engine.complete(task)
    except BaseException as error:
        # The caller is interrupted, and has no request that it could wait for.
        engine.give_up(task, error)
        raise


def prefix_of(operation: Operation) -> bytes:
    """Return the header of a call."""
    payload = -1 if operation.payload is None else len(operation.payload)
    flag = operation.placement.device_flag
    prefix = _encoded(operation.signature, payload, device_flag=flag)
    word, further = operation.word, operation.further_words
    return with_words(prefix, word, further) if word or further else prefix


def _finished(operation: Operation, agreement: Agreement) -> Steps:
    """Move what has not come with the headers, and hand the result over."""
    try:
        yield from operation.steps(agreement)
        if operation.payload is None:
            operation.group.watchdog.check_given_up()
        try:
            return operation.result(agreement)
        except UndeliveredError:
            raise
        except Exception as error:
            raise UndeliveredError(error) from error
    except UndeliveredError as undelivered:
        undelivered.name(operation.name)
        raise


def _refused(group: Group, operation: str) -> Steps:
    yield from ()
    raise group.closed_error(operation)


# Given to operations that run without a header; they need nothing from it.
NO_HEADERS: Final = Agreement.__new__(Agreement)
NO_HEADERS.calls, NO_HEADERS.mixed = None, False
