"""Processes that a loop has started, and that the environment numbers."""

from __future__ import annotations

import signal
from functools import lru_cache

import pytest

from tests.session import numbered
from tests.support.launched import Report, start_numbered
from tests.support.launcher import LAUNCHED

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")


@lru_cache
def _launched() -> tuple[Report, list[int]]:
    job, statuses = start_numbered(numbered.RANKS, "-m", numbered.__name__)
    return Report(job, numbered.RANKS), statuses


@pytest.mark.parametrize("check", [check.__name__ for check in numbered.CHECKS])
def test_check(check: str) -> None:
    _launched()[0].assert_passed(check)


def test_program_of_the_checks_ends_where_it_was_not_killed() -> None:
    report, statuses = _launched()
    # The others have handled the error.
    expected = [-9 if rank == numbered.KILLED else 0 for rank in range(numbered.RANKS)]
    assert statuses == expected, report.job.stdout


ABORTS = """
import arraycomm as ac
comm = ac.init()
part = comm.split(comm.rank)
comm.barrier()
if comm.rank == 1:
    print("last words", end="")
    part.abort(3)
comm.barrier()
"""


def test_abort_ends_all_of_them() -> None:
    job, statuses = start_numbered(2, "-c", ABORTS)
    assert statuses == [-signal.SIGTERM, 3], job.stdout
    assert job.stdout == "last words"


def test_error_with_a_long_text_is_told_to_the_other_processes() -> None:
    wrong = "['cpu' * 30_000] if os.environ['ARRAYCOMM_PROCESS_ID'] == '0' else None"
    job, statuses = start_numbered(2, "-c", f"import os, arraycomm as ac; ac.init(device={wrong})")
    assert statuses == [1, 1]
    assert "PeerError: init: rank 0 raised" in job.stdout
    assert job.stdout.count("ValueError: init: a list of devices") == 2
