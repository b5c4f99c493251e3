"""Properties of the framework in `library_author.py`: `python -m pytest test_library_author.py`.

The ranks are threads. `mpiexec -n 3 python -m pytest -p no:cacheprovider test_library_author.py` takes processes.
"""

from __future__ import annotations

import library_author as tinynet
import numpy as np
import pytest
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm.testing import given


def problem(rows: int, seed: int) -> tuple[tinynet.Array, tinynet.Array]:
    random = np.random.default_rng(seed)
    return random.normal(size=(rows, 2)), random.normal(size=rows)


def start(rank: int = 0) -> tinynet.Params:
    return tinynet.Params(w=np.full(2, float(rank)), b=np.zeros(()))


@given(rows=st.integers(1, 20), seed=st.integers(0, 99))
def test_ranks_fit_as_one_process(comm, rows, seed):
    x, y = problem(rows, seed)
    mine = slice(comm.rank, None, comm.size)  # of fewer rows than ranks, some ranks have none
    got = tinynet.fit(start(comm.rank), x[mine], y[mine], steps=5, comm=comm)
    with comm.split(comm.rank) as alone:
        want = tinynet.fit(start(), x, y, steps=5, comm=alone)
    for name, array in want.arrays.items():
        np.testing.assert_allclose(got.arrays[name], array, rtol=1e-9, atol=1e-9, err_msg=name)
        assert len(set(comm.allgather_object(got.arrays[name].tobytes()))) == 1


@pytest.mark.ranks(2, 3)
def test_wrong_rows_on_one_rank_raise_on_every_rank(comm):
    x, y = problem(4, seed=0)
    with pytest.raises(ValueError if comm.rank == 0 else ac.PeerError, match="two dimensions"):
        tinynet.fit(start(), x[0] if comm.rank == 0 else x, y, comm=comm)
    assert comm.allreduce(1) == comm.size  # the ranks are still in step


def test_it_works_without_arraycomm(monkeypatch):
    x, y = problem(6, seed=1)
    monkeypatch.setattr(tinynet, "ac", None)
    assert np.isfinite(tinynet.fit(start(), x, y).arrays["w"]).all()
    with pytest.raises(ImportError, match="pip install"):
        tinynet.fit(start(), x, y, comm=object())
