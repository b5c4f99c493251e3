"""Whether the other processes of a node live, as each sees it."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._launch.places import known_by
from arraycomm._protocol.group import Group, Options
from arraycomm._transports import lives
from arraycomm._transports.lives import Lives
from arraycomm._transports.notes import ENDED, Notes
from arraycomm._transports.processes.transport import ProcessesTransport, memory_bytes
from tests.support.on_ranks import alone

# Nothing in it depends on what else runs.
pytestmark = alone

# The place of this process in the file, and that of the other one.
_ME, _OTHER = 0, 1


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let time pass, which stands still otherwise."""
    now = [1000.0]
    monkeypatch.setattr("arraycomm._transports.lives.time.monotonic", lambda: now[0])

    def passed(seconds: float) -> None:
        now[0] += seconds

    return passed


@pytest.fixture
def path(tmp_path: Any) -> str:
    made = tmp_path / "lives"
    secret = b"secret".ljust(16)
    made.write_bytes(b"\0\0" + secret)
    return f"{made} {known_by(os.stat(made))} {secret.hex()}"


def _lives(path: str, place: int) -> Lives:
    return lives.find_lives(lambda _: path, lambda opened: opened, place, [0, 1])


def _fork(run: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        # JAX warns of its threads, if another test has imported it.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(1)
    return pid


def _killed(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exits(_: Any) -> None:
    os._exit(0)


def _becomes_another_program(_: Any) -> None:
    os.execv(sys.executable, [sys.executable, "-c", "input()"])


def _killed_while_a_child_lives(own: list[Lives]) -> None:
    _fork(lambda: time.sleep(20))
    _killed(own)


def _ends_its_use(own: list[Lives]) -> None:
    own.clear()


def _has_a_child_that_ends(own: list[Lives]) -> None:
    def child() -> None:
        own.clear()
        os._exit(0)

    os.waitpid(_fork(child), 0)


def _killed_after_a_child_has_ended(own: list[Lives]) -> None:
    _has_a_child_that_ends(own)
    _killed(own)


def _does_nothing(_: Any) -> None: ...


_DIES = [
    *(_killed, _exits, _becomes_another_program),
    *(_killed_while_a_child_lives, _killed_after_a_child_has_ended),
]
_LIVES = [_ends_its_use, _has_a_child_that_ends, _does_nothing]


class _Process:
    """Another rank of the node, which does something when it is told to, and then waits for its end."""

    def __init__(self, path: str, does: Callable[[list[Lives]], None]) -> None:
        self._said, said = os.pipe()
        told, self._told = os.pipe()

        def run() -> None:
            os.setpgid(0, 0)
            for end in (self._said, self._told):
                os.close(end)
            own = [_lives(path, _OTHER)]
            os.write(said, b"begun")
            os.read(told, 1)
            does(own)
            os.write(said, b"done")
            os.read(told, 1)

        self.pid = _fork(run)
        for end in (said, told):
            os.close(end)
        self.hear()

    def tell(self) -> None:
        os.write(self._told, b".")

    def hear(self) -> None:
        os.read(self._said, 8)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@pytest.fixture
def start(path: str) -> Iterator[Callable[[Callable[[list[Lives]], None]], _Process]]:
    started: list[_Process] = []

    def start(does: Callable[[list[Lives]], None]) -> _Process:
        started.append(_Process(path, does))
        return started[-1]

    yield start
    for process in started:
        process.end()


@pytest.mark.parametrize("does", _DIES)
def test_process_that_has_died_is_found(does, start, path, passed) -> None:
    """Not at once: one that has nothing more to do may end before the others."""
    process = start(does)
    found = _lives(path, _ME)
    part = found.of([1, 0])
    assert found.dead(Notes()) == []
    process.tell()
    end = time.time() + 20
    while not found._file.gone and time.time() < end:
        passed(0.2)
        for group in (found.of([0]), found):
            group.dead(Notes())
    assert found.dead(Notes()) == part.dead(Notes()) == []
    passed(lives.DELAY)
    assert (found.dead(Notes()), part.dead(Notes())) == ([1], [0])


@pytest.mark.parametrize("does", _LIVES)
def test_process_that_lives_is_not_missed(does, start, path, passed) -> None:
    process = start(does)
    found = _lives(path, _ME)
    process.tell()
    process.hear()
    for _ in range(3):
        passed(lives.DELAY)
        assert found.dead(Notes()) == []


def test_process_that_is_stopped_lives(start, path, passed) -> None:
    process = start(_does_nothing)
    found = _lives(path, _ME)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    for _ in range(3):
        passed(lives.DELAY)
        assert found.dead(Notes()) == []


@pytest.mark.parametrize("reused", [False, True])
def test_descriptor_that_the_program_has_closed_is_left_alone(
    reused, start, path, passed, tmp_path
) -> None:
    process, found = start(_does_nothing), _lives(path, _ME)
    own = os.open(tmp_path / "own", os.O_CREAT | os.O_RDWR)
    os.write(own, b"data")
    os.close(found._file._descriptor)
    if reused:
        os.dup2(own, found._file._descriptor)
    process.end()
    passed(lives.DELAY)
    assert found.dead(Notes()) == []
    descriptor = found._file._descriptor
    del found
    assert os.pread(own, 8, 0) == b"data"
    if reused:
        os.close(descriptor)
    os.close(own)


def test_processes_of_a_node_are_ended(start, path) -> None:
    process = start(_does_nothing)
    _lives(path, _ME).end()
    assert os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1]) == -signal.SIGTERM


class _Missed:
    """A file in which two others have just been missed."""

    def __init__(self) -> None:
        self.gone = {0: time.monotonic(), 1: time.monotonic()}

    def look(self) -> None: ...


def test_one_that_died_is_the_cause_and_not_one_that_left_because_of_it(passed) -> None:
    memory = np.zeros(memory_bytes(3), np.uint8)
    first, last = (
        ProcessesTransport(memory, rank, 3, Lives({0: 0, 1: 1}, _Missed())) for rank in (0, 2)
    )
    group = Group(last, Options(True, True, 60.0))
    group.control.post()
    group.watchdog.check(1.0)
    first.control.notes.announce_exit(ENDED, 0, "")
    assert last.failed() == [1]
    with pytest.raises(ac.PeerError, match="rank 1 has died without a word"):
        group.watchdog.check(1.0)
