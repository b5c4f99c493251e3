"""The fast path of a small reduction in one call of the native part.

It does the same as the one in Python, which it calls if a rank is late, or if ranks call different things.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView
from arraycomm._collectives.fast_path import FastAllreduce, FastPath, FastPaths, LargeAllreduce
from arraycomm._collectives.runner import Runner
from arraycomm._collectives.statistics import Count
from arraycomm._folds import in_c
from arraycomm._native import compiled
from arraycomm._transports.control import SharedControl

_REPEATED: Final = np.ndarray


def fast_paths_of(runner: Runner) -> FastPaths:
    """Return the fast paths of a communicator: the native part's, if it can make steps of the control channel."""
    control = runner.group.control
    # Another class of control channel does more in a step.
    shared = compiled is not None and type(control) is SharedControl
    return NativePaths(runner) if shared or control.native is not None else FastPaths(runner)


class NativePaths(FastPaths):
    """The fast paths of one communicator; the native part finds those of NumPy arrays by itself."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._repeats = compiled.Repeats(_REPEATED)
        self.again = self._repeats.again

    def make(self, runner: Runner, op: str, source: BufferView, note: str) -> FastAllreduce:
        path = NativeAllreduce(runner, op, source, note)
        if type(source.source) is _REPEATED and not note:
            self._repeats.remember(op, path.exchange)
        return path

    def make_large(self, runner: Runner, op: str, source: BufferView, note: str) -> LargeAllreduce:
        return NativeLargeAllreduce(runner, op, source, note)

    def forget(self) -> None:
        super().forget()
        self._repeats.forget()


class NativeAllreduce(FastAllreduce):
    """A fast path that the native part takes."""

    def __init__(self, runner: Runner, op: str, source: BufferView, note: str) -> None:
        super().__init__(runner, op, source, note)
        self.exchange = _exchange(runner, self, op, source, self._prefix, self._nbytes)

    def _reduce(self, x: Array, out: Array) -> bool:
        reduced: bool = self.exchange.reduce(x if x.flags.c_contiguous else x.copy(), out)
        return reduced

    def await_others(self) -> None:
        self._control.resume()
        super().await_others()

    def count(self) -> Count:
        calls, seconds = self.exchange.counts()
        return Count("allreduce", calls, calls * self._nbytes, seconds)


class NativeLargeAllreduce(LargeAllreduce):
    """The fast path of large arrays, with the header by the native part."""

    def __init__(self, runner: Runner, op: str, source: BufferView, note: str) -> None:
        super().__init__(runner, op, source, note)
        self._meet = _exchange(runner, self, op, source, self._prefix, 0).meet

    def meet(self) -> bool:
        agreed: bool = self._meet()
        return agreed

    def await_others(self) -> None:
        self._control.resume()
        super().await_others()


def _exchange(
    runner: Runner, path: FastPath, op: str, source: BufferView, header: bytes, nbytes: int
) -> Any:
    """Return what makes the steps of a path, with so many bytes beside the header."""
    group, control = runner.group, runner.group.control
    return compiled.Exchange(
        memory=control.slots,
        rank=control.rank,
        size=control.size,
        slot=control.slot,
        header=header,
        nbytes=nbytes,
        fold=in_c.number_of(op, source.dtype),
        dtype=source.dtype,
        shape=source.shape,
        control=control,
        queue=group.engine.queue,
        turn=group.engine.turn,
        path=path,
        patient=group.transport.spins > 0,
        nodes=control.native,
    )
