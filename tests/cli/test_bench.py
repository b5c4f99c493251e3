"""The benchmark: its arithmetic, its tables, and a run of it on two ranks. Nothing here is timed."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arraycomm.cli import main
from arraycomm.cli.bench import calls, cases, results
from arraycomm.cli.bench import command as bench
from arraycomm.cli.bench import device as bench_device
from arraycomm.cli.bench.cases import Case, Field, pattern
from arraycomm.cli.bench.results import Entry
from arraycomm.cli.bench.timing import measure, plan, ratio, rotated
from tests.support.launcher import needs_mpiexec, run_python


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


class Alone:
    """A meeting of one rank, which is its own MPI."""

    rank, size = 0, 1
    place, clear = Field.place, Field.clear

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

    _, samples = measure([lambda: None], repetitions=3, seconds=1e-3, meeting=Slow())
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


def entry_of(answer: Any, shapes: Any = ((16,),)) -> Entry:
    field: Any = Alone()
    case = Case("float32", shapes, field)
    return results.enter(
        field, case, "mpi4py", "numpy", lambda *_: (list, lambda: answer(case.x[:]))
    )


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (lambda x: [np.where(np.arange(16) == 5, 9, *x).astype("f4")], "wrong", "1 of 16"),
        (lambda x: [x[0].astype(np.float64)], "wrong", "the result is float64"),
        (lambda x: [x[0][:3]], "wrong", "(3,)"),
        (lambda x: [x[0] * np.float32("nan")], "wrong", "are wrong"),
        (lambda x: 1 / 0, "error", "ZeroDivisionError: division by zero"),
    ],
    ids=["one number", "other dtype", "other shape", "NaN", "none"],
)
def test_a_wrong_answer_is_reported_and_not_timed(answer: Any, status: str, reason: str) -> None:
    right, entry = entry_of(lambda x: x), entry_of(answer)
    assert (right.status, right.reason) == ("ok", "")
    assert right.call is not None
    assert entry.status == status
    assert reason in entry.reason
    assert entry.call is None


def test_of_a_tree_the_wrong_leaf_is_named() -> None:
    leaves = [(3,), (2, 2), ()]
    assert entry_of(lambda x: x, leaves).status == "ok"
    wrong = entry_of(lambda x: [x[0], x[1] + np.eye(2, dtype="f4"), x[2]], leaves)
    assert wrong.reason.startswith("rank 0: leaf 1: 2 of 4 elements are wrong")
    assert entry_of(lambda x: x[:2], leaves).status == "error"


def test_what_the_last_contender_left_behind_does_not_count_as_an_answer() -> None:
    field: Any = Alone()
    case = Case("float32", [(16,)], field)
    case.y[0][...] = case.expected(0)
    entry = results.enter(field, case, "out", "numpy", lambda *_: (list, lambda: case.y))
    assert entry.status == "wrong"


@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn", "complex64"])
def test_the_expected_sum_is_exact(dtype: str) -> None:
    field: Any = SimpleNamespace(rank=1, size=4)
    case = Case(dtype, [(60,), (4, 15)], field)
    patterns = [pattern(rank, 60) for rank in range(4)]
    total = np.sum([each.astype(np.int64) for each in patterns], axis=0)
    np.testing.assert_array_equal(case.expected(0).astype(np.complex128).real, total)
    np.testing.assert_array_equal(case.expected(1).astype(np.complex128).real.flat, total + 4)
    assert len({each.tobytes() for each in patterns}) == 4


def line_of(status: str = "ok", nbytes: int = 8) -> dict[str, Any]:
    field: Any = Alone()
    case = Case("float32", [(nbytes // 4,)], field)
    entries = [Entry("out", "numpy"), Entry("mpi4py", "numpy")]
    for entry in entries:
        entry.call = list
    entries[1].status, entries[1].reason = status, "its reason"
    if status != "ok":
        entries[1].call = None
    line = results.measured(field, case, "latency", entries, repetitions=3, seconds=1e-3)
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
        ("--dtypes", "bool"),
        ("--frameworks", "abacus"),
        ("--only", "nobody"),
        ("--device", "tpu"),
        ("speed",),
        ("--compare", "nowhere.json", "nowhere.json"),
    ],
)
def test_wrong_arguments_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        parse(*words)


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


# Devices


def test_what_devices_do_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_device.device, "missing", lambda: None)
    assert bench_device.refusal(("cupy",), "latency") == ""
    said = bench_device.refusal(("numpy",), None)
    assert "the frameworks are cupy, torch; got numpy" in said
    assert "on the host only" in bench_device.refusal((), "trees")
    for has_cuda in (False, True):
        cuda = SimpleNamespace(is_available=lambda has=has_cuda: has)
        torch: Any = SimpleNamespace(__version__="2.13.0+cpu", cuda=cuda)
        monkeypatch.setitem(sys.modules, "torch", torch)
        said = bench_device.refusal(("torch",), None)
        assert said == "" if has_cuda else "this PyTorch (2.13.0+cpu) has no CUDA" in said
    # CuPy is of devices alone.
    monkeypatch.setattr(bench, "installed", lambda name: True)
    monkeypatch.setattr(cases, "installed", lambda name: True)
    assert "pass --device cuda" in bench.refusal(parse("--frameworks", "cupy"))
    assert bench.refusal(parse("--frameworks", "numpy")) == ""


@pytest.mark.skipif(bench_device.device.missing() is None, reason="a device is here")
def test_the_command_ends_with_a_message_where_there_is_no_device(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "--device", "cuda"]) == 1
    assert capsys.readouterr().err.startswith("arraycomm bench: --device cuda: ")


# The command


TINY = ("--sizes", "8,64K", "--repeats", "2", "--seconds", "0.01")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command gives where it launches its ranks itself."""
    pytest.importorskip("mpi4py")
    directory = tmp_path_factory.mktemp("bench")
    command = ["-m", "arraycomm", "bench", *TINY, "--dtypes", "float32,bfloat16"]
    done = run_python(*command, "--json", "results.json", cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded: dict[str, Any] = json.loads((directory / "results.json").read_text("utf-8"))
    return {**loaded, "printed": done.stdout}


@needs_mpiexec
def test_each_line_is_printed_once(found: dict[str, Any]) -> None:
    heads = re.findall(r"^(\d+ \S+) of (\w+)$", found["printed"], re.MULTILINE)
    dtypes = ("float32", "bfloat16")
    assert heads == [(size, dtype) for size in ("8 B", "64 KB") for dtype in dtypes]
    for line in found["lines"]:
        assert found["printed"].count(results.as_text(line)) == 1


@needs_mpiexec
def test_the_results_say_what_was_measured_where(found: dict[str, Any]) -> None:
    assert (found["format"], found["ranks"]) == (results.FORMAT, 2)
    assert found["mpi"]
    assert found["machine"]["cores"] >= 1
    assert {"python", "arraycomm", "numpy", "mpi4py"} <= found["versions"].keys()
    assert found["command"][:3] == ["mpiexec", "-n", "2"]


@needs_mpiexec
def test_every_contender_gives_the_right_result_or_says_that_it_cannot(
    found: dict[str, Any],
) -> None:
    measured = [(line["mode"], line["nbytes"]) for line in found["lines"]]
    assert measured == [("latency", 8)] * 2 + [("bandwidth", 64 << 10)] * 2
    for line in found["lines"]:
        for entry in line["contenders"]:
            unable = (entry["key"], line["dtype"]) == ("mpi4py", "bfloat16")
            assert entry["status"] == ("unsupported" if unable else "ok"), entry
            assert len(entry.get("samples", ())) == (0 if unable else line["repetitions"])


@needs_mpiexec
def test_trees_are_reduced_in_every_way(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from arraycomm.cli import main\n"
        "from arraycomm.cli.bench.trees import TREES\n"
        "TREES.clear()\n"
        "TREES['small'] = ((3,), (2, 2), ())\n"
        "sys.exit(main(['bench', 'trees', *sys.argv[1:]]))\n"
    )
    file = tmp_path / "trees.json"
    done = run_python("-c", program, *TINY[2:], "--json", str(file), ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = json.loads(file.read_text("utf-8"))["lines"]
    assert (line["tree"], line["nbytes"]) == ("small", 32)
    entries = [(entry["framework"], entry["key"]) for entry in line["contenders"]]
    assert entries[:3] == [("numpy", "plan"), ("numpy", "tree"), ("numpy", "mpi4py")]
    assert {entry["status"] for entry in line["contenders"]} == {"ok"}, line


@needs_mpiexec
def test_each_call_gives_what_mpi4py_gives(tmp_path: Path) -> None:
    file = tmp_path / "calls.json"
    words = ("bench", "latency", "--sizes", "8,4K", *TINY[2:], "--frameworks", "numpy")
    done = run_python("-m", "arraycomm", *words, "--json", str(file), ranks=3)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in json.loads(file.read_text("utf-8"))["lines"] if "call" in line]
    assert len(lines) == 32
    for line in lines:
        entries = [(entry["key"], entry["status"]) for entry in line["contenders"]]
        assert entries == [("fresh", "ok"), ("mpi4py", "ok")], line
    right = np.arange(3.0)
    row = calls.Row("bcast", 24, lambda: {"a": right[::-1]}, list, {"a": right})
    field: Any = Alone()
    entries_of = {
        key: results.enter(field, row, key, "numpy", row.way(key)) for key in ("fresh", "mpi4py")
    }
    assert [entry.status for entry in entries_of.values()] == ["wrong", "ok"]


def test_pages_and_charts_are_what_the_figures_give() -> None:
    page: Any = importlib.import_module("docs.studies.benchmarks.page")
    figures = page.stored()
    assert page.PAGE.read_text("utf-8") == page.written(figures)
    assert page.TABLES.read_text("utf-8") == page.tabled(figures)
    for name, chart in page.drawn(figures).items():
        assert (page.CHARTS / name).read_text("utf-8") == chart
