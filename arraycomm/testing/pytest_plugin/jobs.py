"""`pytest --mpiexec N --mpiexec-per file|test`: each file, or each test, in a job of its own.

This process collects the tests. Rank 0 of a job writes down its reports, which are reported here
again: so the summary, the JUnit file, the cache and `-x` are those of one run.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Final

import pytest

from arraycomm.testing.pytest_plugin.outcomes import loaded, serialized
from arraycomm.testing.pytest_plugin.quiet import leave_reports
from arraycomm.testing.pytest_plugin.start import refuse_others
from arraycomm.testing.pytest_plugin.warned import Recorded
from arraycomm_pytest import ENDED

# Files of a job: which tests it runs, and its reports.
_TESTS: Final = "tests"
_REPORTS: Final = "reports"
_STOPPED: Final = int(pytest.ExitCode.INTERRUPTED)
# Characters of what a job has written that a report shows.
_SHOWN: Final = 20_000
_LEFT_OUT: Final = (
    "the job of this test has left it out: a plugin, or a hook of a conftest.py, has chosen again, "
    "from the tests of this job alone; leave out --mpiexec-per, or choose by -k or -m"
)


class Jobs:
    """Runs the tests that this process has collected in jobs."""

    def __init__(self, config: pytest.Config, launcher: Any) -> None:
        refuse_others(config)
        self._config, self._launcher = config, launcher
        words = list(map(str, config.invocation_params.args))
        self._has_cache = config.pluginmanager.has_plugin("cacheprovider")
        words += ["--cov-append"] if getattr(config.option, "cov_source", None) else []
        self._options = words

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run one job after another."""
        option = self._config.option
        if option.collectonly or (session.testsfailed and not option.continue_on_collection_errors):
            return None
        per_test = option.mpiexec_per == "test"
        for _, items in groupby(session.items, lambda item: item if per_test else item.path):
            rest = list(items)
            while rest:
                rest = self._run(session, rest)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        return True

    def _run(self, session: pytest.Session, items: list[pytest.Item]) -> list[pytest.Item]:
        """Run a job, and report its tests; return those that it has left for a further one."""
        names = [f"{item.path}{item.nodeid[item.nodeid.find('::') :]}" for item in items]
        captured = self._config.option.capture != "no"
        with TemporaryDirectory(prefix="arraycomm-job-") as folder:
            directory = Path(folder)
            (directory / _TESTS).write_text(json.dumps(names), "utf-8")
            with (directory / "output").open("wb") as output:
                streams: dict[str, Any] = {"stdout": output, "stderr": output} if captured else {}
                cache = [f"-ocache_dir={folder}/cache"] if self._has_cache else []
                status = self._launcher.run([*self._options, *cache], directory, **streams)
            done = self._repeat(directory / _REPORTS)
            ended = (directory / ENDED).exists() and status in (0, 1, 5)
            said = (directory / "output").read_text("utf-8", "replace")[-_SHOWN:]
        rest = [item for item in items if item.nodeid not in done]
        if status == _STOPPED:
            session.shouldstop = session.shouldstop or "a job was interrupted"
        elif rest and not ended:
            self._report_end(rest[0], f"the job ended with status {status} in this test:\n{said}")
            return rest[1:]
        elif not session.shouldfail:
            for item in rest:
                self._report_end(item, _LEFT_OUT)
        return []

    def _repeat(self, path: Path) -> set[str]:
        """Report here what a job has reported; return the tests that have ended."""
        done = set()
        for found in _read(path):
            if isinstance(found, Recorded):
                found.repeat(self._config)
                continue
            report = loaded(self._config, found)
            self._config.hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                done.add(report.nodeid)
        return done

    def _report_end(self, item: pytest.Item, text: str) -> None:
        report = pytest.TestReport(
            item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", text, "call"
        )
        item.ihook.pytest_runtest_logreport(report=report)


def _read(path: Path) -> Iterator[Any]:
    if path.exists():
        with path.open("rb") as file:
            while file.peek():
                try:
                    yield pickle.load(file)
                except (EOFError, pickle.UnpicklingError):
                    # It was being written when the job ended.
                    return


class _ToParent:
    """Writes down the reports and warnings of a job, on rank 0."""

    def __init__(self, config: pytest.Config, file: IO[bytes]) -> None:
        self._config, self._file = config, file

    def _write(self, found: Any) -> None:
        self._file.write(pickle.dumps(found))
        self._file.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write down a report."""
        self._write(serialized(self._config, report))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, nodeid: str
    ) -> None:
        """Write down a warning."""
        self._write(Recorded.of(warning_message, nodeid))


def report_to_parent(config: pytest.Config, directory: str, rank: int) -> None:
    """Run the tests that the process has chosen which has started this job, and report them."""
    leave_reports(config)
    config.args = json.loads(Path(directory, _TESTS).read_text("utf-8"))
    # There are no failures of an earlier run that it could choose.
    config.option.lf = False
    if rank == 0:
        file = Path(directory, _REPORTS).open("ab")  # noqa: SIM115 - closed at the end
        config.add_cleanup(file.close)
        config.pluginmanager.register(_ToParent(config, file), "arraycomm-to-parent")
