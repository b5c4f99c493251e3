"""`arraycomm doctor`: what it finds here, and what it says of what it might find."""

from __future__ import annotations

import json
import os
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from arraycomm.cli.doctor import mpi as doctor_mpi
from arraycomm.cli.doctor.advice import advice_for, is_well
from arraycomm.cli.doctor.pairs import rounds
from arraycomm.cli.doctor.report import as_text
from tests.support.launched import start_numbered
from tests.support.launcher import LAUNCHED, LAUNCHER, is_open_mpi, needs_mpiexec, run_python

# What takes long to import is left out.
QUICK = ("--frameworks", "numpy,array_api_strict")


@needs_mpiexec
@pytest.mark.each_mpi
def test_ranks_try_every_two_of_them() -> None:
    job = run_python("-m", "arraycomm", "doctor", "--ranks", "3", "--json", *QUICK)
    assert (job.returncode, job.stderr) == (0, "")
    found = json.loads(job.stdout)
    assert [pair["ranks"] for pair in found["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(0 < pair["seconds"] < 10 for pair in found["pairs"])
    assert len(found["ranks"]) == 3
    mpi = found["mpi"]
    name = "Open MPI" if is_open_mpi() else "MPICH"
    assert mpi["library"].startswith(name)
    assert (mpi["family"], mpi["threads"]) == (name, "MPI_THREAD_MULTIPLE")
    assert mpi["launcher"] == str(LAUNCHER)
    assert name in found["started_by"]
    assert found["backend"] == "mpi"
    assert found["well"]
    # The same as the text.
    text = as_text(found)
    assert re.search(r"\n  ranks 0-2 +\S+ +(any of|bound to) core", text)
    assert re.search(r"\n  0     -  +[\d.]+ +[\d.]+\n", text)


@needs_mpiexec
def test_a_framework_that_takes_long_to_import_is_waited_for_in_silence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mlx.py").write_text("import time; time.sleep(2); raise ImportError('late')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("ARRAYCOMM_REPORT_AFTER", "0.3")
    job = run_python("-m", "arraycomm", "doctor", "--ranks", "2", "--frameworks", "mlx")
    assert (job.returncode, job.stderr) == (0, "")
    assert "late" in job.stdout


@pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")
def test_numbered_ranks_need_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere")
    job, statuses = start_numbered(2, "-m", "arraycomm", "doctor", "--frameworks", "numpy")
    assert statuses == [0, 0], job.stdout
    assert re.search(r"\n  started by +whoever set ARRAYCOMM_NUM_PROCESSES\n", job.stdout)
    assert re.search(r"\n  connected by +memory of one node, without MPI\n", job.stdout)
    assert re.search(r"\n  1     [\d.]+ +-\n", job.stdout)
    assert "several ranks need an MPI" not in job.stdout


@needs_mpiexec
def test_one_process_hears_of_the_mpi_that_it_has_not_started() -> None:
    job = run_python("-m", "arraycomm", "doctor", *QUICK)
    assert (job.returncode, job.stderr) == (0, "")
    assert re.search(rf"\n  launcher +{re.escape(str(LAUNCHER))}\n", job.stdout)
    assert re.search(r"\n  threads +MPI_THREAD_MULTIPLE\n", job.stdout)
    assert re.search(r"\n  started by +no launcher; one process\n", job.stdout)
    assert re.search(r"\n  numpy +\S+ +cpu +no copy +1 copy +no copy\n", job.stdout)


def test_without_an_mpi_it_says_what_to_install() -> None:
    program = (
        "import os, sys; os.environ |= {'MPI4PY_LIBMPI': '/nowhere', 'ARRAYCOMM_NATIVE': '0'}\n"
        "from arraycomm.cli import main; sys.exit(main(['doctor', '--frameworks', 'numpy']))"
    )
    job = run_python("-c", program)
    assert (job.returncode, job.stderr) == (1, "")
    assert re.search(r"\n  error +this Python loads no MPI \(", job.stdout)
    advice = " ".join(job.stdout.partition("Advice")[2].split())
    assert "install one with: pip install 'arraycomm[mpich]'" in advice
    assert re.search(r"\n  numpy +\S+ +cpu +no copy", job.stdout)
    assert re.search(r"\n  native part +not used: ARRAYCOMM_NATIVE is 0\n", job.stdout)


@needs_mpiexec
def test_an_mpi_that_does_not_start_is_no_end_of_the_examination(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = doctor_mpi.find_library({})
    monkeypatch.setattr(doctor_mpi, "find_library", lambda _: library)
    monkeypatch.setattr(doctor_mpi.sys, "executable", "false")
    found = doctor_mpi._started_elsewhere(library)
    assert found["error"] == (
        "this MPI does not start in one process: it ended with status 1: no word"
    )


def test_every_pair_has_its_turn_and_no_rank_two_at_once() -> None:
    for size in range(1, 8):
        found = [pair for pairs in rounds(size) for pair in pairs]
        assert sorted(found) == list(combinations(range(size), 2))
        for pairs in rounds(size):
            ranks = [rank for pair in pairs for rank in pair]
            assert len(ranks) == len(set(ranks))


# What might be found


def findings(**changed: Any) -> dict[str, Any]:
    """Return findings in which nothing is wrong, but for what is changed."""
    mpi = {
        "library": "MPICH Version: 5.0.2",
        "file": "/opt/lib/libmpi.so.12",
        "family": "MPICH",
        "mpi4py": "4.1.2",
        "threads": "MPI_THREAD_MULTIPLE",
        "gpu_aware": False,
        "ulfm": True,
        "launcher": "/opt/bin/mpiexec",
    }
    machine = {
        "python": "3.11.7",
        "system": "Linux",
        "shared_memory": {"path": "/dev/shm", "bytes": 1 << 30, "free": 1 << 29},
        "cuda": "2 devices",
        "nccl": "2.27.3",
        "native": {"used": True, "level": "avx2", "reason": ""},
    }
    found = {
        "version": "0.1.0",
        "mpi": mpi | changed.pop("mpi", {}),
        "started_by": "srun",
        "ranks": [place(0, 1, 2, 3), place(0, 1, 2, 3)],
        "machine": machine | changed.pop("machine", {}),
        "frameworks": [{"framework": "mlx", "installed": False}],
        **changed,
    }
    return found | {"advice": advice_for(found)}


def place(*cores: int, threads: str = "2") -> dict[str, Any]:
    return {"node": "n1", "cores": list(cores), "of": 4, "threads": threads}


@pytest.mark.parametrize(
    ("changed", "advice", "well"),
    [
        ({}, "", True),
        ({"mpi": {"error": "it crashed"}}, "several ranks need an MPI: it crashed; install", False),
        (
            {"mpi": {"launcher": None, "launcher_error": "there is no mpiexec"}},
            "there is no mpiexec",
            False,
        ),
        ({"mpi": {"threads": "MPI_THREAD_SINGLE"}}, "MPI was started with MPI_THREAD_SINGLE", True),
        (
            {"pairs": [{"ranks": [0, 1], "error": "CommTimeoutError: waited"}]},
            "ranks 0 and 1 cannot communicate: CommTimeoutError: waited",
            False,
        ),
        ({"ranks": [place(0)] * 3}, "3 ranks share one core of n1", True),
        (
            {"ranks": [place(0, 1, 2, 3, threads="")] * 2},
            "8 threads of 2 ranks share 4 cores of n1; set OMP_NUM_THREADS=2",
            True,
        ),
        (
            {"ranks": [place(0), place(1, 2, 3)]},
            "ranks on n1 have more threads than the cores to which they are bound; start",
            True,
        ),
        (
            {"machine": {"shared_memory": {"path": "/dev/shm", "bytes": 1 << 24, "free": 0}}},
            "/dev/shm has 16 MiB, too little for many ranks",
            True,
        ),
        (
            {"machine": {"native": {"used": False, "reason": "it was not built"}}},
            "it was not built; install arraycomm again with a C compiler",
            True,
        ),
        (
            {"frameworks": [{"framework": "jax", "installed": True, "error": "ImportError: old"}]},
            "arrays of jax cannot be used: ImportError: old",
            True,
        ),
    ],
)
def test_what_is_wrong_gets_one_advice(changed: dict[str, Any], advice: str, well: bool) -> None:
    found = findings(**changed)
    assert is_well(found) is well
    lines = as_text(found).partition("\nAdvice\n")[2].splitlines()
    assert [line[:4].isspace() for line in lines] == [False, *[True] * (len(lines) - 1)]
    assert max(map(len, lines)) <= 80
    said = " ".join(map(str.strip, lines))
    assert said.startswith(advice or "nothing is wrong") or advice in said


def test_columns_are_aligned_and_pairs_that_failed_stand_out() -> None:
    pairs = [
        {"ranks": [0, 1], "seconds": 2.5e-6},
        {"ranks": [0, 2], "error": "PeerError: gone"},
        {"ranks": [1, 2], "seconds": 1.5e-4},
    ]
    text = as_text(findings(ranks=[place(0), place(1), place(2)], pairs=pairs))
    table = text.partition("in microseconds\n")[2].partition("\n\n")[0]
    assert table.splitlines() == [
        "  rank  0       1      2",
        "  0     -       2.5    failed",
        "  1     2.5     -      150.0",
        "  2     failed  150.0  -",
    ]
    assert "\n  rank 1      n1  bound to core 1  OMP_NUM_THREADS=2\n" in text
