"""What only rank 0 writes (terminal, debuggers, reports, coverage, cache); files of one name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter

# Options of pytest and its plugins that name a report of the run.
_REPORTS = ("xmlpath", "report_log", "htmlpath", "json_report_file", "pastebin")


def leave_reports(config: pytest.Config) -> None:
    """Write no file with a report of the run. Called before pytest is configured."""
    for name in _REPORTS:
        if getattr(config.option, name, None) is not None:
            setattr(config.option, name, None)


def be_quiet(config: pytest.Config, rank: int) -> None:
    """Let rank 0 write for all. Called before pytest is configured."""
    leave_reports(config)
    # The launcher gives the keyboard to rank 0.
    config.option.usepdb = config.option.trace = False
    if config.option.basetemp is not None:
        # Each rank empties its own.
        config.option.basetemp = f"{config.option.basetemp}-rank{rank}"


def share_directories(config: pytest.Config) -> None:
    """Let ranks remove pytest's old temporary directories together, even if warnings are errors."""
    # The rank that comes second leaves its lock in a directory that the first one is removing, or
    # finds none any more while it looks through them.
    expected = ["ignore:(rm_rf) error removing", "ignore:unclosed scandir iterator"]
    given = config.known_args_namespace.pythonwarnings or []
    config.known_args_namespace.pythonwarnings = [*given, *expected]


def leave_terminal(config: pytest.Config) -> None:
    """Take the terminal and the cache from a rank, once pytest is configured."""
    cache: Any = getattr(config, "cache", None)
    if cache is not None:
        cache.set = lambda key, value: None
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - closed at the end
    config.add_cleanup(nowhere.close)
    config.pluginmanager.unregister(reporter)
    config.pluginmanager.register(TerminalReporter(config, nowhere), "terminalreporter")


def combine_on_rank_0(config: pytest.Config, rank: int, meet: Callable[[], object]) -> None:
    """Let rank 0 combine the coverage that all ranks have saved; do nothing without pytest-cov.

    Each rank saves a file of its own. `meet` returns when all ranks have called it. If another
    process has started one job of many, that one combines.
    """
    rank = rank or int(config.getoption("mpiexec_per") is not None)
    plugin: Any = config.pluginmanager.get_plugin("_cov")
    controller = getattr(plugin, "cov_controller", None)
    if controller is None:
        return
    combine = controller.finish

    def finish() -> None:
        meet()
        combine()

    def save() -> None:
        controller.cov.stop()
        controller.cov.save()
        meet()

    controller.finish = save if rank else finish
    if rank:
        plugin._should_report = lambda: False
