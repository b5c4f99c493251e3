from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._calls.statistics import Statistics
from arraycomm._communicator import Communicator
from tests.support.on_ranks import each_rank_of


@each_rank_of("few")
def test_objects_of_many_bytes_come_back_as_copies(comm: Communicator) -> None:
    objects = ["x" * (3_000_000 if r == comm.size - 1 else r) for r in range(comm.size)]
    assert comm.allgather_object(objects[comm.rank]) == objects
    for root in range(comm.size):
        sent = [objects[root]] if comm.rank == root else None
        got = comm.bcast_object(sent, root)
        assert got == [objects[root]]
        assert got is not sent
        gathered = comm.gather_object(objects[comm.rank], root)
        assert gathered == (objects if comm.rank == root else None)


@each_rank_of("few")
def test_statistics_count_calls_bytes_and_copies(comm: Communicator) -> None:
    # Larger than what travels with a header.
    x = np.ones((200, 200))
    comm.allreduce(x)
    comm.allreduce(x.T)
    comm.allreduce(x[:1, :3].copy())
    comm.allreduce(x[:1, :3].copy())
    numbers = comm.stats()["allreduce"]
    assert numbers["calls"] == 4
    assert numbers["bytes"] == 2 * x.nbytes + 48
    assert numbers["copies"] == 1
    assert numbers["seconds"] > 0
    ac.println("x", comm=comm)
    assert comm.stats()["println"]["calls"] == 1


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


@pytest.mark.parametrize("name", ["uint16", "uint64", "float8_e4m3fn"])
@each_rank_of("few", "torch")
def test_tensors_that_torch_cannot_unpickle(comm: Communicator, name, torch) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    root = comm.size - 1
    sent = {"weights": [tensor, tensor]} if comm.rank == root else None
    for got in (comm.bcast_object(sent, root), ac.synchronize(sent, root=root, comm=comm)):
        first, second = got["weights"]
        assert first.dtype == tensor.dtype
        assert first.float().tolist() == tensor.float().tolist()
        assert first is second


def test_lines_are_printed_by_rounds_and_ranks(on_ranks, few, capsys) -> None:
    def check(comm: Communicator) -> None:
        for number in range(50):
            ac.println("round", number, "x" * comm.rank, comm=comm)

    on_ranks(few, check)
    # Under MPI rank 0 alone has them.
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    if lines:
        texts = [f"[{r}/{few}] round {n} {'x' * r}" for n in range(50) for r in range(few)]
        assert lines == texts
