"""A call leaves nothing behind on its arguments: no reference, no exported buffer, no tensor that cannot be resized."""

from __future__ import annotations

import array
import gc
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from tests.support.frameworks import need

LIMIT = 10.0


class Kind(NamedTuple):
    """Arrays of one kind: one of this length, and what their owner does with one later."""

    make: Callable[[int], Any]
    use: Callable[[Any], object]
    needs: str | None = None


def _tensor(n: int, **more: Any) -> Any:
    return need("torch").ones(n, **more)


def _parameter(n: int) -> Any:
    return need("torch").nn.Parameter(_tensor(n), requires_grad=False)


def _halves(n: int) -> Any:
    return _tensor(n, dtype=need("torch").bfloat16)


def _every_second(n: int) -> Any:
    return _tensor(2 * n)[::2]


def _jax_array(n: int) -> Any:
    return need("jax").numpy.ones(n)


def _resize(x: Any) -> None:
    x.data.resize_(x.numel() + 100)


def _donate(x: Any) -> None:
    jax = need("jax")
    memory = x.unsafe_buffer_pointer()
    assert jax.jit(lambda x: x + 1, donate_argnums=0)(x).unsafe_buffer_pointer() == memory


KINDS = {
    "numpy": Kind(np.ones, lambda x: None),
    "bytearray": Kind(bytearray, lambda x: x.extend(b"more")),
    "array": Kind(lambda n: array.array("d", [1.0] * n), lambda x: x.append(1.0)),
    "mmap": Kind(lambda n: mmap.mmap(-1, n), lambda x: x.close()),
    "torch": Kind(_tensor, _resize, "torch"),
    "torch parameter": Kind(_parameter, _resize, "torch"),
    "torch bfloat16": Kind(_halves, _resize, "torch"),
    "torch strided": Kind(_every_second, _resize, "torch"),
    "jax": Kind(_jax_array, _donate, "jax"),
}

Call = Callable[[Communicator, Any, Any], Any]


def _ring(comm: Communicator, x: Any, other: Any) -> Any:
    return comm.sendrecv(x, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)


def _together(comm: Communicator, x: Any, other: Any) -> Any:
    return [request.wait() for request in (comm.iallreduce(x), comm.ibcast(x))]


def _planned(comm: Communicator, x: Any) -> None:
    plan = comm.plan([x], "sum")
    for _ in range(2):
        plan([x])


CALLS: dict[str, Call] = {
    "allreduce": lambda comm, x, other: [comm.allreduce(x) for _ in range(3)],
    "allreduce to out": lambda comm, x, other: comm.allreduce(other, out=x),
    "reduce": lambda comm, x, other: comm.reduce(x),
    "bcast": lambda comm, x, other: comm.bcast(x),
    "allgather": lambda comm, x, other: comm.allgather(x),
    "scan": lambda comm, x, other: comm.scan(x),
    "sendrecv": _ring,
    "requests": _together,
    "own op": lambda comm, x, other: comm.allreduce(x, ac.op(lambda a, b: b)),
    "a tree": lambda comm, x, other: ac.allreduce_tree([x], "sum", comm=comm),
    "a plan": lambda comm, x, other: _planned(comm, x),
    "gradients": lambda comm, x, other: ac.allreduce_gradients([x], "sum", comm=comm),
    "synchronize": lambda comm, x, other: ac.synchronize({"a": x}, comm=comm),
    "an error": lambda comm, x, other: _refused(lambda: comm.allreduce(x, "nothing")),
}


def _refused(call: Callable[[], Any]) -> None:
    try:
        call()
    except ValueError:
        return
    raise AssertionError("not refused")


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """What only the garbage collector would find is left behind."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("length", [240, 60_000])
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_their_owners_again(on_ranks, few, kind, length) -> None:
    make, use, needs = KINDS[kind]
    if needs is not None:
        need(needs)

    def check(comm: Communicator) -> None:
        for name, call in CALLS.items():
            x = make(length)
            if name == "allreduce to out" and kind == "jax":
                continue
            before = sys.getrefcount(x)
            call(comm, x, make(length))
            # Threads of requests may be about to let go of it.
            until = time.monotonic() + LIMIT
            while sys.getrefcount(x) > before and time.monotonic() < until:
                time.sleep(0.01)
            assert sys.getrefcount(x) == before, name
            try:
                use(x)
            except Exception as error:
                raise AssertionError(f"after {name}: {error}") from error

    on_ranks(few, check)


@pytest.mark.parametrize("length", [240, 60_000])
def test_results_of_torch_can_be_resized(on_ranks, few, length) -> None:
    need("torch")

    def check(comm: Communicator) -> None:
        for x in (_tensor(length), _halves(length)):
            for call in (comm.allreduce, comm.bcast, comm.allgather, comm.scan):
                for _ in range(2):
                    result = call(x)
                    _resize(result)

    on_ranks(few, check)


def test_tensor_whose_memory_numpy_shares_stays_where_it_is() -> None:
    for x in (_tensor(3), _halves(3), _every_second(3)):
        shared = ac.exchange(x, "numpy")
        with pytest.raises(RuntimeError, match="not resizable"):
            _resize(x)
        assert (shared == 1).all()


def test_tensor_that_exchange_has_copied_is_its_owners() -> None:
    need("torch")
    x = _every_second(3)
    ac.exchange(x, "numpy", copy=True)
    _resize(x)
    need("jax")
    # JAX copies memory that is not aligned to 64 bytes.
    x = _tensor(300)[1:]
    ac.exchange(x, "jax")
    _resize(x)
