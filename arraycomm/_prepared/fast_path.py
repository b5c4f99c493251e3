"""The fast paths of collectives (see `_prepared/fast_paths.py`), if the native part is there.

They do what a call does otherwise (view, header, movement, fold, result), with everything worked
out beforehand that depends only on the operation, dtype and shape. A small one is one call of the
native part, which calls back if a rank is late, or if ranks show something else than the last time.
If anything is unusual they hand over.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView, allocate
from arraycomm._arrays.frameworks.base import ByAddress
from arraycomm._arrays.results import allocate_like, commit_out, to_framework, view_out
from arraycomm._arrays.views import by_address, view
from arraycomm._calls.operation import NO_SHARE, Context, Operation, Share
from arraycomm._calls.placement import Destination, HostPlacement
from arraycomm._calls.requests import Ended, Request, noting
from arraycomm._calls.runner import OperationClass, Runner
from arraycomm._calls.statistics import Count
from arraycomm._callsite import call_site
from arraycomm._collectives.reductions import Allreduce
from arraycomm._errors import ConcurrentUseError, forgiving, raise_interrupt
from arraycomm._prepared.exchanged import Exchanged, nbytes_of
from arraycomm._prepared.fast_paths import ONCE, FastPath
from arraycomm._prepared.on_device import DevicePath
from arraycomm._prepared.steps import DIGEST, Call, Form, Step, moving, step_of, step_on_device
from arraycomm._protocol.agreement import UndeliveredError
from arraycomm._protocol.header import MAX_DIMS, Signature, encode
from arraycomm._reduce import chunks
from arraycomm._reduce.algorithms import allreduce
from arraycomm._transports.base import Steps

# In bytes: smaller results are not aligned.
_FEW: Final = 4096
_PLAIN: Final = (np.ndarray, type(None))
# What is sent, the memory for the result, and what makes of that what the caller gets.
_Found = tuple[Any, Any, Callable[[], Any] | None]


def call(
    runner: Runner,
    timeout: float | None,
    operation: OperationClass[...],
    x: Any = None,
    rest: tuple[Any, ...] = (),
    out: Any = None,
    kind: type[Exchanged] | None = None,
) -> Any:
    """Make a call `operation(context, x, *rest, out)`, by its fast path if there is one.

    That of another `kind` than `SmallCall` says itself what the operation is given.
    """
    kind = kind or SmallCall
    try:
        # A fast path waits as long as the communicator's timeout says.
        key, fast = (None, None) if timeout is not None else _find(runner, operation, x, rest, out)
        if fast is not None and (result := fast(x, out)) is not NotImplemented:
            return result
        result = runner.call_within(timeout, operation, *kind.arguments(x, rest, out))
    except BaseException as error:
        runner.leave_by(error)
        raise
    if key is not None and (fast is None or fast is ONCE):
        _remember(runner, key, operation, x, out, kind, result, again=fast is ONCE)
    return result


def start(
    runner: Runner,
    operation: OperationClass[...],
    x: Any = None,
    rest: tuple[Any, ...] = (),
    out: Any = None,
) -> Request[Any]:
    """Start a call like those of `call`; the two have their fast paths in common."""
    try:
        key, fast = _find(runner, operation, x, rest, out)
        if fast is not None and (made := fast.start(x, out)) is not NotImplemented:
            return made  # type: ignore[no-any-return]
    except BaseException as error:
        runner.leave_by(error)
        raise
    request = runner.start(operation, x, *rest, out)
    if key is not None and (fast is None or fast is ONCE):
        remember = partial(_remember, runner, key, operation, x, out, SmallCall)
        request.remember = partial(remember, again=fast is ONCE)
    return request


def _find(
    runner: Runner, operation: OperationClass[...], x: Any, rest: tuple[Any, ...], out: Any
) -> tuple[tuple[Any, ...] | None, FastPath | None]:
    """Return the key of a call and its fast path, if they have any."""
    try:
        array = (None, out is None, None) if x is None else (type(x), x.dtype, x.shape)
        guard = runner.guard
        place = 0 if guard is None else guard.place()
        if place is None:
            return None, None
        # Numbers of several types are equal, as 1 and 1.0, and not all of them may be a root.
        kinds = (getattr(x, "is_cuda", None), place, *map(type, rest))
        key = (operation, *array, kinds, *rest)
        return key, runner.fast_paths.find(key)
    except Exception as error:
        raise_interrupt(error)
        # The full call checks x, and lets the other ranks know of an error.
        return None, None


def _remember(
    runner: Runner,
    key: tuple[Any, ...],
    operation: OperationClass[...],
    x: Any,
    out: Any,
    kind: type[Exchanged],
    result: Any,
    ended: int | None = None,
    *,
    again: bool,
) -> None:
    """Keep the fast path of a call that has just succeeded without it, maybe `again`.

    One that has `ended` in an earlier step than the last one has left nothing to look at.
    """
    guard, (_, place, *_), rest = runner.guard, key[4], key[5:]
    now, found = _find(runner, operation, x, rest, out)
    # By the time a request is waited for, its array may have become another one, the guard may be
    # gone, and the wait for one beside it may have kept the path.
    if now != key or found not in (None, ONCE):
        return
    # A function may be another one in each call.
    if not {*map(type, rest)} <= {str, int, type(None)}:
        return
    arrays = kind.arrays(x)
    if arrays and all(map(runner.placements.on_device, arrays)):
        _keep_on_device(runner, Call(key, operation, rest), x, out, kind)
    elif operation is Allreduce:
        keep_allreduce(runner, key, x, *rest)
    elif not _may_keep(runner, *arrays) or ended not in (None, runner.group.control.step):
        return
    elif not again:
        runner.fast_paths.keep(key, ONCE)
    else:
        # Another thread may be in a call by now.
        with suppress(ConcurrentUseError), runner.group.turn():
            path: FastPath | None = None
            with forgiving:
                context = Context(runner.group, runner.placements)
                made = operation(context, *kind.arguments(x, rest, out))
                if guard is not None:
                    made.signature = guard.sign(made.signature, place)
                step = step_of(runner, made, x, result)
                path = step and kind(runner, Call(key, operation, rest), step, made)
            runner.fast_paths.keep(key, path or FastPath())


def _may_keep(runner: Runner, *arrays: Any) -> bool:
    """Return whether calls with arrays like these may have a fast path."""
    paths = runner.fast_paths
    if paths.repeats is None or not paths.may_keep:
        return False
    # An array on a device would be copied from there to be looked at.
    return not any(map(runner.placements.on_device, arrays))


def _keep_on_device(runner: Runner, call: Call, x: Any, out: Any, kind: type[Exchanged]) -> None:
    """Keep the fast path of a call whose arrays are on a device, or that it has none."""
    group, paths = runner.group, runner.fast_paths
    if paths.repeats is None or not paths.may_keep or not group.options.check or runner.guard:
        return

    def make(placement: HostPlacement) -> tuple[Operation, Steps]:
        context = Context(group, runner.placements, placement)
        made = call.operation(context, *kind.arguments(x, call.rest, out))
        made.payload = made.pack(kind.room)
        return made, moving(made, kind.taken_apart)

    path = FastPath()
    # What is wrong with that is no matter of the call which has just succeeded, and another thread
    # may be in a call by now.
    with forgiving, group.turn():
        found = runner.placements.prepare(make, kind.arrays(x), out)
        step = found and kind.fits(call, found[1]) and step_on_device(group, found[1])
        path = DevicePath(runner, call, step, found, kind) if step else path
    # Arrays of other types may be on the host in the next call.
    of_cupy = {type(each).__module__ for each in kind.arrays(x)} == {"cupy"}
    if type(path) is DevicePath or call.key[4][0] or of_cupy:
        paths.keep(call.key, path)


def keep_allreduce(runner: Runner, key: tuple[Any, ...], x: Any, op: str) -> None:
    """Keep the fast path of `allreduce` after its first call: many programs make a few calls."""
    group, paths, guard = runner.group, runner.fast_paths, runner.guard
    if not _may_keep(runner, x):
        return
    try:
        source = view(x)
        form = Form(source.dtype, source.shape)
        large = nbytes_of(form) > group.inline_bytes
        if len(source.shape) > MAX_DIMS or (source.copied and not large):
            return
        if source.copied or (large and not group.options.check):
            # It would be copied each time to see that, or ranks compare no headers.
            paths.keep(key, FastPath())
            return
        signature = Signature("allreduce", op, None, *form)
        if guard is not None:
            signature = guard.sign(signature, key[4][1])
        header = encode(signature, -1 if large else nbytes_of(form))
        headers, share = header[DIGEST] * group.size, Share(range(group.size), 0, op)
        call = Call(key, Allreduce, (op,))
        plain = type(x) is np.ndarray
        step = Step(signature, header, headers, form, form, share, plain, by_address(x))
        if large:
            step = step._replace(sends=None, gets=None, share=NO_SHARE)
            paths.keep(key, LargeAllreduce(runner, call, step, form))
            return
        path = SmallCall(runner, call, step)
        paths.keep(key, path)
        if type(x) is np.ndarray and guard is None:
            paths.repeats.remember(op, path.exchange)
    except Exception as error:
        raise_interrupt(error)
        # An array that cannot be looked at a second time has no fast path.


class SmallCall(Exchanged):
    """The fast path of calls whose arrays are small enough to travel with the header."""

    def __init__(self, runner: Runner, call: Call, step: Step, made: Any = None) -> None:
        super().__init__(runner, call, step, made)
        self._sends, self._gets, self._plain = step.sends, step.gets, step.plain
        self._make = self.exchange.make
        self._addresses = step.addresses
        if self._addresses is not None and self._gets is not None:
            self._new = self._addresses.maker(self._gets.shape, self._gets.dtype)
        # To align memory takes longer than JAX's copy of few bytes that are not.
        self._empty = np.empty if step.gets is None or nbytes_of(step.gets) <= _FEW else allocate

    def __call__(self, x: Any, out: Any) -> Any:
        if not self._plain:
            found = self._found(x, out)
            if found is None:
                return NotImplemented
            own, target, deliver = found
            result = self._make(own, target, x, out)
            return deliver() if result is target and deliver is not None else result
        try:
            into = self._into(out)
        except MemoryError:
            return NotImplemented
        if into is NotImplemented:
            return into
        if self._sends is None:
            return self._make(None, into, x, out)
        result = self._make(x, into, x, out)
        if result is NotImplemented and not x.flags.c_contiguous and (found := self._found(x, out)):
            own, into, _ = found
            return self._make(own, into, x, out)
        return result

    def start(self, x: Any, out: Any) -> Any:
        # That of who has called the communicator's method, which has called `start` above.
        group, site = self._group, call_site(3)
        engine = self._engine
        with engine.turn:
            exchange, found = self.exchange, self._found(x, out)
            if exchange is None or found is None or group.closed is not None:
                return NotImplemented
            ended = Ended()
            steps = self._steps(self._runner, exchange, x, out, *found, site, ended)
            task = engine.submit(group.guarded(steps), site)
        return Request(group, task, site, ended)

    def free(self) -> None:
        super().free()
        self._make = FastPath()

    def _steps(
        self,
        runner: Runner,
        exchange: Any,
        x: Any,
        out: Any,
        own: Any,
        target: Any,
        deliver: Callable[[], Any] | None,
        site: str,
        ended: Ended,
    ) -> Steps:
        """Make the call as a request, which goes on if the path is given up meanwhile."""
        group, name = self._group, self._call.operation.name
        if group.closed is not None:
            raise group.closed_error(name)
        group.watchdog.current = (name, site)
        exchange.post(own)
        if group.control.native is not None:
            group.control.go_on()
        yield group.control
        if not exchange.finish(target):
            settling, found = self._settling(x, out, site), runner.placements.after
            return (yield from noting(settling, found, group.control, ended))
        try:
            return target if deliver is None else deliver()
        except Exception as error:
            undelivered = UndeliveredError(error)
            undelivered.name(name)
            raise undelivered from error

    def _into(self, out: Any) -> Any:
        """Return the memory for the result of a plain call, or NotImplemented."""
        gets = self._gets
        if gets is None:
            return None
        if out is None:
            return self._empty(gets.shape, gets.dtype)
        fits = type(out) is np.ndarray and (out.dtype, out.shape) == gets and out.flags.carray
        return out if fits else NotImplemented

    def _found(self, x: Any, out: Any) -> _Found | None:
        """Look at the arrays; None if the call has to be made in full."""
        try:
            return self._look_plain(x, out) if self._plain else self._look(x, out)
        except MemoryError:
            # The full call lets the other ranks know of it.
            return None

    def _look_plain(self, x: Any, out: Any) -> _Found | None:
        into = self._into(out)
        if into is NotImplemented:
            return None
        own = None if self._sends is None else _in_c_order(x)
        return own, into, None

    def _look(self, x: Any, out: Any) -> _Found | None:
        """Look at the arrays of a framework."""
        gets = self._gets
        try:
            addresses = self._addresses
            if addresses and (found := self._look_at_addresses(addresses, x, out)):
                return found
            source = view(x)
            into = None if out is None or gets is None else view_out(out, gets.shape, gets.dtype)
        except Exception as error:
            raise_interrupt(error)
            return None
        # One that had to be copied may be on a device, where the full call leaves it.
        copied = source.copied or (into is not None and into.copied)
        if copied or self._sends not in (None, (source.dtype, source.shape)):
            return None
        own = None if self._sends is None else _in_c_order(source.array)
        if into is not None and into.array.flags.carray:
            return own, into.array, partial(commit_out, into)
        if gets is None:
            return own, None, None
        target = allocate_like(gets.shape, gets.dtype, source)
        if into is None:
            return own, target, partial(to_framework, target, source)
        return own, target, partial(_write_out, into, target)

    def _look_at_addresses(self, arrays: ByAddress, x: Any, out: Any) -> _Found | None:
        """Look at where arrays are; None if they have to be looked at through views."""
        gets, address = self._gets, arrays.address(x)
        if not address:
            return None
        own = None if self._sends is None else address
        if gets is None:
            return own, None, None
        if out is None:
            made, into = self._new()
            return own, into, lambda: made
        if type(out) is not type(x) or out.dtype != x.dtype or out.shape != gets.shape:
            return None
        into = arrays.address(out)
        return (own, into, lambda: (arrays.wrote(out), out)[1]) if into else None

    def count(self) -> Count:
        calls, seconds = self.exchange.counts()
        nbytes = 0 if self._sends is None else nbytes_of(self._sends)
        return Count(self._call.operation.name, calls, calls * nbytes, seconds)


def _in_c_order(array: Array) -> Array:
    return array if array.flags.c_contiguous else array.copy()


def _write_out(into: BufferView, elements: Array) -> Any:
    into.array[...] = elements
    return commit_out(into)


class LargeAllreduce(Exchanged):
    """The fast path of `allreduce` of arrays whose elements move after the header."""

    def __init__(self, runner: Runner, call: Call, step: Step, form: Form) -> None:
        super().__init__(runner, call, step)
        (self._op,), (self._dtype, self._shape), self._nbytes = call.rest, form, nbytes_of(form)
        self._link = runner.group.transport
        self._calls, self._seconds = 0, 0.0

    def __call__(self, x: Any, out: Any) -> Any:
        if type(x) is type(out) is np.ndarray and self._is_plain(x, out):
            return out if self._reduce(x, out) else NotImplemented
        try:
            source = view(x)
            if source.copied or source.dtype != self._dtype or source.shape != self._shape:
                return NotImplemented
            into = None if out is None else view_out(out, self._shape, self._dtype)
            own = source.array
            target = allocate_like(self._shape, self._dtype, source) if into is None else into.array
            if not (own.flags.c_contiguous and own.flags.aligned and target.flags.carray):
                return NotImplemented
            if not Destination(source, out, own).takes(target):
                return NotImplemented
        except Exception as error:
            raise_interrupt(error)
            return NotImplemented
        if not self._reduce(own, target):
            return NotImplemented
        return to_framework(target, source) if into is None else commit_out(into)

    def _is_plain(self, x: Array, out: Array) -> bool:
        """Return whether arrays need no closer look: x has the dtype and the shape of this path."""
        return (
            out.dtype == self._dtype
            and out.shape == self._shape
            and out.flags.carray
            and x.flags.c_contiguous
            and x.flags.aligned
            and (out is x or not np.may_share_memory(x, out))
        )

    def _reduce(self, x: Array, out: Array) -> bool:
        """Reduce, unless requests are under way; return whether that was done."""
        with self._engine.turn:
            exchange = self.exchange
            if exchange is None or self._engine.queue or self._group.closed is not None:
                return False
            try:
                chunks.reserve(self._link, self._nbytes)
            except MemoryError:
                return False
            started = perf_counter()
            self._group.watchdog.current = self._current
            if exchange.meet():
                source, target = x.reshape(-1), out.reshape(-1)
                self._engine.run(self._group.guarded(self._moving(source, target)))
                self._calls += 1
                self._seconds += perf_counter() - started
            else:
                out[...] = self.settle(x, None)
            return True

    def _moving(self, source: Array, target: Array) -> Steps:
        yield from allreduce(self._link, source, target, self._op)
        self._group.watchdog.check_given_up()

    def count(self) -> Count:
        return Count("allreduce", self._calls, self._calls * self._nbytes, self._seconds)
