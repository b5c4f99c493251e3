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
from arraycomm.cli.bench import arguments as bench
from arraycomm.cli.bench import device as bench_device
from arraycomm.cli.bench.contenders import Case, Contender, pattern
from arraycomm.cli.bench.lines import Entry, measured, verify
from arraycomm.cli.bench.report import complaints, tables
from arraycomm.cli.bench.results import FORMAT
from arraycomm.cli.bench.tables import as_text
from arraycomm.cli.bench.timing import measure, plan, ratio, rotated
from tests.support.launcher import needs_mpiexec, run_python


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


class Alone:
    """A meeting of one rank, which is its own MPI."""

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


def entry_of(answer: Any) -> Entry:
    field: Any = Alone()
    case = Case("float32", 64, rank=0, size=1)
    entry = Entry("mpi4py", "numpy")
    verify(field, case, Contender("mpi4py", "numpy", lambda: None, lambda: answer(case)), entry)
    return entry


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (lambda case: np.where(np.arange(16) == 5, 9, case.x).astype("f4"), "wrong", "1 of 16"),
        (lambda case: case.x.astype(np.float64), "wrong", "the result is float64"),
        (lambda case: case.x[:3], "wrong", "(3,)"),
        (lambda case: case.x * np.float32("nan"), "wrong", "are wrong"),
        (lambda case: 1 / 0, "error", "ZeroDivisionError: division by zero"),
    ],
    ids=["one number", "other dtype", "other shape", "NaN", "none"],
)
def test_a_wrong_answer_is_reported_and_not_timed(answer: Any, status: str, reason: str) -> None:
    right, entry = entry_of(lambda case: case.x.copy()), entry_of(answer)
    assert (right.status, right.reason) == ("ok", "")
    assert right.contender is not None
    assert entry.status == status
    assert reason in entry.reason
    assert entry.contender is None


def test_what_the_last_contender_left_behind_does_not_count_as_an_answer() -> None:
    field: Any = Alone()
    case, entry = Case("float32", 64, rank=0, size=1), Entry("out", "numpy")
    case.y[...] = case.expected
    verify(field, case, Contender("out", "numpy", lambda: None, lambda: case.y), entry)
    assert entry.status == "wrong"


@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn", "complex64"])
def test_the_expected_sum_is_exact(dtype: str) -> None:
    case = Case(dtype, 240, rank=1, size=4)
    patterns = [pattern(rank, case.count) for rank in range(4)]
    total = np.sum([each.astype(np.int64) for each in patterns], axis=0)
    np.testing.assert_array_equal(case.expected.astype(np.complex128).real, total)
    assert len({each.tobytes() for each in patterns}) == 4


def line_of(status: str = "ok", **more: Any) -> dict[str, Any]:
    field: Any = Alone()
    case = Case("float32", 8, rank=0, size=1)
    entries = [Entry("out", "numpy"), Entry("mpi4py", "numpy")]
    for entry in entries:
        entry.contender = Contender(entry.key, "numpy", lambda: None, lambda: case.x)
    entries[1].status, entries[1].reason = status, "its reason"
    if status != "ok":
        entries[1].contender = None
    line = measured(field, case, "latency", entries, repetitions=3, seconds=1e-3)
    return {**line, **more}


@pytest.mark.parametrize(
    ("status", "cell"), [("unsupported", "–"), ("wrong", "wrong"), ("error", "error")]
)
def test_a_table_says_what_was_not_timed(status: str, cell: str) -> None:
    (table,) = tables([line_of(status)], ranks=2)
    assert list(table.header) == ["size", "arraycomm, out=", "mpi4py Allreduce"]
    assert table.rows[0][2] == cell
    said = "mpi4py Allreduce with NumPy arrays, float32, 8 B: its reason"
    assert complaints([line_of(status)]) == ([] if status == "unsupported" else [said])


def test_a_table_has_a_ratio_of_arraycomm_to_each_reference() -> None:
    line = line_of()
    line["contenders"][0].update(median=3e-6, ratios={"mpi4py": 1.5})
    line["contenders"][1].update(median=2e-6)
    (table,) = tables([line], ranks=2)
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


def test_the_command_line_survives_the_launcher() -> None:
    words = ["latency", "--sizes", "8,64K,2m", "--dtypes", "int8", "--only", "out,gloo"]
    arguments = parse(*words, "--frameworks", "numpy", "--json", "x.json", "--seconds", "0.5")
    assert arguments.sizes == [8, 64 << 10, 2 << 20]
    again = bench.command(arguments)
    assert again[0] == "bench"
    assert parse(*again[1:]) == arguments
    arguments = parse("latency", "--device", "cuda", "--only", "out,nccl,torch-nccl,copy")
    assert parse(*bench.command(arguments)[1:]) == arguments


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
    rows = [line.rsplit(maxsplit=3) for line in capsys.readouterr().out.splitlines()[3:]]
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
    assert "pass --device cuda" in bench.refusal(parse("--frameworks", "cupy"))
    assert bench.refusal(parse("--frameworks", "numpy")) == ""


@pytest.mark.skipif(bench_device.device.missing() is None, reason="a device is here")
def test_the_command_ends_with_a_message_where_there_is_no_device(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "--device", "cuda"]) == 1
    assert capsys.readouterr().err.startswith("bench: --device cuda: ")


# The command


TINY = ("--sizes", "8,64K", "--repeats", "2", "--seconds", "0.01")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command gives where it launches its ranks itself."""
    pytest.importorskip("mpi4py")
    directory = tmp_path_factory.mktemp("bench")
    command = ["-m", "arraycomm", "bench", *TINY, "--dtypes", "float32,bfloat16"]
    done = run_python(*command, "--json", "results.json", cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded: dict[str, Any] = json.loads((directory / "results.json").read_text("utf-8"))
    return {**loaded, "printed": done.stdout, "reported": done.stderr}


@needs_mpiexec
def test_each_line_is_reported_when_it_has_been_measured_and_printed_once(
    results: dict[str, Any],
) -> None:
    found = re.findall(
        r"^bench: (\d of 4: \d+ \S+ of \w+), \d+ s$", results["reported"], re.MULTILINE
    )
    sizes = ("1 of 4: 8 B", "2 of 4: 8 B", "3 of 4: 64 KB", "4 of 4: 64 KB")
    assert found == [f"{size} of {('float32', 'bfloat16')[n % 2]}" for n, size in enumerate(sizes)]
    for table in tables(results["lines"], results["ranks"]):
        assert results["printed"].count(as_text(table)) == 1


@needs_mpiexec
def test_the_results_say_what_was_measured_where(results: dict[str, Any]) -> None:
    assert (results["format"], results["ranks"]) == (FORMAT, 2)
    assert results["mpi"]
    assert results["machine"]["cores"] >= 1
    assert {"python", "arraycomm", "numpy", "mpi4py"} <= results["versions"].keys()
    assert results["command"][:3] == ["mpiexec", "-n", "2"]


@needs_mpiexec
def test_every_contender_gives_the_right_result_or_says_that_it_cannot(
    results: dict[str, Any],
) -> None:
    measured = [(line["mode"], line["nbytes"]) for line in results["lines"]]
    assert measured == [("latency", 8)] * 2 + [("bandwidth", 64 << 10)] * 2
    for line in results["lines"]:
        for entry in line["contenders"]:
            unable = (entry["key"], line["dtype"]) == ("mpi4py", "bfloat16")
            assert entry["status"] == ("unsupported" if unable else "ok"), entry
            assert len(entry.get("samples", ())) == (0 if unable else line["repetitions"])


def test_pages_and_charts_are_what_the_figures_give() -> None:
    page: Any = importlib.import_module("docs.studies.benchmarks.page")
    figures = page.stored()
    assert page.PAGE.read_text("utf-8") == page.written(figures)
    assert page.TABLES.read_text("utf-8") == page.tabled(figures)
    for name, chart in page.drawn(figures).items():
        assert (page.CHARTS / name).read_text("utf-8") == chart
