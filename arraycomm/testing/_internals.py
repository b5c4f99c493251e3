"""What tests reach of a communicator's inside; no other module of this package reaches there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from arraycomm import _session
from arraycomm._calls.operation import Context
from arraycomm._calls.runner import Runner
from arraycomm._collectives.groups import Barrier
from arraycomm._collectives.objects import BcastObject
from arraycomm._communicator import Communicator, group_of, runner_of
from arraycomm._cuda.device import DeviceRequest
from arraycomm._cuda.devices import Devices
from arraycomm._errors import CommunicatorClosedError
from arraycomm._protocol.ends.exit import remove_root
from arraycomm._protocol.ends.leaving import all_left, all_left_well, leave_in_step
from arraycomm._protocol.group import Group, Options
from arraycomm._protocol.waits.waiting import give_up_core
from arraycomm._transports.base import Steps, Transport


class EndOfTest(Barrier):
    """The end of a test, which the ranks reach in step; it does not match what one has left out."""

    name, code = "the end of the test", 39


class Draw(BcastObject):
    """A value that rank 0 draws for all ranks; `label` is compared between them."""

    name, code = "draw", 18

    def __init__(self, context: Context, produce: Callable[[], Any], label: str | None) -> None:
        super().__init__(context, produce(), 0)
        self.signature = replace(self.signature, op=label)


def communicator_over(transport: Transport, timeout: float) -> Communicator:
    """Return a communicator over a transport, with the usual options but for the timeout."""
    group = Group(transport, Options(timeout=timeout))
    return Communicator(Runner(group, Devices(group, DeviceRequest())))


def split_transport(
    comm: Communicator, color: int | None, members: Sequence[int]
) -> Transport | None:
    """Return a transport of the ranks of one color, and None without a color; collective."""
    return group_of(comm).transport.split(color, members)


def bcast_from_root(comm: Communicator, produce: Callable[[], Any], label: str | None) -> Any:
    """Return what `produce` returned on rank 0; collective.

    `produce` is called on every rank. An error in it is raised, and is `PeerError` on the others;
    `MismatchError` is raised if labels differ.
    """
    return runner_of(comm).call(Draw, produce, label)


def end_test(comm: Communicator) -> None:
    """Wait until every rank has ended the test; raise if one calls something else. Collective."""
    runner_of(comm).call(EndOfTest)


def is_open(comm: Communicator) -> bool:
    """Return whether a communicator can be used on this rank."""
    return group_of(comm).closed is None


def world_is_closed() -> bool:
    """Return whether this process has a world that an error has closed."""
    return _session.is_initialized() and not is_open(_session.world())


def leave_world(text: str) -> LastStep | None:
    """Begin the last step of the world and of what was made from it; None if there is no world."""
    return LastStep(_session.world(), text) if _session.is_initialized() else None


def renew_world(*, free: bool) -> None:
    """Make a new world in place of one that the ranks have left; collective.

    With `free`, the old one is freed: nothing is outstanding on any rank.
    """
    if not _session.is_initialized():
        return
    old = group_of(_session.world())
    _session.renew()
    if free:
        _free(old.related)
        old.related.clear()
        remove_root(old)


def revive_world() -> None:
    """Go on with a world that all ranks left in the same step, nothing outstanding; collective."""
    for group in group_of(_session.world()).related:
        group.control.ended, group.engine.threaded = False, group.transport.threaded


def completed_step(comm: Communicator) -> int:
    """Return the communicator's last step that went well on this rank."""
    return group_of(comm).control.completed


def missing_ranks(comm: Communicator) -> list[int]:
    """Return the ranks that have not come to the call that this one is in."""
    return group_of(comm).control.missing()


def unmatched_messages(comm: Communicator) -> int:
    """Return how many more messages this rank has sent than received, groups included."""
    return sum(group.unmatched for group in group_of(comm).related)


def announce_exit(comm: Communicator, state: int, text: str) -> None:
    """Tell the other ranks, on every open communicator, that this rank takes part no more."""
    for group in group_of(comm).related:
        if group.closed is None:
            group.control.notes.announce_exit(state, group.control.completed, text)


def stop_progress(comm: Communicator, error: Exception | None, seconds: float) -> None:
    """Wait for the threads that drive outstanding requests; with an error, give the requests up."""
    for group in group_of(comm).related:
        if error is not None:
            group.engine.give_up_all(error)
        group.engine.progress.join(seconds)


def unseen_error(comm: Communicator) -> BaseException | None:
    """Return the error of a request that nobody has waited for, if there is one."""
    for group in group_of(comm).related:
        for outcome in group.engine.outcomes.errors():
            return outcome.error
    return None


def end_in_step(comm: Communicator, text: str, seconds: float) -> tuple[bool, bool]:
    """Take part in one last step of the communicator and its groups, so that no rank hangs.

    Parameters
    ----------
    text : str
        The traceback of what this rank raised; empty if it ended well.
    seconds : float
        How long to wait for the other ranks.

    Returns
    -------
    in_step : bool
        Whether every rank came to the last step from a test that went well.
    clean : bool
        Whether nothing is outstanding.
    """
    return LastStep(comm, text).complete(seconds)


class LastStep:
    """The last step of a communicator and its groups; its beginning ends the others' waits."""

    def __init__(self, comm: Communicator, text: str) -> None:
        self._related = list(group_of(comm).related)
        self._tasks = []
        for group in self._related:
            group.engine.threaded = False
            if group.closed is None:
                self._tasks.append(group.engine.submit(group.guarded(_last_step(group, text))))
        self._advance()

    def _advance(self) -> None:
        for group in self._related:
            group.engine.advance()

    def complete(self, seconds: float) -> tuple[bool, bool]:
        """Wait for the other ranks; see `end_in_step`."""
        deadline = time.monotonic() + seconds
        while not all(group.engine.idle for group in self._related):
            self._advance()
            if time.monotonic() > deadline:
                break
            give_up_core()
        for task in self._tasks:
            # The group may go on.
            task.outcome.claim()
        in_step = self._all_left and all(task.result.well for task in self._tasks)
        clean = all(group.at_rest() for group in self._related)
        return in_step and clean, clean

    def together(self, seconds: float) -> bool:
        """Return whether all ranks left in the same step, even if by errors of their own."""
        return self.complete(seconds)[1] and self._all_left

    @property
    def _all_left(self) -> bool:
        return len(self._tasks) == len(self._related) and all(
            isinstance(task.result, _Left) and task.result.all for task in self._tasks
        )


class _Left(NamedTuple):
    """Whether all ranks have come to the last step of a group, and whether all did well before."""

    all: bool
    well: bool


def _last_step(group: Group, text: str) -> Steps:
    yield from leave_in_step(group.control, text)
    return _Left(all_left(group.control), all_left_well(group.control))


def free_transports(comm: Communicator, *, keep_own: bool) -> None:
    """Free the transports of the communicator's groups, and its own unless it is to be kept."""
    related = group_of(comm).related
    _free(related[1:] if keep_own else related)


def _free(groups: Sequence[Group]) -> None:
    for group in groups:
        group.end(CommunicatorClosedError("the test is over"))
        group.transport.free()
