"""Ranks as processes of a system: what they start, what stops or ends them, and what they leave behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from arraycomm import _launch
from tests.session import children
from tests.support.launched import Report
from tests.support.launcher import (
    LAUNCHED,
    LAUNCHER,
    SETTINGS,
    is_open_mpi,
    needs_mpiexec,
    run_python,
)

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")

SHARED = Path("/dev/shm")


@lru_cache
def _children() -> Report:
    return Report(
        run_python("-m", "tests.session.children", ranks=children.RANKS, timeout=120),
        children.RANKS,
    )


@needs_mpiexec
@pytest.mark.each_mpi
class TestChildren:
    @pytest.mark.parametrize("check", [check.__name__ for check in children.CHECKS])
    def test_check(self, check: str) -> None:
        _children().assert_passed(check)

    def test_program_of_the_checks_ends_well(self) -> None:
        _children().assert_ended_well()


@pytest.mark.parametrize(
    ("changed", "owner"),
    [
        ({}, 1000),
        ({"PMIX_NAMESPACE": "another"}, 0),
        ({"PMIX_RANK": "1"}, 0),
        # Launchers of PMIx say no more than this.
        ({"OMPI_COMM_WORLD_SIZE": ""}, 1000),
    ],
)
def test_rank_of_a_job_that_a_rank_has_launched_is_a_rank(changed, owner) -> None:
    rank = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "one", "PMIX_RANK": "0"}
    assert _launch.claimed_by(rank, 1000) == 0
    _launch.claim(rank, 1000)
    assert _launch.claimed_by(rank, 1000) == 0
    assert _launch.claimed_by(rank | changed, 1001) == owner


INTERRUPTED = """
import os, subprocess, time, arraycomm as ac
comm = ac.init()
ranks = " ".join(map(str, comm.allgather_object(os.getpid())))
if comm.rank == 0:
    often = f"sleep .5; for i in 1 2 3 4 5 6; do kill -INT {ranks}; sleep .03; done"
    subprocess.Popen(often, shell=True, start_new_session=True, stderr=subprocess.DEVNULL)
    comm.barrier()
time.sleep(30)
"""


@needs_mpiexec
@pytest.mark.each_mpi
def test_interrupts_that_follow_the_first_do_no_harm() -> None:
    done = run_python("-c", INTERRUPTED, ranks=2, timeout=60)
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert "signal" not in done.stderr.replace("signal 15", ""), done.stderr


# One rank waits for ever, the others call for ever; all say who they are.
# One rank ignores the request to end, and another one is in a call that does not look at anything.
ENDLESS = """
import os, signal, sys, time, numpy as np, arraycomm as ac
from arraycomm._exit import process_watch
process_watch._PATIENCE = 1.0
comm = ac.init()
part = comm.split(comm.rank)
sys.stdout.write(f"rank {os.getpid()};\\n")
sys.stdout.flush()
if comm.rank == 1:
    time.sleep(1000)
if comm.rank == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    part.allreduce(np.ones(5))
"""


def _until(done: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.1)
    return done()


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("visible", [True, False])
def test_end_of_an_ancestor_is_seen(visible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "100"])
    ancestor = _launch._process(child.pid)
    assert ancestor is not None
    if not visible:
        monkeypatch.setattr(_launch, "_process", lambda pid: None)
    assert ancestor.lives()
    # Its number has gone to another process.
    assert ancestor._replace(since="1").lives() == (not visible)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ancestor.lives() == (not visible)
    child.wait()
    assert not ancestor.lives()


@needs_mpiexec
@pytest.mark.each_mpi
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path) -> None:
    out = tmp_path / "out"
    with out.open("w") as stdout:
        launcher = subprocess.Popen(
            # A shell stands between the launcher and its rank.
            [str(LAUNCHER), "-n", "3", "sh", "-c", '"$0" -c "$1"; true', sys.executable, ENDLESS],
            env=os.environ | SETTINGS,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stdout,
            start_new_session=True,
        )

    def ranks() -> list[int]:
        return [int(pid) for pid in re.findall(r"rank (\d+);", out.read_text())]

    try:
        assert _until(lambda: len(ranks()) == 3, 60), out.read_text()
        time.sleep(0.5)
    finally:
        launcher.kill()
        launcher.wait()

    def living() -> list[int]:
        return [pid for pid in ranks() if _lives(pid)]

    try:
        assert _until(lambda: not living(), 20), "ranks live without their launcher"
    finally:
        for pid in living():
            os.kill(pid, signal.SIGKILL)


# Rank 0 handles a signal while it waits, which may take its time. Then, on rank 1, a test of a request does
# not return, as those of Open MPI after a connection has broken.
STUCK = """
import ctypes, functools, signal, sys, time, numpy as np, arraycomm as ac
from arraycomm._exit import process_watch
from arraycomm._transports.mpi import transport as over_mpi
process_watch._FOR_EVER = 2.0
comm = ac.init()
if comm.rank == 0:
    signal.signal(signal.SIGALRM, lambda *_: time.sleep(3.5))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    comm.recv(1)
    sys.stdout.write("went on;")
    sys.stdout.flush()
else:
    time.sleep(0.4)
    comm.send(1, 0)
    class Request:
        Test = functools.partial(ctypes.CDLL(None).sleep, 1000)
    class Hanging(over_mpi.Movement):
        def __init__(self, begin, *arguments):
            super().__init__(begin, *arguments)
            self._begun = [Request()]
    over_mpi.Movement = Hanging
comm.reduce(np.ones(3_000_000))
"""


@needs_mpiexec
def test_a_rank_ends_if_a_call_of_mpi_does_not_return() -> None:
    """Its timeout is half an hour, and would never be raised."""
    result = run_python("-c", STUCK, ranks=2, timeout=60)
    assert result.returncode != 0
    assert "went on;" in result.stdout
    assert "arraycomm: a call of MPI has not returned for 2 s; so this rank ends" in result.stderr
    assert "finished: bool = request.Test()" in result.stderr


FAILING = """
import arraycomm as ac
comm = ac.init()
for line in open("/proc/self/maps"):
    if comm.rank == 0 and "/dev/shm/" in line and "(deleted)" not in line:
        print(line.split()[-1], flush=True)
comm.barrier()
raise ValueError
"""


@needs_mpiexec
@pytest.mark.each_mpi
def test_rank_that_raises_leaves_no_file_of_mpi() -> None:
    done = run_python("-c", FAILING, ranks=2, timeout=60)
    assert done.returncode != 0
    files = set(re.findall(r"/dev/shm/\S+", done.stdout))
    assert files
    assert not [name for name in files if Path(name).exists()]


MOUNTS = (
    shutil.which("unshare") is not None
    and not subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode
)


@needs_mpiexec
@pytest.mark.skipif(not MOUNTS, reason="needs the right to mount")
@pytest.mark.parametrize(
    ("options", "fill", "ranks", "told"),
    [
        ("size=64k", "", 2, "has 0.0625 MiB free of 0.0625; make it larger"),
        pytest.param(
            *("size=64m", "dd if=/dev/zero of=/dev/shm/fill bs=1M count=70 2>/dev/null", 2),
            "has 0 MiB free of 64 (fill: 64 MiB; remove what jobs have left behind); make it",
            marks=pytest.mark.each_mpi,
        ),
        ("size=64m,ro", "", 2, "but no file can be made in /dev/shm (Read-only file system); let"),
        ("size=64m,nr_inodes=1", "", 2, "made in /dev/shm (No space left on device); let"),
        ("size=64m", "ulimit -f 4096", 2, "a file of this rank may have 2 MiB, and one needs 3;"),
        # UCX may crash if some of its files have room.
        ("size=38m", "", 6, ""),
        ("size=64m", "ulimit -f 7168", 2, ""),
    ],
    ids=["small", "full", "read-only", "inodes", "small files", "enough", "MPI alone"],
)
def test_too_little_shared_memory_is_told_if_mpi_would_crash(options, fill, ranks, told) -> None:
    program = "import arraycomm as ac; print(f'sum {ac.init().allreduce(1)}\\n', end='')"
    script = f"""mount -t tmpfs -o {options} tmpfs {SHARED}; {fill}
{LAUNCHER} -n {ranks} {sys.executable} -c "{program}"; echo files: $(ls {SHARED})"""
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        env=os.environ | SETTINGS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # Open MPI has other means than shared memory.
    right = done.stdout.count(f"sum {ranks}\n") == ranks and (is_open_mpi() or not told)
    needed = f"init: MPI needs 28 MiB of shared memory for {ranks} ranks on one node, but "
    said = done.stderr.count(needed) == done.stderr.count(told) == ranks
    assert said if told and not is_open_mpi() else right, done.stdout + done.stderr
    assert f"files:{' fill' * fill.startswith('dd')}\n" in done.stdout
