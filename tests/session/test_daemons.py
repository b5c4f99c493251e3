"""Threads that Python does not wait for: they may listen while the program ends, and nobody hears of it."""

from __future__ import annotations

import os

import pytest

from tests.support.launched import ROOT, start_numbered
from tests.support.launcher import LAUNCHED, needs_mpiexec, run_python

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")
PROGRAM = ("-m", "tests.session.listening")


@needs_mpiexec
@pytest.mark.parametrize("native", [pytest.param("", marks=pytest.mark.each_mpi), "0"])
def test_daemons_that_listen_at_the_end_say_nothing(
    native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARRAYCOMM_NATIVE", native or os.environ.get("ARRAYCOMM_NATIVE", ""))
    done = run_python(*PROGRAM, "well", ranks=2, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_mpiexec
@pytest.mark.each_mpi
def test_daemons_hear_that_the_program_has_finalized_mpi() -> None:
    done = run_python(*PROGRAM, "finalizes", ranks=2, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(done.stdout.split()) <= {"CommunicatorClosedError", "PeerError"}
    assert "finalizing" not in done.stderr, done.stderr


@pytest.mark.parametrize(("end", "status"), [("well", 0), ("status", 3), ("late", 0)])
def test_daemons_of_processes_say_nothing(end: str, status: int) -> None:
    job, statuses = start_numbered(2, *PROGRAM, end)
    assert (statuses, job.stdout) == ([status] * 2, "")
