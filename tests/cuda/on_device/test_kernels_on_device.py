"""The kernels on a device against the folds of the host, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from arraycomm import _folds
from arraycomm._arrays.device_memory import DeviceBuffer
from arraycomm._cuda.kernels import MAX_PIECES, MAX_ROWS
from tests.cuda.test_kernels import _CARRIED as CARRIED
from tests.support.guarded import values as values_of
from tests.support.oracle import CASES, IDS, same_result

Array = np.ndarray[Any, Any]

GUARD = 0x5A
EDGE = 256


@pytest.fixture(scope="module")
def memory(device_number: int) -> Any:
    from arraycomm._cuda.device import CudaMemory

    memory = CudaMemory(device_number)
    return memory.at(memory.own_stream)


class Guarded:
    """Elements on the device, between bytes that nobody may write."""

    def __init__(self, memory: Any, array: Array, offset: int = 0) -> None:
        self.memory, self.start = memory, EDGE + offset
        whole = np.full(array.nbytes + 2 * EDGE + offset, GUARD, np.uint8)
        whole[self.start : self.start + array.nbytes] = array.reshape(-1).view(np.uint8)
        self.whole = memory.upload(whole)
        part = self.whole[self.start : self.start + array.nbytes]
        self.device_buffer: DeviceBuffer = part.view(array.dtype)

    def read(self) -> Array:
        """Return the elements, and fail where something beside them was written."""
        found = np.empty(self.whole.size, np.uint8)
        self.memory.download(self.whole, found)
        end = self.start + self.device_buffer.nbytes
        assert (found[: self.start] == GUARD).all()
        assert (found[end:] == GUARD).all()
        return found[self.start : end].copy().view(self.device_buffer.dtype)


def check_fold(
    memory: Any, dtype: Any, op: str, rows: Sequence[Array], offsets: Sequence[int]
) -> None:
    want = np.empty(rows[0].size, dtype)
    _folds.fold(op, dtype, rows, want)
    there = [Guarded(memory, row, at) for row, at in zip(rows, offsets, strict=True)]
    out = Guarded(memory, np.full(want.nbytes, GUARD, np.uint8).view(dtype), offsets[-1])
    memory.fold(op, dtype, [row.device_buffer for row in there], out.device_buffer)
    assert same_result(out.read(), want, op)
    assert [row.read().tobytes() for row in there] == [row.tobytes() for row in rows]
    memory.fold(op, dtype, [row.device_buffer for row in there], there[0].device_buffer)
    assert same_result(there[0].read(), want, op)


def check_prefixes(
    memory: Any, dtype: Any, op: str, rows: Sequence[Array], offsets: Sequence[int]
) -> None:
    wanted = [np.empty(rows[0].size, dtype) for _ in rows]
    _folds.prefixes(op, dtype, rows, wanted)
    there = [Guarded(memory, row, at) for row, at in zip(rows, offsets, strict=True)]
    outs = [Guarded(memory, np.zeros_like(row), at) for row, at in zip(rows, offsets, strict=True)]
    memory.prefixes(
        op, dtype, [row.device_buffer for row in there], [out.device_buffer for out in outs]
    )
    for out, want in zip(outs, wanted, strict=True):
        assert same_result(out.read(), want, op)


both = pytest.mark.parametrize("check", [check_fold, check_prefixes], ids=["fold", "prefixes"])
cases = pytest.mark.parametrize(("dtype", "op"), CASES, ids=IDS)


@both
@cases
def test_kernels_do_what_the_host_does(memory: Any, dtype: Any, op: str, check: Any) -> None:
    """Also where memory is aligned to elements only."""
    for count, many in [(0, 3), (1, 4), (7, 1), (7, 5), (1000, 70), (300_001, 3)]:
        rows = [values_of(dtype, count, rank) for rank in range(many)]
        check(memory, dtype, op, rows, [0] * many)
    rows = [values_of(dtype, 1000, rank) for rank in range(3)]
    check(memory, dtype, op, rows, [rank * dtype.alignment for rank in range(3)])


@both
@pytest.mark.parametrize(("dtype", "op"), CARRIED, ids=str)
def test_rows_of_several_launches_are_rounded_once(memory, dtype, op, check) -> None:
    many = 2 * MAX_ROWS + 3
    check(memory, dtype, op, [values_of(dtype, 37, rank) for rank in range(many)], [0] * many)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_subnormal_numbers_are_kept(memory: Any, dtype: str) -> None:
    tiny = np.finfo(np.empty(0, dtype).real.dtype).smallest_subnormal
    row = np.full(1000, tiny, dtype)
    out = Guarded(memory, np.zeros_like(row))
    memory.fold(
        "sum", row.dtype, [Guarded(memory, row).device_buffer for _ in range(3)], out.device_buffer
    )
    assert (out.read() == 3 * tiny).all()


def test_there_may_be_more_than_two_to_the_31_elements(memory: Any) -> None:
    import cupy

    count = (1 << 31) + 5
    if cupy.cuda.runtime.memGetInfo()[0] < 10 * count:
        pytest.skip("too little memory is free on the device")
    memory = memory.at(0)
    try:
        x, y = cupy.full(count, 100, "int8"), cupy.empty(count, "int8")
        x[-1] = 27
        source, target = (
            DeviceBuffer(a.data.ptr, count, np.dtype("int8"), a, memory) for a in (x, y)
        )
        memory.fold("sum", source.dtype, [source, source], target)
        assert int(y[-1]) == 54
        assert bool((y[:-1] == -56).all())
        y.fill(0)
        memory.gather_pieces([(source.view("u1"), 0, count)], target.view("u1"))
        assert int(y[-1]) == 27
        assert bool((y[:-1] == 100).all())
    finally:
        cupy.get_default_memory_pool().free_all_blocks()


def test_pieces_of_several_launches_are_gathered(memory: Any) -> None:
    values = np.arange(5 * MAX_PIECES + 1, dtype=np.int64)
    source, target = Guarded(memory, values), Guarded(memory, np.zeros_like(values))
    pieces = [(source.device_buffer[k : k + 1].view("u1"), 8 * k, 8) for k in range(len(values))]
    memory.gather_pieces(pieces, target.device_buffer.view("u1"))
    assert np.array_equal(target.read(), values)
