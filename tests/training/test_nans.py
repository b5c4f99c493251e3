from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from tests.support import internals
from tests.support.frameworks import make, need
from tests.support.on_ranks import each_rank_of

CLEAN = {"f": np.ones((2, 3), np.float32), "i": 3, "d": np.zeros(1, "M8[s]"), "n": None, "t": "a"}


def _wrong(index: int, value: complex = np.nan, dtype: object = np.float32) -> np.ndarray:
    array = np.ones((2, 3), dtype)
    array.flat[index:] = value
    return array


@pytest.mark.parametrize("dtype", ["f2", "f8", "c8", ml_dtypes.bfloat16])
@each_rank_of("several")
def test_every_rank_says_which_ranks_have_one_and_where(comm: Communicator, dtype) -> None:
    last = comm.size - 1
    tree = {"a": np.ones(2), "b": [_wrong(4, dtype=dtype) if comm.rank == last else 1]}
    if comm.rank == 0:
        tree["scalar"] = float("nan")
    with pytest.raises(FloatingPointError) as caught:
        ac.raise_on_nan(tree, comm=comm)
    said = str(caught.value)
    assert said.startswith("raise_on_nan: rank 0: nan at tree['scalar'], 1 of 1 elements; rank")
    assert f"; rank {last}: " in said
    assert said.endswith("at tree['b'][0][1, 1], 2 of 6 elements")
    assert comm.allreduce(1) == comm.size


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@each_rank_of("several")
def test_infinities_count_if_asked(comm: Communicator, framework) -> None:
    need(framework)
    x = make(framework, _wrong(5, np.inf if comm.rank == 1 else 1.0))
    tree = {**CLEAN, "t": 1.5, "inf": np.inf, "x": x}
    before = internals.steps(comm)
    assert ac.raise_on_nan(tree, comm=comm) is tree
    assert internals.steps(comm) == before + 1
    with pytest.raises(FloatingPointError, match=r"rank 1: inf at tree\[1, 2\], 1 of 6 elements$"):
        ac.raise_on_nan(x, infinite=True, comm=comm)
    with pytest.raises(TypeError if comm.rank == 0 else ac.PeerError, match="raise_on_nan: "):
        ac.raise_on_nan(CLEAN if comm.rank == 0 else x, comm=comm)
    assert comm.allreduce(1) == comm.size
