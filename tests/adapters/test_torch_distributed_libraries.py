"""Libraries over torch.distributed over arraycomm; they are no dependency of the tests."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.support.launched import Report
from tests.support.launcher import LAUNCHED, needs_mpiexec, run_python

_RANKS = 2
_TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", str(_RANKS))


@pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")
@pytest.mark.parametrize("launcher", [pytest.param("mpiexec", marks=needs_mpiexec), "torchrun"])
@pytest.mark.parametrize(
    ("check", "package"),
    [
        ("fabric", "lightning_fabric"),
        ("lightning", "pytorch_lightning"),
        ("accelerate",) * 2,
        ("ignite",) * 2,
    ],
)
def test_library_trains_as_over_gloo(check: str, package: str, launcher: str) -> None:
    if not (find_spec("torch") and find_spec(package)):
        pytest.skip(f"needs {package}")
    program = ("-m", "tests.adapters.torch_distributed_libraries", check)
    job = (
        run_python(*program, ranks=_RANKS, timeout=120, compiles=True)
        if launcher == "mpiexec"
        else run_python(*_TORCHRUN, *program, timeout=120, compiles=True)
    )
    report = Report(job, _RANKS)
    report.assert_passed(check)
    report.assert_ended_well()
