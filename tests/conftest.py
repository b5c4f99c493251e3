"""Under `mpiexec`: one report, rank 0's, and the failures of the other ranks as they happen."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


def _launched_rank() -> int | None:
    """Return this process's rank in its launcher's job, or None where there is no launcher."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), None)


class _FailuresOfOneRank:
    """Writes what fails on a rank whose report nobody sees."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._show(report, "collection")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._show(report, report.when)

    def _show(self, report: pytest.CollectReport | pytest.TestReport, stage: str) -> None:
        if report.failed:
            heading = f"[rank {self._rank}] FAILED {report.nodeid} ({stage})"
            captured = "".join(f"\n-- {title} --\n{text}" for title, text in report.sections)
            # In one piece, so that the ranks' texts do not mix.
            sys.stderr.write(f"\n{heading}\n{report.longreprtext}{captured}\n")
            sys.stderr.flush()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    rank = _launched_rank()
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not rank or reporter is None:
        return
    nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - closed at the end
    config.add_cleanup(nowhere.close)
    config.pluginmanager.unregister(reporter)
    config.pluginmanager.register(pytest.TerminalReporter(config, nowhere), "terminalreporter")
    config.pluginmanager.register(_FailuresOfOneRank(rank))
