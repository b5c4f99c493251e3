from __future__ import annotations

import json
from pathlib import Path

import pytest

from arraycomm.cli import main
from arraycomm.cli.bench import overlap
from arraycomm.cli.bench.overlap import overlap_table
from tests.support.launcher import needs_mpiexec, run_python


def test_hidden_share_is_shown_in_percent() -> None:
    line = {"beside": "sleep", "nbytes": 1 << 20, "call": 0.002, "work": 0.004, "both": 0.005}
    [row] = overlap_table([{**line, "hidden": 0.5}], 2).rows
    assert row == ["1 MB", "sleep", "2.00", "4.00", "5.00", "50 %"]


def test_command_launches_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(overlap, "detect", lambda environment: None)
    monkeypatch.setattr(overlap, "launch", lambda *arguments: launched.append(arguments) or 3)
    assert main(["overlap", "--ranks", "5", "--repeats", "1", "--json", "x.json"]) == 3
    assert launched == [(5, ["overlap", "--repeats", "1", "--json", "x.json"])]


@needs_mpiexec
def test_command_measures_and_stores(tmp_path: Path) -> None:
    program = (
        "import sys; from arraycomm.cli import main; from arraycomm.cli.bench import overlap\n"
        "overlap._SIZES = overlap._SIZES[:2]\n"
        "sys.exit(main(['overlap', '--repeats', '1', '--json', sys.argv[1]]))"
    )
    stored = tmp_path / "overlap.json"
    done = run_python("-c", program, str(stored), ranks=2)
    assert done.returncode == 0, done.stderr
    lines = json.loads(stored.read_text())["lines"]
    assert [(line["beside"], line["nbytes"] >> 20) for line in lines] == [
        (work, size) for work in ("sleep", "matmul") for size in (1, 8)
    ]
    for line in lines:
        longer = max(line["call"], line["work"])
        assert line["hidden"] <= 1 + 1e-9 or line["both"] < longer
