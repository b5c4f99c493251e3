"""A process beside a node's ranks: if a rank dies, it says in what, and what was found before.

Most launchers end all ranks at once if one dies, so that none of them can say it. Rank 0 starts
this process, which imports only the standard library, writes down the tests that it is to run and
each report, and writes "end" into the standard input when the run is over. Each rank writes down
its own failure at once, and where it is if it is stuck: the ranks may not come to agree on them.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

# Rank 0 writes here which tests there are, and where the JUnit file is to be; and then each report.
PLAN, REPORTS = "plan.json", "reports.jsonl"
# How many tests that were not run are named.
_NAMED: Final = 20
# Bytes of the note of one rank.
SLOT: Final = 1024


def wait_for_death(watched: dict[int, int]) -> list[int]:
    """Return the ranks whose processes were the first to end; none if the run ended well.

    `watched` has the rank of each handle of a process.
    """
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    for handle in watched:
        poll.register(handle, select.POLLIN)
    ready = {handle for handle, _ in poll.poll()}
    if sys.stdin.fileno() in ready and os.read(sys.stdin.fileno(), 3) == b"end":
        return []
    return sorted(watched[handle] for handle in ready if handle in watched) or [0]


def notes_of(directory: Path, ranks: list[int]) -> list[str]:
    """Return what ranks have noted last."""
    notes = (directory / "notes").read_bytes()
    return [notes[rank * SLOT : (rank + 1) * SLOT].rstrip(b" \0").decode() for rank in ranks]


def what_was_found(directory: Path, why: str) -> list[str]:
    """Return the failures that rank 0 has reported, and what was not run; write the JUnit file."""
    try:
        plan = json.loads((directory / PLAN).read_text("utf-8"))
    except OSError:
        return []
    reports = [report for report in _reports(directory) if report["rank"] is None]
    tests = {report["nodeid"]: report for report in reports if report["when"] == "call"}
    # What has failed before or after it counts for the test.
    tests |= {report["nodeid"]: report for report in reports if report["outcome"] != "passed"}
    failed = [test for test in tests.values() if test["outcome"] == "failed"]
    rest = [name for name in plan["tests"] if name not in tests]
    crash, text = unagreed(directory, rest[0]) if rest else ("", "")
    if text:
        name = rest.pop(0)
        tests[name] = _unended(name, "failed", crash or why, text)
        failed.append(tests[name])
    if plan["junit"]:
        cases = [*tests.values(), *(_unended(name, "skipped", "not run", "") for name in rest)]
        if rest and not text:
            cases[len(tests)] = _unended(rest[0], "died", why, why)
        _write_junit(Path(plan["junit"]), cases)
    found = [f"\n____ {test['nodeid']} ____\n{test['text']}\n" for test in failed]
    counts = f"{len(tests) - len(failed)} passed or skipped, {len(failed)} failed, "
    counts += f"{len(rest)} not run or not ended"
    names = [f"  {name}\n" for name in rest[:_NAMED]]
    more = [f"  and {len(rest) - _NAMED} more\n"] if len(rest) > _NAMED else []
    return [*found, f"\narraycomm: the job ended before the run: {counts}:\n", *names, *more]


def unagreed(directory: Path, test: str) -> tuple[str, str]:
    """Return what failed on single ranks in the test that runs: a line of the first, and all."""
    own = [f for f in _reports(directory) if f["nodeid"] == test and f["rank"] is not None]
    own.sort(key=lambda found: (found["order"], found["rank"]))
    # Errors of the rank itself, before those that what it waited for has caused.
    first = [found for found in own if found["order"][0] == 0]
    texts = [f"rank {found['rank']} failed:\n{found['text']}" for found in own]
    here = [f"rank {rank} is here:\n{stack}" for rank, stack in stacks(directory).items()]
    texts[len(first) : len(first)] = here
    return (f"[rank {first[0]['rank']}] {first[0]['crash']}" if first else ""), "\n".join(texts)


def stacks(directory: Path) -> dict[int, str]:
    """Return the stacks of the ranks that are stuck."""
    found = sorted(directory.glob("stuck-*"))
    return {int(path.name.split("-")[1]): path.read_text("utf-8") for path in found}


def _reports(directory: Path) -> Iterator[dict[str, Any]]:
    """Return what was written down, except for a line that was being written."""
    with suppress(OSError):
        for line in (directory / REPORTS).read_text("utf-8").splitlines():
            with suppress(ValueError):
                yield json.loads(line)


def _unended(nodeid: str, outcome: str, crash: str, text: str) -> dict[str, Any]:
    return {"nodeid": nodeid, "outcome": outcome, "crash": crash, "text": text, "seconds": 0.0}


def _write_junit(path: Path, tests: list[dict[str, Any]]) -> None:
    kinds = {"failed": "failure", "died": "error", "skipped": "skipped"}
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", name="pytest", tests=str(len(tests)))
    for test in tests:
        place, _, name = test["nodeid"].rpartition("::")
        where = place.replace(".py", "").replace("/", ".").replace("::", ".")
        seconds = f"{test['seconds']:.3f}"
        case = ET.SubElement(suite, "testcase", classname=where, name=name, time=seconds)
        if test["outcome"] in kinds:
            # XML has no control characters.
            message, text = (
                "".join(c for c in test[key] if c.isprintable() or c in "\n\t")
                for key in ("crash", "text")
            )
            ET.SubElement(case, kinds[test["outcome"]], message=message).text = text
    for count, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(count, str(len(suite.findall(f"testcase/{kind}"))))
    path.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(root).write(path, "utf-8", xml_declaration=True)


def main(directory: Path, near: dict[int, tuple[int, int]]) -> None:
    """Wait for the end of the run or of a rank, and say which; `near` has pids and handles."""
    dead = wait_for_death({handle: rank for rank, (_, handle) in near.items()})
    if not dead:
        return
    # If ranks were stuck, one of them has ended all.
    stuck = list(stacks(directory))
    lines = [
        f"\narraycomm: rank {rank} (process {near[rank][0]}) "
        f"{'is stuck outside Python' if stuck else 'died'} in {note}\n"
        for rank, note in zip(stuck or dead, notes_of(directory, stuck or dead), strict=True)
    ]
    sys.stderr.write("".join([*lines, *what_was_found(directory, "".join(lines).strip())]))
    sys.stderr.flush()
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), {int(rank): pair for rank, pair in json.loads(sys.argv[2]).items()})
