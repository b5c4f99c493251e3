"""What tests reach of a communicator's inside; no other module of this package reaches there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from arraycomm import _session
from arraycomm._calls.operation import Context
from arraycomm._calls.runner import Runner
from arraycomm._callsite import describe_exception
from arraycomm._collectives.groups import Barrier
from arraycomm._collectives.objects import BcastObject
from arraycomm._communicator import Communicator, group_of, runner_of
from arraycomm._cuda.device import DeviceRequest
from arraycomm._cuda.devices import Devices
from arraycomm._errors import CommunicatorClosedError
from arraycomm._exit.exit import remove_root
from arraycomm._launch.places import cores
from arraycomm._protocol.agreement import leave_in_step, states_in_step
from arraycomm._protocol.group import Group, Options
from arraycomm._protocol.task import Task
from arraycomm._protocol.waits.waiting import NAP
from arraycomm._transports.base import Steps, Transport
from arraycomm._transports.notes import ENDED, FAILED, FINISHED

# Seconds after which a rank that waits for the others' last step tells them that it has left: those
# that wait for its messages do not see its step. And those in which messages still arrive.
_LEAVES: Final = 1.0
_ARRIVING: Final = 0.5
_TAKING: Final = 5.0


class EndOfTest(Barrier):
    """The end of a test, which the ranks reach in step; it does not match what one has left out."""

    name, code = "the end of the test", 39


class Draw(BcastObject):
    """A value that rank 0 draws for all ranks; `label` is compared between them."""

    name, code = "draw", 18

    def __init__(self, context: Context, produce: Callable[[], Any], label: str | None) -> None:
        super().__init__(context, produce(), 0)
        self.signature = replace(self.signature, op=label)


def communicator_over(transport: Transport, timeout: float | None) -> Communicator:
    """Return a communicator over a transport, with the usual options but for the timeout."""
    group = Group(transport, Options(timeout=timeout))
    request = DeviceRequest(local_rank=transport.local_rank)
    return Communicator(Runner(group, Devices(group, request)))


def leave_cores(comm: Communicator) -> None:
    """Have waits sleep at once if ranks outnumber the cores, of which polling would take one."""
    if comm.local_size > cores():
        group_of(comm).engine.patience = 0.0


def split_transport(
    comm: Communicator, color: int | None, members: Sequence[int]
) -> Transport | None:
    """Return a transport of the ranks of one color, and None without a color; collective."""
    group = group_of(comm)
    return group.transport.split(color, members, group.wait)


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


def has_world() -> bool:
    """Return whether this process has called `init`."""
    return _session.is_initialized()


def world_is_closed() -> bool:
    """Return whether this process has a world that an error has closed."""
    return has_world() and not is_open(_session.world())


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


def left_behind(comm: Communicator) -> tuple[int, bool, bool, int, str]:
    """Return what `Left` says beyond steps: messages, requests, whether it is open, groups."""
    related = group_of(comm).related
    sizes = {(group.size, group.control.shared, group.backend) for group in related}
    return (
        sum(group.unmatched for group in related),
        not all(group.engine.idle for group in related),
        is_open(comm),
        len(related) if sizes == {(comm.size, True, "mpi")} else 0,
        "" if (unseen := unseen_error(comm)) is None else describe_exception(unseen),
    )


def take_up_rest(comm: Communicator) -> bool:
    """Receive what a test has left, and give up its receives; collective.

    Return whether nothing is left on this rank.
    """
    taken = [_take_up_rest(group) for group in group_of(comm).related]
    return all(taken)


def _take_up_rest(group: Group) -> bool:
    engine, mpi_comm = group.engine, group.transport.mpi_comm
    handles = [task.waiting for task in engine.messages] + [engine.interrupted]
    # A receive of the user's, and then that of MPI, if it has begun.
    handles = [getattr(handle, "_handle", handle) for handle in handles]
    engine.give_up_all(CommunicatorClosedError("the test is over"))
    drained, deadline = drain(mpi_comm), time.monotonic() + _TAKING
    for handle in handles:
        if handle in (None, group.control) or handle.done():
            continue
        request: Any = getattr(handle, "_request", None)
        arguments: Any = getattr(handle, "_arguments", ())
        if request is None or not all(type(number) is int for number in arguments[1:]):
            return False
        # Its message has been taken if it sends: it receives.
        request.Cancel()
        while not handle.done() and time.monotonic() < deadline:
            time.sleep(0)
    return drained and not engine.queue


def drain(mpi_comm: Any) -> bool:
    """Receive the messages that nobody has received; return whether all ranks came; collective.

    Each rank sends a last message to each. Messages do not overtake one another, so those that come
    before it were left.
    """
    from mpi4py import MPI

    largest: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    ranks, last = range(mpi_comm.size), largest - 1
    sends = [mpi_comm.Isend([bytearray(), MPI.BYTE], rank, last) for rank in ranks]
    missing, status, deadline = set(ranks), MPI.Status(), time.monotonic() + _TAKING
    while missing and time.monotonic() < deadline:
        message = mpi_comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        if message:
            message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
            missing -= {status.source} if status.tag == last else set()
    return not missing and MPI.Request.Testall(sends)


def announce_exit(comm: Communicator, state: int, text: str) -> None:
    """Tell the other ranks, on every open communicator, that this rank takes part no more."""
    for group in group_of(comm).related:
        if group.closed is None:
            group.control.notes.announce_exit(state, group.control.completed, text)


def complete_headers(comm: Communicator) -> None:
    """Wait until all ranks have shown the headers of calls on devices that went ahead of them.

    Until then this rank is missed by those that look later.
    """
    for group in group_of(comm).related:
        if group.engine.follower is not None:
            group.engine.complete(group.engine.follower)


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


class LastStep:
    """The last step of a communicator and its groups; its beginning ends the others' waits.

    `text` is the traceback of what this rank raised, and empty if it ended well.
    """

    def __init__(self, comm: Communicator, text: str) -> None:
        self.comm, self._text = comm, text
        self._related = list(group_of(comm).related)
        self._tasks: list[Task] = []
        # Whether the other ranks were told so, after which the communicator is of no use.
        self._told = False
        for group in self._related:
            group.engine.threaded = False
            if group.closed is None:
                self._tasks.append(group.engine.submit(group.guarded(_last_step(group, text))))
        self._advance()

    def _advance(self) -> None:
        for group in self._related:
            group.engine.advance()

    def complete(self, seconds: float, *, tells: bool = True) -> tuple[bool, bool]:
        """Wait for the other ranks.

        Return whether every rank came from a test that went well, and whether nothing is
        outstanding.
        """
        now = time.monotonic()
        # Who waits for it learns of a failure at once.
        leaves, deadline, together = now, now + seconds, not tells
        if not self._text:
            leaves += _LEAVES
        while now < deadline and not all(group.engine.idle for group in self._related):
            self._advance()
            time.sleep(NAP)
            now = time.monotonic()
            if not together and all(task.finished for task in self._tasks):
                # All ranks have left: what is still under way ends soon, or never.
                together, deadline = True, min(deadline, now + _ARRIVING)
            elif not together and now > leaves:
                self.tell()
        for task in self._tasks:
            # The group may go on.
            task.outcome.claim()
        in_step = not self._told and self._all_left and all(t.result.well for t in self._tasks)
        clean = all(group.at_rest() for group in self._related)
        return in_step and clean, clean

    def together(self, seconds: float) -> bool:
        """Return whether all ranks left in the same step, even if by errors of their own."""
        return self.complete(seconds, tells=False)[1] and self._all_left and not self._told

    def tell(self) -> None:
        """Tell the ranks that wait for a message of this one that none will come."""
        if not self._told:
            self._told = True
            announce_exit(self.comm, FAILED if self._text else FINISHED, self._text)

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
    left = list(states_in_step(group.control).values())
    return _Left(len(left) == group.size, left == [ENDED] * group.size)


def free_transports(comm: Communicator, *, keep_own: bool) -> None:
    """Free the transports of the communicator's groups, and its own unless it is to be kept."""
    related = group_of(comm).related
    _free(related[1:] if keep_own else related)


def _free(groups: Sequence[Group]) -> None:
    for group in groups:
        group.end(CommunicatorClosedError("the test is over"))
        group.transport.free()
