"""A call leaves nothing behind on its arguments: no reference, no exported buffer, no tensor that cannot be resized."""

from __future__ import annotations

import array as array_module
import functools
import gc
import mmap
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm.testing import run
from tests.support.frameworks import need
from tests.support.on_ranks import LAUNCH, alone, each_rank_of

LIMIT = 10.0


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """What only the garbage collector would find is left behind."""
    gc.disable()
    yield
    gc.enable()


# What is called


def _raises(error: type[Exception], call: Callable[[], Any]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


def _fail(a: Any, b: Any) -> Any:
    raise KeyError("of the user's")


def _plan(comm: Communicator, x: Any) -> None:
    plan = comm.plan({"x": x}, "sum")
    for _ in range(2):
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


def _together(comm: Communicator, x: Any) -> None:
    with ac.raise_together(comm):
        raise ValueError(comm.rank if len(np.shape(x)) else 0)


# On two ranks.
CALLS: dict[str, Callable[[Communicator, Any], Any]] = {
    "allreduce": lambda c, x: [c.allreduce(x) for _ in range(3)],
    "allreduce of op": lambda c, x: c.allreduce(x, "max"),
    "requests": lambda c, x: [r.wait() for r in (c.iallreduce(x), c.ibcast(x))],
    "reduce": lambda c, x: c.reduce(x),
    "own op": lambda c, x: c.reduce(x, ac.op(lambda a, b: b)),
    "op raises": lambda c, x: _raises(
        KeyError if c.rank == 0 else ac.PeerError, lambda: c.allreduce(x, ac.op(_fail))
    ),
    "bcast": lambda c, x: c.bcast(x, 1),
    "bcast to none": lambda c, x: c.bcast(x if c.rank else None, 1),
    "allgather": lambda c, x: c.allgather(x),
    "allgatherv": lambda c, x: c.allgatherv(x),
    "gather": lambda c, x: c.gather(x),
    "scan": lambda c, x: c.scan(x),
    "tree": lambda c, x: ac.allreduce_tree({"x": [x, 1]}, "sum", comm=c),
    "gradients": lambda c, x: ac.allreduce_gradients([x], "sum", comm=c),
    "synchronize": lambda c, x: ac.synchronize([x, 1], comm=c),
    "plan": _plan,
    "messages": _messages,
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
# With two elements of a floating dtype; `exchange` shares memory for as long as its result is there.
OF_TWO: dict[str, Callable[[Communicator, Any], Any]] = {
    "like": lambda c, x: c.bcast(np.ones(2, "f4") if c.rank else None, 1, like=x),
    "scatter": lambda c, x: c.scatter(x),
    "alltoallv": lambda c, x: c.alltoallv(x, [1, 1]),
    "missing": lambda c, x: ac.allreduce_gradients(
        [x, None if c.rank else np.ones(1, "f4")], comm=c
    ),
    "exchange": lambda c, x: ac.exchange(x, "numpy"),
    "metrics": lambda c, x: ac.mean_metrics([x], 1.0, comm=c),
}


# What is passed, by every protocol


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


class Buffer(array_module.array):
    """A buffer, of which there are weak references."""


DOORS: dict[str, Callable[[Any], Any]] = {
    "versioned": Versioned,
    "unversioned": Unversioned,
    "without keywords": WithoutKeywords,
    "interface": Interface,
    "second protocol": RefusedThenInterface,
    "struct": Struct,
    "cuda": CudaInterface,
    "buffer": lambda array: Buffer("d", array.tolist()),
    "numpy": lambda array: array.copy().view(Array),
    "torch": lambda array: need("torch").from_numpy(array.copy()),
    "jax": lambda array: need("jax").numpy.asarray(array.astype(np.float32)),
}


@alone
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", DOORS)
def test_arrays_are_freed_with_their_last_reference(door: str) -> None:
    def check(comm: Communicator) -> list[str]:
        alive = []
        for name, call in (CALLS | OF_TWO).items():
            x = DOORS[door](np.ones(2))
            seen = weakref.ref(x)
            call(comm, x)
            del x
            if seen() is not None:
                alive.append(name)
        return alive

    assert run(2, check) == [[], []]


# What their owners do with arrays later


def _tensor(n: int, **more: Any) -> Any:
    return need("torch").ones(n, **more)


def _resize(x: Any) -> None:
    x.data.resize_(x.numel() + 100)


@functools.cache
def _donated() -> Any:
    return need("jax").jit(lambda x: x + 1, donate_argnums=0)


def _donate(x: Any) -> None:
    memory = x.unsafe_buffer_pointer()
    assert _donated()(x).unsafe_buffer_pointer() == memory


# How arrays are made, and what their owner does with one.
KINDS: dict[str, tuple[Callable[[int], Any], Callable[[Any], object]]] = {
    "numpy": (np.ones, lambda x: None),
    "bytearray": (bytearray, lambda x: x.extend(b"more")),
    "array": (lambda n: array_module.array("d", [1.0] * n), lambda x: x.append(1.0)),
    "mmap": (lambda n: mmap.mmap(-1, n), lambda x: x.close()),
    "torch": (_tensor, _resize),
    "torch parameter": (
        lambda n: need("torch").nn.Parameter(_tensor(n), requires_grad=False),
        _resize,
    ),
    "torch bfloat16": (lambda n: _tensor(n, dtype=need("torch").bfloat16), _resize),
    "torch strided": (lambda n: _tensor(2 * n)[::2], _resize),
    "jax": (lambda n: need("jax").numpy.full(n, 1.0), _donate),
}


# Whatever carries them between processes gets bytes of all kinds alike.
@pytest.mark.parametrize("kind", KINDS if LAUNCH is None else ["bytearray", "torch", "jax"])
@each_rank_of(2)
def test_arguments_are_their_owners_again(comm: Communicator, kind) -> None:
    make, use = KINDS[kind]
    into = {"out": lambda comm, x: comm.allreduce(ac.exchange(x, "numpy", copy=True), out=x)}
    for length in (240, 60_000):
        for name, call in (CALLS if kind == "jax" else CALLS | into).items():
            x = make(length)
            before = sys.getrefcount(x)
            call(comm, x)
            # Threads of requests may be about to let go of it.
            until = time.monotonic() + LIMIT
            while sys.getrefcount(x) > before and time.monotonic() < until:
                time.sleep(0.01)
            assert sys.getrefcount(x) == before, name
            try:
                use(x)
            except Exception as error:
                raise AssertionError(f"after {name}: {error}") from error


@each_rank_of("few", "torch")
def test_results_of_torch_can_be_resized(comm: Communicator, torch) -> None:
    for length in (240, 60_000):
        for x in (_tensor(length), _tensor(length, dtype=torch.bfloat16)):
            for call in 2 * (comm.allreduce, comm.bcast, comm.allgather, comm.scan):
                _resize(call(x))


@alone
def test_tensors_whose_memory_numpy_shares_stay_and_copied_ones_do_not() -> None:
    torch = need("torch")
    strided = _tensor(6)[::2]
    for x in (_tensor(3), _tensor(3, dtype=torch.bfloat16), strided):
        shared = ac.exchange(x, "numpy")
        with pytest.raises(RuntimeError, match="not resizable"):
            _resize(x)
        assert (shared == 1).all()
    x = _tensor(6)[::2]
    ac.exchange(x, "numpy", copy=True)
    _resize(x)
    need("jax")
    # JAX copies memory that is not aligned to 64 bytes.
    x = _tensor(300)[1:]
    ac.exchange(x, "jax")
    _resize(x)
