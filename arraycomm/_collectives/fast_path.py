"""The fast paths of reductions (see `_calls/fast_paths.py`), if the native part is there.

They do what a call does otherwise (view, header, movement, fold, result), with everything that
depends only on operation, dtype and shape worked out beforehand. A small one is one call of the
native part, which calls back if a rank is late, or if ranks call different things. If anything is
unusual they hand over.
"""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView, allocate
from arraycomm._arrays.results import allocate_like, commit_out, to_framework, view_out
from arraycomm._arrays.views import view
from arraycomm._calls.fast_paths import FastPath
from arraycomm._calls.placement import Destination
from arraycomm._calls.runner import Runner
from arraycomm._calls.statistics import Count
from arraycomm._collectives.reductions import Allreduce
from arraycomm._errors import TransportError
from arraycomm._folds import in_c
from arraycomm._native import compiled
from arraycomm._protocol.agreement import agree
from arraycomm._protocol.header import MAX_DIMS, Signature, encode
from arraycomm._reduce import chunks
from arraycomm._reduce.algorithms import allreduce

_CURRENT: Final = ("allreduce", None)


def remember(runner: Runner, x: Any, op: str) -> None:
    """Keep the fast path of a reduction that has just succeeded without it."""
    # A guard has to see every call.
    if runner.guard is not None:
        return
    with suppress(Exception):
        keep(runner, (type(x), op, x.dtype, x.shape), x, op)


def keep(runner: Runner, key: tuple[Any, ...], x: Any, op: str, note: str = "") -> None:
    """Keep the fast path of a reduction by a key; ranks compare the note together with the op."""
    group, paths = runner.group, runner.fast_paths
    # An array on a device would be copied from there to be looked at.
    if paths.repeats is None or not paths.may_keep or runner.placements.on_device(x):
        return
    large = getattr(x, "nbytes", 0) > group.inline_bytes
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
        elif large:
            paths.keep(key, LargeAllreduce(runner, op, source, note))
        else:
            path = SmallAllreduce(runner, op, source, note)
            paths.keep(key, path)
            if type(x) is np.ndarray and not note:
                paths.repeats.remember(op, path.exchange)


class FastAllreduce(FastPath):
    """`allreduce` of one op, dtype and shape; see `FastPath`."""

    def __init__(
        self, runner: Runner, op: str, source: BufferView, note: str, *, inline: bool
    ) -> None:
        group, control = runner.group, runner.group.control
        dtype, shape = source.dtype, source.shape
        self._runner, self._group, self._engine = runner, group, group.engine
        self._dtype, self._shape, self._op = dtype, shape, op
        self._signature = Signature("allreduce", op + note, None, dtype, shape)
        self._nbytes = source.array.nbytes
        self.exchange = compiled.Exchange(
            memory=control.slots,
            rank=control.rank,
            size=control.size,
            slot=control.slot,
            header=encode(self._signature, self._nbytes if inline else -1),
            nbytes=self._nbytes if inline else 0,
            fold=in_c.number_of(op, dtype),
            dtype=dtype,
            shape=shape,
            control=control,
            queue=group.engine.queue,
            turn=group.engine.turn,
            path=self,
            patient=group.transport.spins > 0,
            nodes=control.native,
        )

    def await_others(self) -> None:
        """Wait until every rank has posted this step, where the native part has stopped."""
        control = self._group.control
        control.go_on()
        self._group.watchdog.current = _CURRENT
        self._engine.wait_for(control.done, handle=control)

    def give_up(self, error: BaseException) -> None:
        """End the group: other ranks may have gone on, and no later call would fit theirs."""
        self._group.close(error)
        if isinstance(error, TransportError):
            self._group.watchdog.explain_failure(error)

    def settle(self, x: Array, out: Array) -> None:
        """Raise on every rank if calls differ; go on if arrays are on devices elsewhere."""
        agreeing = agree(self._group.control, self._signature)
        out[...] = self._runner.settle(agreeing, Allreduce, x, self._op, None)


class SmallAllreduce(FastAllreduce):
    """The fast path of arrays that are small enough to travel with the header."""

    def __init__(self, runner: Runner, op: str, source: BufferView, note: str) -> None:
        super().__init__(runner, op, source, note, inline=True)
        self._numpy = type(source.source) is np.ndarray

    def __call__(self, x: Any, out: Any) -> Any:
        if self._numpy:
            if out is None:
                out = allocate(self._shape, self._dtype)
            elif (
                type(out) is not np.ndarray
                or out.dtype != self._dtype
                or out.shape != self._shape
                or not out.flags.carray
            ):
                return None
            return out if self._reduce(x, out) else None
        try:
            source = view(x)
            into = None if out is None else view_out(out, self._shape, self._dtype)
        except Exception:
            return None
        # One that had to be copied may be on a device, where the full call leaves it.
        if source.copied or source.dtype != self._dtype or source.shape != self._shape:
            return None
        if into is not None and into.array.flags.carray:
            return commit_out(into) if self._reduce(source.array, into.array) else None
        target = allocate_like(self._shape, self._dtype, source)
        if not self._reduce(source.array, target):
            return None
        if into is None:
            return to_framework(target, source)
        into.array[...] = target
        return commit_out(into)

    def _reduce(self, x: Array, out: Array) -> bool:
        """Reduce, unless another call is under way; return whether that was done."""
        reduced: bool = self.exchange.reduce(x if x.flags.c_contiguous else x.copy(), out)
        return reduced

    def count(self) -> Count:
        calls, seconds = self.exchange.counts()
        return Count("allreduce", calls, calls * self._nbytes, seconds)


class LargeAllreduce(FastAllreduce):
    """The fast path of arrays whose elements move after the header."""

    def __init__(self, runner: Runner, op: str, source: BufferView, note: str) -> None:
        super().__init__(runner, op, source, note, inline=False)
        self._link = runner.group.transport
        self._calls, self._seconds = 0, 0.0

    def __call__(self, x: Any, out: Any) -> Any:
        if type(x) is type(out) is np.ndarray and self._is_plain(x, out):
            return out if self._reduce(x, out) else None
        try:
            source = view(x)
            if source.copied or source.dtype != self._dtype or source.shape != self._shape:
                return None
            into = None if out is None else view_out(out, self._shape, self._dtype)
            own = source.array
            target = allocate_like(self._shape, self._dtype, source) if into is None else into.array
            if not (own.flags.c_contiguous and own.flags.aligned and target.flags.carray):
                return None
            if not Destination(source, out, own).takes(target):
                return None
        except Exception:
            return None
        if not self._reduce(own, target):
            return None
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
        """Reduce, unless another call is under way; return whether that was done."""
        if not self._engine.turn.acquire(False):
            return False
        try:
            # Arrays that ranks share go another way if they lie at the same place.
            if self._engine.queue or self._group.closed is not None or self._link.shares_arrays:
                return False
            try:
                chunks.reserve(self._link, self._nbytes)
            except MemoryError:
                return False
            started = perf_counter()
            self._group.watchdog.current = _CURRENT
            if self.exchange.meet():
                source, target = x.reshape(-1), out.reshape(-1)
                moving = allreduce(self._link, source, target, self._op)
                self._engine.run(self._group.guarded(moving))
            else:
                self.settle(x, out)
            self._calls += 1
            self._seconds += perf_counter() - started
            return True
        finally:
            self._engine.turn.release()

    def count(self) -> Count:
        return Count("allreduce", self._calls, self._calls * self._nbytes, self._seconds)
