"""What ranks hold stays flat, however many calls they make, and communicators they free."""

from __future__ import annotations

import sys

import pytest

from arraycomm.testing import run
from tests.session.soak import calls, flat, grown, made_and_freed
from tests.support.launched import start_numbered
from tests.support.launcher import needs_mpiexec, run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures processes by /proc")


@pytest.mark.parametrize(("act", "number"), [(calls, 2_400), (made_and_freed, 20)])
def test_threads_hold_no_more_afterwards(act, number) -> None:
    for before, after in run(2, lambda comm: grown(comm, act, number)):
        assert flat(before, after), f"{before} -> {after}"


_SOAK = ("-m", "tests.session.soak", "--collectives", "2400", "--communicators", "20")


@needs_mpiexec
@pytest.mark.each_mpi
def test_processes_hold_no_more_afterwards() -> None:
    job = run_python(*_SOAK, ranks=2, timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr


def test_processes_without_mpi_hold_no_more_afterwards() -> None:
    job, _ = start_numbered(2, *_SOAK)
    assert job.returncode == 0, job.stdout
