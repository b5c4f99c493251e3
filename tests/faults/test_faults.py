"""A few of the programs in which one rank deviates; `python -m tests.faults` plays thousands."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest

from arraycomm import DeadlockError
from tests.faults import on_threads
from tests.faults.deviations import DEVIATIONS, draw
from tests.faults.judge import MAY_END, Verdict, judge
from tests.faults.optimizers import takes_torch
from tests.faults.play import Trace
from tests.faults.programs import OPERATIONS
from tests.faults.simulation import stuck
from tests.support.launcher import needs_mpiexec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def _assert_as_promised(verdict: Verdict) -> None:
    assert not verdict.wrong, "\n".join([*verdict.wrong, str(verdict.program)])


def _seeds(kinds: tuple[str, ...], count: int) -> list[int]:
    """Return the first programs of these kinds without torch, which takes each process seconds."""
    spared = (seed for seed in range(1000) if not takes_torch(draw(seed, kinds)))
    return list(islice(spared, count))


@pytest.mark.parametrize("kind", on_threads.KINDS)
def test_threads_end_as_promised(kind: str) -> None:
    for seed in _seeds((kind,), 2 if kind == "sleep" else 4):
        _assert_as_promised(on_threads.run_program(seed, (kind,)))


@needs_mpiexec
@pytest.mark.each_mpi
@pytest.mark.at_night("Open MPI")
def test_processes_that_handle_errors_end_as_promised() -> None:
    from tests.faults import on_mpi

    seeds = _seeds(on_mpi.TOGETHER, 8)
    for verdict in on_mpi.play_together(seeds, on_mpi.TOGETHER, Path(sys.executable)):
        _assert_as_promised(verdict)


@needs_mpiexec
@pytest.mark.parametrize(
    "kind",
    ["leave", *(pytest.param(kind, marks=pytest.mark.each_mpi) for kind in ("raise", "die"))],
)
def test_job_ends_as_promised_and_leaves_no_process(kind: str) -> None:
    from tests.faults import on_mpi

    _assert_as_promised(on_mpi.play_alone(2, (kind,), Path(sys.executable)))


@needs_mpiexec
@pytest.mark.parametrize(
    ("seed", "control"), [(3, "shared"), pytest.param(4, "messages", marks=pytest.mark.each_mpi)]
)
def test_job_that_handles_its_errors_ends_well_and_does_everything(seed: int, control: str) -> None:
    from tests.faults import on_mpi

    _assert_as_promised(
        on_mpi.play_handled(seed, on_mpi.DISAGREEING, Path(sys.executable), control)
    )


def test_every_deviation_is_drawn_from_a_number_alone() -> None:
    assert set(MAY_END) == set(DEVIATIONS)
    for seed in range(50):
        assert str(draw(seed, tuple(DEVIATIONS))) == str(draw(seed, tuple(DEVIATIONS)))


def test_every_operation_is_drawn() -> None:
    programs = [draw(seed, ("none",)) for seed in range(200)]
    drawn = {a.call.operation for p in programs for rank in p.actions for a in rank if a.call}
    made = {"dup", "split", "optimizer", "message", "update", "free"}
    assert drawn == {*OPERATIONS, *made}


def test_ranks_that_end_without_a_reason_are_found() -> None:
    """What a judge does not notice was not tested."""
    program = draw(1, ("none",))
    traces = [Trace(place=0, returned=True) for _ in range(program.size)]
    assert not judge(program, traces, stuck(program)).wrong
    traces[0].end("wrong", text="3, not 4")
    assert judge(program, traces, stuck(program)).wrong_numbers == 1
    for error in (None, TimeoutError("never"), DeadlockError("there is none")):
        traces[0] = Trace(place=0)
        if error is not None:
            traces[0].end("error", error)
        assert judge(program, traces, stuck(program)).wrong
