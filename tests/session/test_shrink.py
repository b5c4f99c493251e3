"""Going on after the death of a process, where MPI was started so that it lets the others live."""

from __future__ import annotations

import time

import pytest

from tests.support.launcher import is_open_mpi, needs_mpiexec, run_python

pytestmark = [
    needs_mpiexec,
    pytest.mark.each_mpi,
    pytest.mark.skipif(not is_open_mpi(), reason="needs Open MPI"),
]


@pytest.mark.parametrize("control", ["shared", "messages"])
def test_training_goes_on_with_those_that_live(control) -> None:
    done = run_python(
        "-m", "tests.session.shrinking", control, ranks=3, options=("--with-ft", "ulfm"), timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 2, done.stdout
    assert done.stdout.count("has died") == 2, done.stdout


def test_death_ends_the_job_where_nobody_shrinks() -> None:
    program = """
import os, signal, numpy as np, arraycomm as ac
comm = ac.init()
comm.barrier()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.allreduce(np.ones(3))
"""
    began = time.monotonic()
    done = run_python("-c", program, ranks=3, options=("--with-ft", "ulfm"), timeout=60)
    assert done.returncode != 0
    assert done.stderr.count("PeerError: rank 1 has died") == 2, done.stderr
    assert time.monotonic() - began < 30
