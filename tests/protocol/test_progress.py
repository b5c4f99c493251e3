"""The thread that pushes on requests: it stays for the next one, and ends if none comes."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from arraycomm._native import compiled
from arraycomm._protocol.waits import progress
from arraycomm._protocol.waits.progress import ProgressThread
from arraycomm._transports.control import SharedControl
from tests.support.on_ranks import alone

# Nothing in it depends on what else runs.
pytestmark = alone

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
        self.progress = ProgressThread(self.advance, lambda: list(self.programs), pytest.fail)

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


def test_thread_leaves_alone_what_a_caller_takes_over_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "GLANCE", 0.5)
    outstanding = Outstanding()
    outstanding.programs.append(Program(time.monotonic()))
    for _ in range(30):
        outstanding.progress.start()
        time.sleep(0.02)
        outstanding.progress.take_over()
    assert not outstanding.threads
    outstanding.progress.start()
    wait_until(lambda: not outstanding.programs)
    outstanding.progress.join(LIMIT)


# While the only program waits for late ranks in shared memory, the thread does without the GIL.

needs_native = pytest.mark.skipif(compiled is None, reason="needs the native part")


class Waiting:
    """A program that waits for a step of two ranks, of which this process is rank 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Nothing else ends a wait.
        monkeypatch.setattr(progress, "_ASIDE", 100 * LIMIT)
        memory = np.zeros(SharedControl.nbytes(2), np.uint8)
        self.controls = [SharedControl(rank, 2, memory) for rank in range(2)]
        self.controls[0].post(0)
        self.waiting, self.since = self.controls[0], time.monotonic()
        self.looks, self.ended = 0, False
        self.progress = ProgressThread(
            self.advance, lambda: [] if self.ended else [self], pytest.fail
        )
        self.progress.start()

    def advance(self, _: int) -> None:
        self.looks += 1
        self.ended = bool(self.waiting.rows) and self.waiting.done()

    def settle(self) -> int:
        """Wait until the thread waits without the GIL; return how often it has looked before."""
        wait_until(lambda: self.looks and self.waiting.looking.locked())
        before = self.looks
        time.sleep(0.05)
        assert self.looks == before
        return before


@needs_native
def test_thread_takes_the_gil_once_a_late_rank_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch)
    before = waiting.settle()
    waiting.controls[1].post(0)
    wait_until(lambda: waiting.ended)
    assert waiting.looks == before + 1
    waiting.progress.join(LIMIT)


@needs_native
def test_thread_looks_around_if_there_is_more_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch)
    # A message beside the queue.
    before = waiting.settle()
    waiting.progress.start()
    wait_until(lambda: waiting.looks > before)
    # A caller that pushes on by itself, and goes away.
    before = waiting.settle()
    waiting.progress.take_over()
    wait_until(lambda: not waiting.waiting.looking.locked())
    waiting.progress.start()
    wait_until(lambda: waiting.looks > before)
    # The end of the program.
    waiting.settle()
    waiting.ended = True
    waiting.progress.join(LIMIT)
    assert not waiting.waiting.looking.locked()


@needs_native
def test_memory_is_not_taken_away_under_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch)
    waiting.settle()
    closing = threading.Thread(target=waiting.waiting.close)
    closing.start()
    time.sleep(0.05)
    assert len(waiting.waiting.rows)
    waiting.progress.start()
    closing.join(LIMIT)
    assert not closing.is_alive()
    assert not len(waiting.waiting.rows)
    waiting.ended = True
    waiting.progress.join(LIMIT)


@needs_native
def test_waits_need_slots_and_a_word() -> None:
    memory, word = np.zeros(1024, np.uint8), memoryview(bytearray(4)).cast("i")
    assert not compiled.wait_aside(memory, 2, 256, 1, 0.0, 0.001, word)
    assert compiled.wait_aside(memory, 2, 256, 0, 0.0, LIMIT, word)
    for wrong in (
        (memory, 0, 256, 1, 0.0, 0.0, word),
        (memory, 3, 256, 1, 0.0, 0.0, word),
        (memory, 2, 120, 1, 0.0, 0.0, word),
        (memory, 2, 255, 1, 0.0, 0.0, word),
        (memory[1:], 1, 256, 1, 0.0, 0.0, word),
        (memory, 2, 256, 1, 0.0, 0.0, bytearray(8)),
    ):
        with pytest.raises(ValueError, match="not as the control channel has them"):
            compiled.wait_aside(*wrong)
    with pytest.raises(BufferError):
        compiled.wait_aside(memory, 2, 256, 1, 0.0, 0.0, b"0000")
