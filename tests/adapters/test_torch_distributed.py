"""torch.distributed over arraycomm, on processes that mpiexec has started, and on those of torchrun."""

from __future__ import annotations

import ast
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from tests.support.launched import Report
from tests.support.launcher import LAUNCHED, needs_mpiexec, run_python

pytestmark = pytest.mark.skipif(
    LAUNCHED or not find_spec("torch"), reason="needs torch, and launches programs of its own"
)

_PROGRAM: Final = ("-m", "tests.adapters.torch_distributed_checks")
_STARTS: Final = ("-m", "tests.adapters.torch_distributed_starts")
_TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_RANKS: Final = 3
_FORKED: Final = 2


# Of the program, which is not imported: that takes seconds.
_BODY: Final = ast.parse(
    Path(__file__).with_name("torch_distributed_checks.py").read_text(encoding="utf-8")
).body
_CHECKS: Final = [each.name for each in _BODY if isinstance(each, ast.FunctionDef)]
[_FORKED_CHECKS] = [
    [element.id for element in each.value.elts]
    for each in _BODY
    if isinstance(each, ast.AnnAssign) and each.target.id == "FORKED_CHECKS"
]


@lru_cache
def _over_mpi(*options: str) -> Report:
    done = run_python(*_PROGRAM, *options, ranks=_RANKS, timeout=120, compiles=True)
    return Report(done, _RANKS)


@lru_cache
def _starts() -> Report:
    return Report(run_python(*_STARTS, ranks=2, timeout=120), 2)


@lru_cache
def _without_mpi() -> Report:
    return Report(run_python(*_PROGRAM, "fork", timeout=120), _FORKED)


@needs_mpiexec
@pytest.mark.parametrize("check", [n for n in _CHECKS if not n.startswith(("_", "compiled_"))])
def test_over_mpi(check: str) -> None:
    _over_mpi().assert_passed(check)


@needs_mpiexec
@pytest.mark.at_night
@pytest.mark.parametrize("check", [name for name in _CHECKS if name.startswith("compiled_")])
def test_over_mpi_in_compiled_programs(check: str) -> None:
    _over_mpi("compiled").assert_passed(check)
    _over_mpi("compiled").assert_ended_well()


@needs_mpiexec
def test_program_over_mpi_ends_well() -> None:
    _over_mpi().assert_ended_well()


@needs_mpiexec
@pytest.mark.each_mpi
@pytest.mark.parametrize("check", ["any_part_of_the_variables", "wrong_variables"])
def test_starts_under_mpiexec(check: str) -> None:
    _starts().assert_passed(check)
    _starts().assert_ended_well()


def test_count_of_ranks_without_a_launcher_names_the_variable() -> None:
    start = (
        "import os, torch.distributed as dist, arraycomm.adapters.torch_distributed\n"
        "os.environ['WORLD_SIZE'] = '2'\n"
        "dist.init_process_group('arraycomm')"
    )
    job = run_python("-c", start, timeout=60)
    assert job.returncode != 0
    assert "init: WORLD_SIZE is 2 and RANK is missing, but for arraycomm each" in job.stderr


def test_torchrun_starts_again() -> None:
    again = ("--max-restarts", "1", "--monitor-interval", "0.1")
    report = Report(run_python(*_TORCHRUN, *again, *_STARTS, "restart", timeout=60), 2)
    report.assert_passed("_restart")
    report.assert_ended_well()


@pytest.mark.parametrize("check", _FORKED_CHECKS)
def test_without_mpi(check: str) -> None:
    _without_mpi().assert_passed(check)


def test_program_without_mpi_ends_well() -> None:
    _without_mpi().assert_ended_well()
