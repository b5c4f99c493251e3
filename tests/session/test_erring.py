"""What errors leave behind, and what others get of a call that a rank has given up: over each transport."""

from __future__ import annotations

from functools import lru_cache

import pytest

from arraycomm.testing import run
from tests.session import erring
from tests.support.launched import Report, checks_in, start_numbered
from tests.support.launcher import LAUNCHED, needs_mpiexec, run_python

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")
PROGRAM = "tests.session.erring"


@lru_cache
def report(way: str) -> Report:
    if way == "processes":
        return Report(start_numbered(2, "-m", PROGRAM)[0], 2)
    return Report(run_python("-m", PROGRAM, way, ranks=2, timeout=90), 2)


over_mpi = [needs_mpiexec, pytest.mark.each_mpi]


@pytest.mark.parametrize("check", [check.__name__ for check in checks_in(vars(erring))])
@pytest.mark.parametrize(
    "way", ["processes", *(pytest.param(way, marks=over_mpi) for way in ("shared", "messages"))]
)
def test_check(way: str, check: str) -> None:
    report(way).assert_passed(check)


def test_errors_over_threads_leave_nothing_behind() -> None:
    # Both ranks look at the same process.
    assert max(max(grown.values()) for grown in run(2, erring.growth, 6)) < 4
