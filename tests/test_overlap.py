from __future__ import annotations

import json

from arraycomm.cli.overlap import overlap_table
from tests.launcher import needs_mpiexec, run_python


def test_hidden_share_is_shown_in_percent() -> None:
    line = {"beside": "sleep", "nbytes": 1 << 20, "call": 0.002, "work": 0.004, "both": 0.005}
    [row] = overlap_table([{**line, "hidden": 0.5}], 2).rows
    assert row == ["1 MB", "sleep", "2.00", "4.00", "5.00", "50 %"]


@needs_mpiexec
def test_command_measures_and_stores(tmp_path) -> None:
    stored = tmp_path / "overlap.json"
    done = run_python(
        *("-m", "arraycomm", "overlap", "--ranks", "2", "--repeats", "1", "--json", str(stored))
    )
    assert done.returncode == 0, done.stderr
    lines = json.loads(stored.read_text())["lines"]
    assert [(line["beside"], line["nbytes"] >> 20) for line in lines] == [
        (work, size) for work in ("sleep", "matmul") for size in (1, 8, 64)
    ]
    for line in lines:
        longer = max(line["call"], line["work"])
        assert line["hidden"] <= 1 + 1e-9 or line["both"] < longer
