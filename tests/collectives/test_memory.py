"""Memory that one rank does not have: it raises, the others hear of it, and all go on."""

from __future__ import annotations

import pytest

from tests.collectives.scarce import CASES
from tests.support.launched import Report
from tests.support.launcher import needs_mpiexec, run_python

pytestmark = needs_mpiexec


@pytest.fixture(scope="module")
def report() -> Report:
    return Report(run_python("-m", "tests.collectives.scarce", ranks=2, timeout=120), 2)


@pytest.mark.parametrize("name", CASES)
def test_too_little_memory_on_one_rank(report: Report, name: str) -> None:
    report.assert_passed(name)
