from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from tests.support import internals
from tests.support.on_ranks import each_rank_of


def _tree(rank: int) -> dict[str, Any]:
    return {
        "loss": 0.5 + rank,
        "hits": 3 * rank,
        "right": rank == 0,
        "numpy": np.float32(rank),
        "counts": np.arange(4) + rank,
        "mask": np.arange(3) <= rank,
        "bf16": np.full(2, rank, ml_dtypes.bfloat16),
        "f32": np.full((2, 3), rank, np.float32)[:, ::-1],
        "z": complex(rank, -rank),
        "none": None,
        "deep": [(np.empty((0, 2)),)],
    }


@each_rank_of("size")
def test_means_are_weighted_and_keep_their_kind(comm: Communicator) -> None:
    got = ac.mean_metrics(_tree(comm.rank), comm.rank + 1, comm=comm)
    weights = range(1, comm.size + 1)
    # Of the ranks' numbers: sums of small integers are exact.
    rank = sum(w * (w - 1) for w in weights) / sum(weights)
    assert got["loss"] == sum(w * (w - 0.5) for w in weights) / sum(weights)
    assert got["hits"] == sum(w * (3 * w - 3) for w in weights) / sum(weights)
    assert got["right"] == 1 / sum(weights)
    assert {type(got[name]) for name in ("loss", "hits", "right")} == {float}
    assert type(got["numpy"]) is np.float32
    assert got["numpy"] == np.float32(rank)
    assert got["counts"].dtype == np.float64
    assert np.allclose(got["counts"], np.arange(4) + rank, rtol=1e-15, atol=0)
    assert got["mask"].dtype == np.float64
    assert got["mask"][0] == 1
    assert got["bf16"].dtype == ml_dtypes.bfloat16
    assert (got["bf16"] == ml_dtypes.bfloat16(rank)).all()
    assert got["f32"].dtype == np.float32
    assert (got["f32"] == np.float32(rank)).all()
    assert got["z"] == complex(rank, -rank)
    assert got["none"] is None
    assert got["deep"][0][0].shape == (0, 2)


@pytest.mark.parametrize("count", [10, 200_000])
@each_rank_of("size")
def test_a_mean_is_one_message_whatever_it_holds(comm: Communicator, count) -> None:
    # Large leaves travel behind the small ones.
    tree = [1.0, np.full(count, comm.rank + 1, np.float32), 3.0]
    before = internals.steps(comm)
    got = ac.mean_metrics(tree, 2.0 - comm.rank % 2, comm=comm)
    if 8 * count < internals.inline_bytes(comm):
        assert internals.steps(comm) == before + 1
    weights = [2 - rank % 2 for rank in range(comm.size)]
    want = Fraction(sum(w * (r + 1) for r, w in enumerate(weights)), sum(weights))
    assert (got[1] == np.float32(float(want))).all()
    assert (got[0], got[2]) == (1.0, 3.0)
    assert comm.stats()["mean_metrics"]["calls"] == 1
    assert list(comm.stats()) == ["mean_metrics"]


@each_rank_of("several")
def test_trees_that_differ_raise_with_the_first_path(comm: Communicator) -> None:
    part, row = comm.dup(), np.ones((1, 2) if comm.rank else (2, 1))
    with pytest.raises(ac.MismatchError, match=r"float64 \(2, 1\) on rank 0"), ac.join(part):
        ac.mean_metrics(row, 1, comm=part)
    name = "accuracy" if comm.rank else "acc"
    with pytest.raises(ac.MismatchError, match=r"tree\['acc'\] on rank 0"):
        ac.mean_metrics({name: 1.0}, 1, comm=comm)


@each_rank_of("size")
def test_infinite_metrics_stay_infinite(comm: Communicator) -> None:
    got = ac.mean_metrics([math.inf, complex(math.inf, 0)], 2, comm=comm)
    assert got == [math.inf, complex(math.inf, 0)]


@pytest.mark.parametrize("framework", ["torch", "jax"])
@each_rank_of("size")
def test_arrays_of_frameworks_come_back_as_such(comm: Communicator, framework) -> None:
    pytest.importorskip(framework)
    floats = ac.exchange(np.full(3, comm.rank, np.float32), framework)
    integers = ac.exchange(np.full(3, comm.rank, np.int32), framework)
    mean = sum(range(comm.size)) / comm.size
    for tree in (floats, integers):
        got = ac.mean_metrics(tree, 1, comm=comm)
        assert type(got) is type(tree)
        assert np.allclose(np.asarray(got), mean, rtol=1e-7, atol=0)
    width = "float32" if framework == "jax" else "float64"
    assert str(got.dtype).removeprefix("torch.") == width
