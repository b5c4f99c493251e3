"""Prepared calls of arrays on devices, which go ahead of the check of their headers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Final

from arraycomm._calls.requests import Ended, Request, noting
from arraycomm._calls.runner import Runner
from arraycomm._calls.statistics import Count
from arraycomm._callsite import CallSite, find_call_site
from arraycomm._errors import TransportError
from arraycomm._prepared.exchanged import Exchanged
from arraycomm._prepared.steps import Call, Step
from arraycomm._protocol.agreement import agree
from arraycomm._protocol.task import Finished
from arraycomm._protocol.waits.waiting import give_up_core

# At ranks that are a little later, before a call on devices is made in full.
_LOOKS: Final = 200
# Calls in other streams, one after another, after which they are recorded anew.
_STRAYS: Final = 8
# What lets a thread use the result of a call on a device, if it is not in the caller's stream.
_Follow = Callable[[], None] | None


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
            # Another thread may give up this path meanwhile.
            started, prepared, exchange = perf_counter(), self._prepared, self.exchange
            found = self._look(prepared, exchange, x, out, beside=False)
            if found is None:
                return NotImplemented
            if not self._ahead and not self._meet(exchange):
                return self.settle(x, out)
            self._put(prepared, exchange, found, find_call_site(3), beside=False)
            result = self._kind.whole(x, prepared.deliver(found, out))
            self._seconds += perf_counter() - started
            return result

    def start(self, x: Any, out: Any) -> Any:
        # As in `SmallCall.start`.
        site, ended, engine = find_call_site(3), Ended(), self._engine
        with engine.turn:
            prepared, exchange = self._prepared, self.exchange
            found = self._look(prepared, exchange, x, out, beside=True)
            if found is None:
                return NotImplemented
            if not self._ahead and not self._meet(exchange):
                steps, after = self._settling(x, out, str(site)), self._runner.placements.after
                steps = noting(steps, after, self._group.control, ended)
                result = engine.run(self._group.guarded(steps))
            else:
                ended.follow = self._put(prepared, exchange, found, site, beside=True)
                result = self._kind.whole(x, prepared.deliver(found, out))
            task = Finished(result, engine.outcomes, site)
        return Request(self._group, task, site, ended)

    def _look(self, prepared: Any, exchange: Any, x: Any, out: Any, *, beside: bool) -> Any:
        """Look at the arrays of a call; None if it has to be made in full."""
        # A check of the header before may end the group.
        if None in (prepared, exchange) or not self._is_idle() or self._group.closed is not None:
            return None
        found = prepared.look(self._kind.arrays(x), out, beside=beside)
        if prepared.strays >= _STRAYS:
            # The program has gone to another stream for good: the next call is recorded there.
            self._runner.fast_paths.drop(self._call.key)
        return found

    def _meet(self, exchange: Any) -> bool:
        """Show the header, and wait for those of the others; return whether they are as before."""
        self._group.watchdog.current = self._current
        return bool(exchange.meet())

    def _put(
        self, prepared: Any, exchange: Any, found: Any, site: CallSite, *, beside: bool
    ) -> _Follow:
        """Put a call on the device, and return what lets its caller use the result."""
        group = self._group
        try:
            follow = self._begin(prepared, exchange, found, site, beside)
            group.watchdog.check_given_up()
        except BaseException as error:
            if isinstance(error, TransportError) and group.deferred_error is not None:
                # Another thread has ended the group, and with it what this call was in.
                raise group.closed_error(self._signature.operation) from error
            self.give_up(error)
            raise
        self._calls += 1
        return follow

    def _begin(
        self, prepared: Any, exchange: Any, found: Any, site: CallSite, beside: bool
    ) -> _Follow:
        group, control, placements = self._group, self._group.control, self._runner.placements
        if not self._ahead:
            follow = placements.put(prepared, found, lambda _: None, beside=beside)
            # So a rank that ends next is missed by nobody in this call.
            control.completed = control.step
            return follow
        group.watchdog.current = self._current
        follow = placements.put(prepared, found, exchange.post, beside=beside)
        agreeing = agree(control, self._signature, site=site)
        self._engine.follow(group.guarded(agreeing, deferred=True))
        # What checks that header in the next call.
        group.kept[DevicePath] = self._engine.follower, exchange
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
