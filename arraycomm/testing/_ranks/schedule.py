"""Which rank runs next, and which of its steps fail: chosen by a seed, so that it can be replayed.

Ranks that are threads pass a baton: only its holder runs. At every switch point (a step posted,
polled or seen complete, a movement started, polled or finished, a group split, freed or left) the
seeded generator chooses the next holder. Between two switch points a rank runs alone, so the order
of the switch points is the whole interleaving.

The choice follows priorities that change at random points. If a race needs one rank far ahead or
far behind, this finds it sooner than a fair choice (Burckhardt, Kothari, Musuvathi, Nagarakatte: A
Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, ASPLOS 2010).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Final

from arraycomm._checks import check_integer
from arraycomm._errors import TransportError

# Seconds that the holder may stay away from switch points while other ranks wait for the baton.
_PATIENCE: Final = 0.5
# Seconds after which a waiting rank checks again how long the holder has been away.
_CHECK_INTERVAL: Final = 0.05
# Switch points between two changes of priorities, on average; each schedule draws one of these. 1
# is a fair choice at every point; the last seldom changes the priorities of a short program.
_CALMS: Final = (1, 4, 16, 64, 256)
_NOBODY: Final = -1
_NEVER: Final = -1
_KEPT: Final = 1 << 16


@dataclass(frozen=True)
class Schedule:
    """An interleaving of the ranks, and injected failures, chosen by a seed.

    Parameters
    ----------
    seed : int
        Chooses which rank runs when. The same seed replays the same interleaving.
    faults : float, optional, keyword only
        Probability, 0 to 1, that a rank's step or movement of data fails. That rank then raises
        `TransportError`, and the others learn of it as of any failure.

    Notes
    -----
    Replay is exact for ranks whose behaviour depends on their arguments and on what arraycomm
    returns, and on nothing else: no clock, no unseeded random numbers, no threads of their own, no
    other means of communication. If a rank does not call arraycomm for half a second (a long
    computation, a lock that another rank holds), the others no longer wait for it: it runs beside
    them, and the replay is not exact.

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
        object.__setattr__(
            self, "seed", check_integer(self.seed, "Schedule: seed must be an integer")
        )
        object.__setattr__(self, "faults", float(self.faults))
        if not 0 <= self.faults <= 1:
            raise ValueError(f"Schedule: faults is a probability, 0 to 1; got {self.faults!r}")


class Baton:
    """What the ranks of a schedule pass from one to the next; only its holder runs.

    Each rank's thread calls `enter` before its program and `leave` after it, however it ended. No
    rank runs its program before all have entered.

    Only `_holder` says which rank may run, and it changes under the lock only. A gate is a hint to
    look at it. So an asynchronous exception costs at most time, wherever it arrives. A rank that it
    reaches while it waits for its turn continues without the baton.
    """

    def __init__(self, size: int, schedule: Schedule) -> None:
        self.schedule = schedule
        # Rank and name of the last switch points from which ranks continued, and of all faults.
        self.trace: deque[tuple[int, str]] = deque(maxlen=_KEPT)
        self.faults: list[tuple[int, str]] = []
        # Whether no rank has run without the baton, which may lead to another interleaving.
        self.exact = True
        # Counts events that may let a waiting rank continue.
        self.changes = 0
        self._lock = threading.Lock()
        self._holder = _NOBODY
        self._since = time.monotonic()
        self._expected = set(range(size))
        self._threads: dict[int, int] = {}
        # Ranks at a switch point, and the count of changes at which each one's poll found nothing.
        self._ready: set[int] = set()
        self._in_vain = [_NEVER] * size
        self._gates = [threading.Lock() for _ in range(size)]
        for gate in self._gates:
            gate.acquire()
        self._order = Random(f"order {schedule.seed}")
        self._calm = self._order.choice(_CALMS)
        self._priorities = self._order.sample(range(size), size)
        # One generator for each rank, so that its faults do not depend on the interleaving.
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
        """Take part no more; harmless if `rank` has not entered, or has left before."""
        with self._lock:
            self._threads.pop(rank, None)
            self._expected.discard(rank)
            self._ready.discard(rank)
            self.changes += 1
            self._pass_on(rank)

    def switch(self, rank: int, point: str) -> None:
        """Let the schedule choose the next rank; return when it is this rank's turn again."""
        # What this rank did before this point, and what it does after it, may concern others.
        self.changes += 1
        self.poll(rank, point, _NEVER)
        self.changes += 1

    def poll(self, rank: int, point: str, in_vain: int) -> None:
        """Do as `switch`, for a rank that polls whether something is finished.

        It was not finished at `in_vain` changes, so polling again is useless until there is another
        change.
        """
        if self._threads.get(rank) != threading.get_ident():
            # This is not the rank's own thread, or its program has ended.
            return
        with self._lock:
            self._in_vain[rank] = in_vain
            self._ready.add(rank)
            self._pass_on(rank)
        try:
            self._wait(rank)
        except BaseException:
            # An interrupted rank is to end, not to wait for its turn once more.
            self.exact = False
            self.leave(rank)
            raise
        self.trace.append((rank, point))

    def fail_by_chance(self, rank: int, point: str) -> None:
        """Raise a fault if the schedule has one here."""
        if self._failing[rank].random() < self.schedule.faults:
            self.faults.append((rank, point))
            raise TransportError(f"injected fault: {point} on rank {rank}, {self.schedule}")

    def _wait(self, rank: int) -> None:
        while self._holder != rank and rank in self._threads:
            if not self._gates[rank].acquire(timeout=_CHECK_INTERVAL):
                self._check_holder(rank)

    def _check_holder(self, rank: int) -> None:
        """Take the baton from a holder that has been away for too long."""
        with self._lock:
            if self._holder == rank or rank not in self._threads:
                return
            # It is missing if the rank was given the baton, and lost it again before it woke.
            self._ready.add(rank)
            if time.monotonic() - self._since > _PATIENCE:
                self.exact = False
                self._expected.clear()
                self._choose()

    def _pass_on(self, rank: int) -> None:
        """Choose the next holder if `rank` holds the baton, or nobody; with the lock held."""
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
            # All wait, perhaps for a rank that runs without the baton: each has to check the clock
            # and its peers now and then.
            chosen = self._order.choice(sorted(self._ready) or [_NOBODY])
        self._holder, self._since = chosen, time.monotonic()
        self._ready.discard(chosen)
        if chosen != _NOBODY:
            # It is open already if the rank has not noticed an earlier turn.
            with suppress(RuntimeError):
                self._gates[chosen].release()
