"""A pytest plugin of the runs on a faulty copy: says which tests fail, as they do, and shrinks nothing."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest

RECORD = "PLANTED_RECORD"
# Names modules that the drawn arrays do without: most faults need none, and importing them takes longest.
HIDDEN = "PLANTED_HIDDEN"

_find_spec = importlib.util.find_spec


def _find_others(name: str, package: str | None = None) -> Any:
    return None if name in os.environ[HIDDEN].split(",") else _find_spec(name, package)


if HIDDEN in os.environ:
    importlib.util.find_spec = _find_others


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Take few examples, the same in every run, and none of them twice."""
    hypothesis.settings.register_profile(
        "planted",
        hypothesis.settings.get_profile("default"),
        max_examples=int(os.environ.get("EXAMPLES") or "15"),
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("planted")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    """Append a line for each test that fails."""
    report = yield
    if report.failed and call.excinfo is not None:
        _write(item.nodeid, call.excinfo.value)
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Append a line for a file of tests that cannot be imported."""
    if report.failed:
        _write(report.nodeid, ImportError(str(report.longrepr)[-500:]))


def _write(node: str, error: BaseException) -> None:
    line = json.dumps({"test": node, "error": type(error).__name__, "said": str(error)[:300]})
    with Path(os.environ[RECORD]).open("a", encoding="utf-8") as record:
        record.write(line + "\n")
