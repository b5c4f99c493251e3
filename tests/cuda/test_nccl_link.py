"""The NCCL link over the NCCL in software: what it asks for, in which order, and how it ends.

That one is as strict as NCCL's documents about what may be called when. What NCCL itself does, no test here
knows.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arraycomm import _folds
from arraycomm._arrays.device_memory import DeviceBuffer
from arraycomm._cuda import device
from arraycomm._cuda.device import CudaMemory
from arraycomm._cuda.links import libnccl
from arraycomm._cuda.links.gpu_aware import GpuAwareMpiLink
from arraycomm._cuda.links.libnccl import Comm, Library
from arraycomm._cuda.links.nccl_link import NcclLink, refuse_sharing
from arraycomm._cuda.links.staged_link import HostStagedLink
from arraycomm._dtypes import OPS, TABLE
from arraycomm._errors import TransportError
from arraycomm._transports.base import Blocks, Handle
from tests.support.device import rank_of_threads, software_device
from tests.support.internals import finish

OK, INVALID_ARGUMENT, REMOTE_ERROR, IN_PROGRESS = 0, 4, 6, 7
UINT8 = np.dtype(np.uint8)
# One rank's NCCL in software.
Nccl = Any


@pytest.fixture(autouse=True)
def cuda(request: pytest.FixtureRequest) -> Iterator[Any]:
    if "real_library" in request.node.name:
        yield None
        return
    with software_device() as machine:
        yield machine


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not end is left behind at once."""
    monkeypatch.setattr(libnccl, "_GRACE", 0.05)


# Driving it ----------------------------------------------------------------------------------------


def drive(program: Generator[Handle, None, Any]) -> Any:
    try:
        while True:
            finish(next(program))
    except StopIteration as stop:
        return stop.value


def new_nccl() -> Nccl:
    from cupy._nccl import Nccl as InSoftware

    return InSoftware()


def new_memory() -> CudaMemory:
    """Memory in a stream of its own, since the ranks are threads."""
    memory = CudaMemory(0)
    memory.stream = memory.own_stream
    return memory


def opening(nccl: Nccl, rank: int, size: int, name: bytes, **options: Any) -> Any:
    return NcclLink.open(Library(nccl), new_memory(), rank, size, name, **options)


def new_name() -> bytes:
    return Library(new_nccl()).unique_id()


def on_links(*sizes: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on every rank's link, each in a thread; with each of these numbers of ranks."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_all(**given: Any) -> None:
            for size in sizes:
                name = new_name()

                def rank(number: int, size: int = size, name: bytes = name) -> None:
                    nccl = new_nccl()
                    with rank_of_threads(number):
                        link = drive(opening(nccl, number, size, name, **options))
                        test(link, nccl, **given)

                with ThreadPoolExecutor(size) as threads:
                    list(threads.map(rank, range(size)))

        signature = inspect.signature(test)
        own = list(signature.parameters.values())[2:]
        on_all.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return on_all

    return decorate


def alone(**options: Any) -> tuple[NcclLink, Nccl]:
    nccl = new_nccl()
    return drive(opening(nccl, 0, 1, new_name(), **options)), nccl


def stuck() -> tuple[NcclLink, Nccl, Handle]:
    """A link of two ranks, the other of which has gone after the opening."""
    name, nccl = new_name(), new_nccl()
    programs = [opening(nccl, 0, 2, name), opening(new_nccl(), 1, 2, name)]
    finish(*map(next, programs))
    link: NcclLink = drive(programs[0])
    buffer = link.empty(8, UINT8)
    nccl.slowness = 1 << 30
    return link, nccl, link.bcast(buffer, 1)


def over(nccl: Nccl, handle: Handle) -> None:
    """Let NCCL put what is under way on its stream."""
    nccl.only.polls = 0
    finish(handle)


def wait_for_abort(nccl: Nccl) -> None:
    """Wait for what an abort does in a thread of its own."""
    deadline = time.monotonic() + 10
    while not nccl.only.gone and time.monotonic() < deadline:
        time.sleep(0.001)
    assert nccl.only.gone == "aborted"


def device_buffer(array: np.ndarray, memory: Any) -> DeviceBuffer:
    found: DeviceBuffer = memory.upload(array)
    return found


def values(part: DeviceBuffer) -> np.ndarray:
    """Return the elements, once the stream has come so far."""
    into = np.empty(part.size, part.dtype)
    part.memory.download(part, into)
    return into


def fill(part: DeviceBuffer, value: int) -> None:
    part[...] = part.memory.upload(np.full(part.size, value, part.dtype))


def blocks(link: NcclLink, counts: list[int], value: int = 0) -> Blocks:
    offsets = [sum(counts[:r]) for r in range(len(counts))]
    buffer = link.empty(sum(counts), UINT8)
    fill(buffer, value)
    return Blocks(buffer, counts, offsets)


# Movements -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("even", [True, False])
@on_links(1, 3)
def test_allgather_is_in_place(link, nccl, even) -> None:
    size = link.size
    for scale in (0, 3, 5000):
        counts = [scale * (1 if even else r) for r in range(size)]
        recv = blocks(link, counts, 255)
        fill(recv.block(link.rank), link.rank)
        finish(link.allgather(recv))
        for rank in range(size):
            assert (values(recv.block(rank)) == rank).all()
    assert ("ncclAllGather" in nccl.calls) == even


def test_memory_is_kept_until_nccl_has_put_the_operation_on_its_stream() -> None:
    link, nccl = alone()
    nccl.slowness = 3
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
    allowed = {(op, row.name) for op in OPS for row in TABLE if link.reduces(op, row.dtype)}
    assert allowed == (EXACT if reproducible else EXACT | ROUNDED)
    assert not link.reduces("sum", np.dtype("M8[s]"))


@on_links(3, reproducible=False)
def test_allreduce_names_type_and_operation_rightly(link, nccl) -> None:
    for op, name in sorted(EXACT | ROUNDED):
        dtype = np.dtype(name)
        rows = [(np.arange(7) * 3 + r + 1).astype(dtype) * dtype.type(1 + r) for r in range(3)]
        want = np.empty(7, dtype)
        _folds.fold(op, dtype, rows, want)
        source, target = device_buffer(rows[link.rank], link.memory), link.empty(7, dtype)
        finish(link.allreduce(source, target, op))
        assert values(target).tobytes() == want.tobytes(), (op, name)
        finish(link.allreduce(source, source, op))
        assert values(source).tobytes() == want.tobytes(), (op, name)


# In progress ---------------------------------------------------------------------------------------


def test_opening_goes_on_until_all_ranks_have_come() -> None:
    name = new_name()
    programs = [opening(new_nccl(), rank, 2, name) for rank in range(2)]
    first = next(programs[0])
    assert not any(first.done() for _ in range(50))
    finish(first, next(programs[1]))
    links = [drive(program) for program in programs]
    assert [(link.rank, link.size) for link in links] == [(0, 2), (1, 2)]


def test_a_movement_is_done_only_when_nccl_says_so() -> None:
    link, nccl = alone()
    nccl.slowness = 4
    handle = link.bcast(link.empty(4, UINT8), 0)
    nccl.calls.clear()
    assert [handle.done() for _ in range(7)] == [False] * 4 + [True] * 3
    assert nccl.calls == ["ncclCommGetAsyncError"] * 5


def test_an_error_of_a_call_is_raised_in_nccl_s_words_and_closes_the_group() -> None:
    link, nccl = alone()
    nccl.fails["ncclBroadcast"] = INVALID_ARGUMENT
    with pytest.raises(
        TransportError, match=r"NCCL reported: invalid argument \(the cable is out\)"
    ):
        link.bcast(link.empty(4, UINT8), 0)
    assert nccl.calls.count("ncclGroupEnd") == nccl.calls.count("ncclGroupStart")


@on_links(3)
def test_after_a_failed_call_no_more_of_the_group_is_issued(link, nccl) -> None:
    nccl.fails["ncclSend"] = INVALID_ARGUMENT
    nccl.calls.clear()
    with pytest.raises(TransportError):
        link.alltoall(blocks(link, [1] * 3), blocks(link, [1] * 3))
    assert nccl.calls[:3] == ["ncclGroupStart", "ncclSend", "ncclGroupEnd"]


def test_only_nccl_takes_calls_ahead_of_their_headers() -> None:
    """What NCCL holds up can be aborted; MPI is never handed what differs between ranks."""
    assert NcclLink.async_check
    assert not HostStagedLink.async_check
    assert not GpuAwareMpiLink.async_check


def test_an_error_while_in_progress_is_raised_by_the_handle() -> None:
    link, nccl, handle = stuck()
    assert not handle.done()
    assert link.error() is None
    nccl.only.state = REMOTE_ERROR
    with pytest.raises(TransportError, match="remote error"):
        handle.done()
    assert isinstance(link.error(), TransportError)


def test_the_per_thread_stream_is_refused() -> None:
    link, nccl = alone()
    buffer = link.empty(4, UINT8)
    nccl.calls.clear()
    with pytest.raises(TransportError, match="per-thread"):
        link.at(2).bcast(buffer, 0)
    assert nccl.calls == []


# Splitting -----------------------------------------------------------------------------------------


@on_links(3)
def test_a_rank_of_no_color_takes_part_in_a_split_and_gets_none(link, nccl) -> None:
    out = link.rank == 1
    child = drive(link.split(None if out else 0, link.rank))
    assert (child is None) == out
    assert len(nccl.comms) == (1 if out else 2)


def test_a_split_keeps_whether_floats_are_summed_in_rank_order() -> None:
    for reproducible in (True, False):
        link, _ = alone(reproducible=reproducible)
        child = drive(link.split(0, 0))
        assert child.reduces("sum", np.dtype(np.float32)) == (not reproducible)


def test_a_nccl_without_split_leaves_it_to_the_caller() -> None:
    link, nccl = alone()
    del nccl.ncclCommSplit
    nccl.calls.clear()
    assert drive(link.split(0, 0)) is None
    assert nccl.calls == []


def test_a_split_that_is_given_up_ends_both_halves() -> None:
    link, nccl, handle = stuck()
    over(nccl, handle)
    # As if the other rank had taken part in it.
    nccl.only.issued = nccl.only.finished
    program = link.split(0, 0)
    assert not next(program).done()
    with pytest.raises(KeyboardInterrupt):
        program.throw(KeyboardInterrupt())
    wait_for_abort(nccl)


# The end -------------------------------------------------------------------------------------------


def test_an_opening_that_is_given_up_is_aborted() -> None:
    nccl = new_nccl()
    program = opening(nccl, 0, 2, new_name())
    assert not next(program).done()
    with pytest.raises(TimeoutError):
        program.throw(TimeoutError())
    wait_for_abort(nccl)


def test_an_opening_that_fails_at_once_says_why() -> None:
    nccl = new_nccl()
    nccl.fails["ncclCommInitRankConfig"] = INVALID_ARGUMENT
    with pytest.raises(TransportError, match="the cable is out"):
        drive(opening(nccl, 0, 2, new_name()))


def test_abort_of_many_threads_ends_what_is_under_way_and_happens_once() -> None:
    link, nccl, handle = stuck()
    assert not handle.done()
    with ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            threads.submit(link.abort)
    link.close()
    wait_for_abort(nccl)
    assert nccl.calls.count("ncclCommAbort") == 1
    with pytest.raises(TransportError, match="was aborted"):
        handle.done()
    with pytest.raises(TransportError, match="was aborted"):
        link.bcast(link.empty(4, UINT8), 0)
    assert "was aborted" in str(link.error())


@pytest.mark.usefixtures("soon")
def test_an_abort_that_hangs_is_left_behind() -> None:
    link, nccl, _ = stuck()
    leave, abort = threading.Event(), nccl.ncclCommAbort

    def hang(handle: Any) -> int:
        leave.wait(20)
        return abort(handle)

    nccl.ncclCommAbort = hang
    link.abort()
    assert nccl.only.gone == ""
    leave.set()
    wait_for_abort(nccl)


@pytest.mark.usefixtures("soon")
def test_an_abort_does_not_wait_for_a_thread_that_hangs_in_nccl() -> None:
    link, nccl, _ = stuck()
    inside, leave = threading.Event(), threading.Event()

    def hang(*arguments: Any) -> int:
        inside.set()
        leave.wait(20)
        return OK

    nccl.ncclCommGetAsyncError = hang
    with ThreadPoolExecutor(1) as threads:
        threads.submit(link.error)
        inside.wait()
        link.abort()
        wait_for_abort(nccl)
        leave.set()


@pytest.mark.usefixtures("soon")
def test_an_abort_does_not_wait_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be in CUDA, and wait for the movement that is to be aborted."""
    link, nccl, _ = stuck()
    leave = threading.Event()

    @contextmanager
    def hanging(number: int) -> Iterator[None]:
        leave.wait(20)
        yield

    monkeypatch.setattr(link.comm._library, "current", hanging)
    assert link.error() is None
    link.abort()
    wait_for_abort(nccl)
    leave.set()


def test_an_error_is_not_waited_for_while_a_thread_is_in_nccl() -> None:
    link, _, _ = stuck()
    with link.comm._using:
        began = time.monotonic()
        assert link.error() is None
        assert time.monotonic() - began < 1


@on_links(3)
def test_close_finalizes_and_then_destroys(link, nccl) -> None:
    nccl.calls.clear()
    link.close()
    ends = [name for name in nccl.calls if name != "ncclCommGetAsyncError"]
    assert ends == ["ncclCommFinalize", "ncclCommDestroy"]
    link.abort()
    link.close()
    assert nccl.only.gone == "destroyed"


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("under_way", [True, False])
def test_close_aborts_what_is_under_way_and_where_the_others_do_not_come(under_way: bool) -> None:
    link, nccl, handle = stuck()
    if not under_way:
        over(nccl, handle)
    link.close()
    wait_for_abort(nccl)
    assert "ncclCommDestroy" not in nccl.calls
    assert ("ncclCommFinalize" in nccl.calls) != under_way


# Devices that ranks share ------------------------------------------------------------------------


@pytest.mark.parametrize("last", [True, False])
def test_nccl_shares_a_device_only_where_it_was_told_to(last: bool) -> None:
    shares = [True, True, last]
    text = refuse_sharing(["a", "b", "a"], shares)
    assert (text is None) == last
    if text is not None:
        assert "ranks 0, 2 share" in text
        assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in text
    assert refuse_sharing(["a", "b", "c"], shares) is None


# The library itself --------------------------------------------------------------------------------


def test_version_and_unique_id_are_read() -> None:
    nccl = new_nccl()
    nccl.version = 22304
    library = Library(nccl)
    assert library.version() == (2, 23, 4)
    assert len(library.unique_id()) == 128
    assert library.unique_id() != library.unique_id()


def test_what_the_environment_takes_away_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_COMM_BLOCKING", raising=False)
    assert libnccl.missing() is None
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "1")
    assert "unset it" in (libnccl.missing() or "")


@pytest.mark.parametrize(
    ("device_lacks", "error", "words"),
    [
        (None, OSError("no file"), "pip install"),
        (None, AttributeError("ncclX"), "2.14"),
        ("there is no device", None, "there is no device"),
    ],
)
def test_what_is_missing_is_named(monkeypatch, device_lacks, error, words) -> None:
    def load() -> Library:
        raise error

    monkeypatch.delenv("NCCL_COMM_BLOCKING", raising=False)
    with monkeypatch.context() as within:
        within.setattr(device, "missing", lambda: device_lacks)
        within.setattr(libnccl, "load", load)
        assert words in (libnccl.missing() or "")


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
