"""How processes come together without MPI: one makes a file, and all map it."""

from __future__ import annotations

import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._launch import places
from arraycomm._start import on_node as node_start
from arraycomm._start.arguments import Arguments
from arraycomm._start.on_node import open_on_node
from arraycomm._transports import shared_files
from arraycomm._transports.lives import Lives
from arraycomm._transports.notes import FAILED
from arraycomm._transports.processes import transport as processes
from arraycomm._transports.processes.rings import Ring
from arraycomm._transports.processes.transport import ProcessesTransport, meet, memory_bytes
from arraycomm._transports.shared_files import open_path, share_file, share_opened
from arraycomm.testing._ranks.rank_links import RankLinks
from properties.test_giving_up_laws import over_rings
from tests.support import internals
from tests.support.on_ranks import alone

# Nothing in it depends on what else runs.
pytestmark = alone

_SIZE = 3
_ARGUMENTS = Arguments("auto", None, check=True, reproducible=True, timeout=60.0)


class _Store(dict[str, str]):
    """Texts by name and rank; each rank waits for those of all."""

    def __init__(self, size: int = 1) -> None:
        self._changed, self._size = threading.Condition(), size

    def tell(self, rank: int, name: str, text: str) -> list[str]:
        keys = [f"{name}/{other}" for other in range(self._size)]
        with self._changed:
            self[keys[rank]] = text
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.keys() >= set(keys), 20), keys
            return [self[key] for key in keys]


def _refusing(monkeypatch: pytest.MonkeyPatch, prefixes: tuple[str, ...]) -> None:
    usual = shared_files.open_file
    monkeypatch.setattr(shared_files, "_names_needed", False)
    monkeypatch.setattr(
        shared_files,
        "open_file",
        lambda path, nbytes: None if path.startswith(prefixes) else usual(path, nbytes),
    )


def _met() -> list[Any]:
    store = _Store(_SIZE)
    with ThreadPoolExecutor(_SIZE) as ranks:
        return list(
            ranks.map(lambda rank: meet(partial(store.tell, rank), rank, _SIZE)[0], range(_SIZE))
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
            ProcessesTransport(memory, rank, size, Lives({}))
    assert [at for at in begin if at % 128] == []
    assert len(begin) == sum(4 * size * (size - 1) for size in range(1, 20))


def test_no_rank_has_memory_that_another_cannot_map(monkeypatch: pytest.MonkeyPatch) -> None:
    _refusing(monkeypatch, ("/",))
    assert _met() == [None] * _SIZE
    monkeypatch.setattr("arraycomm._start.on_node.watch_exit", lambda: None)
    room = f"no room for {memory_bytes(1) / 2**20:.3g} MiB in memory"
    with pytest.raises(ac.BackendUnavailableError, match=room):
        open_on_node(partial(_Store().tell, 0), 0, 1, _ARGUMENTS)


def test_forked_child_of_a_rank_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arraycomm._exit.exit._process.forked", True)
    with pytest.raises(ac.CommunicatorClosedError, match="init: a forked process cannot use"):
        open_on_node(partial(_Store().tell, 0), 0, 1, _ARGUMENTS)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (["a b c", "a b c", "a b d"], "do not have the same PID namespace, as in .*--ipc=host"),
        (["a b c", "a e c", "a b d"], "do not have the same mount namespace, PID namespace"),
        (["a b c", "f b c", "f b c"], "on several hosts .rank 0: a; ranks 1, 2: f.; .*mpiexec -n 3"),
    ],
    ids=["PID", "mount and PID", "hosts"],
)  # fmt: skip
def test_ranks_that_share_no_memory_are_told_why(
    monkeypatch: pytest.MonkeyPatch, where: list[str], said: str
) -> None:
    _refusing(monkeypatch, ("/",))
    here = threading.local()
    monkeypatch.setattr(node_start, "watch_exit", lambda: None)
    monkeypatch.setattr(node_start, "host", lambda: here.place[0])
    monkeypatch.setattr("socket.gethostname", lambda: here.place[0])
    monkeypatch.setattr(
        node_start,
        "namespaces",
        lambda: dict(zip(["mount namespace", "PID namespace"], here.place[1:], strict=True)),
    )
    store = _Store(_SIZE)

    def start(rank: int) -> None:
        here.place = where[rank].split()
        with pytest.raises(ac.BackendUnavailableError, match=said):
            open_on_node(partial(store.tell, rank), rank, _SIZE, _ARGUMENTS)

    with ThreadPoolExecutor(_SIZE) as ranks:
        list(ranks.map(start, range(_SIZE)))


def _in_place_of(told: str, other: Path) -> str:
    """Return what tells of a file, with the path that another file has."""
    return f"{other} {told.partition(' ')[2]}"


def test_another_file_at_the_path_is_neither_mapped_nor_opened(tmp_path: Path) -> None:
    """As in another container; nor one with the same numbers of device and inode, of another host."""
    told = shared_files.make_file(64)
    other, pipe = tmp_path / "data", tmp_path / "pipe"
    other.write_bytes(b"x" * 200)
    os.mkfifo(pipe)
    assert shared_files.open_file(_in_place_of(told, other), 64) is None
    assert shared_files.open_file(_in_place_of(told, pipe), 64) is None
    found = places.known_by(other.stat())
    path, _, secret = _in_place_of(told, other).split()
    assert shared_files.open_file(f"{path} {found} {secret}", 64) is None
    assert other.read_bytes() == b"x" * 200
    shared_files.close_file(told)


@pytest.mark.parametrize("sees", [True, False])
def test_a_group_is_made_by_names_if_its_first_rank_is_not_seen(
    monkeypatch: pytest.MonkeyPatch, sees: bool
) -> None:
    """As if it is the one in a PID namespace of its own; or told on all, also those that take no part."""
    memories = _met()
    _refusing(monkeypatch, ("/proc/",) if sees else ("/",))

    def split(rank: int) -> Any:
        whole = ProcessesTransport(memories[rank], rank, _SIZE, Lives({}))
        members = [2, 1] if rank else []
        try:
            return whole.split((rank and 1) or None, members)
        except ac.TransportError as error:
            return str(error)

    with ThreadPoolExecutor(_SIZE) as ranks:
        alone, *others = ranks.map(split, range(_SIZE))
    if sees:
        assert alone is None
        assert [part.rank for part in others] == [1, 0]
    else:
        assert all("common" in said or "have the same one" in said for said in (alone, *others))


@pytest.mark.parametrize(
    "make", [lambda comm: comm.split(0), lambda comm: (comm.barrier(), RankLinks(comm).of(2))]
)
@pytest.mark.parametrize("leaves", [True, False])
def test_a_group_is_not_made_with_a_rank_that_leaves_or_stops_before(leaves: bool, make) -> None:
    """It has confirmed that it is about to make it: as if it was killed or stopped since."""
    over = threading.Event()

    def stop(transport: ProcessesTransport) -> None:
        if leaves:
            transport.control.notes.announce_exit(FAILED, 0, "it was killed")
        over.wait(20)

    def split(transport: Any) -> None:
        comm = internals.communicator(transport, timeout=0.5)
        if comm.rank:
            transport.split = lambda *_: stop(transport)
            make(comm)
            return
        try:
            kind, said = (
                (ac.PeerError, "rank 1") if leaves else (ac.CommTimeoutError, r"\(timeout 0.5 s\)")
            )
            with pytest.raises(kind, match=said):
                make(comm)
            with pytest.raises(ac.CommunicatorClosedError):
                comm.barrier()
        finally:
            over.set()

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(split, over_rings(2)))


def test_memory_of_another_user_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    path = shared_files.make_file(64)
    assert shared_files.open_file(path, 64) is not None
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    assert shared_files.open_file(path, 64) is None
    shared_files.close_file(path)


def test_memory_is_made_without_calls_that_macos_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("memfd_create", "posix_fallocate"):
        monkeypatch.delattr(os, call, raising=False)
    told = shared_files.make_file((1 << 20) + 3)
    assert not shared_files.open_file(told, (1 << 20) + 3).any()
    assert os.stat(told.partition(" ")[0]).st_blocks * 512 > 1 << 20  # allocated
    shared_files.close_file(told)


def test_no_directory_for_temporary_files_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile._os.open", Mock(side_effect=OSError))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delattr(os, "memfd_create")
    assert shared_files.make_file(64) == ""


def test_ranks_of_different_versions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arraycomm._start.on_node.watch_exit", lambda: None)
    store = _Store(2)
    store |= dict.fromkeys(("version/1", "build/1"), "another")
    with pytest.raises(ac.MismatchError, match="rank 1: another"):
        open_on_node(partial(store.tell, 0), 0, 2, _ARGUMENTS)


def test_file_is_closed_if_a_rank_dies_before_all_have_opened_it() -> None:
    def agree(_: bool) -> bool:
        raise ac.TransportError("rank 1 has died")

    before = len(os.listdir("/dev/fd"))
    for share in (share_file, partial(share_opened, opens=open_path)):
        with pytest.raises(ac.TransportError):
            share(4096, lambda told: told, agree, makes=True)
        # Or one of the ranks could not.
        assert share(4096, lambda told: told, lambda _: False, makes=True) is None
    assert len(os.listdir("/dev/fd")) == before
