"""The short way of a small reduction that was called before.

It does what the long way does (view, header, fold, result), with everything that depends only on
operation, dtype and shape worked out beforehand. When anything is unusual it hands over.
"""

from __future__ import annotations

import contextvars
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from arraycomm._arrays.results import allocate, commit_out, to_framework
from arraycomm._arrays.views import view, view_out
from arraycomm._dtypes import DType
from arraycomm._errors import TransportError
from arraycomm._folds import fold_function, ieee_mode, in_ieee_mode
from arraycomm._protocol.header import Signature, encode, settle
from arraycomm._transports.control import PAYLOAD, PREFIX

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator

Array = np.ndarray[Any, Any]

_DOING: Final = ("allreduce", None)


class ShortReduction:
    """`allreduce` of one op, dtype and shape, small enough to travel with the header.

    Calling it returns the result, or None where the long way has to be taken.
    """

    def __init__(
        self, comm: Communicator, op: str, dtype: DType, shape: tuple[int, ...], *, numpy: bool
    ) -> None:
        control = comm._control
        self._comm, self._control, self._engine = comm, control, comm._engine
        self._turn = comm._engine.turn
        self._dtype, self._shape, self._numpy = dtype, shape, numpy
        self._signature = Signature("allreduce", op, None, dtype, shape)
        count = int(np.prod(shape, dtype=np.int64))
        self._nbytes = count * dtype.itemsize
        self._prefix = encode(self._signature, self._nbytes)
        self._digest = memoryview(self._prefix)[:8].cast("q")[0]
        self._fold = fold_function(op, dtype)
        self._quiet = contextvars.copy_context()
        self._quiet.run(np.seterr, all="ignore")
        end = PAYLOAD + self._nbytes
        self._rows = [
            [row[PAYLOAD:end].view(dtype).reshape(shape) for row in rows] for rows in control.rows
        ]
        self._mine = [
            np.frombuffer(slot, np.uint8)[PAYLOAD:end].view(dtype).reshape(shape)
            for slot in control.mine
        ]
        self._digests = [peer * control.stride + 1 for peer in control.peers]
        self._calls, self._seconds = 0, 0.0

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
            source = view(x, "allreduce")
            into = None if out is None else view_out(out, self._shape, self._dtype, "allreduce")
        except Exception:
            return None
        # One that had to be copied may be on a device, where the long way leaves it.
        if source.copied or source.dtype != self._dtype or source.shape != self._shape:
            return None
        if into is not None and into.array.flags.carray:
            return commit_out(into) if self._reduce(source.array, into.array) else None
        target = allocate(self._shape, self._dtype)
        if not self._reduce(source.array, target):
            return None
        if into is None:
            return to_framework(target, source)
        into.array[...] = target
        return commit_out(into)

    def _reduce(self, x: Array, out: Array) -> bool:
        """Reduce, unless somebody else is at it; tell whether that was done."""
        if not self._turn.acquire(False):
            return False
        try:
            if self._engine._queue or self._comm._closed is not None:
                return False
            started = perf_counter()
            control = self._control
            parity = (control.step + 1) & 1
            if control.shown[parity] is not self._prefix:
                control.mine[parity][PREFIX] = control.shown[parity] = self._prefix
            self._mine[parity][...] = x
            try:
                control.post()
                if not control.done():
                    self._comm._doing = _DOING
                    self._engine.wait_for(control.done)
            except BaseException as error:
                # The other ranks may have gone on from here: no later call would fit theirs.
                self._comm._close(error)
                if isinstance(error, TransportError):
                    self._comm._tell_death(error)
                raise
            words, digest = control.words[parity], self._digest
            for place in self._digests:
                if words[place] != digest:
                    return self._meet(x, out)
            if in_ieee_mode():
                self._quiet.run(self._fold, self._rows[parity], out)
            else:
                with ieee_mode():
                    self._quiet.run(self._fold, self._rows[parity], out)
            self._comm._completed = control.step
            self._calls += 1
            self._seconds += perf_counter() - started
            return True
        finally:
            self._turn.release()

    def _meet(self, x: Array, out: Array) -> bool:
        """Raise on every rank where calls differ; go on with arrays that are on devices elsewhere."""
        met = self._comm._met_after(settle(self._control, self._signature), x, self._signature.op)
        out[...] = self._engine.run(met)
        return True

    def add_to(self, totals: list[float]) -> None:
        """Add this way's figures to the communicator's: calls, bytes, copies, seconds."""
        totals[0] += self._calls
        totals[1] += self._calls * self._nbytes
        totals[3] += self._seconds
