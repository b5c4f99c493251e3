"""How programs come to their ends: with statuses of their own, and with all that Python does then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.session.launching import CONTROLS, launch
from tests.support.launched import start_numbered
from tests.support.launcher import LAUNCHED, needs_mpiexec

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")

# What some of three ranks wait for in vain, each on a duplicate of its own, and handle.
HANDLED = """
def a_message(c):
    if c.rank == 0: c.recv(1)
def a_call_that_others_do_not_make(c):
    if c.rank == 1: c.barrier()
def a_call_that_one_makes_too_late(c):
    time.sleep(1.4 * (c.rank == 1)); c.barrier()
def other_calls(c):
    c.allreduce(np.ones(3 + c.rank))
def a_request(c):
    if c.rank == 2: c.iallreduce(np.ones(10**6)).wait()
def a_message_that_nobody_takes(c):
    if c.rank == 0: c.isend(np.ones(10**6), 1).wait()

comm = ac.init(timeout=20)
waits = [value for name, value in globals().items() if name.startswith(("a_", "other_"))]
for wait in waits:
    try:
        wait(comm.dup(timeout=0.7))
    except ac.ArrayCommError:
        sys.stdout.write(f"handled {wait.__name__}\\n")
    assert comm.allreduce(1) == comm.size
# Closes the world on one rank alone: it takes no last step, and the others hear of it.
try:
    if comm.rank == 0: comm.recv(1, timeout=1)
except (ac.CommTimeoutError, ac.PeerError):
    sys.stdout.write("handled at last\\n")
"""
# Rank 1 fails, or waits in vain; rank 0 handles that, and goes on for longer than others wait that know nothing.
SAVES = """
import atexit, gc, os, pathlib, tempfile
# Python writes at its end what it finds in open files, as it does outside of these tests.
atexit.unregister(gc.freeze)
folder = tempfile.TemporaryDirectory(dir={place!r})
place = pathlib.Path({place!r})
me = os.getpid()
def add(name):
    with (place / f"{{name}}-{{me}}").open("a") as file: file.write("once")
atexit.register(add, "registered")
{imports}
# Ranks whose start takes longer than the limit of `init` would be ended.
(folder_of_all := pathlib.Path({place!r}) / "starts").mkdir(exist_ok=True)
(folder_of_all / str(me)).touch()
while len(list(folder_of_all.iterdir())) < 3: time.sleep(0.01)
comm = ac.init(timeout=4)
atexit.register(add, "later")
left_open = (place / f"open-{{comm.rank}}").open("w")
left_open.write("not flushed")
both = open(place / f"binary-{{comm.rank}}", "wb")
both.write(b"nor this")
try:
    if comm.rank == 1:
        {ends}
    comm.allreduce(1)
except (ac.PeerError, ac.CommTimeoutError):
    if comm.rank == 0:
        time.sleep(4.5)
        (place / "checkpoint").write_text("saved")
"""
CHILDREN = """
import os
from sys import exit as leave
{imports}
comm = ac.init(timeout=20)
def child(f):
    pid = os.fork()
    if pid == 0:
        left_open = open(f"{place}/child-{{comm.rank}}-{{f.__name__}}", "w")
        left_open.write("result")
        f()
        raise SystemExit
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def raises_exit(): raise SystemExit(3)
def calls_exit(): leave(4)
def calls_sys_exit(): sys.exit("a text")
def ends(): pass
def fails(): raise ValueError
statuses = [child(f) for f in (calls_sys_exit, ends, fails, raises_exit, calls_exit)]
assert statuses[:3] == [1, 0, 1], statuses
# If the program has imported mpi4py.MPI before, Python's own end in a child would be that of MPI as well.
assert {first} or statuses[3:] == [3, 4], statuses
"""
FIRST = "from mpi4py import MPI"


@needs_mpiexec
class TestEnds:
    @pytest.mark.parametrize("control", CONTROLS)
    def test_job_in_which_every_error_is_handled_ends_well(self, control: str) -> None:
        done = launch(HANDLED, control, 3)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("handled") >= 8, done.stdout

    @pytest.mark.parametrize(
        ("ends", "imports", "statuses"),
        [
            # A launcher may end ranks before it has seen their statuses.
            pytest.param("raise ValueError", "", (1, 9), id="fails", marks=pytest.mark.each_mpi),
            pytest.param("comm.recv(0)", FIRST, (0,), id="waits in vain"),
            pytest.param("sys.exit(3)", "", (3,), id="leaves"),
        ],
    )
    def test_rank_that_goes_on_is_waited_for_and_everything_is_done_at_the_end(
        self, ends, imports, statuses, tmp_path
    ) -> None:
        done = launch(SAVES.format(place=str(tmp_path), ends=ends, imports=imports), ranks=3)
        assert done.returncode in statuses, done.stdout + done.stderr
        found = sorted(path.name.partition("-")[0] for path in tmp_path.iterdir())
        kinds = {"binary": 3, "checkpoint": 1, "later": 3, "open": 3, "registered": 3, "starts": 1}
        assert found == [name for name, count in kinds.items() for _ in range(count)]
        for name in ("later", "registered"):
            assert {path.read_text() for path in tmp_path.glob(f"{name}-*")} == {"once"}
        assert all(path.read_text() == "not flushed" for path in tmp_path.glob("open-*"))
        assert all(path.read_text() == "nor this" for path in tmp_path.glob("binary-*"))

    @pytest.mark.parametrize(
        "imports", ["", pytest.param(FIRST, id="mpi4py first", marks=pytest.mark.each_mpi)]
    )
    def test_children_end_as_python_does(self, imports: str, tmp_path: Path) -> None:
        done = launch(CHILDREN.format(place=tmp_path, imports=imports, first=bool(imports)))
        assert done.returncode == 0, done.stdout + done.stderr
        assert [path.read_text() for path in tmp_path.iterdir()] == ["result"] * 10


# How rank 0 of two processes without MPI goes, whether that is after an error that both have handled, and the
# status of the other.
GOES = {
    "handled, killed": ("os.kill(os.getpid(), 9)", True, -9, 0),
    "handled, exits": ("sys.exit(3)", True, 3, 0),
    "os._exit": ("os._exit(0)", False, 0, 1),
    "exits": ("sys.exit(3)", False, 3, 0),
}


def test_request_that_fails_unseen_is_a_status_without_mpi_too() -> None:
    program = "import numpy as np, arraycomm as ac; c = ac.init(timeout=10)\n"
    job, statuses = start_numbered(
        2, "-c", f"{program}r = c.iallreduce(np.ones(10**6)) if c.rank == 0 else None"
    )
    assert statuses == [1, 0], job.stdout
    assert "failed, and nobody waited for it" in job.stdout


@pytest.mark.parametrize(("goes", "after_error", "own", "other"), GOES.values(), ids=GOES)
def test_process_that_is_gone_is_not_waited_for(goes, after_error, own, other) -> None:
    job, statuses = start_numbered(
        2,
        "-c",
        f"""
import os, sys, time
import numpy as np, arraycomm as ac
comm = ac.init(timeout=10)
try:
    comm.allreduce(np.ones(3 + comm.rank * {after_error}))
except ac.MismatchError:
    pass
if comm.rank == 0:
    {goes}
time.sleep(0.5)
""",
    )
    assert statuses == [own, other], job.stdout
    assert ("rank 0 ended before the end of the program" in job.stdout) == (other == 1)
