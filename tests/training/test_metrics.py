from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from tests.support import internals
from tests.support.on_ranks import each_rank_of


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
