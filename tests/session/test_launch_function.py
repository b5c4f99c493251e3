"""`launch`: ranks that are processes, started by a function."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from tests.support.launcher import LAUNCHED

pytest.importorskip("cloudpickle")
pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")


class OwnError(Exception):
    """Of the caller's."""


def alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_results_come_in_rank_order_and_prints_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    class Local:
        def __init__(self, number: float) -> None:
            self.number = number

    def work(comm: ac.Communicator, x: Any) -> Local:
        assert (comm, comm.backend) == (ac.world(), "processes")
        for _ in range(300):
            print("ab"[comm.rank] * 5000)
        print("part", end="", file=sys.stderr)
        return Local(comm.rank + float(comm.allreduce(x).sum()))

    async def cell() -> list[Local]:
        return ac.launch(work, 2, np.ones(100_000))

    found = asyncio.run(cell())
    assert [each.number for each in found] == [200_000, 200_001]
    assert {type(each) for each in found} == {Local}
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == sorted(letter * 5000 for letter in "ab" * 300)
    assert err == "part\npart"


def test_one_rank_runs_alone() -> None:
    assert ac.launch(lambda comm, x: (comm.allreduce(x), sys.argv), 1, 2) == [(2, sys.argv)]


def test_first_error_is_raised_and_all_ranks_end(capsys: pytest.CaptureFixture[str]) -> None:
    def work(comm: ac.Communicator) -> None:
        print(os.getpid(), flush=True)
        comm.barrier()
        if comm.rank == 1:
            error = OwnError("mine")
            raise error from error
        if comm.rank == 2:
            time.sleep(600)
        comm.barrier()

    began = time.monotonic()
    with pytest.raises(OwnError, match="mine") as caught:
        ac.launch(work, 3)
    assert time.monotonic() - began < 120
    own, *others = caught.value.__notes__
    assert own.startswith("raised on rank 1 of 3:\nTraceback")
    assert "in work\n" in own
    assert others[0].startswith("rank 0 raised PeerError: rank 1 ")
    assert others[1] == "rank 2 was ended, since another had failed"
    out, err = capsys.readouterr()
    assert err == ""
    assert not any(map(alive, map(int, out.split())))


def test_rank_that_dies_is_named() -> None:
    def work(comm: ac.Communicator) -> None:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    with pytest.raises(ac.PeerError, match="rank 1 died by SIGKILL before") as caught:
        ac.launch(work, 2)
    assert caught.value.rank == 1


WAITS = """
import os, time, arraycomm as ac
def work(comm):
    print(os.getpid(), flush=True)
    time.sleep(600)
ac.launch(work, 2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_caller(number: int) -> None:
    command = [sys.executable, "-c", WAITS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        try:
            assert job.stdout is not None
            ranks = [int(job.stdout.readline()) for _ in range(2)]
            job.send_signal(number)
            assert ("KeyboardInterrupt" in job.communicate(timeout=60)[1]) is (number == 2)
        finally:
            job.kill()
    deadline = time.monotonic() + 10
    while any(map(alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, ranks))


ACTS = """
import os, signal, sys, time, arraycomm as ac
def work(comm):
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(3.5), print("saved"), os._exit(0)))
    print("ready", flush=True)
    time.sleep(600)
ac.launch(work, 2)
"""


def test_ranks_have_time_to_act_on_a_signal_that_ends_the_caller() -> None:
    command = [sys.executable, "-c", ACTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout is not None
            assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
            job.terminate()
            assert job.communicate(timeout=60)[0] == "saved\nsaved\n"
        finally:
            job.kill()
    assert job.returncode == 143


def test_no_disk_is_needed() -> None:
    """Not for results, nor for the output, which is lost if its disk is full."""
    program = (
        "import resource, sys, tempfile, arraycomm as ac\n"
        "tempfile.tempdir = '/no/such/directory'\n"
        "def work(comm, most):\n"
        "    print('x' * 100_000)\n"
        "    if most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))\n"
        "    return bytes(most + 1)\n"
        "for most in (0, 1 << 16):\n"
        "    try: print(ac.launch(work, 2, most), file=sys.stderr)\n"
        "    except OSError as error: print(error, error.__notes__[0], file=sys.stderr)"
    )
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", program]
        job = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    lost = "launch: sys.stdout cannot be written (No space left on device); what ranks print there"
    assert job.stderr.splitlines() == [
        f"{lost} is lost",
        "[b'\\x00', b'\\x00']",
        f"{lost} is lost",
        "[Errno 27] File too large launch: there was no room for what the function returned or raised",
    ]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("sys.executable", None, "sys.executable must be the Python that starts the ranks; got No"),
        ("_HOST", "255.255.255.255", "the ranks meet at 255.255.255.255, which this machine or "),
    ],
)
def test_machine_that_starts_no_ranks_is_named(
    name: str, value: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"arraycomm._jobs.launch.{name}", value)
    with pytest.raises(RuntimeError, match=said):
        ac.launch(print, 2)


def test_rank_that_ends_before_its_function_begins_is_told_apart() -> None:
    class EndsWhenRead:
        def __reduce__(self) -> Any:
            return os._exit, (5,)

    for argument, said in ((EndsWhenRead(), "began"), (None, "returned")):
        with pytest.raises(ac.PeerError, match=f"left with status 5 before its function {said}"):
            ac.launch(lambda comm, x: os._exit(5), 1, argument)


def test_what_cannot_be_launched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks, fn, kind, said in (
        (0, print, ValueError, "launch: ranks must be at least 1; got 0"),
        (2, 3, TypeError, "fn must be callable; got 3"),
        (2, lambda comm: 3, TypeError, r"pickled .*; install cloudpickle, or define them in a"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "cloudpickle", None)
            patch.setitem(sys.modules, "joblib.externals.cloudpickle", None)
            with pytest.raises(kind, match=said):
                ac.launch(fn, ranks)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.delenv("ARRAYCOMM_RANK_PROCESS", raising=False)
    with pytest.raises(RuntimeError, match="this process is one of 4 ranks already"):
        ac.launch(print, 2)
