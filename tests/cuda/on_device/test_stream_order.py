"""The order of streams, both ways: each of these fails where something on the device is not waited for.

Kernels that take long are put on a stream of its own before the call, or the other ranks come late;
what the caller does after the call is put there while the device is still to come to the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from tests.cuda.on_device.conftest import Framework, OnRanks, is_busy, spin, stream_of
from tests.support import internals
from tests.support.on_ranks import each_rank_of

LENGTH = 1 << 18
LATE = 0.3

Call = Callable[[Communicator, Any], Any]

# What every element of the result is, where every element of rank r's array is r + 1.
CALLS: dict[str, tuple[Call, Callable[[int, int], float]]] = {
    "allreduce": (lambda comm, x: comm.allreduce(x), lambda size, _: sum(range(size + 1))),
    "native": (
        lambda comm, x: comm.allreduce(x.view(dtype_of(x, "int32")), "max").view(x.dtype),
        lambda size, _: size,
    ),
    "allgather": (lambda comm, x: comm.allgather(x)[-1], lambda size, _: size),
    "bcast": (lambda comm, x: comm.bcast(x, comm.size - 1), lambda size, _: size),
    "scan": (lambda comm, x: comm.scan(x), lambda _, rank: sum(range(rank + 2))),
    "alltoall": (
        lambda comm, x: comm.alltoall(x.reshape((comm.size, -1)))[-1],
        lambda size, _: size,
    ),
    "tree": (
        lambda comm, x: ac.allreduce_tree({"x": x}, "sum", comm=comm)["x"],
        lambda size, _: sum(range(size + 1)),
    ),
}


def dtype_of(x: Any, name: str) -> Any:
    """Return a dtype in the words of the array's framework."""
    if type(x).__module__.startswith("torch"):
        import torch

        return getattr(torch, name)
    return np.dtype(name)


def set_to(x: Any, value: float) -> None:
    """Put a write on the current stream."""
    x[...] = value


def copy(into: Any, x: Any, stream: int) -> None:
    """Put a copy on a stream, as a kernel does of which the framework knows nothing."""
    import cupy

    to, source = (a.data_ptr() if hasattr(a, "data_ptr") else a.data.ptr for a in (into, x))
    cupy.cuda.runtime.memcpyAsync(to, source, x.nbytes, 4, stream)


def length(comm: Communicator) -> int:
    return LENGTH - LENGTH % comm.size


def begun(comm: Communicator, writable: Framework) -> None:
    """Have everything compiled, connected and allocated, which may wait for the device."""
    x = writable.make(np.ones(length(comm), np.float32))
    for call, _ in CALLS.values():
        call(comm, x)
    spin(stream_of(writable), 1e-6)
    writable.back(x)


@pytest.mark.parametrize("name", CALLS)
@each_rank_of()
def test_calls_read_what_is_still_to_be_written(comm, writable, name) -> None:
    call, wanted = CALLS[name]
    begun(comm, writable)
    for _ in range(2):
        with writable.side():
            x = writable.make(np.zeros(length(comm), np.float32))
            spin(stream_of(writable))
            x += comm.rank + 1
            got = call(comm, x)
            twice = got * 2
            # Overwritten in order, while the call may be still to come.
            set_to(x, -1000)
            assert (writable.back(twice) == 2 * wanted(comm.size, comm.rank)).all()
            assert (writable.back(got) == wanted(comm.size, comm.rank)).all()
            assert (writable.back(x) == -1000).all()


@pytest.mark.parametrize(("name", "late"), [(name, i % 2) for i, name in enumerate(CALLS)])
@each_rank_of(by="nccl_job")
def test_input_may_be_overwritten_while_others_are_missing(comm, writable, name, late) -> None:
    call, wanted = CALLS[name]
    begun(comm, writable)
    comm.barrier()
    with writable.side():
        x = writable.make(np.full(length(comm), comm.rank + 1, np.float32))
        if comm.rank % 2 == late:
            time.sleep(LATE)
            spin(stream_of(writable))
        got = call(comm, x)
        set_to(x, -1000)
        # Memory that is given back here is given out at once, for what comes later.
        del x
        other = writable.make(np.full(length(comm), 7, np.float32))
        assert (writable.back(got + 0) == wanted(comm.size, comm.rank)).all()
        assert (writable.back(other) == 7).all()


@pytest.mark.parametrize("name", [name for name in CALLS if name != "tree"])
@each_rank_of(by="nccl_job")
def test_the_host_does_not_wait_for_the_device(comm, writable, name) -> None:
    call, wanted = CALLS[name]
    begun(comm, writable)
    with writable.side():
        x = writable.make(np.full(length(comm), comm.rank + 1, np.float32))
        # Once more on this stream, for which memory is set apart.
        call(comm, x)
        writable.back(x)
        comm.barrier()
        spin(stream_of(writable), 0.3)
        got = call(comm, x)
        assert is_busy(stream_of(writable))
        assert (writable.back(got) == wanted(comm.size, comm.rank)).all()


@each_rank_of(by="nccl_job")
def test_calls_in_several_streams_come_in_their_order(comm, writable) -> None:
    begun(comm, writable)
    results, sides = [], []
    for turn in range(6):
        # Kept: CuPy destroys a stream that nobody refers to.
        sides.append(writable.side())
        with sides[-1]:
            x = writable.make(np.full(length(comm), turn, np.float32))
            if turn % 2 == comm.rank % 2:
                spin(stream_of(writable))
            x += 1
            results.append((comm.allreduce(x), stream_of(writable), x))
    import cupy

    for turn, (got, stream, _) in enumerate(results):
        cupy.cuda.runtime.streamSynchronize(stream)
        assert (writable.back(got) == (turn + 1) * comm.size).all()


@each_rank_of()
def test_out_is_written_in_order(comm, writable) -> None:
    begun(comm, writable)
    for step in (1, 2):
        with writable.side():
            x = writable.make(np.full(length(comm), comm.rank + 1, np.float32))
            whole = writable.make(np.zeros(step * length(comm), np.float32))
            spin(stream_of(writable))
            # Before the call in the stream, and so not to be seen after it.
            set_to(whole, 5)
            out = whole[::step]
            comm.allreduce(x, out=out)
            out += 1
            want = np.full(step * length(comm), 5, np.float32)
            want[::step] = sum(range(comm.size + 1)) + 1
            assert np.array_equal(writable.back(whole), want)


@each_rank_of()
def test_memory_of_results_is_not_used_too_early(comm, writable) -> None:
    """Results are dropped while they are still to be written, and their memory is taken again."""
    begun(comm, writable)
    with writable.side():
        x = writable.make(np.full(length(comm), comm.rank + 1, np.float32))
        for _ in range(15):
            spin(stream_of(writable), 2e-3)
            comm.allreduce(x)
            mine = x * 0 + 3
            comm.allgather(x)
            assert (writable.back(mine) == 3).all()


def test_jaxs_work_comes_before_and_after(on_ranks: OnRanks, framework: Framework) -> None:
    if framework.name != "jax":
        pytest.skip("has streams of its own")
    import jax

    work = jax.jit(lambda a: jax.lax.fori_loop(0, 300, lambda _, b: b @ b / 2000, a))

    def check(comm: Communicator) -> None:
        start = framework.make(np.ones((2000, 2000), np.float32))
        work(start).block_until_ready()
        for _ in range(3):
            x = work(start) * (comm.rank + 1)
            got = comm.allreduce(x)
            del x
            again = work(got / sum(range(comm.size + 1))) + 1
            assert np.allclose(framework.back(again), 2, rtol=1e-2)
            total = sum(range(comm.size + 1))
            assert np.allclose(framework.back(got), total, rtol=1e-2)

    on_ranks(check)


@each_rank_of()
def test_a_result_is_the_start_of_the_next_step(comm, framework) -> None:
    """As in training: nothing is waited for between the steps."""
    with framework.side():
        x = framework.make(np.full(LENGTH, 1.0, np.float32))
        for _ in range(40):
            x = comm.allreduce(x) / comm.size + 1
        assert (framework.back(x) == 41).all()


@each_rank_of()
def test_calls_are_refused_while_a_graph_is_captured_and_requests_go_on(comm) -> None:
    import cupy

    x = cupy.ones(1 << 22, "float32")
    comm.allreduce(x)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        try:
            with pytest.raises(ValueError, match="captured into a CUDA graph"):
                comm.allreduce(x)
        finally:
            stream.end_capture()
    time.sleep(LATE * (comm.rank == 0))
    request = comm.iallreduce(x)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        # CUDA lets another thread ask nothing meanwhile, unless that has said that it may.
        time.sleep(2 * LATE)
        stream.end_capture()
    assert (request.wait() == comm.size).all()


@each_rank_of()
def test_a_request_may_be_waited_for_in_another_stream(comm, writable) -> None:
    begun(comm, writable)
    with writable.side():
        x = writable.make(np.zeros(length(comm), np.float32))
        spin(stream_of(writable))
        x += comm.rank + 1
        request = comm.iallreduce(x)
        with writable.side():
            got = request.wait() * 2
            assert (writable.back(got) == sum(range(comm.size + 1)) * 2).all()


@each_rank_of()
def test_a_result_may_be_taken_twice_and_the_first_stream_be_gone(comm, writable) -> None:
    begun(comm, writable)
    for _ in range(3):
        with writable.side():
            x = writable.make(np.full(length(comm), comm.rank + 1, np.float32))
            read = writable.make(np.zeros(length(comm), np.float32))
            spin(stream_of(writable))
            request = comm.iallreduce(x)
        while not request.test():
            time.sleep(1e-3)
        with writable.side():
            copy(read, request.wait(), stream_of(writable))
            assert (writable.back(read) == sum(range(comm.size + 1))).all()


@each_rank_of()
def test_requests_of_two_communicators_may_be_taken_in_any_order(comm, writable) -> None:
    """Over NCCL all ranks start them in one order; each takes them in its own, and one call waits for another's result."""
    begun(comm, writable)
    other = comm.dup()
    ones = np.ones(LENGTH // 64, np.float32)
    summed = ones * sum(range(comm.size + 1))
    gathered = np.concatenate([ones * (rank + 1) for rank in range(comm.size)])
    with writable.side():
        for turn in range(6):
            x = writable.make(np.stack([ones, ones], 1) * (comm.rank + 1))
            groups = [comm, other]
            link = internals.device_link(comm)
            own_order = link is None or not link.async_check
            if (comm.rank * own_order + turn) % 2:
                groups.reverse()
            requests = []
            for group in groups:
                spin(stream_of(writable), 1e-3)
                # What is not contiguous is copied; the shape of the second comes with the headers.
                requests.append((group.iallreduce(x[:, 0]), summed))
                requests.append((group.iallgatherv(x[:, 1]), gathered))
            if (comm.rank + turn) % 3:
                requests.reverse()
            for request, want in requests:
                assert np.array_equal(writable.back(request.wait() * 2), want * 2)
    other.free()


@each_rank_of()
def test_memory_of_requests_is_not_used_too_early(comm, writable) -> None:
    """A result is dropped while it is still read, and a request that is under way needs memory."""
    begun(comm, writable)
    each = np.repeat(np.arange(1, comm.size + 1, dtype=np.float32), LENGTH)
    with writable.side():
        x = writable.make(np.full(LENGTH, comm.rank + 1, np.float32))
        for _ in range(3):
            read = writable.make(np.zeros(len(each), np.float32))
            got = comm.iallgatherv(x).wait()
            if comm.rank:
                time.sleep(0.03)
            request = comm.iallgatherv(x + 10)
            spin(stream_of(writable), 0.1)
            copy(read, got, stream_of(writable))
            del got
            assert np.array_equal(writable.back(request.wait()), each + 10)
            assert np.array_equal(writable.back(read), each)


@pytest.mark.filterwarnings("ignore:the request made:RuntimeWarning")
@each_rank_of()
def test_a_request_that_nobody_waits_for_keeps_its_memory(comm, writable) -> None:
    begun(comm, writable)
    with writable.side():
        x = writable.make(np.full(LENGTH, comm.rank + 1, np.float32))
        if comm.rank == 0:
            request = comm.iallreduce(x)
            del request, x
            other = writable.make(np.full(LENGTH, 100, np.float32))
            assert (writable.back(other) == 100).all()
        else:
            time.sleep(LATE)
            assert (writable.back(comm.iallreduce(x).wait()) == sum(range(comm.size + 1))).all()
    comm.barrier()
