"""How a phase of a test ended on each rank, and the one report that comes of it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from arraycomm._callsite import is_ours
from arraycomm._errors import CommTimeoutError
from arraycomm._protocol.mismatch import ranks_of
from arraycomm.testing._failures import CAUSED, FOUND_BY_RANK_0, ON_RANK, in_a_line, priority

# Characters of what another rank raised, and the frames of its stack.
_LONG = 200
_FRAMES = 6


@dataclass
class Outcome:
    """How a phase of a test ended on one rank."""

    rank: int
    when: str | None
    outcome: str
    # Not None if the test was expected to fail.
    xfail: str | None = None
    # The order of failures: see `arraycomm.testing._failures`.
    order: tuple[int, int, int] = (0, 0, 0)
    # What the rank did, in a line, and where.
    text: str = "passed"
    crash: tuple[str, int] | None = None
    # Where a rank was that has timed out.
    stack: str = ""
    # The rank of the test's own that raised the error, if it is known; whether only rank 0's is to
    # be shown.
    label: str = ""
    is_echo: bool = False
    # The report as pytest serializes it, unless the phase passed.
    report: dict[str, Any] | None = None

    @property
    def is_caused(self) -> bool:
        """Whether another rank's failure caused this one."""
        return self.order[0] == CAUSED


def outcome_of(
    item: pytest.Item,
    rank: int,
    report: pytest.TestReport,
    excinfo: pytest.ExceptionInfo[BaseException] | None,
    step: int,
) -> Outcome:
    """Describe how a phase ended on this rank."""
    xfail = getattr(report, "wasxfail", None)
    if report.passed:
        return Outcome(rank, report.when, report.outcome, xfail)
    error = None if excinfo is None else excinfo.value
    crash = getattr(report.longrepr, "reprcrash", None)
    return Outcome(
        rank,
        report.when,
        report.outcome,
        xfail,
        order=(
            CAUSED if hasattr(error, FOUND_BY_RANK_0) else priority(error),
            # 0 for what was interrupted, as others may have waited for it; 2 for the test's end.
            getattr(error, "place_in_test", 1),
            step,
        ),
        text=_text(report, excinfo),
        crash=None if crash is None else (crash.path, crash.lineno),
        stack=_stack(item, error) if isinstance(error, CommTimeoutError) else "",
        label=getattr(error, ON_RANK, ""),
        is_echo=hasattr(error, FOUND_BY_RANK_0),
        report=serialized(item.config, report),
    )


def _stack(item: pytest.Item, error: BaseException) -> str:
    """Return the user's frames of an error, from the test on."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not is_ours(frame.filename)
    ]
    files = [frame.filename for frame in frames]
    begin = files.index(str(item.path)) if str(item.path) in files else 0
    return "".join(traceback.format_list(frames[begin:][-_FRAMES:]))


def _text(report: pytest.TestReport, excinfo: pytest.ExceptionInfo[BaseException] | None) -> str:
    if excinfo is None:
        return str(report.longrepr).splitlines()[0]
    verb = "skipped" if report.skipped and not hasattr(report, "wasxfail") else "raised"
    return f"{verb} {in_a_line(excinfo.exconly(tryshort=True))}"[:_LONG]


def deciding(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the outcome that is that of the whole test; None if the test passed on every rank."""
    failed = [o for o in outcomes if o.outcome == "failed"]
    unexpected = [o for o in failed if o.report is not None and o.report["longrepr"] is not None]
    own = [o for o in unexpected if not o.is_caused and not _is_strict_xpass(o)]
    expected = [o for o in outcomes if o.outcome == "skipped" and o.xfail is not None]
    skipped = [o for o in outcomes if o.outcome == "skipped"]
    for candidates in (own, expected, skipped, failed):
        if candidates:
            return min(candidates, key=lambda outcome: (outcome.order, outcome.rank))
    return None


def _is_strict_xpass(outcome: Outcome) -> bool:
    assert outcome.report is not None
    return str(outcome.report["longrepr"]).startswith("[XPASS(strict)]")


def merged(
    config: pytest.Config,
    rank: int,
    reports: Sequence[pytest.TestReport],
    everyone: Sequence[Sequence[Outcome]],
    parts: Sequence[Sequence[Any]],
) -> list[pytest.TestReport]:
    """Return the reports of a test, which have the same outcomes on each rank.

    After a phase that did not pass, errors that it has caused are not reported. `parts` are the
    subtests that have failed on each rank.
    """
    mine: dict[str | None, pytest.TestReport] = {report.when: report for report in reports}
    made: list[pytest.TestReport] = []
    ended = False
    for when in ("setup", "call", "teardown"):
        outcomes = [o for ranks in everyone for o in ranks if o.when == when]
        first = deciding(outcomes)
        if not outcomes or (when == "call" and ended):
            continue
        if first is None or (ended and first.is_caused):
            report = mine[when]
            report.outcome, report.longrepr = "passed", None
            if when == "call" and any(parts):
                # In pytest's words, as on the ranks whose subtests have failed.
                count = len(_ranks_by_part(parts))
                report.outcome = "failed"
                report.longrepr = f"contains {count} failed subtest{'s' if count > 1 else ''}"
            made.append(report)
            continue
        ended = True
        report = mine[when] if first.rank == rank else loaded(config, first.report)
        _tell_rank(report, first, outcomes)
        made.append(report)
    return made


def parts_of_others(
    config: pytest.Config, rank: int, everyone: Sequence[Sequence[Any]]
) -> list[pytest.TestReport]:
    """Return the reports of subtests that failed on other ranks only; this one reports its own."""
    made = []
    for found in _ranks_by_part(everyone).values():
        if rank not in found:
            report = loaded(config, next(iter(found.values())))
            show_rank(report, f"[{ranks_text(list(found))} of {len(everyone)}]")
            made.append(report)
    return made


def _ranks_by_part(everyone: Sequence[Sequence[Any]]) -> dict[str, dict[int, Any]]:
    """Return for each subtest its reports by the rank on which it has failed."""
    found: dict[str, dict[int, Any]] = {}
    for rank, parts in enumerate(everyone):
        for data in parts:
            part = f"{data['nodeid']} {data.get('_subtest.context')}"
            found.setdefault(part, {})[rank] = data
    return found


def serialized(config: pytest.Config, report: Any) -> Any:
    """Return a report as it travels to another process."""
    return config.hook.pytest_report_to_serializable(config=config, report=report)


def loaded(config: pytest.Config, data: Any) -> Any:
    """Return a report of another process."""
    return config.hook.pytest_report_from_serializable(config=config, data=data)


def _tell_rank(report: pytest.TestReport, first: Outcome, outcomes: Sequence[Outcome]) -> None:
    """Write into a report which ranks it is of, and what the others did."""
    said = first.outcome, first.text, first.crash
    alike = [o.rank for o in outcomes if (o.outcome, o.text, o.crash) == said]
    if first.label:
        show_rank(report, first.label)
    elif len(alike) < len(outcomes):
        show_rank(report, f"[{ranks_text(alike)} of {len(outcomes)}]")
    others = [o for o in outcomes if o.rank not in alike and not o.is_echo]
    if report.failed and others:
        report.sections.append((f"{ranks_text(alike)} failed; the other ranks", _lines(others)))


def show_rank(report: pytest.TestReport, label: str) -> None:
    """Put a label that names the rank into the heading of a report, and into its summary."""
    path, line, name = report.location
    report.location = (path, line, f"{name} {label}")
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = f"{label} {crash.message}"
    if report.skipped and isinstance(report.longrepr, tuple):
        where, number, reason = report.longrepr
        report.longrepr = (where, number, f"Skipped: {label} {reason.removeprefix('Skipped: ')}")


def _lines(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each different thing that ranks did."""
    said = ranks_of((each.rank, f"{each.text}{_place(each)}") for each in outcomes)
    return "\n".join(f"{ranks_text(ranks)} {text}" for text, ranks in said.items())


def _place(outcome: Outcome) -> str:
    if outcome.stack:
        return f"\n{outcome.stack.rstrip()}"
    return "" if outcome.crash is None else f" ({_short(outcome.crash[0])}:{outcome.crash[1]})"


def _short(path: str) -> str:
    """Return a path as pytest shows it."""
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 2", "ranks 0-3" or "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
