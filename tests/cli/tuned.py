"""Checks of two ranks that get measured crossovers from a file; see `test_tune.py`.

The arguments are the right file, and wrong ones. Only rank 0 has the variable that names it.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._launch import detect
from arraycomm._protocol.tuning import VARIABLE
from arraycomm._transports.crossovers import NOT_MEASURED, Crossovers
from tests.support import internals
from tests.support.launched import Check, perform

RIGHT, *WRONG = sys.argv[1:] or [""]
NEVER = Crossovers(steps=0)


def _rank() -> int:
    if detect(os.environ) is None:
        return int(os.environ["ARRAYCOMM_PROCESS_ID"])
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank


def _name_on_rank_0(path: str) -> None:
    os.environ.pop(VARIABLE, None)
    if _rank() == 0:
        os.environ[VARIABLE] = path


def wrong_files_are_errors_on_every_rank() -> None:
    for path in WRONG:
        _name_on_rank_0(path)
        with pytest.raises(
            (ValueError, ac.PeerError), match=f"ARRAYCOMM_TUNING: '{path}'"
        ) as found:
            ac.init(timeout=20)
        assert (found.type is ValueError) == (_rank() == 0)
        assert not ac.is_initialized()


def measurements_of_rank_0_hold_on_every_rank() -> None:
    _name_on_rank_0(RIGHT)
    comm = ac.init(timeout=20)
    assert internals.transport(comm).crossovers == NEVER
    x = np.arange(200_000.0) + comm.rank
    assert x.nbytes > internals.inline_bytes(comm)
    assert (comm.allreduce(x) == 2 * np.arange(200_000.0) + 1).all()
    explained = ac.explain(x)
    assert explained.algorithm in {"slices", "segment"}
    assert f"chosen by what was measured of 2 ranks on 1 node: {RIGHT}" in str(explained)
    assert "measured" not in str(ac.explain(1.0))
    with comm.dup() as in_steps:
        internals.transport(in_steps).crossovers = Crossovers(steps=4 << 20)
        assert ac.explain(x, comm=in_steps).algorithm == "steps"


def communicators_made_from_it_have_those_of_their_own_ranks() -> None:
    comm = ac.world()
    part = comm.split(comm.rank)
    assert part is not None
    with comm.dup() as same, part as alone:
        assert internals.transport(same).crossovers == NEVER
        assert internals.transport(alone).crossovers == NOT_MEASURED
    with pytest.raises(TypeError, match="tuning is read by init alone"):
        comm.dup(tuning=RIGHT)


CHECKS: list[Check] = [
    wrong_files_are_errors_on_every_rank,
    measurements_of_rank_0_hold_on_every_rank,
    communicators_made_from_it_have_those_of_their_own_ranks,
]

if __name__ == "__main__":
    perform(CHECKS)
