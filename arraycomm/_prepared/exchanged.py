"""What prepared calls of all forms have in common: headers that the native part exchanges."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from arraycomm._calls.placement import HostPlacement
from arraycomm._calls.runner import Runner
from arraycomm._collectives.movements import FromRoot
from arraycomm._errors import TransportError
from arraycomm._folds import in_c
from arraycomm._native import compiled
from arraycomm._prepared.fast_paths import FastPath
from arraycomm._prepared.steps import Call, Form, Step
from arraycomm._protocol.agreement import UndeliveredError, agree
from arraycomm._transports.base import Steps


class Exchanged(FastPath):
    """Calls whose headers the native part exchanges, like one for which an operation was `made`."""

    # Up to how many bytes travel with the header of a call on devices, as in the full call.
    room = -1

    def __init__(self, runner: Runner, call: Call, step: Step, made: Any = None) -> None:
        group, control = runner.group, runner.group.control
        # The group keeps this path, and the runner keeps the group: a communicator that the program
        # has dropped could not be given back.
        self._runner_ref = weakref.ref(runner)
        self._group, self._engine = group, group.engine
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

    @property
    def _runner(self) -> Runner:
        """Return the runner, which whoever makes the call has."""
        runner = self._runner_ref()
        assert runner is not None
        return runner

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
