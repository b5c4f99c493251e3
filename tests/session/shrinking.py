"""A training run that goes on after the death of a process; see `test_shrink.py`."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import arraycomm as ac
from tests.support import internals

STEPS, DEATH, RATE = 40, 7, 0.01
WEIGHTS = np.arange(4.0)


def main() -> None:
    if sys.argv[1] == "messages":
        internals.refuse_shared_memory()
    comm = ac.init(timeout=30)
    data = np.random.default_rng(0).normal(size=(60, 4))
    found, step, deaths = np.zeros(4), 0, 0
    while step < STEPS:
        mine = data[comm.rank :: comm.size]
        try:
            if step == DEATH and comm.size == 3 and comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            gradient = comm.allreduce(mine.T @ (mine @ found - mine @ WEIGHTS))
            # By way of data movement, too.
            assert comm.allreduce(np.ones(50_000))[0] == comm.size
        except ac.PeerError as error:
            print(error, flush=True)
            deaths += 1
            comm = comm.shrink()
            # The last step that all who live have finished.
            step = int(comm.allreduce(step, "min"))
            continue
        found -= RATE * gradient
        step += 1
    assert ac.world() is comm
    assert (comm.size, deaths) == (2, 1)
    assert np.allclose(found, WEIGHTS, atol=0.05), found
    assert comm.allreduce(found, "min").tobytes() == found.tobytes()
    print("finished", flush=True)


if __name__ == "__main__":
    main()
