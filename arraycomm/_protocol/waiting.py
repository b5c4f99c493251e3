"""How a rank waits: it polls, after a while it gives up its core between polls, and then it sleeps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from arraycomm._protocol import clock, launcher

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


def wait_for(done: Callable[[], bool], spins: int, watch: Watch) -> None:
    """Poll until `done`; `watch(seconds waited)` now and then, which may raise."""
    for _ in range(spins):
        if done():
            return
    started = clock.now()
    waited, polls = 0.0, 0
    while not done():
        if waited < PATIENCE:
            give_up_core()
        else:
            time.sleep(NAP)
        polls += 1
        if polls % _LOOK_EVERY == 0:
            waited = clock.now() - started
            if done_after_all(done, watch, waited):
                return


def done_after_all(done: Callable[[], bool], watch: Watch, waited: float) -> bool:
    """Call `watch`; what it raises counts only if nothing came between the last poll and its look.

    What came says better why others have left since.
    """
    launcher.watch.look(time.perf_counter())
    try:
        watch(waited)
    except Exception:
        if not done():
            raise
        return True
    return False
