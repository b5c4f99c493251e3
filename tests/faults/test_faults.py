"""A few of the programs in which one rank deviates; `python -m tests.faults` plays thousands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.faults import on_threads
from tests.faults.deviations import DEVIATIONS, draw
from tests.faults.judge import MAY_END, Verdict, judge
from tests.faults.play import Trace
from tests.faults.simulation import stuck
from tests.support.launcher import needs_mpiexec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def _assert_as_promised(verdict: Verdict) -> None:
    assert not verdict.wrong, "\n".join([*verdict.wrong, str(verdict.program)])


@pytest.mark.parametrize("kind", on_threads.KINDS)
def test_threads_end_as_promised(kind: str) -> None:
    for seed in range(3 if kind == "sleep" else 6):
        _assert_as_promised(on_threads.run_program(seed, (kind,)))


@needs_mpiexec
@pytest.mark.each_mpi
def test_processes_that_handle_errors_end_as_promised() -> None:
    from tests.faults import on_mpi

    for verdict in on_mpi.play_together(range(12), on_mpi.TOGETHER, Path(sys.executable)):
        _assert_as_promised(verdict)


@needs_mpiexec
@pytest.mark.each_mpi
@pytest.mark.parametrize("kind", ["raise", "exit", "leave", "kill", "die"])
def test_job_ends_as_promised_and_leaves_no_process(kind: str) -> None:
    from tests.faults import on_mpi

    _assert_as_promised(on_mpi.play_alone(2, (kind,), Path(sys.executable)))


def test_every_deviation_is_drawn_from_a_number_alone() -> None:
    assert set(MAY_END) == set(DEVIATIONS)
    for seed in range(50):
        assert str(draw(seed, tuple(DEVIATIONS))) == str(draw(seed, tuple(DEVIATIONS)))


def test_ranks_that_end_without_a_reason_are_found() -> None:
    """What a judge does not notice was not tested."""
    program = draw(1, ("none",))
    traces = [Trace() for _ in range(program.size)]
    for rank, trace in enumerate(traces):
        trace.begin(0)
        if rank:
            trace.finish()
    assert judge(program, traces, stuck(program)).wrong
    traces[0].end("error", TimeoutError("never"))
    assert judge(program, traces, stuck(program)).wrong
    traces[0].events.clear()
    traces[0].end("wrong", text="3, not 4")
    traces[0].finish()
    assert judge(program, traces, stuck(program)).wrong_numbers == 1
    traces[0].events.clear()
    assert not judge(program, traces, stuck(program)).wrong
