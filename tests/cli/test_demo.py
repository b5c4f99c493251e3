"""The demonstration: that it passes, and that it fails where something is wrong."""

from __future__ import annotations

import math
import subprocess
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import arraycomm as ac
from arraycomm.cli import launch as demo_launch
from arraycomm.cli import main
from arraycomm.cli.demo import command as demo
from arraycomm.cli.demo import data as demo_data
from arraycomm.cli.demo import runs as demo_runs
from arraycomm.cli.demo import verdict as demo_verdict
from tests.cli.faulty_demo import FAULTS, NONE, RAISES
from tests.support.launcher import needs_mpiexec, run_python

MODULES = {"numpy": ["numpy"], "torch": ["torch"], "jax": ["jax", "optax"]}
INSTALLED = [name for name, needs in MODULES.items() if all(map(find_spec, needs))]
# Enough for an accuracy over 0.9.
EPOCHS = "20"

needs_digits = pytest.mark.skipif(find_spec("sklearn") is None, reason="no scikit-learn")


def run_demo(picture: Path, *options: str) -> tuple[int, str, str]:
    job = run_python("-m", "arraycomm", "demo", "--picture", str(picture), *options)
    # On a busy machine a rank says that it waits for another, which imports a framework.
    said = [line for line in job.stderr.splitlines() if "still waiting" not in line]
    return job.returncode, job.stdout, "\n".join(said)


@needs_digits
@needs_mpiexec
@pytest.mark.skipif(len(INSTALLED) < 2, reason="fewer than two frameworks")
def test_each_framework_and_different_ones_in_lock_step(tmp_path: Path) -> None:
    frameworks = INSTALLED[-2:]
    picture = tmp_path / "losses.svg"
    status, out, err = run_demo(
        *(picture, "--frameworks", ",".join(frameworks), "--ranks", "2", "--epochs", EPOCHS)
    )
    assert (status, err) == (0, ""), out + err
    for number, framework in enumerate(frameworks, 1):
        assert f"[{number}/3] {framework} on every rank" in out
    together = out.partition("together, in lock step: ")[2]
    for rank, framework in enumerate(frameworks):
        assert f"{framework} on rank {rank}" in together
    assert "the same bits on every rank" in together
    assert "Passed: 3 runs " in out
    assert f"over that of one process: {picture}\n" in out
    texts = [e.text for e in ET.parse(picture).iter() if e.tag.endswith("text")]
    assert texts[-4:] == [
        "one process, without arraycomm",
        *(f"{framework} on every rank" for framework in frameworks),
        f"{' + '.join(frameworks)}, one on each rank",
    ]


@needs_digits
def test_one_rank_needs_no_launcher_and_ends_well_if_no_picture_can_be_written(
    tmp_path: Path,
) -> None:
    status, out, err = run_demo(
        *(tmp_path / "no" / "directory.svg", "--frameworks", "numpy"),
        *("--ranks", "1", "--epochs", EPOCHS),
    )
    assert (status, err) == (0, ""), out + err
    assert "0.0e+00 from the run in one process" in out
    assert "could not be written: [Errno 2] No such file" in out


def test_ctrl_c_ends_a_single_process_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "take_part", interrupted)
    assert main(["demo", "--frameworks", "numpy", "--ranks", "1"]) == 130
    assert capsys.readouterr().err == "\ndemo: ended by Ctrl-C\n"


@lru_cache
def _faulty() -> subprocess.CompletedProcess[str]:
    return run_python("-m", "tests.cli.faulty_demo", EPOCHS, ranks=3)


def _said_with(fault: str) -> tuple[str, str]:
    """Return what the demonstration says of a fault, and the status on each rank."""
    said, found, rest = _faulty().stdout.partition(f"<{fault}>")[2].partition("<status ")
    assert found, _faulty()
    return said, rest.partition(">")[0]


@needs_digits
@needs_mpiexec
class TestFailing:
    def test_without_a_fault_the_program_passes(self) -> None:
        said, status = _said_with(NONE)
        assert status == "[0, 0, 0]", said
        assert "3 ranks learn" in said
        assert "[1/1] numpy on every rank" in said
        assert "Passed: 1 run " in said

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_fault_is_noticed(self, fault: str) -> None:
        said, status = _said_with(fault)
        assert status == "[1, 1, 1]", said
        failure = said.partition("FAILED")[2]
        assert "numpy on every rank: " in failure
        assert "parameters" in failure
        assert "test accuracy is" in failure

    def test_a_rank_that_raises_fails_the_job(self) -> None:
        job = _faulty()
        assert job.returncode != 0
        assert "the disk of rank 1 is gone" in job.stderr
        assert "Passed" not in job.stdout.partition(f"<{RAISES}>")[2]

    def test_the_status_of_the_ranks_reaches_the_caller_of_the_launcher(self, capfd) -> None:
        assert demo_launch.launch(2, ["demo", "--frameworks", "keras"]) == 2
        assert capfd.readouterr().err.count("must be of numpy, torch, jax; got 'keras'") == 2


# The verdict

GOOD = demo_verdict.Outcome(
    accuracy=0.95,
    ranks_agree=True,
    difference=1e-7,
    tolerance=1e-5,
    seconds=1.0,
    communicating=0.1,
    losses=[2.0, 1.0],
    losses_alone=[2.0, 1.0],
)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"difference": 1.01e-5}, "parameters differ by"),
        ({"difference": math.nan}, "parameters differ by"),
        ({"ranks_agree": False}, "different parameters"),
        ({"accuracy": 0.899}, "test accuracy is 0.899"),
        ({"accuracy": math.nan}, "test accuracy is nan"),
    ],
)
def test_each_fault_of_an_outcome_is_complained_of(wrong: dict[str, Any], complaint: str) -> None:
    assert demo_verdict.complaints(GOOD._replace(difference=GOOD.tolerance)) == []
    (said,) = demo_verdict.complaints(GOOD._replace(**wrong))
    assert complaint in said


def test_one_bit_is_a_disagreement_and_the_difference_is_the_largest_of_any_parameter() -> None:
    rows = np.zeros((3, 5), np.float32)
    assert demo_verdict.same_bits(rows)
    rows[2, 4] = -0.0
    assert not demo_verdict.same_bits(rows)
    one = demo_data.Linear(np.zeros((2, 2), np.float32), np.zeros(2, np.float32))
    other = demo_data.Linear(np.full((2, 2), 0.5, np.float32), np.array([0, -2], np.float32))
    assert demo_verdict.difference(one, other) == 2


# The command line


def test_frameworks_are_repeated_over_the_ranks_if_there_are_several() -> None:
    *_, together = demo_runs.plan_runs(("numpy", "jax"), 3)
    assert together.by_rank == ("numpy", "jax", "numpy")
    for frameworks, size in ((("numpy",), 3), (("numpy", "jax"), 1)):
        assert len(demo_runs.plan_runs(frameworks, size)) == len(frameworks)


@pytest.mark.parametrize(
    ("missing", "frameworks", "said"),
    [
        ("torch", "numpy,torch", ("no module torch", "'arraycomm[torch]'", "--frameworks numpy")),
        ("sklearn", "numpy", ("pip install 'arraycomm[demo]'",)),
    ],
)
def test_what_is_not_installed_is_named(
    missing: str,
    frameworks: str,
    said: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == missing else object())
    assert main(["demo", "--frameworks", frameworks]) == 2
    err = capsys.readouterr().err
    assert all(text in err for text in said), err


@pytest.mark.parametrize(
    "options", [["--frameworks", "numpy,keras"], ["--frameworks", ","], ["--ranks", "0"]]
)
def test_wrong_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", *options])
    assert stop.value.code == 2
    assert "must be" in capsys.readouterr().err


def test_without_a_launcher_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_: Any) -> Any:
        raise ac.BackendUnavailableError("there is none")

    monkeypatch.setattr(demo_launch, "find_launcher", missing)
    assert demo_launch.launch(3, ["demo"], ", or sit down") == 127
    assert "there is none; install one with: pip install 'arraycomm[mpich]', or sit" in (
        capsys.readouterr().err
    )
