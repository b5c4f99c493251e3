"""The thread that pushes on requests: it stays for the next one, and ends if none comes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from arraycomm._protocol import progress
from arraycomm._protocol.progress import ProgressThread

LIMIT = 30.0


class Program:
    """One that ends when it is told to."""

    def __init__(self, since: float) -> None:
        self.waiting, self.since = None, since


class Outstanding:
    """Programs, and the thread that pushes them on."""

    def __init__(self) -> None:
        self.programs: list[Any] = []
        self.threads: list[threading.Thread] = []
        self.progress = ProgressThread(self.advance, lambda: list(self.programs))

    def advance(self, _: int) -> None:
        if threading.current_thread() not in self.threads:
            self.threads.append(threading.current_thread())
        self.programs.clear()

    def push(self) -> None:
        """Have the thread end a program."""
        self.programs.append(Program(time.monotonic()))
        self.progress.start()
        wait_until(lambda: not self.programs)


def wait_until(true: Any) -> None:
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end
        time.sleep(1e-4)


def test_thread_stays_for_the_next_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LINGER", 100 * LIMIT)
    outstanding = Outstanding()
    for _ in range(50):
        outstanding.push()
    (thread,) = outstanding.threads
    # Who waits for it does not wait for that moment.
    outstanding.progress.join(LIMIT)
    assert not thread.is_alive()
    outstanding.push()
    assert len(outstanding.threads) == 2
    outstanding.progress.join(LIMIT)


@pytest.mark.parametrize("moment", [0.0, 1e-4])
def test_thread_that_is_about_to_end_takes_a_program_all_the_same(
    moment: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINGER", moment)
    outstanding = Outstanding()
    for number in range(500):
        outstanding.push()
        time.sleep(moment * (number % 20) / 10)
    wait_until(lambda: not any(thread.is_alive() for thread in outstanding.threads))
