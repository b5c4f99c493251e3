"""`ARRAYCOMM_TRACE`: a trace of a whole program, however that ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arraycomm._trace.files import read
from arraycomm.cli.trace.spans import Span, spans_of
from tests.support.launcher import LAUNCHED, needs_mpiexec, run_python
from tests.trace.event_format import check_format

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")

ENDS = """
import arraycomm as ac
comm = ac.init()
comm.allreduce(comm.rank)
"""
GOES_ELSEWHERE_AND_FORKS = """
import os
import arraycomm as ac
comm = ac.init()
os.chdir("/")
for _ in range(2):
    comm.allreduce(comm.rank)
    if not os.fork():
        raise SystemExit
    assert os.wait()[1] == 0
"""
FINALIZES_AND_FAILS = """
import json, os, sys
import arraycomm as ac
comm = ac.init()
comm.allreduce(comm.rank)
ac.finalize()
os.environ["ARRAYCOMM_TRACE"] += ".second"
comm = ac.init()
comm.bcast(comm.rank)
if comm.rank == 1:
    sys.exit("rank 1 fails")
comm.barrier()
"""
FILLS_THE_DISK = """
import os, resource, sys
import arraycomm as ac
comm = ac.init()
most = int(os.environ["MOST"])
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
for _ in range(200):
    comm.allreduce(1)
"""


def calls_of(path: Path) -> dict[int, list[Span]]:
    """Return the calls of each rank in a trace."""
    found: dict[int, list[Span]] = {}
    for span in spans_of(read(str(path))):
        found.setdefault(span.rank, []).append(span)
    return found


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run.json"
    monkeypatch.setenv("ARRAYCOMM_TRACE", str(path))
    return path


@needs_mpiexec
@pytest.mark.each_mpi
def test_rank_that_fails_leaves_what_every_rank_has_recorded(path: Path) -> None:
    done = run_python("-c", FINALIZES_AND_FAILS, ranks=2, timeout=60)
    assert done.returncode != 0
    first, second = calls_of(path), calls_of(path.with_name("run.json.second"))
    assert [[call.operation for call in first[rank]] for rank in (0, 1)] == [["allreduce"]] * 2
    assert [call.operation for call in second[1]] == ["bcast"]
    bcast, barrier = second[0]
    assert (bcast.operation, bcast.error) == ("bcast", "")
    assert (barrier.operation, barrier.error, barrier.absent) == ("barrier", "PeerError", (1,))


def test_one_process_alone_is_traced_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARRAYCOMM_TRACE", path.name)
    done = run_python("-c", GOES_ELSEWHERE_AND_FORKS, cwd=path.parent, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [call.operation for call in calls_of(path)[0]] == ["allreduce"] * 2
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@needs_mpiexec
@pytest.mark.each_mpi
def test_run_leaves_one_file_of_all_ranks(tmp_path: Path) -> None:
    words = ["run", "-n", "3", "--trace", "run.json", "-c", ENDS]
    done = run_python("-m", "arraycomm", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
    check_format(json.loads((tmp_path / "run.json").read_text("utf-8")))
    found = calls_of(tmp_path / "run.json")
    assert sorted(found) == [0, 1, 2]
    assert [[call.operation for call in calls] for calls in found.values()] == [["allreduce"]] * 3


@pytest.mark.parametrize(("most", "suffix"), [(2_000, ".rank0"), (60_000, "")])
def test_trace_that_has_no_room_is_said(
    path: Path, monkeypatch: pytest.MonkeyPatch, most: int, suffix: str
) -> None:
    """Of a rank's own part, and of the file of all, of which the parts then stay."""
    monkeypatch.setenv("MOST", str(most))
    job = run_python("-c", FILLS_THE_DISK)
    lost = f"arraycomm: the trace {path}{suffix} cannot be written: File too large"
    assert (job.returncode, job.stderr.splitlines()) == (0, [lost])
    assert suffix or len(calls_of(path)[0]) == 200
    assert not path.with_name("run.json.partial").exists()


def test_file_that_cannot_be_written_is_an_error_that_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = tmp_path / "none" / "run.json"
    monkeypatch.setenv("ARRAYCOMM_TRACE", str(nowhere))
    done = run_python("-c", ENDS, timeout=60)
    assert done.returncode == 1
    assert "no trace, by ARRAYCOMM_TRACE" in done.stderr
    assert str(nowhere) in done.stderr
