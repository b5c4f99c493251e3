"""The tests of the systems that this library succeeds, in their strict form."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._training.batches.data import DistributedDataContainer
from tests.support.on_ranks import each_rank_of
from tests.support.oracle import DTYPES, FLOAT, expected, same_bits, sample


def test_rank_and_size_and_printing(on_ranks, few, capsys) -> None:
    def check(comm: Communicator) -> tuple[int, int]:
        ac.println("rank", comm.rank, "says", "x" * comm.rank, comm=comm)
        return comm.rank, comm.size

    assert on_ranks(few, check) == [(rank, few) for rank in range(few)]
    lines = [line for line in capsys.readouterr().out.splitlines() if "says" in line]
    if lines:
        ends = [f"[{rank}/{few}] rank {rank} says {'x' * rank}" for rank in range(few)]
        assert [line.split(" ", 1)[1] for line in lines] == ends


def test_lines_of_many_rounds_come_in_order(on_ranks, few, capsys) -> None:
    def check(comm: Communicator) -> None:
        for number in range(50):
            ac.println(f"round {number}", comm=comm)

    on_ranks(few, check)
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    if lines:
        assert lines == [f"[{r}/{few}] round {n}" for n in range(50) for r in range(few)]


@pytest.mark.parametrize("count", [0, 2, 7])
def test_container_covers_the_data_and_sums_agree(on_ranks, few, count) -> None:
    data = np.arange(count, dtype=np.float64) ** 2

    def check(comm: Communicator) -> list[float]:
        container = DistributedDataContainer(data, comm=comm)
        local = float(sum(container))
        assert comm.allreduce(len(container)) == count
        assert comm.allreduce(local) == data.sum()
        return [float(item) for item in container]

    parts = on_ranks(few, check)
    assert sorted(item for part in parts for item in part) == data.tolist()
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1


@each_rank_of("few")
def test_allreduce_of_different_values(comm: Communicator) -> None:
    for dtype in DTYPES:
        arrays = [np.full((2, 3), rank + 1).astype(dtype) for rank in range(comm.size)]
        for op in ("or",) if dtype.kind == "b" else ("sum", "prod"):
            want = expected(arrays, op)
            assert same_bits(comm.allreduce(arrays[comm.rank], op), want), (dtype, op)
            got = comm.iallreduce(arrays[comm.rank], op).wait()
            assert same_bits(got, want), (dtype, op)


@each_rank_of("few")
def test_bcast_of_two_by_three_from_every_root(comm: Communicator) -> None:
    for dtype, root in product(DTYPES, range(comm.size)):
        mine = sample(dtype, 6, comm.rank).reshape(2, 3)
        want = sample(dtype, 6, root).reshape(2, 3)
        before = mine.tobytes()
        assert same_bits(comm.bcast(mine if comm.rank == root else None, root), want), dtype
        assert same_bits(comm.bcast(mine, root), want), dtype
        assert same_bits(comm.ibcast(mine, root).wait(), want), dtype
        assert mine.tobytes() == before
        assert comm.bcast(mine, root, out=mine) is mine
        assert same_bits(mine, want), dtype


@pytest.mark.parametrize("dtype", FLOAT, ids=str)
@pytest.mark.parametrize("op", ["sum", "mean"])
@each_rank_of("few")
def test_five_hundred_twelve_elements_from_fill(comm: Communicator, few, dtype, op) -> None:
    total = sum(range(1, few + 1))
    want = total / few if op == "mean" else total
    x = np.full(512, comm.rank + 1, dtype)
    out = np.empty(512, dtype)
    assert comm.allreduce(x, op, out=out) is out
    assert (out == want).all()
    for root in range(comm.size):
        result = comm.reduce(x, op, root)
        assert (result is None) == (comm.rank != root)
        assert result is None or (result == want).all()
        assert (x == comm.rank + 1).all()
    assert (comm.bcast(x, comm.size - 1) == comm.size).all()
    assert comm.allreduce(x, op, out=x) is x
    assert (x == want).all()


class Layer(NamedTuple):
    weight: object
    bias: object


def _state(value: float, name: str) -> dict[str, Any]:
    full = np.full
    return {
        "layers": [Layer(full((2, 3), value, np.float32), full(3, value)) for _ in range(2)],
        "adam": {"count": int(value), "mu": (full(4, value), full((), value)), "nu": full(0, 0.0)},
        "descent": (),
        "component": full(7, value, ml_dtypes.bfloat16),
        "nested": ((full(1, value),), [value, None]),
        "none": None,
        "symbol": name,
        "raw": name.encode(),
        "scalar": np.float32(value),
        "flag": bool(value),
        "activation": len,
    }


@each_rank_of("few")
def test_synchronize_nested_state_from_every_root(comm: Communicator) -> None:
    for root in range(comm.size):
        mine = _state(float(comm.rank + 1), f"rank{comm.rank}")
        got = ac.synchronize(mine, root=root, comm=comm)
        want = _state(float(root + 1), f"rank{root}")
        assert repr(got) == repr(want)
        assert repr(mine) == repr(_state(float(comm.rank + 1), f"rank{comm.rank}"))
        assert list(got) == list(mine)


@each_rank_of("few")
def test_unused_parameters(comm: Communicator) -> None:
    """A leaf, a branch, none: missing on some ranks, on all, on none; dtype and shape are kept."""
    last = comm.size - 1
    mine = comm.rank == last
    gradients = {
        "used": np.full(3, comm.rank + 1, np.float32),
        "sometimes": np.full((2, 2), 6, ml_dtypes.bfloat16) if mine else None,
        "branch": [np.full(2, 3.0) if mine else None, None],
        "never": None,
    }
    got = ac.allreduce_gradients(gradients, "sum", comm=comm)
    assert (got["used"] == sum(range(comm.size + 1))).all()
    assert got["sometimes"].dtype == ml_dtypes.bfloat16
    assert got["sometimes"].astype(float).tolist() == [[6, 6], [6, 6]]
    assert got["branch"][0].tolist() == [3, 3]
    assert got["branch"][1] is None
    assert got["never"] is None
    mean = ac.allreduce_gradients(gradients, comm=comm)
    assert mean["branch"][0].tolist() == [3 / comm.size] * 2
