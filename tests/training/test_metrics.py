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


def test_means_are_weighted_and_keep_their_kind(on_ranks, size) -> None:
    def check(comm: Communicator) -> None:
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

    on_ranks(size, check)


def test_a_large_array_among_small_ones_keeps_its_place(on_ranks, several) -> None:
    """Large leaves travel behind the small ones, whatever their order in the tree."""

    def check(comm: Communicator) -> None:
        tree = {"a": 1.0, "b": np.full(200_000, 2.0), "c": 3.0}
        got = ac.mean_metrics(tree, comm.rank + 1, comm=comm)
        assert (got["a"], got["c"]) == (1.0, 3.0)
        assert got["b"].tobytes() == tree["b"].tobytes()

    on_ranks(several, check)


@pytest.mark.parametrize("count", [10, 200_000])
def test_a_mean_is_one_message_whatever_it_holds(on_ranks, size, count) -> None:
    def check(comm: Communicator) -> None:
        tree = [np.full(count, comm.rank + 1, np.float32), 1.0, comm.rank]
        before = internals.steps(comm)
        got = ac.mean_metrics(tree, 2.0 - comm.rank % 2, comm=comm)
        if 8 * count < internals.inline_bytes(comm):
            assert internals.steps(comm) == before + 1
        weights = [2 - rank % 2 for rank in range(comm.size)]
        want = Fraction(sum(w * (r + 1) for r, w in enumerate(weights)), sum(weights))
        assert (got[0] == np.float32(float(want))).all()
        assert got[1] == 1.0
        assert comm.stats()["mean_metrics"]["calls"] == 1
        assert list(comm.stats()) == ["mean_metrics"]

    on_ranks(size, check)


def test_a_rank_of_weight_zero_does_not_count(on_ranks, several) -> None:
    def check(comm: Communicator) -> None:
        nothing = comm.rank == 1
        tree = {"loss": math.nan if nothing else 3.0, "n": np.full(2, np.inf if nothing else 1.0)}
        got = ac.mean_metrics(tree, 0 if nothing else 5, comm=comm)
        assert got["loss"] == 3.0
        assert got["n"].tolist() == [1.0, 1.0]

    on_ranks(several, check)


def test_the_mean_of_nothing_is_nan(on_ranks, size) -> None:
    def check(comm: Communicator) -> None:
        got = ac.mean_metrics({"loss": 1.0, "n": np.ones(2, np.int32)}, 0.0, comm=comm)
        assert math.isnan(got["loss"])
        assert np.isnan(got["n"]).all()

    on_ranks(size, check)


@pytest.mark.parametrize(
    ("weight", "error"),
    [
        *((-1, ValueError), (math.nan, ValueError), (math.inf, ValueError)),
        *(("3", TypeError), (None, TypeError), (1j, TypeError), (np.ones(1), TypeError)),
    ],
)
def test_a_wrong_weight_on_one_rank_raises_on_all(on_ranks, several, weight, error) -> None:
    def check(comm: Communicator) -> None:
        wrong = comm.rank == comm.size - 1
        with pytest.raises(error if wrong else ac.PeerError, match=r"mean_metrics: .*weight"):
            ac.mean_metrics({"loss": 1.0}, weight if wrong else 1, comm=comm)
        assert ac.mean_metrics(2.0, np.float32(0.5), comm=comm) == 2.0

    on_ranks(several, check)


def test_a_leaf_without_arithmetic_raises_with_its_path(on_ranks, several) -> None:
    def check(comm: Communicator) -> None:
        bad = np.zeros(2, "datetime64[s]") if comm.rank == 0 else np.zeros(2)
        with pytest.raises(
            TypeError if comm.rank == 0 else ac.PeerError, match=r"mean_metrics: tree\['when'\]"
        ):
            ac.mean_metrics({"when": bad}, 1, comm=comm)

    on_ranks(several, check)


def test_trees_that_differ_raise_with_the_first_path(on_ranks, several) -> None:
    def check(comm: Communicator) -> None:
        name = "accuracy" if comm.rank else "acc"
        with pytest.raises(ac.MismatchError, match=r"tree\['acc'\] on rank 0"):
            ac.mean_metrics({name: 1.0}, 1, comm=comm)

    on_ranks(several, check)


def test_infinite_metrics_stay_infinite(on_ranks, size) -> None:
    def check(comm: Communicator) -> None:
        got = ac.mean_metrics([math.inf, complex(math.inf, 0)], 2, comm=comm)
        assert got == [math.inf, complex(math.inf, 0)]

    on_ranks(size, check)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_arrays_of_frameworks_come_back_as_such(on_ranks, size, framework) -> None:
    pytest.importorskip(framework)

    def check(comm: Communicator) -> None:
        floats = ac.exchange(np.full(3, comm.rank, np.float32), framework)
        integers = ac.exchange(np.full(3, comm.rank, np.int32), framework)
        mean = sum(range(comm.size)) / comm.size
        for tree in (floats, integers):
            got = ac.mean_metrics(tree, 1, comm=comm)
            assert type(got) is type(tree)
            assert np.allclose(np.asarray(got), mean, rtol=1e-7, atol=0)
        width = "float32" if framework == "jax" else "float64"
        assert str(got.dtype).removeprefix("torch.") == width

    on_ranks(size, check)
