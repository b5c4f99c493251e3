from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._calls.statistics import Statistics
from arraycomm._communicator import Communicator
from tests.support.on_ranks import each_rank_of


def test_figures_can_be_read_while_another_thread_counts() -> None:
    class Numbers(list[float]):
        def __iter__(self) -> Iterator[float]:
            statistics.count("another")
            return super().__iter__()

    statistics = Statistics()
    statistics._totals = {"first": Numbers([1, 2, 3, 4.0])}
    assert statistics.by_name()["first"]["calls"] == 1


class FailsOnRankOne:
    """Unpickles everywhere but in the thread or process of rank 1."""

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickle, ()


_local = threading.local()


def _unpickle() -> str:
    if _local.rank == 1:
        raise ZeroDivisionError("only here")
    return "fine"


@pytest.mark.parametrize("length", [0, 100_000])
@each_rank_of(3)
def test_object_that_one_rank_cannot_unpickle_concerns_that_rank_alone(
    comm: Communicator, length
) -> None:
    _local.rank = comm.rank
    sent = (FailsOnRankOne(), "x" * length)
    calls = {
        "root": lambda: comm.gather_object(sent, 1),
        "one of all": lambda: comm.bcast_object(sent, 0),
        "each": lambda: comm.allgather_object(sent),
    }
    # The third call is prepared.
    for where, call in [*calls.items()] * 3:
        if comm.rank == 1:
            with pytest.raises(ZeroDivisionError, match="only here") as caught:
                call()
            assert len(caught.value.__notes__) == 1
        else:
            assert ("fine" in str(call())[:100]) == (where != "root")
        assert comm.allreduce(1) == comm.size


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("bcast_object", lambda c, obj: c.bcast_object(obj, 1)),
        ("gather_object", lambda c, obj: c.gather_object(obj, 0)),
        ("allgather_object", lambda c, obj: c.allgather_object(obj)),
        ("synchronize", lambda c, obj: ac.synchronize(obj if c.rank else None, root=1, comm=c)),
        ("synchronize", lambda c, obj: ac.synchronize([1.5, obj], root=1, comm=c)),
    ],
)
@each_rank_of(3)
def test_object_that_cannot_be_pickled(comm: Communicator, operation, call, error) -> None:
    class Unpicklable(str):
        __slots__ = ()

        def __reduce__(self) -> str:
            raise error("no pickle of this")

    obj = Unpicklable() if comm.rank == 1 else "a"
    wanted = rf"(obj|tree) cannot be pickled \({error.__name__}: no pickle of this\); send"
    with pytest.raises(
        TypeError if comm.rank == 1 else ac.PeerError,
        match=rf"{operation}: .*{wanted}|{operation}: rank 1 raised",
    ):
        call(comm, obj)
    assert comm.allreduce(1) == comm.size


@each_rank_of("few")
def test_array_that_can_be_looked_at_once_only_is_reduced(comm: Communicator) -> None:
    class Once:
        dtype, shape = np.dtype("f8"), [2]

        def __init__(self) -> None:
            self._array = np.ones(2)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self._array.__dlpack_device__()

        def __dlpack__(self, **keywords: object) -> object:
            capsule = self._array.__dlpack__(**keywords)
            self._array = None
            return capsule

    for _ in range(2):
        assert comm.allreduce(Once()).tolist() == [comm.size] * 2


@pytest.mark.parametrize(
    "name", ["uint16", "uint64", "float8_e4m3fn", "float8_e8m0fnu", "complex32"]
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@each_rank_of("few", "torch")
def test_tensors_that_torch_cannot_unpickle(comm: Communicator, name, torch) -> None:
    tensor = torch.tensor([[0, 1, 2], [4, 8, 16]]).to(getattr(torch, name)).t()
    root = comm.size - 1
    sent = {"weights": [tensor, tensor]} if comm.rank == root else None
    trees = [comm.bcast_object(sent, root)]
    if name not in ("float8_e8m0fnu", "complex32"):  # which no tree takes
        trees.append(ac.synchronize(sent, root=root, comm=comm))
    for got in trees:
        first, second = got["weights"]
        assert first.dtype == tensor.dtype
        assert first.cfloat().tolist() == tensor.cfloat().tolist()
        assert first is second
    kept = comm.bcast_object(tensor.untyped_storage() if comm.rank == root else None, root)
    assert bytes(kept) == bytes(tensor.untyped_storage())
