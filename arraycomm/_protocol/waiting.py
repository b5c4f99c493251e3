"""How a rank waits: it polls, after a while it gives up its core between polls, and then it sleeps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from arraycomm._protocol import clock

# Seconds after which a wait sleeps between polls, instead of only giving up the core.
PATIENCE: Final = 0.02
NAP: Final = 5e-5
# Polls between two looks at the clock and at the peers.
_LOOK_EVERY: Final = 32

# Called during a wait with the seconds waited; raises if waiting on makes no sense.
Watch = Callable[[float], None]


def give_up_core() -> None:
    """Let another process or thread run."""
    os.sched_yield()


def _never() -> float:
    return 0.0


def wait_for(
    done: Callable[[], bool], spins: int, watch: Watch, moved: Callable[[], float] = _never
) -> None:
    """Poll until `done`; `watch(seconds waited)` now and then, which may raise.

    `moved` tells when a part of what is waited for was last done: patience begins anew then.
    """
    for _ in range(spins):
        if done():
            return
    started = last = clock.now()
    still, polls = 0.0, 0
    while not done():
        if still < PATIENCE:
            give_up_core()
        else:
            time.sleep(NAP)
        if (seen := moved()) > last:
            still, last = 0.0, seen
        polls += 1
        if polls % _LOOK_EVERY == 0:
            now = clock.now()
            still = now - last
            if done_after_all(done, watch, now - started):
                return


def done_after_all(done: Callable[[], bool], watch: Watch, waited: float) -> bool:
    """Call `watch`; what it raises counts only if nothing came between the last poll and its look.

    What came says better why others have left since.
    """
    try:
        watch(waited)
    except Exception:
        if not done():
            raise
        return True
    return False
