"""Transports whose ranks run as a schedule says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from arraycomm._transports.base import Handle, Transport, Wait, poll
from arraycomm._transports.control import ControlChannel
from arraycomm._transports.notes import Notes
from arraycomm.testing._ranks.schedule import Baton, Schedule

# No count of changes: the handle has not been polled yet.
_NEVER: Final = -1


def scheduled(
    links: Sequence[Transport], schedule: Schedule | int
) -> tuple[list[Transport], Baton]:
    """Return transports over `links` whose ranks run in the order of a schedule, and their baton.

    `links` are those of one group of threads. Each rank's thread has to `enter` and `leave` the
    baton, which transports that are split from these share.
    """
    if not isinstance(schedule, Schedule):
        schedule = Schedule(schedule)
    baton = Baton(len(links), schedule)
    return [_ScheduledLink(link, baton, rank) for rank, link in enumerate(links)], baton


class _ScheduledHandle:
    """A movement or step, with switch points at which it is polled and finished."""

    def __init__(self, handle: Handle, baton: Baton, player: int, point: str) -> None:
        self._handle, self._baton, self._player = handle, baton, player
        self._polled, self._finished = f"{point} polled", f"{point} finished"
        self._in_vain = _NEVER

    def done(self) -> bool:
        self._baton.poll(self._player, self._polled, self._in_vain)
        if not self._handle.done():
            self._in_vain = self._baton.changes
            return False
        # Other ranks may run far ahead before this rank reads what has arrived.
        self._baton.switch(self._player, self._finished)
        return True


def _passed_on(name: str) -> Any:
    """Return a method that calls the one of what is wrapped."""
    return lambda self, *args: getattr(self._inner, name)(*args)


def _attribute(name: str) -> Any:
    """Return an attribute that is the one of what is wrapped."""
    return property(
        lambda self: getattr(self._inner, name),
        lambda self, value: setattr(self._inner, name, value),
    )


class _ScheduledControl(ControlChannel):
    """A control channel with switch points; all other attributes are those of the one it wraps."""

    def __init__(self, control: ControlChannel, baton: Baton, player: int) -> None:
        self._inner, self._baton, self._player = control, baton, player
        self._step = _ScheduledHandle(control, baton, player, "step")
        self.shared = control.shared
        self.notes = cast(Notes, _ScheduledNotes(control, baton, player))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    step, completed = _attribute("step"), _attribute("completed")
    missing, withdraw, close = map(_passed_on, ("missing", "withdraw", "close"))

    def post(self, nbytes: int | None = None) -> None:
        self._baton.switch(self._player, "post")
        self._baton.fail_by_chance(self._player, "post")
        self._inner.post(nbytes)

    def done(self) -> bool:
        return self._step.done()


class _ScheduledNotes:
    """Notes with a switch point; all else is that of the control channel's own."""

    def __init__(self, control: ControlChannel, baton: Baton, player: int) -> None:
        self._control, self._baton, self._player = control, baton, player

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control.notes, name)

    def announce_exit(self, state: int, completed: int, text: str) -> None:
        try:
            self._baton.switch(self._player, "leave")
        finally:
            # Whatever ends the wait, since the other ranks wait for this notice.
            self._control.notes.announce_exit(state, completed, text)


def _movement(name: str) -> Any:
    """Return the method that starts a movement at a switch point, where it may fail."""

    def start(self: _ScheduledLink, *args: Any) -> Handle:
        self._baton.switch(self._player, name)
        self._baton.fail_by_chance(self._player, name)
        return _ScheduledHandle(getattr(self._inner, name)(*args), self._baton, self._player, name)

    return start


class _ScheduledLink(Transport):
    """A transport with switch points; `player` is its rank in the outermost group."""

    threaded = False

    def __init__(self, link: Transport, baton: Baton, player: int) -> None:
        self._inner, self._baton, self._player = link, baton, player
        self.name, self.rank, self.size = link.name, link.rank, link.size
        self.local_rank, self.local_size = link.local_rank, link.local_size
        self.mpi_comm, self.spins = link.mpi_comm, link.spins
        self.control = _ScheduledControl(link.control, baton, player)
        # For each probe, the count of changes at which it found nothing.
        self._in_vain: dict[tuple[int | None, range], int] = {}

    alltoall = _movement("alltoall")
    allgather = _movement("allgather")
    gather = _movement("gather")
    scatter = _movement("scatter")
    bcast = _movement("bcast")
    send = _movement("send")
    recv = _movement("recv")

    nodes, progress, abort = map(_passed_on, ("nodes", "progress", "abort"))
    offer_memory = _passed_on("offer_memory")
    open_memory = _passed_on("open_memory")
    close_memory = _passed_on("close_memory")

    def probe(self, source: int | None, tags: range) -> tuple[int, int] | None:
        self._baton.poll(self._player, "probe polled", self._in_vain.get((source, tags), _NEVER))
        found = self._inner.probe(source, tags)
        self._in_vain[source, tags] = self._baton.changes if found is None else _NEVER
        return found

    def split(
        self, color: int | None, members: Sequence[int], wait: Wait = poll
    ) -> Transport | None:
        self._baton.switch(self._player, "split")
        link = self._inner.split(color, members, wait)
        return None if link is None else _ScheduledLink(link, self._baton, self._player)

    def free(self) -> None:
        self._baton.switch(self._player, "free")
        self._inner.free()
