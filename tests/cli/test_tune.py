"""Measured crossovers: the choice from measurements, the file, and ranks that read it. Nothing here is timed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arraycomm._protocol import tuning
from arraycomm._transports.crossovers import NOT_MEASURED, Crossovers
from arraycomm.cli.bench.tune import best_chunk, crossover, plan_of
from tests.cli import tuned
from tests.support.launched import Report, start_numbered
from tests.support.launcher import LAUNCHED, needs_mpiexec, run_python

_SECONDS = st.floats(1e-6, 1.0)

# The choice


@given(st.dictionaries(st.integers(0, 1 << 30), st.tuples(_SECONDS, _SECONDS)))
def test_no_other_limit_takes_less_time(seconds: dict[int, tuple[float, float]]) -> None:
    def cost(limit: int) -> float:
        return sum(math.log(times[n > limit]) for n, times in seconds.items())

    limit = crossover(seconds)
    assert limit in {0, *seconds}
    assert all(cost(limit) <= cost(other) + 1e-9 for other in (0, *seconds))


@pytest.mark.parametrize(
    ("faster_up_to", "limit"), [(0, 0), (64, 64), (100, 64), (256, 256), (1 << 20, 1024)]
)
def test_limit_is_where_the_other_algorithm_becomes_faster(faster_up_to: int, limit: int) -> None:
    sizes = [1 << bits for bits in range(5, 11)]
    times = {n: (1.0, 2.0) if n <= faster_up_to else (2.0, 1.0) for n in sizes}
    assert crossover(times) == limit


def test_one_size_that_was_disturbed_moves_no_limit() -> None:
    times = {n: (1.0, 1.5) if n <= 256 else (1.5, 1.0) for n in (32, 64, 128, 256, 512, 1024)}
    assert crossover(times | {64: (1.7, 1.5)}) == 256


def test_chunks_are_as_built_unless_others_are_clearly_faster() -> None:
    assert best_chunk({}) is None
    assert best_chunk({8: {None: 1.0, 4: 0.97}}) is None
    assert best_chunk({8: {None: 1.0, 4: 0.9, 2: 0.8}, 16: {None: 1.0, 4: 0.7, 2: 0.95}}) == 4
    # Twice as long for one array is not made up for by a little less for another.
    assert best_chunk({8: {None: 1.0, 4: 0.8}, 16: {None: 1.0, 4: 2.0}}) is None


def test_what_is_measured_is_what_the_library_chooses_between() -> None:
    on_node = plan_of(4, 32 << 10, True, None)
    assert on_node == ({"steps": [1 << bits for bits in range(16, 23)]}, ())
    gather = plan_of(64, 4096, False, None).sizes["gather"]
    assert gather == [1 << bits for bits in range(13, 21)]
    assert 64 * gather[-1] <= 64 << 20
    assert plan_of(2, 4096, False, [8192, 1 << 23]) == ({"gather": [8192]}, ())
    assert plan_of(3, 4096, False, [8, 8192, 1 << 23]) == ({"gather": [8192]}, [1 << 23])
    chained = plan_of(4, 1 << 20, False, [8, 2 << 20, 1 << 23], chained=True)
    assert chained == ({"gather": [2 << 20], "slices": [2 << 20, 1 << 23]}, [1 << 23])


# The file

_LIMITS = st.none() | st.integers(0, 1 << 18)
_ENTRIES = st.dictionaries(
    st.integers(1, 64).flatmap(lambda n: st.tuples(st.integers(max(n, 2), 4096), st.just(n))),
    st.builds(Crossovers, _LIMITS, _LIMITS, _LIMITS, st.none() | st.integers(1 << 16, 1 << 28)),
)


@given(entries=_ENTRIES)
def test_what_is_written_is_read(
    entries: dict[tuple[int, int], Crossovers], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "tuning.json"
    tuning.write(path, entries)
    assert tuning.read(path) == entries
    found = tuning.tuning_of({tuning.VARIABLE: str(path)})
    assert all(found.of(*shape) == crossovers for shape, crossovers in entries.items())
    assert found.of(5000, 1) == NOT_MEASURED


def test_without_the_variable_nothing_is_read() -> None:
    assert tuning.tuning_of({}) is tuning.tuning_of({tuning.VARIABLE: ""}) is tuning.UNTUNED


_HEAD = {"arraycomm": "tuning", "format": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file or directory"),
        ("", "Expecting value"),
        ("[]", "does not begin with"),
        (json.dumps(_HEAD | {"format": 2, "measured": []}), "does not begin with"),
        (json.dumps(_HEAD), "no list 'measured'"),
        *(
            (json.dumps(_HEAD | {"measured": [entry]}), reason)
            for entry, reason in [
                (3, "3 is no entry"),
                ({"nodes": 1}, "'ranks' is null, and must be a whole number from 2"),
                ({"ranks": 4, "nodes": 5}, "'nodes' is 5, and must be a whole number from 1 to 4"),
                ({"ranks": 4, "nodes": 1, "steps": -1}, "'steps' is -1"),
                ({"ranks": 4, "nodes": 1, "steps": True}, "'steps' is true"),
                ({"ranks": 4, "nodes": 1, "steps": 1.5}, "'steps' is 1.5"),
                ({"ranks": 4, "nodes": 2, "chunk": 0}, "'chunk' is 0"),
                ({"ranks": 4, "nodes": 2, "gather": 1 << 29}, "more than 1073741824 bytes in all"),
                ({"ranks": 4, "nodes": 1, "stpes": 1}, "'stpes', which is unknown"),
            ]
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"init: ARRAYCOMM_TUNING: .*write one with") as found:
        tuning.tuning_of({tuning.VARIABLE: str(path)})
    assert reason in str(found.value)


# Ranks


def _files(folder: Path) -> list[str]:
    right, wrong, missing = (folder / name for name in ("right", "wrong", "missing"))
    tuning.write(right, {(2, 1): tuned.NEVER, (3, 1): Crossovers(steps=1 << 20)})
    wrong.write_text("{}")
    return [str(path) for path in (right, wrong, missing)]


def _passed(job: Any) -> None:
    for check in tuned.CHECKS:
        Report(job, 2).assert_passed(check.__name__)


@needs_mpiexec
@pytest.mark.each_mpi
def test_ranks_over_mpi_follow_the_file_of_rank_0(tmp_path: Path) -> None:
    _passed(run_python("-m", tuned.__name__, *_files(tmp_path), ranks=2, timeout=60))


@pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")
def test_numbered_processes_follow_the_file_of_process_0(tmp_path: Path) -> None:
    _passed(start_numbered(2, "-m", tuned.__name__, *_files(tmp_path))[0])


@needs_mpiexec
def test_bench_adds_what_it_measures_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    known = Crossovers(gather=4096, chunk=1 << 20)
    tuning.write(path, {(8, 2): known})
    words = ("-m", "arraycomm", "bench", "--tune", str(path), "--sizes", "2M,4M")
    job = run_python(*words, "--seconds", "0.01", "--repeats", "5", timeout=60)
    assert job.returncode == 0, job.stdout + job.stderr
    entries = tuning.read(path)
    assert entries.pop((8, 2)) == known
    ((shape, found),) = entries.items()
    assert shape == (2, 1)
    assert found.steps in {0, 2 << 20, 4 << 20}
    assert "for 2 ranks on 1 node: steps" in job.stdout
    assert f"ARRAYCOMM_TUNING={path}" in job.stdout
    path.write_text("[]")
    job = run_python(*words, timeout=60)
    assert job.returncode == 1
    assert "--tune would overwrite a file" in job.stderr
    assert path.read_text() == "[]"
