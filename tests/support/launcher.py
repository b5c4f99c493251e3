"""Programs on several ranks, each a process, for tests that need more than threads."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest


def find_launcher() -> Path:
    """Return the launcher of this interpreter's environment, or else the one on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = shutil.which("mpiexec")
    return beside if beside.exists() or found is None else Path(found)


# That of this interpreter's environment fits the MPI that is loaded here.
LAUNCHER = find_launcher()
# Open MPI's launcher refuses root, and more ranks than cores, unless told otherwise.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    # It asks libfabric for networks that no test uses, which takes a second of every start.
    "OMPI_MCA_btl": "^ofi",
    # It patches the functions of memory for networks that no test uses.
    "UCX_MEM_MMAP_HOOK_MODE": "none",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "80",
}
# With these set pytest prints otherwise, and the output of programs is compared.
UNSET = ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS")
# Torch without its compiler; see `start/sitecustomize.py`.
UNCOMPILED = {"TESTS_COMPILE_TORCH": "0"}
LAUNCHED = any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"))


@cache
def is_open_mpi() -> bool:
    """Return whether the launcher of this environment is Open MPI's."""
    if not LAUNCHER.exists():
        return False
    version = subprocess.run([LAUNCHER, "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in version.stdout


needs_mpiexec = pytest.mark.skipif(
    not LAUNCHER.exists() or LAUNCHED,
    reason="no mpiexec beside the interpreter or on PATH, or under one",
)


def run_python(
    *arguments: str,
    ranks: int | None = None,
    options: Sequence[str] = (),
    wrapper: Sequence[str] = (),
    cwd: Path | None = None,
    timeout: float = 240,
    compiles: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run the interpreter with these arguments, under mpiexec where `ranks` is given.

    `options` are those of mpiexec, and `wrapper` is a program that runs the interpreter. A program that compiles with torch, or trains with its data parallelism, has to say so: others start sooner.
    """
    launcher = [] if ranks is None else [str(LAUNCHER), *options, "-n", str(ranks)]
    command = [*launcher, *wrapper, sys.executable, *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=environment | SETTINGS | ({} if compiles else UNCOMPILED),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"{' '.join(command)} took over {timeout} s:\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)
