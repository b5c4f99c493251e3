"""The benchmark: its arithmetic, its tables, and a run of it on two ranks. Nothing here is timed."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arraycomm.cli import main
from arraycomm.cli.bench import command as bench
from arraycomm.cli.bench import results
from arraycomm.cli.bench.results import Entry
from arraycomm.cli.bench.rows import Row
from arraycomm.cli.bench.timing import measure, plan, ratio, rotated
from tests.support.launcher import needs_mpiexec, run_python

CALLS = (
    *("barrier", "bcast", "allreduce", "reduce", "scan", "allgather", "gather", "alltoall"),
    *("reduce_scatter", "scatter", "sendrecv", "isend and irecv", "send, and recv back"),
    *("iallreduce and wait", "allreduce_tree, two leaves", "bcast_object"),
)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


class Alone:
    """One rank, which is its own MPI."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.barriers = 0
        self.mpi = SimpleNamespace(allgather=lambda said: [said])

    def barrier(self) -> None:
        self.barriers += 1

    def finish(self) -> None:
        pass

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        return list(seconds)


# Timing


def test_contenders_take_every_place_in_turn_and_get_the_same_time() -> None:
    orders = [rotated("abc", repetition) for repetition in range(6)]
    for place in range(3):
        assert sorted(order[place] for order in orders) == list("aabbcc")
    assert plan([1e-3, 1e-4], repetitions=10, seconds=1.0).calls == (50, 500)
    assert plan([], repetitions=3, seconds=1.0).calls == ()


def test_a_ratio_compares_samples_of_the_same_repetition() -> None:
    # Twice as slow throughout, on a machine that was ten times slower at one time.
    assert ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == 2.0
    assert ratio([4.0, 20.0, 2.0], [2.0, 10.0, 4.0]) == 2.0


def test_the_slowest_rank_counts() -> None:
    class Slow(Alone):
        def slowest(self, seconds: Sequence[float]) -> list[float]:
            return [7.0] * len(seconds)

    _, samples = measure([lambda: None], repetitions=3, seconds=1e-3, ranks=Slow())
    assert samples == [[7.0] * 3]


def test_every_sample_begins_with_a_barrier() -> None:
    meeting = Alone()
    before_calls = []
    done, _ = measure([lambda: before_calls.append(meeting.barriers)], 4, 1e-3, meeting)
    assert meeting.barriers == len(set(before_calls))
    assert meeting.barriers > done.repetitions


def test_the_end_of_what_calls_have_begun_is_waited_for_and_counts() -> None:
    begun: list[None] = []

    class Idle(Alone):
        def barrier(self) -> None:
            assert not begun

        def finish(self) -> None:
            time.sleep(2e-3)
            begun.clear()

    done, (row,) = measure([lambda: begun.append(None)], 3, 1e-3, Idle())
    assert not begun
    assert min(row) * done.calls[0] >= 2e-3


# Verification


def entry_of(answer: Any, expected: Any, ranks: Any = None) -> Entry:
    """Return the entry of a call, where mpi4py's leaves `expected`."""
    row = Row("calls", "", 64, other=list, gets=expected, fresh=answer)
    return results.enter(
        ranks or Alone(), "fresh", "numpy", row.contenders["fresh"], lambda: row.verify("fresh")
    )


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (lambda x: np.where(x == 5, 9, x), "wrong", "the result is"),
        (lambda x: x[:3], "wrong", "the result is"),
        (lambda x: x * float("nan"), "wrong", "nan"),
        (lambda x: 1 / 0, "error", "ZeroDivisionError: division by zero"),
    ],
    ids=["one number", "other shape", "NaN", "none"],
)
@pytest.mark.parametrize("holds", [lambda x: x, lambda x: {"a": x}, lambda x: [x, x]])
def test_a_wrong_answer_is_reported_and_not_timed(
    answer: Any, status: str, reason: str, holds: Any
) -> None:
    x = np.arange(16.0)
    right = entry_of(lambda: holds(x.copy()), holds(x))
    entry = entry_of(lambda: holds(answer(x)), holds(x))
    assert (right.status, right.reason) == ("ok", "")
    assert right.call is not None
    assert entry.status == status
    assert entry.reason.startswith("rank 0: ")
    assert reason in entry.reason
    assert entry.call is None


def line_of(status: str = "ok", nbytes: int = 8) -> dict[str, Any]:
    row: Any = SimpleNamespace(nbytes=nbytes, dtype_name="float32")
    alone: Any = Alone()
    entries = [Entry("out", "numpy"), Entry("mpi4py", "numpy")]
    for entry in entries:
        entry.call = list
    entries[1].status, entries[1].reason = status, "its reason"
    if status != "ok":
        entries[1].call = None
    line = results.measured(alone, row, "latency", entries, repetitions=3, seconds=1e-3)
    line["contenders"][0].update(median=3e-6, ratios={"mpi4py": 1.5})
    if status == "ok":
        line["contenders"][1].update(median=2e-6)
    return line


@pytest.mark.parametrize("status", ["unsupported", "wrong", "error"])
def test_what_was_not_timed_says_why(status: str) -> None:
    line = line_of(status)
    assert results.as_text(line).splitlines()[2].split("  ")[-1].strip() == f"{status}: its reason"
    failed = status != "unsupported"
    assert not results.failed({"lines": [line]})
    line["contenders"][1]["key"] = "fresh"
    assert results.failed({"lines": [line]}) == failed
    report: Any = importlib.import_module("docs.studies.benchmarks.report")
    said = ["arraycomm with NumPy arrays, float32, 8 B: its reason"]
    assert report.complaints([line]) == (said if failed else [])
    (table,) = report.tables([line], ranks=2)
    assert table.rows[0][2] == ("–" if status == "unsupported" else status)


def test_a_line_has_a_ratio_of_arraycomm_to_each_reference() -> None:
    assert results.as_text(line_of()).splitlines() == [
        "8 B of float32",
        "  numpy: arraycomm, out=   3.00 µs      1.50 × mpi4py",
        "  numpy: mpi4py            2.00 µs",
    ]
    rows = results.as_text(line_of(nbytes=64 << 10)).splitlines()
    assert rows[0] == "64 KB of float32"
    assert rows[1].endswith("   0.00300 ms   21.8 GB/s   1.50 × mpi4py")
    report: Any = importlib.import_module("docs.studies.benchmarks.report")
    (table,) = report.tables([line_of()], ranks=2)
    assert table.title == "float32, NumPy arrays, 2 ranks: µs per call"
    assert list(table.header)[-1] == "out= ÷ mpi4py"
    assert list(table.rows[0]) == ["8 B", "3.00", "2.00", "1.50"]


# Arguments


@pytest.mark.parametrize(
    "words",
    [
        ("--dtypes", "float32"),
        ("--frameworks", "torch"),
        ("--only", "gloo"),
        ("--device", "cuda"),
        ("speed",),
        ("--compare", "nowhere.json", "nowhere.json"),
    ],
)
def test_wrong_arguments_are_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*words)
    assert ("was removed" in capsys.readouterr().err) == (words[0] in bench.REMOVED)


def test_sizes_and_modes_say_what_is_measured() -> None:
    assert parse("--sizes", "8,64K,2m").sizes == [8, 64 << 10, 2 << 20]
    for mode, sizes, latency, bandwidth in (
        (None, [8, 64 << 10], [8], [64 << 10]),
        ("latency", [8, 64 << 10], [8, 64 << 10], []),
        ("trees", [8], [], []),
    ):
        for name, want in (("latency", latency), ("bandwidth", bandwidth)):
            assert list(bench.sizes_of(name, mode, sizes)) == want
    assert bench.sizes_of("latency", None, None)[0] == 8


# Two runs


def _stored(path: Path, **seconds: float) -> Path:
    """Write results in which these contenders took so long, and mpi4py a second."""
    contenders = [
        {"key": key, "name": key, "framework": "numpy", "status": "ok", "samples": [9.0, took, 0.0]}
        for key, took in {**seconds, "mpi4py": 1.0}.items()
    ]
    line = {"mode": "latency", "dtype": "float32", "nbytes": 8, "contenders": contenders}
    lines = [line, line | {"mode": "trees", "tree": "GPT-2"}]
    path.write_text(json.dumps({"lines": lines}), "utf-8")
    return path


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _stored(tmp_path / "a.json", out=2e-6, new=1e-6)
    # The median of three runs counts.
    after = [_stored(tmp_path / f"{took}.json", out=took * 1e-6) for took in (1, 3, 50)]
    files = [str(before), ",".join(map(str, after))]
    assert main(["bench", "--compare", *files]) == 0
    rows = [line.rsplit(maxsplit=3) for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [
        ["latency 8 B of float32, numpy, out", "2.00", "3.00", "1.50"],
        ["latency 8 B of float32, numpy, new", "1.00", "–", "–"],
        ["trees GPT-2 of float32, numpy, out", "2.00", "3.00", "1.50"],
        ["trees GPT-2 of float32, numpy, new", "1.00", "–", "–"],
    ]
    assert main(["bench", "--compare", *files, "--at-most", "1.6"]) == 0
    assert main(["bench", "--compare", *files, "--at-most", "1.4"]) == 1
    assert "latency 8 B of float32, numpy, out takes 1.50 times as long" in capsys.readouterr().err
    other = _stored(tmp_path / "b.json", old=1.0)
    assert main(["bench", "--compare", str(before), str(other), "--at-most", "2"]) == 1
    assert "nothing in common" in capsys.readouterr().err


# The command


TINY = ("--repeats", "2", "--seconds", "0.01")


@needs_mpiexec
def test_the_command_launches_its_ranks_and_stores_what_it_prints(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    words = ["-m", "arraycomm", "bench", "bandwidth", "--sizes", "64K,1K", *TINY]
    done = run_python(*words, "--json", "results.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert (found["format"], found["ranks"]) == (results.FORMAT, 2)
    assert found["mpi"]
    assert found["machine"]["cores"] >= 1
    assert {"python", "arraycomm", "numpy", "mpi4py"} <= found["versions"].keys()
    assert found["command"][:3] == ["mpiexec", "-n", "2"]
    heads = re.findall(r"^(\d+ \S+) of (\w+)$", done.stdout, re.MULTILINE)
    assert heads == [("64 KB", "float32"), ("1 KB", "float32")]
    for line in found["lines"]:
        assert done.stdout.count(results.as_text(line)) == 1
        for entry in line["contenders"]:
            assert entry["status"] == "ok", entry
            assert len(entry["samples"]) == line["repetitions"]


@needs_mpiexec
def test_trees_are_reduced_in_every_way(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from arraycomm.cli import main\n"
        "from arraycomm.cli.bench.rows import TREES\n"
        "TREES.clear()\n"
        "TREES['small'] = ((3,), (2, 2), ())\n"
        "sys.exit(main(['bench', 'trees', *sys.argv[1:]]))\n"
    )
    file = tmp_path / "trees.json"
    done = run_python("-c", program, *TINY, "--json", str(file), ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = json.loads(file.read_text("utf-8"))["lines"]
    assert (line["tree"], line["nbytes"]) == ("small", 32)
    assert [entry["key"] for entry in line["contenders"]] == ["plan", "tree", "mpi4py"]
    assert {entry["status"] for entry in line["contenders"]} == {"ok"}, line


@needs_mpiexec
def test_each_call_gives_what_mpi4py_gives(tmp_path: Path) -> None:
    file = tmp_path / "calls.json"
    words = ("bench", "latency", "--sizes", "8,4K", *TINY)
    done = run_python("-m", "arraycomm", *words, "--json", str(file), ranks=3)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads(file.read_text("utf-8"))["lines"]
    torch = find_spec("torch") is not None
    assert [line["call"] for line in lines] == 2 * [*CALLS, *["allreduce of torch tensors"] * torch]
    for line in lines:
        entries = [(entry["key"], entry["status"]) for entry in line["contenders"]]
        assert entries == [("fresh", "ok"), ("mpi4py", "ok")], line


@needs_mpiexec
def test_other_arrays_are_measured_from_a_checkout(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "arrays.json"
    words = ("--dtypes", "bfloat16", "--frameworks", "numpy,torch,jax", "--sizes", "8", *TINY)
    study = ("-m", "docs.studies.benchmarks.arrays", "latency")
    done = run_python(*study, *words, "--json", str(file), ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = json.loads(file.read_text("utf-8"))["lines"]
    found = {(e["framework"], e["key"]): e["status"] for e in line["contenders"]}
    assert found.pop(("numpy", "mpi4py")) == found.pop(("torch", "mpi4py")) == "unsupported"
    assert ("torch", "gloo") in found
    assert set(found.values()) == {"ok"}, line


def test_pages_and_charts_are_what_the_figures_give() -> None:
    page: Any = importlib.import_module("docs.studies.benchmarks.page")
    figures = page.stored()
    assert page.PAGE.read_text("utf-8") == page.written(figures)
    assert page.TABLES.read_text("utf-8") == page.tabled(figures)
    for name, chart in page.drawn(figures).items():
        assert (page.CHARTS / name).read_text("utf-8") == chart
