"""A rank that waits for absent ones sleeps longer and longer between polls; one that waits for data does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arraycomm._communicator import Communicator
from arraycomm._protocol.waits import progress, waiting
from arraycomm.testing import run
from tests.support.on_ranks import alone

pytestmark = alone

# Seconds in which a rank sleeps between polls, and in which it comes to its longest nap, however little it runs.
LONG, ENOUGH = 0.5, 30.0


def _barrier(comm: Communicator) -> None:
    comm.barrier()


def _reduce(comm: Communicator) -> None:
    # The second one takes the fast path.
    comm.allreduce(np.ones(2))
    comm.allreduce(np.ones(2))


def _request(comm: Communicator) -> None:
    comm.iallreduce(np.ones(2)).wait()


def _receive(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.recv(1)
    else:
        comm.send(np.ones(2), 0)


def _come_late(naps: list[float], longest: float) -> None:
    """Return after a while, if another rank has slept so long at once by then."""
    began = time.monotonic()
    time.sleep(LONG)
    while max(naps, default=0.0) < longest and time.monotonic() - began < ENOUGH:
        time.sleep(LONG / 10)


def _naps(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Communicator], None], longest: float
) -> list[float]:
    """Return for how long rank 0 slept at once in a call for which rank 1 comes late."""
    waiter: list[threading.Thread] = []
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        if threading.current_thread() in waiter:
            naps.append(seconds)
        time.sleep(seconds)

    def check(comm: Communicator) -> None:
        call(comm)
        if comm.rank:
            _come_late(naps, longest)
        else:
            waiter.append(threading.current_thread())
        call(comm)

    monkeypatch.setattr(waiting, "time", SimpleNamespace(sleep=sleep))
    run(2, check)
    return naps


def test_naps_are_a_part_of_the_time_waited() -> None:
    seconds = [waiting.nap_of(waited) for waited in (0.0, 0.02, 0.05, 0.1, 0.2, 9.0)]
    assert seconds == pytest.approx([5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 1e-3])
    aside = [waiting.nap_of(waited, aside=True) for waited in (0.0, 0.0016, 0.008, 0.016, 9.0)]
    assert aside == pytest.approx([5e-5, 5e-5, 2.5e-4, 5e-4, 1e-3])


@pytest.mark.parametrize("call", [_barrier, _reduce, _request])
def test_naps_grow_while_ranks_are_absent(monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    assert max(_naps(monkeypatch, call, waiting._LONG_NAP)) == waiting._LONG_NAP


def test_naps_stay_short_if_data_may_move(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(_naps(monkeypatch, _receive, waiting.NAP)) == {waiting.NAP}


def test_the_thread_that_pushes_requests_naps_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        time.sleep(seconds)

    def check(comm: Communicator) -> None:
        if comm.rank:
            _come_late(naps, waiting._LONG_NAP)
        request = comm.iallreduce(np.ones(2))
        if comm.rank == 0:
            _come_late(naps, waiting._LONG_NAP)
        request.wait()

    monkeypatch.setattr(progress, "time", SimpleNamespace(sleep=sleep))
    # The native part naps by itself.
    monkeypatch.setattr(progress, "compiled", None)
    run(2, check)
    assert max(naps) == waiting._LONG_NAP
