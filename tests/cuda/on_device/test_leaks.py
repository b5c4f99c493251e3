"""Many collectives, and many communicators made and freed: what a rank holds stays flat."""

from __future__ import annotations

import gc
import os
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from arraycomm._arrays import pinned
from tests.cuda.on_device.conftest import Framework
from tests.support import internals
from tests.support.on_ranks import each_rank_of

MIB = 1 << 20


class Held(NamedTuple):
    """Bytes in use on the device by everyone, kept by CuPy's pool, kept pinned; open files."""

    device: int
    pool: int
    pinned: int
    files: int


def held(comm: Communicator) -> Held:
    """Measure, with all ranks at rest."""
    import cupy

    comm.barrier()
    gc.collect()
    cupy.cuda.runtime.deviceSynchronize()
    comm.barrier()
    free, total = cupy.cuda.runtime.memGetInfo()
    files = len(os.listdir("/proc/self/fd"))
    pool = cupy.get_default_memory_pool().total_bytes()
    found = Held(total - free, pool, pinned.pinned(cupy.cuda.Device().id)._kept, files)
    comm.barrier()
    return found


def small_calls(comm: Communicator, framework: Framework, number: int) -> None:
    """Make some collectives of several kinds, and look at a result now and then."""
    x = framework.make(np.full((comm.size, 300), comm.rank + 1, np.float32))
    whole = framework.make(np.full((comm.size, 300), 3, np.int32))
    for turn in range(number // 8):
        got = comm.allreduce(x)
        comm.allreduce(whole)
        comm.allgather(x)
        comm.bcast(x, turn % comm.size)
        comm.reduce_scatter(x)
        comm.scan(x)
        comm.iallreduce(x).wait()
        ac.allreduce_tree({"a": x, "b": whole}, "sum", comm=comm)
        if turn % 10 == 0:
            assert (framework.back(got) == sum(range(comm.size + 1))).all()


def check_flat(before: Held, after: Held, device: int = 4 * MIB) -> None:
    assert after.device <= before.device + device, (before, after)
    assert after.pool <= before.pool + MIB, (before, after)
    assert after.pinned <= before.pinned + MIB, (before, after)
    assert after.files <= before.files + 2, (before, after)


@each_rank_of()
def test_calls_hold_nothing(comm, framework) -> None:
    # The same calls twice: the first time, CUDA loads what they use, and keeps it.
    small_calls(comm, framework, 4000)
    before = held(comm)
    small_calls(comm, framework, 4000)
    check_flat(before, held(comm))


@each_rank_of(by="nccl_job")
def test_side_streams_hold_nothing(comm, writable) -> None:
    """One stream after another, whose memory the pools keep apart, but only so much of it."""
    import cupy

    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    torch = pytest.importorskip("torch") if writable.name == "torch" else None

    def turn() -> None:
        for stream in streams:
            there: Any = stream
            if torch is not None:
                there = torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr))
            with there:
                small_calls(comm, writable, 80)

    for _ in range(5):
        turn()
    before = held(comm)
    for _ in range(5):
        turn()
    check_flat(before, held(comm))


def made_and_freed(comm: Communicator, x: Any, number: int) -> None:
    for turn in range(number):
        made = comm.split(0, -comm.rank) if turn % 2 else comm.dup()
        assert made is not None
        made.allreduce(x)
        made.free()


@each_rank_of(by="nccl_job")
def test_communicators_hold_nothing(comm, framework) -> None:
    x = framework.make(np.ones(1000, np.float32))
    made_and_freed(comm, x, 4)
    before = held(comm)
    with comm.dup() as one:
        one.allreduce(x)
        cost = max(held(comm).device - before.device, 0)
    made_and_freed(comm, x, 36)
    # Far less than 36 communicators take, on each of the ranks that share the device.
    check_flat(before, held(comm), device=2 * cost + 16 * MIB)


@each_rank_of(by="nccl_job")
def test_communicators_that_fail_hold_no_files(comm, framework) -> None:
    x = framework.make(np.ones(1000, np.float32))

    def fail() -> None:
        made = comm.dup()
        made.allreduce(x)
        internals.devices(made).abort()
        internals.devices(made).abort()
        comm.barrier()

    for _ in range(3):
        fail()
    before = held(comm)
    for _ in range(10):
        fail()
    after = held(comm)
    # The hosts' side of them is not given back, with a file or two of each.
    assert after.files <= before.files + 30, (before, after)
    assert after.device <= before.device + 64 * MIB, (before, after)
