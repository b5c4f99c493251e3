"""How processes come together without MPI: one makes a file, and all map it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._mpi_start import Arguments
from arraycomm._node_start import open_on_node
from arraycomm._protocol.group import Group, Options
from arraycomm._transports import shared_files
from arraycomm._transports.notes import ENDED
from arraycomm._transports.processes import lives
from arraycomm._transports.processes import transport as processes
from arraycomm._transports.processes.rings import Ring
from arraycomm._transports.processes.transport import ProcessesTransport, meet, memory_bytes
from tests.support.on_ranks import alone

# Nothing in it depends on what else runs.
pytestmark = alone

_SIZE = 3
_ARGUMENTS = Arguments("auto", None, check=True, reproducible=True, timeout=60.0)


class _Store(dict[str, str]):
    """A store as torch has it: `get` waits for what another rank sets."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        with self._changed:
            assert self._changed.wait_for(lambda: key in self, 20), key
            return self[key].encode()


def _refusing(monkeypatch: pytest.MonkeyPatch, prefixes: tuple[str, ...]) -> None:
    usual = shared_files.open_file
    monkeypatch.setattr(shared_files, "_names_needed", False)
    monkeypatch.setattr(
        shared_files,
        "open_file",
        lambda path, nbytes: None if path.startswith(prefixes) else usual(path, nbytes),
    )


def _met() -> list[Any]:
    store = _Store()
    with ThreadPoolExecutor(_SIZE) as ranks:
        return list(
            ranks.map(
                lambda rank: meet(store.set, lambda key: store.get(key).decode(), rank, _SIZE),
                range(_SIZE),
            )
        )


@pytest.mark.parametrize("refused", [(), ("/proc/",)])
def test_ranks_map_the_same_zeroed_memory(
    monkeypatch: pytest.MonkeyPatch, refused: tuple[str, ...]
) -> None:
    """Also where no process may open what another one has made without a name."""
    _refusing(monkeypatch, refused)
    memories = _met()
    assert [len(memory) for memory in memories] == [memory_bytes(_SIZE)] * _SIZE
    assert not np.any(memories[0])
    memories[0][5] = 7
    assert [memory[5] for memory in memories] == [7] * _SIZE


def test_words_of_every_ring_begin_lines_whatever_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A word across two lines may be read while only a half of it is written."""
    begin: list[int] = []

    class Found(Ring):
        def __init__(self, memory: Any) -> None:
            begin.append(memory.ctypes.data)
            super().__init__(memory)

    monkeypatch.setattr(processes, "Ring", Found)
    for size in range(1, 20):
        memory = np.frombuffer(mmap.mmap(-1, memory_bytes(size)), np.uint8)
        for rank in range(size):
            ProcessesTransport(memory, rank, size, lives.Lives({}))
    assert [at for at in begin if at % 128] == []
    assert len(begin) == sum(4 * size * (size - 1) for size in range(1, 20))


def test_no_rank_has_memory_that_another_cannot_map(monkeypatch: pytest.MonkeyPatch) -> None:
    _refusing(monkeypatch, ("/",))
    assert _met() == [None] * _SIZE
    monkeypatch.setattr("arraycomm._node_start.watch_exit", lambda: None)
    with pytest.raises(ac.BackendUnavailableError, match=r"one host.*mpiexec -n 1"):
        open_on_node(_Store(), 0, 1, _ARGUMENTS)


def test_memory_of_another_user_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    path = shared_files.make_file(64)
    assert shared_files.open_file(path, 64) is not None
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    assert shared_files.open_file(path, 64) is None
    shared_files.close_file(path)


def test_memory_is_made_without_calls_that_macos_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("memfd_create", "posix_fallocate"):
        monkeypatch.delattr(os, call, raising=False)
    path = shared_files.make_file((1 << 20) + 3)
    assert not shared_files.open_file(path, (1 << 20) + 3).any()
    assert os.stat(path).st_blocks * 512 > 1 << 20  # allocated
    shared_files.close_file(path)


def test_ranks_of_different_versions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arraycomm._node_start.watch_exit", lambda: None)
    store = _Store()
    store.set("version/1", "another")
    with pytest.raises(ac.MismatchError, match="rank 1: another"):
        open_on_node(store, 0, 2, _ARGUMENTS)


def test_processes_that_have_ended_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at once: one that has nothing more to do may end before the others."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    store = _Store()
    for key, text in (("process/1", f"{child.pid} {lives._namespace()}"), ("looked/1", "yes")):
        store.set(key, text)
    store.set("process/2", f"{child.pid} of another container")
    store.set("looked/2", "yes")
    found = lives.find_lives(store.set, lambda key: store.get(key).decode(), 0, _SIZE)
    part = found.of([1, 0])
    now = time.monotonic()
    monkeypatch.setattr("arraycomm._transports.processes.lives.time.monotonic", lambda: now)
    assert found.dead() == part.dead() == []
    child.communicate(b"end\n")
    assert found.dead() == part.dead() == []
    now += lives.DELAY / 3
    assert found.dead() == part.dead() == []
    assert found.dead(at_once=True) == [1]
    now += lives.DELAY
    assert (found.dead(), part.dead()) == ([1], [0])


class _Dead(lives.Lives):
    """What rank 2 sees: rank 1 has just died, and rank 0 is there or has ended well."""

    def __init__(self) -> None:
        super().__init__({})

    def dead(self, *, at_once: bool = False) -> list[int]:
        return [0, 1] if at_once else []


def test_one_that_died_is_the_cause_and_not_one_that_left_because_of_it() -> None:
    memory = np.zeros(memory_bytes(_SIZE), np.uint8)
    first, last = (ProcessesTransport(memory, rank, _SIZE, _Dead()) for rank in (0, 2))
    group = Group(last, Options(True, True, 60.0))
    group.control.post()
    group.watchdog.check(1.0)
    first.control.notes.announce_exit(ENDED, 0, "")
    assert last.failed() == [1]
    with pytest.raises(ac.PeerError, match="rank 1 has died without a word"):
        group.watchdog.check(1.0)
