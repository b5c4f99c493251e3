"""The fast paths of collectives (see `_prepared/fast_paths.py`), if the native part is there.

They do what a call does otherwise (view, header, movement, fold, result), with everything worked
out beforehand that depends only on the operation, dtype and shape. A small one is one call of the
native part, which calls back if a rank is late, or if ranks show something else than the last time.
If anything is unusual they hand over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from arraycomm._calls.placement import Destination, HostPlacement, check_order
from arraycomm._calls.requests import Ended, Request, noting
from arraycomm._calls.runner import OperationClass, Runner
from arraycomm._calls.statistics import Count
from arraycomm._callsite import CallSite, call_site, find_call_site
from arraycomm._collectives.movements import FromRoot
from arraycomm._collectives.reductions import Allreduce
from arraycomm._errors import ConcurrentUseError, TransportError
from arraycomm._folds import in_c
from arraycomm._native import compiled
from arraycomm._prepared.fast_paths import ONCE, FastPath
from arraycomm._prepared.steps import DIGEST, Call, Form, Step, moving, step_of, step_on_device
from arraycomm._protocol.agreement import UndeliveredError, agree
from arraycomm._protocol.header import MAX_DIMS, Headers, Signature, encode
from arraycomm._protocol.task import Finished
from arraycomm._protocol.waits.waiting import give_up_core
from arraycomm._reduce import chunks
from arraycomm._reduce.algorithms import allreduce
from arraycomm._transports.base import Steps

# At ranks that are a little later, before a call on devices is made in full.
_LOOKS: Final = 200
# In bytes: smaller results are not aligned.
_FEW: Final = 4096
_PLAIN: Final = (np.ndarray, type(None))
# What is sent, the memory for the result, and what makes of that what the caller gets.
_Found = tuple[Any, Any, Callable[[], Any] | None]
# What lets a thread use the result of a call on a device, if it is not in the caller's stream.
_Follow = Callable[[], None] | None


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
    except Exception:
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
    # A function may be another one in each call.
    if not {*map(type, rest)} <= {str, int, type(None)} or (guard and guard.place() is None):
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
            with suppress(Exception):
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
    # It may be another one by the time its request is waited for.
    if (x.dtype, x.shape) != call.key[2:4]:
        return

    def make(placement: HostPlacement) -> tuple[Operation, Steps]:
        context = Context(group, runner.placements, placement)
        made = call.operation(context, *kind.arguments(x, call.rest, out))
        made.payload = made.pack(kind.room)
        return made, moving(made, kind.taken_apart)

    path = FastPath()
    # What is wrong with that is no matter of the call which has just succeeded, and another thread
    # may be in a call by now.
    with suppress(Exception), group.turn():
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
    nbytes = getattr(x, "nbytes", 0)
    # Some frameworks have a method of this name.
    if not isinstance(nbytes, int) or not _may_keep(runner, x):
        return
    large = nbytes > group.inline_bytes
    # Ranks that compare no headers go without one if their arrays are large.
    if large and not group.options.check:
        return
    # An array that cannot be looked at a second time has no fast path.
    with suppress(Exception):
        source = view(x)
        if len(source.shape) > MAX_DIMS or (source.copied and not large):
            return
        if source.copied:
            # It would be copied each time to see that.
            paths.keep(key, FastPath())
            return
        form = Form(source.dtype, source.shape)
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


class Exchanged(FastPath):
    """Calls whose headers the native part exchanges, like one for which an operation was `made`."""

    # Up to how many bytes travel with the header of a call on devices, as in the full call.
    room = -1

    def __init__(self, runner: Runner, call: Call, step: Step, made: Any = None) -> None:
        group, control = runner.group, runner.group.control
        self._runner, self._group, self._engine = runner, group, group.engine
        self._placement: HostPlacement | None = runner.placements.host
        self._negotiable = False
        self._call, self._signature = call, step.signature
        self._current = (call.operation.name, None)
        share, (sends, sent), (gets, given) = step.share, _size(step.sends), _size(step.gets)
        fold, dtype = -1, None
        if step.gets is not None:
            dtype = step.gets.dtype
            fold = -1 if share.op is None else in_c.number_of(share.op, dtype)
        part = given // max(len(share.ranks), 1) if fold < 0 else given
        self.exchange: Any = compiled.Exchange(
            memory=control.slots,
            rank=control.rank,
            size=control.size,
            slot=control.slot,
            header=step.header,
            headers=step.headers,
            takes=(sends, sent),
            gives=(gets, given),
            ranks=(share.ranks.start, share.ranks.stop),
            place=share.part * part,
            fold=fold,
            dtype=dtype,
            control=control,
            queue=group.engine.queue,
            turn=group.engine.turn,
            path=self,
            patient=group.transport.spins > 0,
            nodes=control.native,
        )

    @staticmethod
    def arguments(x: Any, rest: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        """Return what an operation is made of, beside its context."""
        return x, *rest, out

    @staticmethod
    def arrays(x: Any) -> Sequence[Any]:
        """Return what may be on a device of what the call is given."""
        return (x,)

    @staticmethod
    def fits(call: Call, made: Any) -> bool:
        """Return whether a call of arrays on devices that was made may have a fast path."""
        return True

    @staticmethod
    def taken_apart(result: Any) -> list[Any]:
        """Return the arrays of a result."""
        return [] if result is None else [result]

    @staticmethod
    def whole(x: Any, results: list[Any]) -> Any:
        """Return the result of these arrays, of a call of `x`."""
        return results[0] if results else None

    def free(self) -> None:
        """Let go of the native part's object, which has this one, and the memory of the slots."""
        self.exchange = None

    def await_others(self) -> None:
        """Wait until every rank has posted this step, where the native part has stopped."""
        control = self._group.control
        control.go_on()
        self._group.watchdog.current = self._current
        self._engine.wait_for(control.done, handle=control)

    def give_up(self, error: BaseException) -> None:
        """End the group: other ranks may have gone on, and no later call would fit theirs."""
        self._engine.interrupted = self._group.control
        self._group.close(error)
        if isinstance(error, TransportError):
            self._group.watchdog.explain_failure(error)

    def settle(self, x: Any, out: Any) -> Any:
        """Raise on every rank if calls differ; else make the rest of the call in full."""
        steps = self._settling(x, out, None)
        result = self._engine.run(self._group.guarded(steps))
        self._runner.follow()
        return result

    def _settling(self, x: Any, out: Any, site: str | None) -> Steps:
        key, operation, rest = self._call
        if isinstance(operation, type) and issubclass(operation, FromRoot):
            # What ranks show may be another array of the root from now on.
            self._runner.fast_paths.drop(key)
        control, negotiable = self._group.control, self._negotiable
        agreeing = agree(control, self._signature, negotiable=negotiable, site=site)
        arguments = self.arguments(x, rest, out)
        return self._runner.settling(agreeing, site, self._placement, operation, *arguments)

    def handed_over(self, deliver: Callable[[], Any]) -> Any:
        """Return the result of a call that is over for the other ranks."""
        try:
            return deliver()
        except Exception as error:
            UndeliveredError(error).name(self._call.operation.name)
            raise


def _size(form: Form | None) -> tuple[tuple[int, ...], int]:
    return ((), 0) if form is None else (form.shape, nbytes_of(form))


def nbytes_of(form: Form) -> int:
    """Return the bytes of an array."""
    return math.prod(form.shape) * form.dtype.itemsize


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
            found = self._look(x, out)
            if found is None:
                return NotImplemented
            own, target, deliver = found
            result = self._make(own, target, x, out)
            return deliver() if result is target and deliver is not None else result
        into = self._into(out)
        if into is NotImplemented:
            return into
        if self._sends is None:
            return self._make(None, into, x, out)
        result = self._make(x, into, x, out)
        if result is NotImplemented and not x.flags.c_contiguous:
            return self._make(x.copy(), into, x, out)
        return result

    def start(self, x: Any, out: Any) -> Any:
        # That of who has called the communicator's method, which has called `start` above.
        group, site = self._group, call_site(3)
        engine = self._engine
        with engine.turn:
            found = self._look_plain(x, out) if self._plain else self._look(x, out)
            if found is None or group.closed is not None:
                return NotImplemented
            ended = Ended()
            begun_after = self._runner.placements.order.count
            steps = self._steps(self.exchange, x, out, *found, site, begun_after, ended)
            task = engine.submit(group.guarded(steps), site)
        return Request(group, task, site, ended)

    def free(self) -> None:
        super().free()
        self._make = FastPath()

    def _steps(
        self,
        exchange: Any,
        x: Any,
        out: Any,
        own: Any,
        target: Any,
        deliver: Callable[[], Any] | None,
        site: str,
        begun_after: int,
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
            placements = self._runner.placements
            if len(Headers(group.control).device_flags()) > 1:
                check_order(placements, name, begun_after)
            settling, found = self._settling(x, out, site), placements.after
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
        except Exception:
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
        except Exception:
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
            if self._engine.queue or self._group.closed is not None:
                return False
            try:
                chunks.reserve(self._link, self._nbytes)
            except MemoryError:
                return False
            started = perf_counter()
            self._group.watchdog.current = self._current
            if self.exchange.meet():
                source, target = x.reshape(-1), out.reshape(-1)
                moving = allreduce(self._link, source, target, self._op)
                self._engine.run(self._group.guarded(moving))
                self._calls += 1
                self._seconds += perf_counter() - started
            else:
                out[...] = self.settle(x, None)
            return True

    def count(self) -> Count:
        return Count("allreduce", self._calls, self._calls * self._nbytes, self._seconds)


class DevicePath(Exchanged):
    """The fast path of calls with arrays on devices; `prepared` puts them there.

    Most go ahead of the check of their headers. The next call checks the header, or a thread that
    looks before. The others wait for it.
    """

    def __init__(
        self, runner: Runner, call: Call, step: Step, found: tuple[Any, Any], kind: type[Exchanged]
    ) -> None:
        super().__init__(runner, call, step)
        prepared, made = found
        # Made in full, each goes where its arrays are.
        self._placement, self._ahead = None, made.may_go_ahead
        self._kind = kind
        # As the class has it, in an attribute of this object.
        self.arguments = kind.arguments  # type: ignore[method-assign]
        self._prepared, self._nbytes, self._copies = prepared, made.nbytes, made.copies
        self._negotiable = made.negotiable
        self._calls, self._seconds = 0, 0.0

    def __call__(self, x: Any, out: Any) -> Any:
        with self._engine.turn:
            started = perf_counter()
            found = self._look(x, out, beside=False)
            if found is None:
                return NotImplemented
            if not self._ahead and not self._meet():
                return self.settle(x, out)
            prepared = self._prepared
            self._put(prepared, found, find_call_site(3), beside=False)
            result = self._kind.whole(x, prepared.deliver(found, out))
            self._seconds += perf_counter() - started
            return result

    def start(self, x: Any, out: Any) -> Any:
        # As in `SmallCall.start`.
        site, ended, engine = find_call_site(3), Ended(), self._engine
        with engine.turn:
            found = self._look(x, out, beside=True)
            if found is None:
                return NotImplemented
            if not self._ahead and not self._meet():
                steps, after = self._settling(x, out, str(site)), self._runner.placements.after
                steps = noting(steps, after, self._group.control, ended)
                result = engine.run(self._group.guarded(steps))
            else:
                prepared = self._prepared
                ended.follow = self._put(prepared, found, site, beside=True)
                result = self._kind.whole(x, prepared.deliver(found, out))
            task = Finished(result, engine.outcomes, site)
        return Request(self._group, task, site, ended)

    def _look(self, x: Any, out: Any, *, beside: bool) -> Any:
        """Look at the arrays of a call; None if it has to be made in full."""
        prepared = self._prepared
        # A check of the header before may end the group.
        if prepared is None or not self._is_idle() or self._group.closed is not None:
            return None
        return prepared.look(self._kind.arrays(x), out, beside=beside)

    def _meet(self) -> bool:
        """Show the header, and wait for those of the others; return whether they are as before."""
        self._group.watchdog.current = self._current
        return bool(self.exchange.meet())

    def _put(self, prepared: Any, found: Any, site: CallSite, *, beside: bool) -> _Follow:
        """Put a call on the device, and return what lets its caller use the result."""
        group = self._group
        try:
            follow = self._begin(prepared, found, site, beside)
            group.watchdog.check_given_up()
        except BaseException as error:
            if isinstance(error, TransportError) and group.deferred_error is not None:
                # Another thread has ended the group, and with it what this call was in.
                raise group.closed_error(self._signature.operation) from error
            self.give_up(error)
            raise
        self._calls += 1
        return follow

    def _begin(self, prepared: Any, found: Any, site: CallSite, beside: bool) -> _Follow:
        group, control, placements = self._group, self._group.control, self._runner.placements
        if not self._ahead:
            return placements.put(prepared, found, lambda _: None, beside=beside)
        group.watchdog.current = self._current
        follow = placements.put(prepared, found, self.exchange.post, beside=beside)
        agreeing = agree(control, self._signature, site=site)
        self._engine.follow(group.guarded(agreeing, deferred=True))
        # What checks that header in the next call.
        group.kept[DevicePath] = self._engine.follower, self.exchange
        if control.native is not None:
            control.go_on()
        return follow

    def _is_idle(self) -> bool:
        """Return whether nothing is outstanding, after a look at the header of the call before."""
        engine = self._engine
        if not engine.queue:
            return True
        follower, exchange = self._group.kept.get(DevicePath, (None, None))
        if follower is not None and engine.follower is follower:
            return engine.end_follower(partial(self._has_agreed, exchange))
        engine.advance()
        return not engine.queue

    def _has_agreed(self, exchange: Any) -> bool:
        """Return whether all ranks have shown the header of the call before; wait for a moment."""
        done = self._group.control.done
        for _ in range(_LOOKS):
            if done():
                return bool(exchange.finish(None))
            give_up_core()
        return False

    def free(self) -> None:
        super().free()
        self._prepared = None

    def count(self) -> Count:
        calls, name = self._calls, self._call.operation.name
        return Count(name, calls, calls * self._nbytes, self._seconds, calls * self._copies)
