"""Which rank runs next, and which of its steps fail: chosen by a seed, so that it can be replayed.

Ranks that are threads pass a baton: only its holder runs. At every switch point (a step posted,
polled or seen complete, a movement started, polled or finished, a group split, freed or left) the
seeded generator chooses who holds it next. What ranks do between two switch points they do alone,
so the order of the switch points is the whole interleaving.

The choice follows priorities that change at random points, which finds races that need one rank far
ahead or far behind sooner than a fair choice does (Burckhardt, Kothari, Musuvathi, Nagarakatte:
A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, ASPLOS 2010).
"""

from __future__ import annotations

import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from arraycomm._errors import TransportError
from arraycomm._transports.base import Blocks, Bytes, Handle, Transport
from arraycomm._transports.control import ControlChannel, ExitNotice

# Seconds that the holder of the baton may stay away from switch points while others want to go on.
_PATIENCE: Final = 0.5
# Seconds between two looks of a waiting rank at how long the holder has been away.
_GLANCE: Final = 0.05
# Switch points between two changes of priorities, on average; each schedule draws one of these.
# 1 is a fair choice at every point; with the last, a short program keeps its first priorities.
_CALMS: Final = (1, 4, 16, 64, 256)
_NOBODY: Final = -1
_NEVER: Final = -1
_KEPT: Final = 1 << 16


@dataclass(frozen=True)
class Schedule:
    """An interleaving of the ranks, and failures on the way, named by a seed.

    Parameters
    ----------
    seed : int
        Chooses who runs when. The same seed replays the same interleaving.
    faults : float, optional, keyword only
        Probability, 0 to 1, that a rank's step or movement of data fails: there that rank raises
        `TransportError`, and the others learn of it as of any failure.

    Notes
    -----
    Replay is exact for ranks whose behaviour depends on their arguments and on what arraycomm
    returns, and on nothing else: no clock, no unseeded random numbers, no threads of their own, no
    other means of communication. A rank that stays away from arraycomm for half a second (a long
    computation, a lock that another rank holds) is no longer waited for; from there on it runs
    beside the others, and the replay is not exact.

    Requests make progress only while their rank calls, tests or waits, as over an MPI that allows
    one thread.

    Examples
    --------
    >>> Schedule(7, faults=0.01)
    Schedule(seed=7, faults=0.01)
    """

    seed: int
    faults: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", operator.index(self.seed))
        object.__setattr__(self, "faults", float(self.faults))
        if not 0 <= self.faults <= 1:
            raise ValueError(f"Schedule: faults is a probability, 0 to 1; got {self.faults!r}")


class Baton:
    """What the ranks of a schedule pass from one to the next.

    Each rank's thread calls `enter` before its program and `leave` after it, however it ended. No
    rank runs its program before all have entered.

    Attributes
    ----------
    schedule : Schedule
        What chooses the next holder.
    trace : deque of (int, str)
        The last switch points, in the order in which ranks went on from them: rank and point.
    faults : list of (int, str)
        Where faults were injected: rank and point.
    exact : bool
        Whether every rank kept to the baton so far. Where one stayed away for too long, the same
        schedule may lead to another interleaving.

    Notes
    -----
    `_holder` alone says who may go on, and changes under the lock only; gates are hints to look at
    it. So an asynchronous exception anywhere costs at most time. A rank that it reaches while it
    waits for its turn runs on without the baton.
    """

    def __init__(self, size: int, schedule: Schedule) -> None:
        self.schedule = schedule
        self.trace: deque[tuple[int, str]] = deque(maxlen=_KEPT)
        self.faults: list[tuple[int, str]] = []
        self.exact = True
        # Counts what may let a waiting rank go on.
        self.changes = 0
        self._lock = threading.Lock()
        self._holder = _NOBODY
        self._since = time.monotonic()
        self._expected = set(range(size))
        self._threads: dict[int, int] = {}
        # Ranks at a switch point, and the count of changes up to which their poll is in vain.
        self._ready: set[int] = set()
        self._in_vain = [_NEVER] * size
        self._gates = [threading.Lock() for _ in range(size)]
        for gate in self._gates:
            gate.acquire()
        self._order = Random(f"order {schedule.seed}")
        self._calm = self._order.choice(_CALMS)
        self._priorities = self._order.sample(range(size), size)
        # One generator a rank: whether its tenth step fails does not depend on the interleaving.
        self._failing = [Random(f"faults {schedule.seed} {rank}") for rank in range(size)]

    def enter(self, rank: int) -> None:
        """Take part as `rank`, in this thread; return when it is this rank's turn."""
        with self._lock:
            self._threads[rank] = threading.get_ident()
            self._expected.discard(rank)
            if self._holder == _NOBODY:
                self._since = time.monotonic()
        self.switch(rank, "enter")

    def leave(self, rank: int) -> None:
        """Take part no more; harmless where `rank` has not entered, or has left before."""
        with self._lock:
            self._threads.pop(rank, None)
            self._expected.discard(rank)
            self._ready.discard(rank)
            self.changes += 1
            self._pass_on(rank)

    def switch(self, rank: int, point: str) -> None:
        """Let the schedule choose who goes on; return when it is this rank's turn again."""
        # What this rank did before this point, and what it does after it, may concern others.
        self.changes += 1
        self._take_turns(rank, point, _NEVER)
        self.changes += 1

    def poll(self, rank: int, point: str, in_vain: int) -> None:
        """Do as `switch`, for a rank that only looks whether something is finished.

        It was not at `in_vain` changes: until there is another, looking again is in vain.
        """
        self._take_turns(rank, point, in_vain)

    def fail_by_chance(self, rank: int, point: str) -> None:
        """Raise a fault where the schedule has one here."""
        if self._failing[rank].random() < self.schedule.faults:
            self.faults.append((rank, point))
            raise TransportError(f"injected fault: {point} on rank {rank}, {self.schedule}")

    def _take_turns(self, rank: int, point: str, in_vain: int) -> None:
        if self._threads.get(rank) != threading.get_ident():
            # Another thread than the rank's own, or one whose program has ended.
            return
        with self._lock:
            self._in_vain[rank] = in_vain
            self._ready.add(rank)
            self._pass_on(rank)
        try:
            self._wait(rank)
        except BaseException:
            # What interrupts a rank is to end it, not to wait for its turn once more.
            self.exact = False
            self.leave(rank)
            raise
        self.trace.append((rank, point))

    def _wait(self, rank: int) -> None:
        while self._holder != rank and rank in self._threads:
            if not self._gates[rank].acquire(timeout=_GLANCE):
                self._look(rank)

    def _look(self, rank: int) -> None:
        """Take the baton from a holder that has been away for too long."""
        with self._lock:
            if self._holder == rank or rank not in self._threads:
                return
            # A rank that was given the baton, and lost it again before it woke, is not there.
            self._ready.add(rank)
            if time.monotonic() - self._since > _PATIENCE:
                self.exact = False
                self._expected.clear()
                self._choose()

    def _pass_on(self, rank: int) -> None:
        """Choose the next holder if that is for `rank` to do; with the lock held."""
        if self._holder in (rank, _NOBODY) and not self._expected:
            self._choose()

    def _choose(self) -> None:
        """Give the baton to a rank at a switch point, or to nobody; with the lock held."""
        if self._order.random() * self._calm < 1:
            self._order.shuffle(self._priorities)
        able = [rank for rank in self._ready if self._in_vain[rank] != self.changes]
        if able:
            chosen = max(able, key=self._priorities.__getitem__)
        else:
            # All wait, perhaps for a rank that runs without the baton: each has to look at the
            # clock and at its peers now and then.
            chosen = self._order.choice(sorted(self._ready) or [_NOBODY])
        self._holder, self._since = chosen, time.monotonic()
        self._ready.discard(chosen)
        if chosen != _NOBODY:
            # It is open already where the rank has not noticed an earlier turn.
            with suppress(RuntimeError):
                self._gates[chosen].release()


def scheduled(
    links: Sequence[Transport], schedule: Schedule | int
) -> tuple[list[Transport], Baton]:
    """Return transports over `links` whose ranks run as `schedule` says, and their baton.

    Parameters
    ----------
    links : sequence of Transport
        The transports of one group of threads, in rank order.
    schedule : Schedule or int
        The schedule, or its seed.

    Returns
    -------
    list of Transport
        For each rank, what to make its communicator of. Groups that are split from them share the
        baton.
    Baton
        What each rank's thread has to `enter` and `leave`.
    """
    if not isinstance(schedule, Schedule):
        schedule = Schedule(schedule)
    baton = Baton(len(links), schedule)
    return [_ScheduledLink(link, baton, rank) for rank, link in enumerate(links)], baton


class _ScheduledHandle:
    """A movement or step that is polled in turn by the holder of the baton."""

    def __init__(self, handle: Handle, baton: Baton, player: int, point: str) -> None:
        self._handle, self._baton, self._player = handle, baton, player
        self._polled, self._finished = f"{point} polled", f"{point} finished"
        self._in_vain = _NEVER

    def done(self) -> bool:
        self._baton.poll(self._player, self._polled, self._in_vain)
        if not self._handle.done():
            self._in_vain = self._baton.changes
            return False
        # Others may go far before this rank reads what it has just been told is there.
        self._baton.switch(self._player, self._finished)
        return True


class _ScheduledBoard(ControlChannel):
    """A board with switch points; all that it does not name is the other board's own."""

    def __init__(self, control: ControlChannel, baton: Baton, player: int) -> None:
        self._control, self._baton, self._player = control, baton, player
        self._step = _ScheduledHandle(control, baton, player, "step")
        self.shared = control.shared

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    @property
    def step(self) -> int:
        return self._control.step

    @step.setter
    def step(self, step: int) -> None:
        self._control.step = step

    def post(self) -> None:
        self._baton.switch(self._player, "post")
        self._baton.fail_by_chance(self._player, "post")
        self._control.post()

    def done(self) -> bool:
        return self._step.done()

    def missing(self) -> list[int]:
        return self._control.missing()

    def leave(self, state: int, completed: int, text: str) -> None:
        try:
            self._baton.switch(self._player, "leave")
        finally:
            # Said whatever ends the wait: the others wait for this word.
            self._control.leave(state, completed, text)

    def exit_notices(self) -> dict[int, ExitNotice]:
        return self._control.exit_notices()

    def tell(self, doing: str) -> None:
        self._control.tell(doing)

    def told(self, rank: int) -> str:
        return self._control.told(rank)

    def close(self) -> None:
        self._control.close()


class _ScheduledLink(Transport):
    """A transport with switch points; `player` is its rank in the outermost group."""

    threaded = False

    def __init__(self, link: Transport, baton: Baton, player: int) -> None:
        self._link, self._baton, self._player = link, baton, player
        self.name, self.rank, self.size = link.name, link.rank, link.size
        self.local_rank, self.local_size = link.local_rank, link.local_size
        self.mpi_comm, self.spins = link.mpi_comm, link.spins
        self.control = _ScheduledBoard(link.control, baton, player)

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        return self._start("alltoall", lambda: self._link.alltoall(send, recv))

    def allgather(self, recv: Blocks) -> Handle:
        return self._start("allgather", lambda: self._link.allgather(recv))

    def gather(self, send: Bytes, recv: Blocks | None, root: int) -> Handle:
        return self._start("gather", lambda: self._link.gather(send, recv, root))

    def scatter(self, send: Blocks | None, recv: Bytes, root: int) -> Handle:
        return self._start("scatter", lambda: self._link.scatter(send, recv, root))

    def bcast(self, buffer: Bytes, root: int) -> Handle:
        return self._start("bcast", lambda: self._link.bcast(buffer, root))

    def send(self, buffer: Bytes, dest: int, tag: int) -> Handle:
        return self._start("send", lambda: self._link.send(buffer, dest, tag))

    def recv(self, buffer: Bytes, source: int, tag: int) -> Handle:
        return self._start("recv", lambda: self._link.recv(buffer, source, tag))

    def _start(self, movement: str, start: Callable[[], Handle]) -> Handle:
        self._baton.switch(self._player, movement)
        self._baton.fail_by_chance(self._player, movement)
        return _ScheduledHandle(start(), self._baton, self._player, movement)

    def split(self, color: int | None, members: Sequence[int]) -> Transport | None:
        self._baton.switch(self._player, "split")
        link = self._link.split(color, members)
        return None if link is None else _ScheduledLink(link, self._baton, self._player)

    def free(self) -> None:
        self._baton.switch(self._player, "free")
        self._link.free()

    def nodes(self) -> Sequence[int]:
        return self._link.nodes()

    def offer_memory(self, nbytes: int) -> str:
        return self._link.offer_memory(nbytes)

    def open_memory(self, name: str, nbytes: int) -> Bytes | None:
        return self._link.open_memory(name, nbytes)

    def close_memory(self, name: str) -> None:
        self._link.close_memory(name)

    def progress(self) -> None:
        self._link.progress()

    def abort(self, code: int) -> None:
        self._link.abort(code)
