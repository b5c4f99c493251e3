"""The benchmark: its arithmetic, its tables, and a run of it on two ranks. Nothing here is timed."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arraycomm.cli import main
from arraycomm.cli.bench import command as bench
from arraycomm.cli.bench import results, timing
from arraycomm.cli.bench.rows import Row
from arraycomm.cli.bench.timing import Ranks, measure, ratio, rotated
from docs.studies.benchmarks import results as figures
from docs.studies.benchmarks.results import Entry
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


class Alone(Ranks):
    """One rank, which is its own MPI."""

    def __init__(self) -> None:
        self.rank, self.size, self.barriers = 0, 1, 0
        self.mpi = SimpleNamespace(allgather=lambda said: [said], Barrier=self.barrier)

    def barrier(self) -> None:
        self.barriers += 1


# Timing


def test_contenders_take_every_place_in_turn_and_get_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for count in (2, 3):
        orders = [rotated(count, repetition) for repetition in range(2 * count)]
        for place in range(count):
            assert sorted(order[place] for order in orders) == sorted(2 * [*range(count)])
    took = [0.0, 0.0]
    # Only calls take time.
    monkeypatch.setattr(timing, "perf_counter", lambda: sum(took))

    def call(which: int, seconds: float) -> None:
        took[which] += seconds

    quick, slow = partial(call, 0, 1e-3), partial(call, 1, 1e-2)
    assert [len(row) for row in measure([quick, slow], 5, 0.5, Alone())] == [5, 5]
    assert took[0] == pytest.approx(took[1], rel=0.2)
    assert measure([], 3, 1.0, Alone()) == []


def test_a_ratio_compares_samples_of_the_same_repetition() -> None:
    # Twice as slow throughout, on a machine that was ten times slower at one time.
    assert ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == 2.0
    assert ratio([4.0, 20.0, 2.0], [2.0, 10.0, 4.0]) == 2.0


def test_the_slowest_rank_counts() -> None:
    class Slow(Alone):
        def slowest(self, seconds: Sequence[float]) -> list[float]:
            return [7.0] * len(seconds)

    assert measure([list], repetitions=3, seconds=1e-3, ranks=Slow()) == [[7.0] * 3]


def test_every_sample_begins_with_a_barrier() -> None:
    meeting = Alone()
    before_calls = []
    measure([lambda: before_calls.append(meeting.barriers)], 4, 1e-3, meeting)
    assert meeting.barriers == len(set(before_calls)) > 4


def test_the_end_of_what_calls_have_begun_is_waited_for_and_counts() -> None:
    begun: list[None] = []

    class Idle(Alone):
        def barrier(self) -> None:
            assert not begun

        def finish(self) -> None:
            time.sleep(2e-3)
            begun.clear()

    (row,) = measure([lambda: begun.append(None)], 3, 0.0, Idle())
    assert not begun
    assert min(row) >= 2e-3


# Verification


@pytest.mark.parametrize(
    "answer",
    [lambda x: np.where(x == 5, 9, x), lambda x: x[:3], lambda x: x * float("nan")],
    ids=["one number", "other shape", "NaN"],
)
@pytest.mark.parametrize("holds", [lambda x: x, lambda x: {"a": x}, lambda x: [x, x]])
def test_a_wrong_answer_is_found(answer: Any, holds: Any) -> None:
    x = np.arange(16.0)
    assert Row("right", lambda: holds(x.copy()), list, holds(x)).wrong(Alone()) == ""
    wrong = Row("wrong", lambda: holds(answer(x)), list, holds(x)).wrong(Alone())
    assert wrong.startswith("rank 0: the result is")


def test_a_study_says_what_a_contender_raised() -> None:
    entry = figures.enter(Alone(), "fresh", "numpy", list, lambda: str(1 / 0))
    assert (entry.call, entry.status) == (None, "error")
    assert entry.reason == "rank 0: ZeroDivisionError: division by zero"


def line_of(status: str = "ok", nbytes: int = 8) -> dict[str, Any]:
    entries = [Entry("out", "numpy"), Entry("mpi4py", "numpy")]
    for entry in entries:
        entry.call = list
    entries[1].status, entries[1].reason = status, "its reason"
    if status != "ok":
        entries[1].call = None
    line = figures.measured(
        Alone(), "latency", "float32", nbytes, entries, repetitions=3, seconds=1e-3
    )
    line["contenders"][0].update(median=3e-6, ratios={"mpi4py": 1.5})
    if status == "ok":
        line["contenders"][1].update(median=2e-6)
    return line


@pytest.mark.parametrize("status", ["unsupported", "wrong", "error"])
def test_what_was_not_timed_says_why(status: str) -> None:
    line = line_of(status)
    assert figures.as_text(line).splitlines()[2].split("  ")[-1].strip() == f"{status}: its reason"
    failed = status != "unsupported"
    assert not figures.failed({"lines": [line]})
    line["contenders"][1]["key"] = "fresh"
    assert figures.failed({"lines": [line]}) == failed
    report: Any = importlib.import_module("docs.studies.benchmarks.report")
    said = ["arraycomm with NumPy arrays, float32, 8 B: its reason"]
    assert report.complaints([line]) == (said if failed else [])
    (table,) = report.tables([line], ranks=2)
    assert table.rows[0][2] == ("–" if status == "unsupported" else status)


def test_a_line_has_a_ratio_of_arraycomm_to_each_reference() -> None:
    assert figures.as_text(line_of()).splitlines() == [
        "8 B of float32",
        "  numpy: arraycomm, out=   3.00 µs      1.50 × mpi4py",
        "  numpy: mpi4py            2.00 µs",
    ]
    shown = figures.as_text(line_of(nbytes=64 << 10)).splitlines()
    assert shown[0] == "64 KB of float32"
    assert shown[1].endswith("   0.00300 ms   21.8 GB/s   1.50 × mpi4py")
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


def test_sizes_have_suffixes() -> None:
    assert parse("--sizes", "8,64K,2m").sizes == [8, 64 << 10, 2 << 20]


# Two runs


def _stored(path: Path, **seconds: float) -> Path:
    """Write results in which these calls took so long."""
    lines = [
        {"name": name, "nbytes": 8, "arraycomm": [9.0, took, 0.0], "mpi4py": [1.0]}
        for name, took in seconds.items()
    ]
    path.write_text(json.dumps({"format": results.FORMAT, "lines": lines}), "utf-8")
    return path


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _stored(tmp_path / "a.json", scan=2e-6, new=1e-6)
    # The median of three runs counts.
    after = [_stored(tmp_path / f"{took}.json", scan=took * 1e-6) for took in (1, 3, 5000)]
    files = [str(before), ",".join(map(str, after))]
    assert main(["bench", "--compare", *files]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert shown == [["scan", "2.00", "µs", "3.00", "µs", "1.50"], ["new", "1.00", "µs", "–", "–"]]
    assert main(["bench", "--compare", *files, "--at-most", "1.6"]) == 0
    assert main(["bench", "--compare", *files, "--at-most", "1.4"]) == 1
    assert "scan takes 1.50 times as long" in capsys.readouterr().err
    other = _stored(tmp_path / "b.json", old=1.0)
    assert main(["bench", "--compare", str(before), str(other), "--at-most", "2"]) == 1
    assert "nothing in common" in capsys.readouterr().err
    before.write_text('{"format": 1, "lines": []}', "utf-8")
    assert main(["bench", "--compare", *files]) == 1
    assert "written by another version" in capsys.readouterr().err


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
    assert found["machine"]["cores"]
    assert found["command"][:3] == ["mpiexec", "-n", "2"]
    names = [f"allreduce{out}, {size}" for size in ("64 KB", "1 KB") for out in (", out=", "")]
    assert [line["name"] for line in found["lines"]] == names
    for line in found["lines"]:
        assert done.stdout.count(results.as_text(line)) == 1
        assert len(line["arraycomm"]) == len(line["mpi4py"]) == 2


def test_a_wrong_result_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "detect", lambda _: "this one")
    monkeypatch.setattr(bench, "Ranks", lambda _: Alone())
    monkeypatch.setattr(bench.arraycomm, "init", lambda _: None)
    monkeypatch.setattr(
        bench, "about", lambda *_: {"mpi": "", "machine": {"cores": [0]}, "lines": []}
    )
    monkeypatch.setattr(bench, "asked", lambda *_: [Row("scan, 8 B", int, int, 1), None])
    assert main(["bench"]) == 1
    said = "arraycomm bench: scan, 8 B: rank 0: the result is 0 in place of 1\n"
    assert capsys.readouterr().err == said


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
    lines = json.loads(file.read_text("utf-8"))["lines"]
    names = [(line["name"], line["nbytes"]) for line in lines]
    assert names == [("plan(tree), small", 32), ("allreduce_tree, small", 32)]


@needs_mpiexec
@pytest.mark.at_night
def test_each_call_gives_what_mpi4py_gives(tmp_path: Path) -> None:
    file = tmp_path / "calls.json"
    words = ("bench", "latency", "--sizes", "8,4K", *TINY)
    done = run_python("-m", "arraycomm", *words, "--json", str(file), ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads(file.read_text("utf-8"))["lines"]
    torch = find_spec("torch") is not None
    calls = [*CALLS, *["allreduce of torch tensors"] * torch]
    names = [f"{call}, {size}" for size in ("8 B", "4 KB") for call in calls]
    assert [line["name"] for line in lines] == names


@needs_mpiexec
@pytest.mark.at_night
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
