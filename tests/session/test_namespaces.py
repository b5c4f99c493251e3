"""Ranks in namespaces of their own, as containers have them: each gets right results, or an error that names the namespace."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

import pytest

from tests.support.launched import ROOT
from tests.support.launcher import LAUNCHED, LAUNCHER, SETTINGS, is_open_mpi, needs_mpiexec
from tests.support.pairwise import EVERY

PIDS, SHM = "--pid --fork --kill-child --mount-proc", "mount -t tmpfs tmpfs /dev/shm;"
# Options of unshare, and what a shell does inside.
KINDS: Final = {
    "PID": (PIDS, ""),
    "IPC": ("--ipc", ""),
    "network": ("--net", "ip link set lo up;"),
    "user": ("--user --map-root-user", ""),
    "mount": ("--mount", SHM),
    "UTS": ("--uts", "hostname other;"),
    "those of a pod": (f"{PIDS} --mount --uts", "hostname other;"),
    "those of a container": (f"{PIDS} --mount --ipc --uts", f"{SHM} mount -t tmpfs tmpfs $TMPDIR;"),
}
LAUNCHERS: Final = ("mpiexec", "numbers", "run", "torchrun", "launch")
# Which of two ranks have them.
INSIDE: Final = ("0 1", "0", "1")
# EVERY=1 runs the whole table.
TABLE: Final = [
    ("PID", "mpiexec", "0 1"),
    ("PID", "numbers", "0 1"),
    ("PID", "launch", "1"),
    ("IPC", "run", "0"),
    ("network", "mpiexec", "0 1"),
    ("network", "numbers", "1"),
    ("network", "torchrun", "0 1"),
    ("user", "mpiexec", "0"),
    ("user", "numbers", "0 1"),
    ("mount", "mpiexec", "0 1"),
    ("mount", "torchrun", "1"),
    ("UTS", "mpiexec", "0"),
    ("those of a pod", "run", "0 1"),
    ("those of a container", "mpiexec", "1"),
    ("those of a container", "numbers", "0"),
]
PROGRAM: Final = ("-m", "tests.session.namespaces")
LIMIT: Final = 40.0

_PYTHON = """#!/bin/sh
rank=${{PMI_RANK:-${{PMIX_RANK:-${{ARRAYCOMM_PROCESS_ID:-$RANK}}}}}}
case " $INSIDE " in *" $rank "*) exec unshare $OPTIONS sh -c "$INSIDE_DO exec \\"\\$@\\"" sh {python} "$@" ;; esac
exec {python} "$@"
"""
_LAUNCH = """
import sys, arraycomm as ac
from tests.session.namespaces import calls
sys.executable = sys.argv[1]
print(*ac.launch(calls, 2, timeout=20), sep="\\n")
"""


def _denied() -> str:
    if LAUNCHED or not shutil.which("unshare") or not shutil.which("ip") or os.geteuid():
        return "needs root, unshare and ip, and no launcher"
    every = ["unshare", *PIDS.split(), "--net", "--ipc", "--uts", "--mount", "true"]
    return subprocess.run(every, capture_output=True, text=True, check=False).stderr.strip()


pytestmark = pytest.mark.skipif(bool(_denied()), reason=f"no namespaces: {_denied()}")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that enters namespaces of its own if it is one of the ranks INSIDE."""
    made = tmp_path / "python"
    made.write_text(_PYTHON.format(python=sys.executable))
    made.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    return made


def _commands(launcher: str, python: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    program = [str(python), *PROGRAM]
    if launcher == "mpiexec":
        yield [str(LAUNCHER), "-n", "2", *program], {}
    elif launcher == "run":
        yield [sys.executable, "-m", "arraycomm", "run", "-n", "2", *program], {}
    elif launcher == "launch":
        yield [sys.executable, "-c", _LAUNCH, str(python)], {}
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        for rank in "01":
            numbers = {
                "ARRAYCOMM_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "ARRAYCOMM_NUM_PROCESSES": "2",
                "ARRAYCOMM_PROCESS_ID": rank,
            }
            said = {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "h", "MASTER_PORT": port}
            yield program, numbers if launcher == "numbers" else said


def _outcome(kind: str, launcher: str, inside: str, python: Path) -> tuple[str, list[int]]:
    """Return what all have printed, and how they ended."""
    options, do = KINDS[kind]
    given = {"OPTIONS": options, "INSIDE_DO": do, "INSIDE": inside}
    given |= {"TMPDIR": str(python.with_name("tmp")), "ARRAYCOMM_START_TIMEOUT": "2"}
    with TemporaryFile("w+") as out:
        started = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | SETTINGS | given | more,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            for command, more in _commands(launcher, python)
        ]
        deadline = time.monotonic() + LIMIT
        try:
            ends = [process.wait(max(deadline - time.monotonic(), 0.1)) for process in started]
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        out.seek(0)
        return out.read(), ends


def _can(kind: str, launcher: str) -> bool:
    """Return whether such ranks can communicate."""
    if launcher in ("mpiexec", "run"):
        # Open MPI's launcher has files in the directory for temporary ones.
        return not is_open_mpi() or kind not in ("network", "those of a container")
    return kind not in ("network", "those of a container")


@pytest.mark.each_mpi
@pytest.mark.parametrize(
    ("kind", "launcher", "inside"), [*product(KINDS, LAUNCHERS, INSIDE)] if EVERY else TABLE
)
def test_results_are_right_or_an_error_names_the_namespace(
    kind: str, launcher: str, inside: str, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A container sees the directory that tests give to launchers, and not the usual one.
    monkeypatch.delenv("PRTE_MCA_prte_tmpdir_base", raising=False)
    if launcher in ("mpiexec", "run") and not LAUNCHER.exists():
        pytest.skip("no mpiexec")
    if launcher not in ("mpiexec", "run") and is_open_mpi() and not EVERY:
        pytest.skip("as without this MPI")
    before = set(os.listdir("/dev/shm"))
    said, ends = _outcome(kind, launcher, inside, python)
    if _can(kind, launcher):
        assert said.split("\n").count("right") == 2, said
        assert not any(ends), said
    else:
        assert "right" not in said.split("\n"), said
        assert "namespace" in said
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "arraycomm" in name]


@needs_mpiexec
def test_ranks_with_pid_namespaces_are_told_if_mpi_has_begun_before(python: Path) -> None:
    """MPICH would take the memory of one process for another's."""
    if is_open_mpi():
        pytest.skip("Open MPI does not begin")
    command = [str(LAUNCHER), "-n", "2", str(python), *PROGRAM, "begun"]
    given = {"OPTIONS": PIDS, "INSIDE_DO": "", "INSIDE": "0 1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | SETTINGS | given,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    told = "told: init: ranks of one node are in different PID namespaces, and MPI, which began"
    assert done.stdout.count(told) == 2, done.stdout + done.stderr
    remedy = {"MPIR_CVAR_CH4_CMA_ENABLE": "0", "UCX_POSIX_USE_PROC_LINK": "n"}
    assert all(f"{name}={value}" in done.stdout for name, value in remedy.items())
