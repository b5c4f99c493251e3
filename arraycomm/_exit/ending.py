"""The end of this process's groups: ranks wait for one another, and see how each has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from arraycomm._errors import TransportError
from arraycomm._protocol.agreement import leave_in_step, states_in_step
from arraycomm._protocol.group import Group
from arraycomm._protocol.mismatch import name_ranks
from arraycomm._protocol.waits import clock
from arraycomm._protocol.waits.still_waiting import StillWaiting, say
from arraycomm._transports.notes import ENDED, FAILED, GAVE_UP, GONE

# Seconds for which a rank that knows of a failure waits for those that do not, and for those that
# do.
_GRACE: Final = 3.0
_HANDLING: Final = 60.0
_NAP: Final = 1e-4


def wait_for_ends(
    groups: list[Group], watched: list[Group], failure: str, on_failure: Callable[[], None]
) -> tuple[bool, bool, bool]:
    """Wait for the other ranks to come to their ends as well.

    Returns whether all have ended well, whether one has died, and whether this rank's program knows
    nothing of that.

    A rank that works is waited for. Once a rank has failed, those that do not know of it yet are
    waited for only so long, since they may wait for it outside the library; those that have handled
    it have longer.

    `groups` are all of this rank, and `watched` those whose ranks make up its families. `failure`
    is the traceback that ends this rank, or empty. `on_failure` is called once another rank is seen
    to have failed.
    """
    ends = [_Ends(group, failure) for group in groups]
    lines = [StillWaiting(end.group.control) for end in ends]
    for line in lines:
        line.begin("at the end of the program", "")
    began, failed_at = clock.now(), clock.now() if failure else 0.0
    while True:
        for end in ends:
            end.look()
        seen = [end for end in ends if end.group in watched]
        if not failed_at and any(end.failed for end in seen):
            failed_at = clock.now()
            on_failure()
        waited = clock.now() - failed_at
        waiting = [
            rank
            for end in seen
            for rank, knows in end.waiting.items()
            if not failed_at or waited < (_HANDLING if knows else _GRACE)
        ]
        if not waiting:
            return not failed_at, any(end.died for end in seen), _say_who_died(seen)
        for end, line in zip(ends, lines, strict=True):
            if end.group in watched and end.waiting:
                line.look(clock.now() - began, partial(sorted, end.waiting))
        time.sleep(_NAP)


class Between:
    """Equals what was registered with atexit from one of two functions to the other.

    For `atexit.unregister`, which compares it with each function in the order of registration.
    """

    def __init__(self, *ends: Callable[[], None]) -> None:
        self._ends, self._inside = ends, False

    def __eq__(self, registered: object) -> bool:
        at_end, inside = registered in self._ends, self._inside
        self._inside = inside is not at_end
        return inside or at_end

    def __call__(self) -> None:
        """Do nothing: atexit takes functions."""

    __hash__ = object.__hash__


def _say_who_died(seen: list[_Ends]) -> bool:
    missed = [end for end in seen if end.died and end.group.closed is None]
    for end in missed:
        ranks = f"{name_ranks(end.died)} ended before the end of the program"
        say(f"arraycomm: rank {end.group.rank} of {end.group.name}: {ranks}\n")
    return bool(missed)


class _Ends:
    """How the ranks of one group come to their ends, as far as this one has seen.

    In shared memory each says it in its notes. Otherwise a last step of the group says it, and
    messages do of the ranks that an error has put out of step.
    """

    def __init__(self, group: Group, failure: str) -> None:
        self.group = group
        # The ranks that go on, and whether each knows of an error; whether one has failed.
        self.waiting: dict[int, bool] = dict.fromkeys(group.control.peers, False)
        self.failed, self.died = False, list[int]()
        control = group.control
        self._stepping = not control.shared and group.at_rest() and not control.ended
        self._insists = control.shared
        self._own = GONE if failure else ENDED
        if self._stepping:
            text = (failure.strip().splitlines() or [""])[-1]
            with suppress(TransportError):
                next(leave_in_step(control, text))

    def look(self) -> None:
        """See what has become of the other ranks."""
        with suppress(Exception):
            self.group.transport.progress()
        try:
            states = self._states()
            dead = self.group.transport.failed()
        except TransportError:
            # Nobody can be heard any more.
            self.failed, self.waiting = True, {}
            return
        group = self.group
        going_on = [r for r in group.control.peers if states.get(r, FAILED) in (FAILED, GAVE_UP)]
        self.died = [rank for rank in going_on if rank in dead]
        # A program that goes on after an error knows of the death.
        self.failed |= GONE in states.values() or (bool(self.died) and group.closed is None)
        self.waiting = {rank: rank in states for rank in going_on if rank not in dead}

    def _states(self) -> dict[int, int]:
        """Return the state of each rank that has said how it leaves."""
        control = self.group.control
        states = {rank: said.state for rank, said in control.notes.exit_notices().items()}
        # Also of a group that takes no last step: ranks pass on there what others wait for.
        complete = not control.shared and control.done()
        in_step = states_in_step(control) if complete and control.ended else {}
        in_step.pop(control.rank, None)
        out_of_step = not self._stepping or bool(states) or complete
        if not self._insists and out_of_step and len(in_step) < len(control.peers):
            # Some rank does not come to that step: what this one has announced is said by messages
            # too, also if it has heard of all others.
            self._insists = True
            control.notes.announce_exit(self._own, control.completed, "")
        return states | in_step
