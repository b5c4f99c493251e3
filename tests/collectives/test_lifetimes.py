"""No call keeps an array alive: it is freed with its last reference, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm.testing import run
from tests.support.frameworks import need
from tests.support.on_ranks import alone


class _Shown:
    """Shows an array by one protocol."""

    def __init__(self, array: Any) -> None:
        self.array = array


class Versioned(_Shown):
    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Unversioned(Versioned):
    def __dlpack__(self, stream: Any = None) -> Any:
        return self.array.__dlpack__()


class WithoutKeywords(Versioned):
    def __dlpack__(self) -> Any:
        return self.array.__dlpack__()


class Interface(_Shown):
    @property
    def __array_interface__(self) -> Any:
        return self.array.__array_interface__


class RefusedThenInterface(Interface):
    """Has a first protocol that fails, and a second that works."""

    def __dlpack__(self, **keywords: Any) -> Any:
        raise BufferError("not this one")

    def __dlpack_device__(self) -> Any:
        return 1, 0


class Struct(_Shown):
    @property
    def __array_struct__(self) -> Any:
        return self.array.__array_struct__


class CudaInterface(Interface):
    """On a machine without CuPy, or with a wrong interface, the next protocol is taken."""

    @property
    def __cuda_array_interface__(self) -> Any:
        return {**self.array.__array_interface__, "mask": None}


class Array(np.ndarray):
    """A NumPy array, of which there are weak references."""


def _buffer(array: Any) -> Any:
    import array as module

    class Buffer(module.array):
        pass

    return Buffer("d", array.tolist())


def _torch(array: Any) -> Any:
    return need("torch").from_numpy(array.copy())


DOORS: dict[str, Callable[[Any], Any]] = {
    "versioned": Versioned,
    "unversioned": Unversioned,
    "without keywords": WithoutKeywords,
    "interface": Interface,
    "second protocol": RefusedThenInterface,
    "struct": Struct,
    "cuda": CudaInterface,
    "buffer": _buffer,
    "numpy": lambda array: array.copy().view(Array),
    "torch": _torch,
    "jax": lambda array: need("jax").numpy.asarray(array.astype(np.float32)),
}


def _raises(error: type[Exception], call: Callable[[], Any]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


def _fail(a: Any, b: Any) -> Any:
    raise KeyError("of the user's")


def _plan(comm: Communicator, x: Any) -> None:
    plan = comm.plan({"x": x})
    plan({"x": x})
    _raises(ValueError, lambda: plan({"y": x}))
    comm.allreduce(1)


def _messages(comm: Communicator, x: Any) -> None:
    other = 1 - comm.rank
    comm.sendrecv(x, other, other)
    sending = comm.isend(x, other)
    comm.recv(other)
    sending.wait()
    _raises(ValueError, lambda: comm.send(x, 7))


def _request(comm: Communicator, x: Any) -> None:
    request = comm.iallreduce(x, "avg")
    for _ in range(2):
        _raises(ValueError, request.wait)


CALLS: dict[str, Callable[[Communicator, Any], Any]] = {
    "allreduce": lambda c, x: [c.allreduce(x) for _ in range(3)],
    "allreduce of op": lambda c, x: c.allreduce(x, "max"),
    "iallreduce": lambda c, x: c.iallreduce(x).wait(),
    "reduce": lambda c, x: c.reduce(x, ac.op(lambda a, b: a + b)),
    "op raises": lambda c, x: _raises(
        KeyError if c.rank == 0 else ac.PeerError, lambda: c.allreduce(x, ac.op(_fail))
    ),
    "bcast": lambda c, x: c.bcast(x, 1),
    "bcast to none": lambda c, x: c.bcast(x if c.rank else None, 1),
    "like": lambda c, x: c.bcast(np.ones(2, "f4") if c.rank else None, 1, like=x),
    "allgather": lambda c, x: c.allgather(x),
    "allgatherv": lambda c, x: c.allgatherv(x),
    "gather": lambda c, x: c.gather(x),
    "scatter": lambda c, x: c.scatter(x),
    "alltoallv": lambda c, x: c.alltoallv(x, [1, 1]),
    "scan": lambda c, x: c.scan(x),
    "tree": lambda c, x: ac.allreduce_tree({"x": [x, 1.0]}, comm=c),
    "gradients": lambda c, x: ac.allreduce_gradients(
        [x, None if c.rank else np.ones(1, "f4")], comm=c
    ),
    "synchronize": lambda c, x: ac.synchronize([x, 1], comm=c),
    "metrics": lambda c, x: ac.mean_metrics([x], 1.0, comm=c),
    "plan": _plan,
    "messages": _messages,
    "exchange": lambda c, x: ac.exchange(x, "numpy"),
    "wrong op": lambda c, x: _raises(ValueError, lambda: c.allreduce(x, "avg")),
    "wrong on one": lambda c, x: _raises(
        ac.PeerError if c.rank else ValueError, lambda: c.allreduce(x, "sum" if c.rank else "avg")
    ),
    "wrong out": lambda c, x: _raises(ValueError, lambda: c.allreduce(x, out=np.ones(7))),
    "late out": lambda c, x: _raises(ValueError, lambda: c.allgatherv(x, out=np.ones(7))),
    "wrong tree": lambda c, x: _raises(TypeError, lambda: ac.allreduce_tree([x, "a"], comm=c)),
    "request raises": _request,
    "together": lambda c, x: _raises(ValueError, lambda: _together(c, x)),
    "not exchanged": lambda c, x: _raises(ValueError, lambda: ac.exchange(x, "nothing")),
}


def _together(comm: Communicator, x: Any) -> None:
    with ac.raise_together(comm):
        raise ValueError(comm.rank if len(np.shape(x)) else 0)


@pytest.fixture(scope="module")
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@alone
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize("door", DOORS)
def test_arrays_are_freed_with_their_last_reference(door: str) -> None:
    def check(comm: Communicator) -> list[str]:
        alive = []
        for name, call in CALLS.items():
            x = DOORS[door](np.ones(2))
            seen = weakref.ref(x)
            call(comm, x)
            del x
            if seen() is not None:
                alive.append(name)
        return alive

    assert run(2, check) == [[], []]
