"""The NCCL link over a stand-in for NCCL: what it asks for, in which order, and how it ends.

The stand-in moves host memory between threads, and is as strict as NCCL's documents about what may
be called when. What NCCL itself does, no test here knows.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arraycomm import _folds
from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory, Piece
from arraycomm._collectives import algorithms
from arraycomm._cuda import device, libnccl
from arraycomm._cuda.gpu_aware_link import GpuAwareMpiLink
from arraycomm._cuda.libnccl import Comm, Library
from arraycomm._cuda.nccl_link import NcclLink, refuse_sharing
from arraycomm._cuda.staged_link import HostStagedLink
from arraycomm._dtypes import BY_NAME, OPS, TABLE
from arraycomm._errors import TransportError
from arraycomm._protocol.waiting import wait_for
from arraycomm._transports.base import Blocks, Handle

OK, INVALID_ARGUMENT, REMOTE_ERROR, IN_PROGRESS = 0, 4, 6, 7
UINT8 = np.dtype(np.uint8)
NCCL_DTYPES = {
    0: "int8",
    1: "uint8",
    2: "int32",
    3: "uint32",
    4: "int64",
    5: "uint64",
    7: "float32",
    8: "float64",
}
NCCL_OPS = {0: "sum", 1: "prod", 2: "max", 3: "min"}


# The stand-in --------------------------------------------------------------------------------------


class HostMemory(DeviceMemory):
    """Host memory in the place of a device's."""

    def __init__(self) -> None:
        self.device = 0
        self.stream = 77

    def allocate(self, nbytes: int) -> DeviceBuffer:
        return device_buffer(np.full(nbytes, 255, np.uint8), self)

    def copy(self, target: DeviceBuffer, source: DeviceBuffer) -> None:
        ctypes.memmove(target.address, source.address, source.nbytes)

    def upload(self, array: np.ndarray) -> DeviceBuffer:
        return device_buffer(array.copy(), self)

    def download(self, device_buffer: DeviceBuffer, into: np.ndarray) -> None:
        into[...] = values(device_buffer)

    def fold(self, op: str, dtype: Any, rows: Sequence[DeviceBuffer], out: DeviceBuffer) -> None:
        _folds.fold(op, dtype, [values(row) for row in rows], values(out))

    def prefixes(
        self, op: str, dtype: Any, rows: Sequence[DeviceBuffer], outs: Sequence[DeviceBuffer]
    ) -> None:
        raise NotImplementedError

    def gather_pieces(self, pieces: Sequence[Piece], target: DeviceBuffer) -> None:
        raise NotImplementedError

    def record(self) -> Any:
        raise NotImplementedError


def device_buffer(array: np.ndarray, memory: DeviceMemory) -> DeviceBuffer:
    return DeviceBuffer(array.ctypes.data, array.size, array.dtype, array, memory)


def at(address: int, count: int, dtype: Any) -> np.ndarray:
    if not count:
        return np.empty(0, dtype)
    memory = (ctypes.c_ubyte * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


def values(part: DeviceBuffer) -> np.ndarray:
    return at(part.address, part.size, part.dtype)


class World:
    """What the ranks' stand-ins share: the rows that each has put up for an operation."""

    def __init__(self) -> None:
        self.posted: dict[Any, dict[int, Any]] = {}
        self.lock = threading.Lock()

    def post(self, key: Any, rank: int, what: Any) -> None:
        with self.lock:
            self.posted.setdefault(key, {})[rank] = what


class FakeComm:
    def __init__(self, name: Any, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.state = OK
        self.polls = 0
        self.waiting: Callable[[], bool] = lambda: True
        self.operations: Counter[Any] = Counter()
        self.gone = ""


class FakeNccl:
    """One rank's stand-in for the functions of libnccl."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.comms: dict[int, FakeComm] = {}
        self.calls: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []
        self.streams: set[int] = set()
        self.slowness = 3
        self.group: list[tuple[FakeComm, Callable[[], bool]]] | None = None
        self.fails: dict[str, int] = {}
        self.hangs = threading.Event()
        self.hangs.set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nccl"):
            raise AttributeError(name)
        method = getattr(type(self), re.sub("([A-Z])", r"_\1", name.removeprefix("nccl")).lower())

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self.fails:
                return self.fails[name]
            return method(self, *arguments)

        return call

    def _get_version(self, out: Any) -> int:
        out._obj.value = 22304
        return OK

    def _get_unique_id(self, out: Any) -> int:
        out._obj.internal[:] = range(128)
        return OK

    def _get_error_string(self, code: int) -> bytes:
        return {INVALID_ARGUMENT: b"invalid argument", REMOTE_ERROR: b"remote error"}[code]

    def _get_last_error(self, comm: Any) -> bytes:
        return b"the cable is out\n"

    def _comm_init_rank_config(self, out: Any, size: int, name: Any, rank: int, config: Any) -> int:
        assert (config._obj.size, config._obj.magic) == (48, 0xCAFEBEEF)
        assert config._obj.blocking == 0
        comm = self._make(("init", bytes(name)), rank, size)
        out._obj.value = id(comm)
        self._begin(comm, self._meeting(comm, "init", None))
        return IN_PROGRESS

    def _make(self, name: Any, rank: int, size: int) -> FakeComm:
        comm = FakeComm(name, rank, size)
        self.comms[id(comm)] = comm
        return comm

    def _comm_split(self, handle: Any, color: int, key: int, out: Any, config: Any) -> int:
        comm = self._usable(handle)
        if comm is None:
            return INVALID_ARGUMENT
        assert config is None
        number = comm.operations["split"]
        met = self._meeting(comm, "split", (color, key))

        def split() -> bool:
            if not met():
                return False
            told = self.world.posted[comm.name, "split", number]
            mine = sorted((key, rank) for rank, (c, key) in told.items() if c == color)
            if color >= 0:
                rank = mine.index((key, comm.rank))
                child = self._make((comm.name, number, color), rank, len(mine))
                out._obj.value = id(child)
            return True

        return self._begin(comm, split)

    def _comm_get_async_error(self, handle: Any, out: Any) -> int:
        comm = self.comms[handle.value]
        assert not comm.gone, f"polled after it was {comm.gone}"
        comm.polls += 1
        if comm.state == IN_PROGRESS and comm.polls >= self.slowness and comm.waiting():
            comm.state = OK
        out._obj.value = comm.state
        return OK

    def _comm_abort(self, handle: Any) -> int:
        self.hangs.wait()
        self._end(handle, "aborted")
        return OK

    def _comm_user_rank(self, handle: Any, out: Any) -> int:
        out._obj.value = self.comms[handle.value].rank
        return OK

    def _comm_count(self, handle: Any, out: Any) -> int:
        out._obj.value = self.comms[handle.value].size
        return OK

    def _comm_finalize(self, handle: Any) -> int:
        comm = self._usable(handle)
        if comm is None:
            return INVALID_ARGUMENT
        return self._begin(comm, self._meeting(comm, "finalize", None))

    def _comm_destroy(self, handle: Any) -> int:
        assert self.comms[handle.value].state == OK
        self._end(handle, "destroyed")
        return OK

    def _end(self, handle: Any, how: str) -> None:
        comm = self.comms[handle.value]
        assert not comm.gone, f"{how} after it was {comm.gone}"
        comm.gone = how

    def _group_start(self) -> int:
        assert self.group is None
        self.group = []
        return OK

    def _group_end(self) -> int:
        assert self.group is not None
        begun, self.group = self.group, None
        if not begun:
            return OK
        comm = begun[0][0]
        left = [step for _, step in begun]

        def all_done() -> bool:
            left[:] = [step for step in left if not step()]
            return not left

        return self._begin(comm, all_done)

    def _send(self, buffer: int, count: int, dtype: int, peer: int, comm: Any, stream: int) -> int:
        return self._enqueue(
            comm, stream, lambda c: self._send_step(c, buffer, count, peer), dtype, count
        )

    def _recv(self, buffer: int, count: int, dtype: int, peer: int, comm: Any, stream: int) -> int:
        return self._enqueue(
            comm, stream, lambda c: self._recv_step(c, buffer, count, peer), dtype, count
        )

    def _send_step(self, comm: FakeComm, buffer: int, count: int, peer: int) -> Callable[[], bool]:
        number = comm.operations["to", peer]
        comm.operations["to", peer] += 1
        key = (comm.name, comm.rank, peer, number)
        self.world.post(key, 0, (buffer, count))
        return lambda: 1 in self.world.posted[key]

    def _recv_step(self, comm: FakeComm, buffer: int, count: int, peer: int) -> Callable[[], bool]:
        number = comm.operations["from", peer]
        comm.operations["from", peer] += 1
        key = (comm.name, peer, comm.rank, number)

        def receive() -> bool:
            sent = self.world.posted.get(key, {}).get(0)
            if sent is None:
                return False
            assert sent[1] == count, "a receive of another length than the send"
            ctypes.memmove(buffer, sent[0], count)
            self.world.post(key, 1, True)
            return True

        return receive

    def _broadcast(
        self, source: int, target: int, count: int, dtype: int, root: int, comm: Any, stream: int
    ) -> int:
        def copy(rows: dict[int, Any]) -> None:
            assert len({row[1] for row in rows.values()}) == 1
            assert source == target
            at(target, count, UINT8)[...] = rows[root][2]

        return self._collective(comm, stream, source, count, dtype, copy)

    def _all_gather(
        self, source: int, target: int, count: int, dtype: int, comm: Any, stream: int
    ) -> int:
        def copy(rows: dict[int, Any]) -> None:
            assert source == target + self.comms[comm.value].rank * count, "not in place"
            for rank, row in rows.items():
                at(target + rank * count, count, UINT8)[...] = row[2]

        return self._collective(comm, stream, source, count, dtype, copy)

    def _all_reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, comm: Any, stream: int
    ) -> int:
        def reduce(rows: dict[int, Any]) -> None:
            kind = np.dtype(NCCL_DTYPES[dtype])
            parts = [rows[rank][2].view(kind) for rank in sorted(rows)]
            _folds.fold(NCCL_OPS[op], kind, parts, at(target, count, kind))

        size = np.dtype(NCCL_DTYPES[dtype]).itemsize
        return self._collective(comm, stream, source, count * size, dtype, reduce)

    def _collective(
        self,
        handle: Any,
        stream: int,
        source: int,
        nbytes: int,
        dtype: int,
        finish: Callable[[dict[int, Any]], None],
    ) -> int:
        def step(comm: FakeComm) -> Callable[[], bool]:
            number = comm.operations["collective"]
            met = self._meeting(
                comm, "collective", (self.rank, nbytes, at(source, nbytes, UINT8).copy())
            )

            def done() -> bool:
                if not met():
                    return False
                finish(self.world.posted[comm.name, "collective", number])
                return True

            return done

        return self._enqueue(handle, stream, step, dtype, nbytes)

    def _enqueue(
        self, handle: Any, stream: int, step: Callable[[FakeComm], Any], *arguments: int
    ) -> int:
        assert self.group is not None
        comm = self._usable(handle)
        if comm is None:
            return INVALID_ARGUMENT
        self.arguments.append(arguments)
        self.streams.add(stream)
        self.group.append((comm, step(comm)))
        return OK

    def _usable(self, handle: Any) -> FakeComm | None:
        comm = self.comms[handle.value]
        assert not comm.gone, f"used after it was {comm.gone}"
        assert comm.state != IN_PROGRESS, "used while in progress"
        return comm if comm.state == OK else None

    def _begin(self, comm: FakeComm, waiting: Callable[[], bool]) -> int:
        comm.state, comm.polls, comm.waiting = IN_PROGRESS, 0, waiting
        return IN_PROGRESS

    def _meeting(self, comm: FakeComm, kind: str, what: Any) -> Callable[[], bool]:
        """Return whether all ranks have come to this operation of its kind."""
        key = (comm.name, kind, comm.operations[kind])
        comm.operations[kind] += 1
        self.world.post(key, comm.rank, what)
        return lambda: len(self.world.posted[key]) == comm.size

    @property
    def only(self) -> FakeComm:
        (comm,) = self.comms.values()
        return comm


# Driving it ----------------------------------------------------------------------------------------


def finish(*handles: Handle) -> None:
    def watch(waited: float) -> None:
        assert waited < 20, "the movement does not end"

    wait_for(lambda: not [handle for handle in handles if not handle.done()], 0, watch)


def drive(program: Generator[Handle, None, Any]) -> Any:
    try:
        while True:
            finish(next(program))
    except StopIteration as stop:
        return stop.value


def library_of(fake: FakeNccl) -> Library:
    return Library(fake, lambda number: nullcontext())


def opened(fake: FakeNccl, size: int, **options: Any) -> NcclLink:
    library = library_of(fake)
    program = NcclLink.open(library, HostMemory(), fake.rank, size, bytes(range(128)), **options)
    link: NcclLink = drive(program)
    return link


def on_links(size: int, check: Callable[[NcclLink, FakeNccl], Any], **options: Any) -> list[Any]:
    """Run `check` on every rank's link, each in a thread."""
    world = World()

    def rank(number: int) -> Any:
        fake = FakeNccl(world, number)
        return check(opened(fake, size, **options), fake)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


def alone(**options: Any) -> tuple[NcclLink, FakeNccl]:
    fake = FakeNccl(World(), 0)
    return opened(fake, 1, **options), fake


def stuck() -> tuple[NcclLink, FakeNccl, Handle]:
    """A link of two ranks, the other of which has gone after the opening."""
    world = World()
    FakeNccl(world, 1)._comm_init_rank_config(*_init_arguments(1))
    fake = FakeNccl(world, 0)
    link = opened(fake, 2)
    return link, fake, link.bcast(link.empty(8, UINT8), 1)


def _init_arguments(rank: int) -> tuple[Any, ...]:
    name = libnccl.UniqueId.from_buffer_copy(bytes(range(128)))
    handle, config = ctypes.c_void_p(), libnccl.Config.nonblocking()
    return ctypes.byref(handle), 2, name, rank, ctypes.byref(config)


def blocks(link: NcclLink, counts: list[int], fill: int = 0) -> Blocks:
    offsets = [sum(counts[:r]) for r in range(len(counts))]
    buffer = link.empty(sum(counts), UINT8)
    values(buffer)[...] = fill
    return Blocks(buffer, counts, offsets)


def bytes_of(part: DeviceBuffer) -> np.ndarray:
    return values(part.view(np.uint8))


size = pytest.mark.parametrize("size", [1, 2, 3, 4])


# Movements -----------------------------------------------------------------------------------------


@size
def test_alltoall_of_different_lengths(size: int) -> None:
    def check(link: NcclLink, fake: FakeNccl) -> None:
        for scale in (0, 1, 1000):
            send = blocks(link, [scale * (r + link.rank) for r in range(size)])
            for rank in range(size):
                values(send.block(rank))[...] = 10 * link.rank + rank
            recv = blocks(link, [scale * (r + link.rank) for r in range(size)], 255)
            finish(link.alltoall(send, recv))
            for rank in range(size):
                assert (values(recv.block(rank)) == 10 * rank + link.rank).all()

    on_links(size, check)


@size
@pytest.mark.parametrize("even", [True, False])
def test_allgather_is_in_place(size: int, even: bool) -> None:
    def check(link: NcclLink, fake: FakeNccl) -> None:
        for scale in (0, 3, 5000):
            counts = [scale * (1 if even else r) for r in range(size)]
            recv = blocks(link, counts, 255)
            values(recv.block(link.rank))[...] = link.rank
            finish(link.allgather(recv))
            for rank in range(size):
                assert (values(recv.block(rank)) == rank).all()
        assert ("ncclAllGather" in fake.calls) == even

    on_links(size, check)


def test_blocks_with_gaps_between_them_are_broadcast_and_empty_ones_are_not() -> None:
    def check(link: NcclLink, fake: FakeNccl) -> None:
        for counts in ([4, 4, 4], [5, 0, 3]):
            fake.calls.clear()
            recv = Blocks(blocks(link, [30], 255).buffer, counts, [0, 10, 20])
            values(recv.block(link.rank))[...] = link.rank
            finish(link.allgather(recv))
            want = np.full(30, 255)
            for rank in range(3):
                want[10 * rank : 10 * rank + counts[rank]] = rank
            assert values(recv.buffer).tolist() == want.tolist()
            assert fake.calls.count("ncclBroadcast") == np.count_nonzero(counts)

    on_links(3, check)


@size
def test_gather_reaches_every_root(size: int) -> None:
    def check(link: NcclLink, fake: FakeNccl) -> None:
        for root in range(size):
            recv = blocks(link, [100 * r for r in range(size)], 255)
            send = link.empty(100 * link.rank, UINT8)
            values(send)[...] = link.rank
            finish(link.gather(send, recv if link.rank == root else None, root))
            for rank in range(size):
                want = rank if link.rank == root else 255
                assert (values(recv.block(rank)) == want).all()

    on_links(size, check)


@size
def test_scatter_from_every_root(size: int) -> None:
    def check(link: NcclLink, fake: FakeNccl) -> None:
        for root in range(size):
            send = blocks(link, [50 * r for r in range(size)])
            for rank in range(size):
                values(send.block(rank))[...] = 10 * root + rank
            recv = link.empty(50 * link.rank, UINT8)
            finish(link.scatter(send if link.rank == root else None, recv, root))
            assert (values(recv) == 10 * root + link.rank).all()

    on_links(size, check)


@size
def test_bcast_from_every_root(size: int) -> None:
    def check(link: NcclLink, fake: FakeNccl) -> None:
        for root in range(size):
            for count in (0, 1, 3000):
                buffer = link.empty(count, UINT8)
                values(buffer)[...] = 10 * root + link.rank
                finish(link.bcast(buffer, root))
                assert (values(buffer) == 11 * root).all()

    on_links(size, check)


def test_movements_are_groups_of_bytes_on_the_current_stream() -> None:
    def check(link: NcclLink, fake: FakeNccl) -> None:
        fake.calls.clear()
        link.memory.stream = 4711
        finish(link.alltoall(blocks(link, [2, 5, 7]), blocks(link, [[2, 5, 7][link.rank]] * 3)))
        asked = [name for name in fake.calls if name != "ncclCommGetAsyncError"]
        assert asked[0] == "ncclGroupStart"
        assert asked[-1] == "ncclGroupEnd"
        assert Counter(asked[1:-1]) == {"ncclSend": 2, "ncclRecv": 2}
        assert fake.streams == {4711}
        assert {dtype for dtype, _ in fake.arguments} == {libnccl.UINT8}

    on_links(3, check)


def test_what_is_empty_asks_nothing_of_nccl() -> None:
    link, fake = alone()
    fake.calls.clear()
    nothing, none = link.empty(0, UINT8), blocks(link, [0])
    for handle in (
        link.alltoall(none, none),
        link.allgather(none),
        link.gather(nothing, none, 0),
        link.scatter(none, nothing, 0),
        link.bcast(nothing, 0),
        link.allreduce(nothing.view(np.int32), nothing.view(np.int32), "sum"),
    ):
        assert handle.done()
    assert fake.calls == []


def test_memory_is_kept_until_nccl_has_put_the_operation_on_its_stream() -> None:
    link, fake = alone()
    fake.slowness = 3
    buffer = link.empty(64, UINT8)
    memory = weakref.ref(buffer.owner)
    handle = link.bcast(buffer, 0)
    del buffer
    while not handle.done():
        assert memory() is not None
    assert memory() is None


# NCCL's own reductions -----------------------------------------------------------------------------


EXACT = {
    (op, name)
    for op in ("sum", "prod", "min", "max")
    for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64")
}
ROUNDED = {(op, name) for op in ("sum", "prod") for name in ("float32", "float64")} | {
    ("sum", "complex64"),
    ("sum", "complex128"),
}


@pytest.mark.parametrize("reproducible", [True, False])
def test_nccl_reduces_only_what_the_contract_lets_it(reproducible: bool) -> None:
    link, _ = alone(reproducible=reproducible)
    allowed = {(op, row.name) for op in OPS for row in TABLE if link.native(op, row.dtype)}
    assert allowed == (EXACT if reproducible else EXACT | ROUNDED)
    assert not link.native("sum", np.dtype("M8[s]"))


@pytest.mark.parametrize(("op", "name"), sorted(EXACT | ROUNDED))
def test_allreduce_names_type_and_operation_rightly(op: str, name: str) -> None:
    def check(link: NcclLink, fake: FakeNccl) -> None:
        dtype = np.dtype(name)
        rows = [(np.arange(7) * 3 + r + 1).astype(dtype) * dtype.type(1 + r) for r in range(3)]
        want = np.empty(7, dtype)
        _folds.fold(op, dtype, rows, want)
        source, target = device_buffer(rows[link.rank], link.memory), link.empty(7, dtype)
        finish(link.allreduce(source, target, op))
        assert values(target).tobytes() == want.tobytes()
        finish(link.allreduce(source, source, op))
        assert values(source).tobytes() == want.tobytes()

    on_links(3, check, reproducible=False)


@pytest.mark.parametrize(
    ("op", "name"), [("mean", "float32"), ("sum", "bfloat16"), ("sum", "int32")]
)
def test_algorithms_reduce_over_the_link_in_rank_order(op: str, name: str) -> None:
    def check(link: NcclLink, fake: FakeNccl) -> None:
        link.chunk_bytes = 4096
        dtype = BY_NAME[name].dtype
        rng = np.random.default_rng(7)
        rows = [(rng.standard_normal(9001) * 1000).astype(dtype) for _ in range(3)]
        want = np.empty(9001, dtype)
        _folds.fold(op, dtype, rows, want)
        source, target = device_buffer(rows[link.rank], link.memory), link.empty(9001, dtype)
        drive(algorithms.allreduce(link, source, target, op))
        assert values(target).tobytes() == want.tobytes()
        assert ("ncclAllReduce" in fake.calls) == (name == "int32")

    on_links(3, check)


# In progress ---------------------------------------------------------------------------------------


def test_opening_goes_on_until_all_ranks_have_come() -> None:
    world = World()
    fakes = [FakeNccl(world, rank) for rank in range(2)]
    programs = [
        NcclLink.open(library_of(fake), HostMemory(), fake.rank, 2, bytes(range(128)))
        for fake in fakes
    ]
    first = next(programs[0])
    assert not any(first.done() for _ in range(50))
    finish(first, next(programs[1]))
    links = [drive(program) for program in programs]
    assert [(link.rank, link.size) for link in links] == [(0, 2), (1, 2)]


def test_a_movement_is_done_only_when_nccl_says_so() -> None:
    link, fake = alone()
    fake.slowness = 5
    buffer = link.empty(4, UINT8)
    handle = link.bcast(buffer, 0)
    assert [handle.done() for _ in range(6)] == [False] * 4 + [True] * 2
    assert fake.only.polls == 5


def test_an_error_of_a_call_is_raised_in_nccl_s_words_and_closes_the_group() -> None:
    link, fake = alone()
    fake.fails["ncclBroadcast"] = INVALID_ARGUMENT
    with pytest.raises(
        TransportError, match=r"NCCL reported: invalid argument \(the cable is out\)"
    ):
        link.bcast(link.empty(4, UINT8), 0)
    assert fake.group is None


def test_after_a_failed_call_no_more_of_the_group_is_issued() -> None:
    def check(link: NcclLink, fake: FakeNccl) -> None:
        fake.fails["ncclSend"] = INVALID_ARGUMENT
        fake.calls.clear()
        with pytest.raises(TransportError):
            link.alltoall(blocks(link, [1] * 3), blocks(link, [1] * 3))
        assert fake.calls[:3] == ["ncclGroupStart", "ncclSend", "ncclGroupEnd"]

    on_links(3, check)


def test_only_nccl_takes_calls_ahead_of_their_headers() -> None:
    """What NCCL holds up can be aborted; MPI is never handed what differs between ranks."""
    assert NcclLink.async_check
    assert not HostStagedLink.async_check
    assert not GpuAwareMpiLink.async_check


def test_an_error_while_in_progress_is_raised_by_the_handle() -> None:
    link, fake, handle = stuck()
    assert not handle.done()
    fake.only.state = REMOTE_ERROR
    with pytest.raises(TransportError, match="remote error"):
        handle.done()
    assert isinstance(link.error(), TransportError)


def test_no_error_while_all_is_well() -> None:
    link, _, handle = stuck()
    assert not handle.done()
    assert link.error() is None


def test_the_per_thread_stream_is_refused() -> None:
    link, fake = alone()
    link.memory.stream = 2
    fake.calls.clear()
    with pytest.raises(TransportError, match="per-thread"):
        link.bcast(link.empty(4, UINT8), 0)
    assert fake.calls == []


# Splitting -----------------------------------------------------------------------------------------


def test_split_makes_links_of_the_members_in_their_order() -> None:
    def check(link: NcclLink, fake: FakeNccl) -> None:
        members = [3, 1] if link.rank % 2 else [0, 2]
        child = drive(link.split(link.rank % 2, members.index(link.rank)))
        assert (child.rank, child.size) == (members.index(link.rank), 2)
        assert child.memory is not link.memory
        recv = blocks(child, [1, 1])
        values(recv.block(child.rank))[...] = link.rank
        finish(child.allgather(recv))
        assert values(recv.buffer).tolist() == members
        finish(link.bcast(link.empty(1, UINT8), 0))

    on_links(4, check)


def test_a_rank_of_no_color_takes_part_in_a_split_and_gets_none() -> None:
    def check(link: NcclLink, fake: FakeNccl) -> None:
        out = link.rank == 1
        child = drive(link.split(None if out else 0, link.rank))
        assert (child is None) == out
        assert len(fake.comms) == (1 if out else 2)

    on_links(3, check)


def test_a_split_keeps_whether_floats_are_summed_in_rank_order() -> None:
    for reproducible in (True, False):
        link, _ = alone(reproducible=reproducible)
        child = drive(link.split(0, 0))
        assert child.native("sum", np.dtype(np.float32)) == (not reproducible)


def test_a_nccl_without_split_leaves_it_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    link, fake = alone()
    monkeypatch.delattr(FakeNccl, "_comm_split")
    fake.calls.clear()
    assert drive(link.split(0, 0)) is None
    assert fake.calls == []


def test_a_split_that_is_given_up_ends_both_halves() -> None:
    link, fake, handle = stuck()
    fake.only.waiting = lambda: True
    finish(handle)
    program = link.split(0, 0)
    assert not next(program).done()
    with pytest.raises(KeyboardInterrupt):
        program.throw(KeyboardInterrupt())
    assert fake.only.gone == "aborted"


# The end -------------------------------------------------------------------------------------------


def test_an_opening_that_is_given_up_is_aborted() -> None:
    fake = FakeNccl(World(), 0)
    program = NcclLink.open(library_of(fake), HostMemory(), 0, 2, bytes(range(128)))
    assert not next(program).done()
    with pytest.raises(TimeoutError):
        program.throw(TimeoutError())
    assert fake.only.gone == "aborted"


def test_an_opening_that_fails_at_once_says_why() -> None:
    fake = FakeNccl(World(), 0)
    fake.fails["ncclCommInitRankConfig"] = INVALID_ARGUMENT
    with pytest.raises(TransportError, match="the cable is out"):
        opened(fake, 2)


def test_abort_ends_what_is_under_way_and_happens_once() -> None:
    link, fake, handle = stuck()
    assert not handle.done()
    link.abort()
    link.abort()
    link.close()
    assert fake.calls.count("ncclCommAbort") == 1
    with pytest.raises(TransportError, match="was aborted"):
        handle.done()
    with pytest.raises(TransportError, match="was aborted"):
        link.bcast(link.empty(4, UINT8), 0)
    assert "was aborted" in str(link.error())


def test_many_threads_that_abort_abort_once() -> None:
    link, fake, _ = stuck()
    threads = [threading.Thread(target=link.abort) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake.calls.count("ncclCommAbort") == 1


def test_an_abort_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libnccl, "_GRACE", 0.05)
    link, fake, _ = stuck()
    fake.hangs.clear()
    link.abort()
    assert fake.only.gone == ""
    fake.hangs.set()
    # The thread that was left behind ends with the test.
    while fake.only.gone == "":
        time.sleep(0.001)


def test_an_abort_does_not_wait_for_a_thread_that_hangs_in_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libnccl, "_GRACE", 0.05)
    link, fake, _ = stuck()
    inside, leave = threading.Event(), threading.Event()

    def hang(*arguments: Any) -> int:
        inside.set()
        leave.wait()
        return OK

    monkeypatch.setattr(FakeNccl, "_comm_get_async_error", hang)
    thread = threading.Thread(target=link.error)
    thread.start()
    inside.wait()
    link.abort()
    assert fake.only.gone == "aborted"
    leave.set()
    thread.join()


def test_an_abort_does_not_wait_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be in CUDA, and wait for the movement that is to be aborted."""
    monkeypatch.setattr(libnccl, "_GRACE", 0.05)
    link, fake, _ = stuck()
    leave = threading.Event()

    @contextmanager
    def hanging(number: int) -> Iterator[None]:
        leave.wait(20)
        yield

    monkeypatch.setattr(link._comm._library, "current", hanging)
    assert link.error() is None
    link.abort()
    assert fake.only.gone == "aborted"
    leave.set()


def test_an_error_is_not_waited_for_while_a_thread_is_in_nccl() -> None:
    link, _, _ = stuck()
    with link._comm._using:
        began = time.monotonic()
        assert link.error() is None
        assert time.monotonic() - began < 1


def test_close_finalizes_and_then_destroys() -> None:
    def check(link: NcclLink, fake: FakeNccl) -> None:
        fake.calls.clear()
        link.close()
        ends = [name for name in fake.calls if name != "ncclCommGetAsyncError"]
        assert ends == ["ncclCommFinalize", "ncclCommDestroy"]
        link.abort()
        link.close()
        assert fake.only.gone == "destroyed"

    on_links(3, check)


def test_close_aborts_where_the_others_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libnccl, "_GRACE", 0.05)
    link, fake, handle = stuck()
    fake.only.waiting = lambda: True
    finish(handle)
    link.close()
    assert fake.only.gone == "aborted"
    assert "ncclCommDestroy" not in fake.calls


def test_close_aborts_what_is_still_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libnccl, "_GRACE", 0.05)
    link, fake, _ = stuck()
    link.close()
    assert fake.only.gone == "aborted"
    assert "ncclCommFinalize" not in fake.calls


# Devices that ranks share ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "last", "refused"),
    [((2, 30, 3), True, False), ((2, 30, 3), False, True), ((2, 27, 5), True, True)],
)
def test_nccl_shares_a_device_only_where_it_was_told_to(
    version: tuple[int, ...], last: bool, refused: bool
) -> None:
    shares = [True, True, last]
    text = refuse_sharing(["a", "b", "a"], version, shares)
    assert (text is not None) == refused
    if text is not None:
        assert "ranks 0, 2 share" in text
        assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in text
        assert ("2.27.5" in text) == (version < (2, 30))
    assert refuse_sharing(["a", "b", "c"], version, shares) is None


# The library itself --------------------------------------------------------------------------------


def test_version_and_unique_id_are_read() -> None:
    library = library_of(FakeNccl(World(), 0))
    assert library.version() == (2, 23, 4)
    assert library.unique_id() == bytes(range(128))


def test_what_the_environment_takes_away_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "missing", lambda: None)
    monkeypatch.setattr(libnccl, "load", lambda: library_of(FakeNccl(World(), 0)))
    monkeypatch.delenv("NCCL_COMM_BLOCKING", raising=False)
    assert libnccl.missing() is None
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "1")
    assert "unset it" in (libnccl.missing() or "")


@pytest.mark.parametrize(
    ("error", "words"), [(OSError("no file"), "pip install"), (AttributeError("ncclX"), "2.14")]
)
def test_a_library_that_does_not_load_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def load() -> Library:
        raise error

    monkeypatch.setattr(device, "missing", lambda: None)
    monkeypatch.setattr(libnccl, "load", load)
    monkeypatch.delenv("NCCL_COMM_BLOCKING", raising=False)
    assert words in (libnccl.missing() or "")


def test_what_devices_lack_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "missing", lambda: "there is no device")
    assert libnccl.missing() == "there is no device"


def test_the_configuration_has_the_layout_of_2_18() -> None:
    config = libnccl.Config.nonblocking()
    places = {name: getattr(libnccl.Config, name).offset for name, _ in libnccl.Config._fields_}
    assert ctypes.sizeof(config) == config.size == 48
    assert places["blocking"] == 16
    assert places["net_name"] == 32
    assert places["split_share"] == 40
    assert (config.magic, config.version, config.blocking) == (0xCAFEBEEF, 21800, 0)
    assert {config.min_ctas, config.max_ctas, config.split_share} == {-(2**31)}


def test_only_split_may_be_lacking() -> None:
    found = SimpleNamespace(**{name: SimpleNamespace() for name in libnccl.SIGNATURES})
    del found.ncclCommSplit
    libnccl.declare(found)
    assert found.ncclSend.argtypes == libnccl.SIGNATURES["ncclSend"]
    assert found.ncclGetErrorString.restype is ctypes.c_char_p
    del found.ncclSend
    with pytest.raises(AttributeError, match="ncclSend"):
        libnccl.declare(found)


def _installed() -> ctypes.CDLL:
    try:
        places = find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        places = None
    if places is None:
        pytest.skip("no package nvidia-nccl")
    (place, *_) = places.submodule_search_locations or [""]
    return ctypes.CDLL(str(Path(place) / "lib" / "libnccl.so.2"))


def test_the_real_library_has_every_function_and_speaks() -> None:
    functions = _installed()
    libnccl.declare(functions)
    library = Library(functions, lambda number: nullcontext())
    assert library.version() >= libnccl.OLDEST
    assert len(set(library.unique_id())) > 1
    with pytest.raises(TransportError, match="NCCL reported: invalid usage"):
        library.check(5)


def test_the_real_library_refuses_without_a_device() -> None:
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("there is a driver")
    functions = _installed()
    libnccl.declare(functions)
    library = Library(functions, lambda number: nullcontext())
    with pytest.raises(TransportError, match="NCCL reported"):
        Comm.begin(library, 0, 0, 1, library.unique_id())
