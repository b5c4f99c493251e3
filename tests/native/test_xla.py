"""The handler of XLA's programs, called as XLA calls it: without the GIL, and Python if it has to be."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._native import compiled
from arraycomm._transports.threads import make_group
from tests.support import internals

if compiled is None:
    pytest.skip("the native part was not built, or is not to be used", allow_module_level=True)

_PREFIX: Final = [("struct_size", ctypes.c_size_t), ("extensions", ctypes.c_void_p)]
_LIMIT: Final = 30


class _Buffer(ctypes.Structure):
    _fields_ = [*_PREFIX, ("dtype", ctypes.c_int), ("data", ctypes.c_void_p)]


class _Scalar(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int), ("value", ctypes.POINTER(ctypes.c_uint64))]


class _List(ctypes.Structure):
    _fields_ = [
        *_PREFIX,
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("items", ctypes.c_void_p),
    ]


class _Attributes(ctypes.Structure):
    _fields_ = [*_List._fields_[:-1], ("names", ctypes.c_void_p), ("items", ctypes.c_void_p)]


class _Error(ctypes.Structure):
    _fields_ = [*_PREFIX, ("message", ctypes.c_char_p), ("code", ctypes.c_int)]


class _Interface(ctypes.Structure):
    _fields_ = [
        *_PREFIX,
        ("version", ctypes.c_byte * 24),
        ("internal", ctypes.c_void_p),
        ("create_error", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Error))),
    ]


class _Frame(ctypes.Structure):
    _fields_ = [
        *_PREFIX,
        ("interface", ctypes.POINTER(_Interface)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _List),
        ("results", _List),
        ("attributes", _Attributes),
    ]


def _handler() -> Any:
    take = ctypes.pythonapi.PyCapsule_GetPointer
    take.restype, take.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = take(compiled.xla_handler, b"xla._CUSTOM_CALL_TARGET")
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)


def _pointers(*items: Any) -> Any:
    return (ctypes.c_void_p * len(items))(*(ctypes.addressof(item) for item in items))


class _Xla:
    """Calls the handler with arrays, and raises the errors that it returns."""

    def __init__(self) -> None:
        self._handler = _handler()

    def __call__(self, address: int, x: Any, out: Any, dtype: int = 9) -> None:
        messages = []

        def create(error: Any) -> int:
            messages.append(error.contents.message.decode())
            return 1

        interface = _Interface(create_error=_Interface._fields_[-1][1](create))
        token = _Buffer()
        buffers = [_Buffer(data=array.ctypes.data) for array in (x, out)]
        number = ctypes.c_uint64(address)
        scalar = _Scalar(dtype, ctypes.pointer(number))
        arguments, results, attributes = (
            _pointers(token, buffers[0]),
            _pointers(buffers[1], token),
            _pointers(scalar),
        )
        frame = _Frame(
            interface=ctypes.pointer(interface),
            arguments=_List(size=2, items=ctypes.addressof(arguments)),
            results=_List(size=2, items=ctypes.addressof(results)),
            attributes=_Attributes(
                size=1, types=ctypes.pointer(ctypes.c_int(3)), items=ctypes.addressof(attributes)
            ),
        )
        failed = self._handler(ctypes.addressof(frame))
        assert bool(failed) == bool(messages)
        if messages:
            raise RuntimeError(messages[0])


class _Rank:
    """A rank whose small reductions are made as those of a program."""

    def __init__(self, comm: Communicator, like: Any, op: str = "sum") -> None:
        self.comm, self._like, self._op = comm, like, op
        self.whole = self.ends = 0
        self.call = compiled.ProgramCall(self._in_python, like.nbytes)
        self.xla = _Xla()

    def _in_python(self, begun: Any, x: memoryview, out: memoryview) -> None:
        arrays = [np.ndarray(self._like.shape, self._like.dtype, memory) for memory in (x, out)]
        if begun is not None:
            self.ends += 1
            begun.go_on(*arrays)
            return
        self.whole += 1
        self.comm.allreduce(arrays[0], self._op, out=arrays[1])
        exchange = internals.exchange(self.comm, arrays[0], self._op)
        if exchange is not None:
            self.call.use(exchange)

    def reduce(self, x: Any) -> Any:
        out = np.empty_like(x)
        self.xla(self.call.address(), x, out)
        return out


def _ranks(size: int, like: Any, op: str = "sum") -> list[_Rank]:
    return [_Rank(internals.communicator(member), like, op) for member in make_group(size)]


def _each(ranks: list[_Rank], function: Callable[[_Rank], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        futures = [threads.submit(function, rank) for rank in ranks]
        return [future.result(_LIMIT) for future in futures]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "like", [np.empty(3, np.float32), np.empty((2, 5), np.int16), np.empty((), np.complex128)]
)
def test_reductions_are_right_and_need_python_once(size: int, like: Any) -> None:
    def many(rank: _Rank) -> None:
        for turn in range(50):
            if turn % 10 == rank.comm.rank:
                time.sleep(0.002)
            x = np.full_like(like, turn + rank.comm.rank)
            want = np.full_like(like, sum(turn + r for r in range(size)))
            assert (rank.reduce(x) == want).all()
            assert internals.completed(rank.comm) == internals.steps(rank.comm)

    ranks = _ranks(size, like)
    _each(ranks, many)
    assert [rank.whole for rank in ranks] == [1] * size
    assert [rank.comm.stats()["allreduce"]["calls"] for rank in ranks] == [50] * size


def test_another_call_on_one_rank_raises_on_all() -> None:
    def different(rank: _Rank) -> str:
        x = np.ones(2)
        rank.reduce(x)
        with pytest.raises((RuntimeError, ac.MismatchError)) as caught:
            rank.comm.allreduce(x, "max") if rank.comm.rank == 1 else rank.reduce(x)
        assert not internals.engine(rank.comm).turn.locked()
        return str(caught.value)

    for text in _each(_ranks(3, np.empty(2)), different):
        assert "allreduce" in text
        assert "max" in text


def test_python_makes_what_the_native_part_must_not() -> None:
    [rank] = _ranks(1, np.empty(2))
    turn, queue = internals.engine(rank.comm).turn, internals.engine(rank.comm).queue
    rank.reduce(np.ones(2))
    assert turn.acquire(False)
    with pytest.raises(RuntimeError, match="two threads called one communicator"):
        rank.reduce(np.ones(2))
    turn.release()
    rank.reduce(np.ones(2))
    assert rank.whole == 2
    queue.append(None)
    try:
        with pytest.raises(RuntimeError):
            rank.reduce(np.ones(2))
    finally:
        queue.clear()
    assert not turn.locked()
    assert rank.whole == 3
    rank.comm.free()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the communicator is closed"):
            rank.reduce(np.ones(2))


def test_errors_come_back_as_texts() -> None:
    def fail(*_: Any) -> None:
        raise ValueError("wrong: ä")

    xla, x = _Xla(), np.ones(2)
    call = compiled.ProgramCall(fail, x.nbytes)
    with pytest.raises(RuntimeError, match="wrong: ä"):
        xla(call.address(), x, x)
    with pytest.raises(RuntimeError, match="something else than a token and an array"):
        xla(call.address(), x, x, dtype=5)
    with pytest.raises(TypeError, match="by an Exchange"):
        call.use(None)
    [rank] = _ranks(1, np.empty(2))
    rank.comm.allreduce(x)
    exchange = internals.exchange(rank.comm, x, "sum")
    for wrong in (np.ones(3), None):
        with pytest.raises(ValueError, match="not an array of the reduction"):
            exchange.go_on(x, wrong)


def test_no_reduction_is_made_once_an_exchange_has_been_retired() -> None:
    """One thread reduces again and again, and another one takes the exchange away."""
    [rank] = _ranks(1, np.empty(2))
    ended, seen = threading.Event(), 0

    def reduce() -> None:
        while not ended.is_set():
            rank.reduce(np.ones(2))

    thread = threading.Thread(target=reduce)
    thread.start()
    try:
        for _ in range(100):
            exchange = internals.exchange(rank.comm, np.ones(2), "sum")
            if exchange is None:
                time.sleep(0.0001)
                continue
            internals.forget_fast_paths(rank.comm)
            calls, _ = exchange.counts()
            time.sleep(0.0005)
            assert exchange.counts()[0] == calls
            seen += 1
    finally:
        ended.set()
        thread.join(_LIMIT)
    assert seen
    assert sys.getrefcount(rank.call) < 5
