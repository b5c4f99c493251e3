"""How a rank waits: it polls, then it gives up its core between polls, and then it sleeps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from arraycomm._errors import raise_interrupt
from arraycomm._protocol.waits import clock
from arraycomm._transports.base import Handle

# Seconds after which a wait sleeps between polls, instead of only giving up the core.
PATIENCE: Final = 0.02
NAP: Final = 5e-5
# While ranks are absent, so that no data moves, it sleeps for this part of the time; for the second
# one if each poll takes the interpreter from a caller that computes; at once for these seconds.
_PART: Final = 1 / 200
_PART_ASIDE: Final = 1 / 32
_LONG_NAP: Final = 1e-3
# Polls between two looks at the clock and at the peers; and the seconds of sleep that count as one.
_LOOK_EVERY: Final = 32
_SLEPT: Final = 1e-4

# Called during a wait with the seconds waited; raises if waiting on makes no sense.
Watch = Callable[[float], None]
# Called at each look of every wait: they stop the waits of threads that others leave behind.
looks: Final[list[Callable[[], None]]] = []


def give_up_core() -> None:
    """Let another process or thread run."""
    os.sched_yield()


def nap_of(waited: float, *, aside: bool = False) -> float:
    """Return how long to sleep between two polls, if absent ranks have been waited for so long.

    `aside` is whether the caller computes meanwhile.
    """
    return min(max(NAP, (_PART_ASIDE if aside else _PART) * waited), _LONG_NAP)


def wait_for(
    done: Callable[[], bool],
    spins: int,
    watch: Watch,
    moved: Callable[[], float] = lambda: 0.0,
    absent: Callable[[], bool] = lambda: False,
    patience: float = PATIENCE,
) -> None:
    """Poll until `done`; `watch(seconds waited)` now and then, which may raise.

    It polls for the seconds of `patience` before it sleeps between polls.
    `moved` tells when a part of what is waited for was last done: patience begins anew then.
    `absent` says whether ranks are waited for that have not called: no data moves, which might
    need more polls.
    """
    for _ in range(spins):
        if done():
            return
    started = last = clock.now()
    still = polls = 0.0
    while not done():
        if still < patience:
            give_up_core()
            polls += 1
        else:
            nap = nap_of(still) if absent() else NAP
            time.sleep(nap)
            polls += max(nap / _SLEPT, 1)
            if (seen := moved()) > last:
                still, last = 0.0, seen
        if polls >= _LOOK_EVERY:
            now, polls, last = clock.now(), 0.0, max(last, moved())
            still = now - last
            if done_after_all(done, watch, now - started):
                return


def done_after_all(done: Callable[[], bool], watch: Watch, waited: float) -> bool:
    """Call `watch`; what it raises counts only if nothing came between the last poll and its look.

    What came says better why others have left since.
    """
    for look in looks:
        look()
    try:
        watch(waited)
    except Exception as error:
        raise_interrupt(error)
        if not done():
            raise
        return True
    return False


def beside_own_work(waiting: Handle, watch: Watch) -> Watch:
    """Return a watch that does not count a handle's waits for what is this rank's own.

    Such a handle says so by its `local`. Others are watched as they are.
    """
    if not hasattr(waiting, "local"):
        return watch
    own = 0.0

    def watch_others(waited: float) -> None:
        nonlocal own
        if waiting.local:
            own = waited
        watch(waited - own)

    return watch_others
