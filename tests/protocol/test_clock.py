from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from arraycomm import Communicator
from arraycomm._protocol.waits.clock import LONGEST_GAP, WaitClock
from arraycomm.testing import run
from tests.support import internals
from tests.support.on_ranks import alone

TIMEOUT = 3.0


class _Suspended:
    """The system's clock, which goes on while this process is stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._usual, self._stopped = time.monotonic, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self._usual() + self._stopped)

    def stop(self, seconds: float) -> None:
        self._stopped += seconds


@pytest.fixture
def suspended(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Suspended]:
    yield _Suspended(monkeypatch)
    monkeypatch.undo()
    internals.restart_clock()
    # It would stand before the start of a machine that runs for less long than was missed here.
    assert abs(internals.now() - time.monotonic()) < 1.0


def test_gap_between_two_looks_counts_little(suspended) -> None:
    clock = WaitClock()
    began = clock.now()
    for _ in range(3):
        suspended.stop(1000.0)
        clock.now()
    assert 3 * LONGEST_GAP <= clock.now() - began < 3 * LONGEST_GAP + 0.5


def test_shorter_times_count_in_full(suspended) -> None:
    clock = WaitClock()
    began = clock.now()
    for _ in range(20):
        suspended.stop(LONGEST_GAP / 2)
        clock.now()
    assert clock.now() - began == pytest.approx(10 * LONGEST_GAP, abs=0.5)


WAITS: dict[str, Callable[[Communicator], Any]] = {
    "call": lambda comm: comm.barrier(),
    "request": lambda comm: comm.iallreduce(np.ones(3)).wait(TIMEOUT),
    "message": lambda comm: comm.recv(1) if comm.rank == 0 else comm.send(np.ones(3), 0),
}


@alone
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_job_may_be_stopped_for_longer_than_the_timeout(suspended, wait) -> None:
    """Rank 0 waits; then all are stopped; then rank 1 comes, in time by its own clock."""
    waiting = threading.Event()

    def job(comm: Communicator) -> None:
        part = comm.dup(timeout=TIMEOUT)
        if comm.rank == 0:
            waiting.set()
        else:
            waiting.wait()
            time.sleep(0.3)
            suspended.stop(1000.0)
            time.sleep(0.5)
        wait(part)

    run(2, job)


def test_a_handler_may_wait_that_a_signal_calls_while_the_clock_is_looked_at(monkeypatch) -> None:
    clock, usual, looks = WaitClock(), time.monotonic, list[float]()

    def interrupted() -> float:
        if not looks:
            looks.append(0.0)
            looks.append(clock.now())
        return usual()

    monkeypatch.setattr(time, "monotonic", interrupted)
    looking = threading.Thread(target=clock.now, daemon=True)
    looking.start()
    looking.join(5)
    assert len(looks) == 2
    assert clock.now() >= looks[1]
