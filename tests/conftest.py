"""An end to tests that hang; under `mpiexec` one report, rank 0's, and other ranks' failures as they happen."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.support import internals
from tests.support.launcher import is_open_mpi
from tests.support.on_ranks import few, is_spared, on_ranks, several, size, transport
from tests.support.pairwise import EVERY, thinned

__all__ = ["few", "on_ranks", "several", "size", "transport"]

# Not in programs that tests launch.
internals.set_slots(48 << 10, 32 << 10, 128 << 10)

# In programs that tests launch, and here.
_START = str(Path(__file__).parent / "support" / "start")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_START, os.environ.get("PYTHONPATH")]))
# Threads of NumPy's BLAS take as long to start as all of NumPy, and no test needs them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Small programs take longer to compile than to run. Those of `jax_programs.py` are compiled as users' are.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what runs in the background. Some tests interrupt their own process.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")

# Seconds after which a test hangs, alone (some launch programs, and wait for them) and as a rank of a job;
# and after which the clock is set back for the next test.
_HANGING, _HANGING_ON_RANKS = 300.0, 120.0
_HANGING_HERE = float(os.environ.get("TESTS_HANG_AFTER") or 0)
_ANEW = 30.0

# NIGHT=1 runs the tests that are marked `at_night`.
_NIGHT = bool(os.environ.get("NIGHT")) or EVERY

# The files whose tests take longest, one after the other: a worker that gets one at the end works alone.
_LONGEST = (
    "testing/test_plugin.py",
    "adapters/test_jax_collectives.py",
    "testing/test_given.py",
    "docs/test_documents.py",
    "testing/test_conformance_checks.py",
    "session/test_ends.py",
)


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


@pytest.fixture(autouse=True)
def _own_files_of_launchers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what a killed launcher of Open MPI leaves from the launcher that gets its process number later.

    It keeps its files in a directory of its process number. It does not start if there are any.
    """
    given = {}
    if _launched_rank() is None and is_open_mpi():
        given["PRTE_MCA_prte_tmpdir_base"] = str(tmp_path_factory.mktemp("launchers"))
    # Not by `monkeypatch`, which would be undone after fixtures that tests use beside it.
    with mock.patch.dict(os.environ, given):
        yield


class _Limit:
    """Ends the process, and mpiexec with it, when a test hangs; shows every thread's stack.

    pytest's own limit begins and ends a thread with each test, which takes longer than most tests where
    four ranks share two cores. Here one goes on for many.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stderr = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)
        self._began = -_ANEW

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        if time.monotonic() - self._began > _ANEW:
            self._began = time.monotonic()
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._stderr)

    def pytest_unconfigure(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.close(self._stderr)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Leave the report in a file to rank 0, before anything opens it."""
    if _launched_rank():
        config.option.xmlpath = None


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    rank = _launched_rank()
    usual = _HANGING if rank is None else _HANGING_ON_RANKS
    config.pluginmanager.register(_Limit(_HANGING_HERE or usual))
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not rank or reporter is None:
        return
    nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - closed at the end
    config.add_cleanup(nowhere.close)
    config.pluginmanager.unregister(reporter)
    config.pluginmanager.register(pytest.TerminalReporter(config, nowhere), "terminalreporter")
    config.pluginmanager.register(_FailuresOfOneRank(rank))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what is imported and collected out of garbage collections, which become few: most tests leave little behind."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    now = [item for item in items if _NIGHT or not _is_at_night(item)]
    chosen = thinned([item for item in now if not is_spared(item)])
    left_out = set(items).difference(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = sorted(chosen, key=_place)


def _is_at_night(item: pytest.Item) -> bool:
    """Return whether a test is for nights, under this MPI or under any."""
    mark = item.get_closest_marker("at_night")
    return mark is not None and (not mark.args or is_open_mpi() == ("Open MPI" in mark.args))


def _place(item: pytest.Item) -> int:
    """Return where an item's file stands among those that come first, or behind them."""
    name = "/".join(item.path.parts[-2:])
    return _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)
