"""Daemon threads that wait in messages and calls while the program ends; see `test_daemons.py`."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import numpy as np

import arraycomm as ac

comm = ac.init()
PEER = (comm.rank + 1) % comm.size


def tested(c: ac.Communicator) -> None:
    request = c.irecv(PEER)
    while not request.test():
        time.sleep(0.01)


def looked_for(c: ac.Communicator) -> None:
    while c.iprobe(PEER) is None:
        time.sleep(0.001)


WAITS: list[Callable[[ac.Communicator], object]] = [
    lambda c: c.recv(PEER),
    lambda c: c.recv(ac.ANY_SOURCE),
    lambda c: c.recv_object(PEER),
    lambda c: c.irecv(PEER).wait(),
    lambda c: c.probe(PEER),
    lambda c: c.send(np.ones(10**6), PEER),
    lambda c: c.sendrecv(np.ones(10**6), PEER, comm.rank - 1) if comm.rank else None,
    lambda c: c.barrier() if comm.rank else None,
    lambda c: c.iallreduce(np.ones(10**6)).wait() if comm.rank else None,
    tested,
    looked_for,
]
if sys.argv[1] == "late":
    # Its limit passes once this rank's own program has ended, and while it waits for the other.
    WAITS = [lambda c: c.recv(PEER, timeout=2) if comm.rank == 0 else None]
for wait in WAITS:
    threading.Thread(target=wait, args=(comm.dup(),), daemon=True).start()
time.sleep(0.3)
comm.barrier()
# One is later than the others.
time.sleep(0.5 * comm.rank)
match sys.argv[1]:
    case "late":
        time.sleep(3 * comm.rank)
    case "status":
        sys.exit(3)
    case "finalizes":
        from mpi4py import MPI

        threading.excepthook = lambda error: sys.stdout.write(f"{error.exc_type.__name__}\n")
        MPI.Finalize()
        time.sleep(0.5)
