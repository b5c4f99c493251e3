"""What happens on the device when ranks disagree, fail or do not come: programs with a time limit."""

from __future__ import annotations

import subprocess
import textwrap

import pytest

from tests.cuda.on_device.conftest import SPIN
from tests.support.launcher import needs_mpiexec, run_python

pytestmark = needs_mpiexec

LIMIT = 120.0
HEAD = """
import sys, time
import cupy
import arraycomm as ac

try:
    # Without the program's timeout: on a busy machine NCCL may need longer than that to begin.
    world = ac.init({backend!r}, timeout=60)
except ac.BackendUnavailableError as error:
    print("unavailable:", error, flush=True)
    sys.exit(0)


def say(*words):
    # A line at once: the lines of two ranks are not mixed.
    sys.stdout.write(" ".join(map(str, ("rank", comm.rank, *words))) + "\\n")
    sys.stdout.flush()


def wait_for_the_device():
    cupy.cuda.get_current_stream().synchronize()
    say("is through")


def attempt(call):
    try:
        call()
    except ac.ArrayCommError as error:
        say(type(error).__name__, error)


def spin(stream):
    # For twice the timeout.
    busy = cupy.RawKernel({kernel!r}, "spin")
    busy((1,), (1,), (int(2e9 * {timeout}),), stream=stream)


x = cupy.ones(100_000, "float32")
assert (world.allreduce(x) == world.size).all()
comm = world.dup(timeout={timeout})
assert (comm.allreduce(x) == comm.size).all()
"""


def launch(
    program: str, timeout: float = 60.0, backend: str = "nccl"
) -> subprocess.CompletedProcess[str]:
    """Run on two ranks, which have made one collective on the device before."""
    text = HEAD.format(timeout=timeout, backend=backend, kernel=SPIN) + textwrap.dedent(program)
    done = run_python("-c", text, ranks=2, timeout=LIMIT)
    if "unavailable:" in done.stdout:
        pytest.skip(done.stdout.strip().splitlines()[0])
    return done


CALLS = (
    "comm.allreduce(x[: 50_000 + 1000 * comm.rank])",
    'comm.allreduce(x, "sum" if comm.rank else "max")',
    "comm.allreduce(x) if comm.rank else comm.allgather(x)",
    "comm.bcast(x, comm.rank)",
    'comm.allreduce(x.astype("float64" if comm.rank else "float32"))',
    'ac.allreduce_tree({"a": x, "b": x[: 5 + comm.rank]}, "sum", comm=comm)',
)


def test_disagreement_is_an_error_on_all_and_hangs_nobody() -> None:
    """The device is of use afterwards, each time."""
    done = launch(f"""
        for call in {CALLS}:
            comm = world.dup(timeout=60)
            assert (comm.allreduce(x) == comm.size).all()
            # The other rank may have been seen to disagree before this one's call is over.
            attempt(lambda: eval(call))
            wait_for_the_device()
            attempt(comm.barrier)
            assert float((x * 2).sum()) == 200_000
            say("goes on")
    """)
    for rank in range(2):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"rank {rank} ")]
        *parts, _ = "\n".join(lines).split("goes on")
        assert len(parts) == len(CALLS), done.stdout + done.stderr
        for call, said in zip(CALLS, parts, strict=True):
            assert "is through" in said, call
            assert "MismatchError" in said, call


def test_rank_that_raises_is_heard_by_the_others_whose_device_is_released() -> None:
    done = launch("""
        try:
            comm.allreduce(x if comm.rank else "no array")
        except (TypeError, ac.ArrayCommError) as error:
            say(type(error).__name__)
        wait_for_the_device()
        attempt(comm.barrier)
        comm = world
        if comm.rank == 1:
            raise RuntimeError("out of data")
        attempt(lambda: comm.allreduce(x))
        wait_for_the_device()
        attempt(comm.barrier)
    """)
    said = done.stdout + done.stderr
    assert "rank 0 TypeError" in done.stdout, said
    assert "rank 1 is through" in done.stdout, said
    assert "rank 1 PeerError" in done.stdout, said
    assert done.returncode != 0
    assert "out of data" in done.stderr
    assert done.stdout.count("rank 0 is through") == 2, said
    assert "rank 0 PeerError" in done.stdout, said


@pytest.mark.parametrize("backend", ["nccl", "mpi"])
def test_own_work_may_take_longer_than_the_timeout(backend: str) -> None:
    """Other ranks are waited for from where the device comes to the call."""
    done = launch(
        """
        with cupy.cuda.Stream(non_blocking=True) as stream:
            mine = cupy.full(100_000, comm.rank + 1, "float32")
            for _ in range(2):
                spin(stream)
                got = comm.allreduce(mine)
                assert (got.get() == 3).all()
        attempt(comm.barrier)
        say("goes on")
        """,
        timeout=3,
        backend=backend,
    )
    assert done.stdout.count("goes on") == 2, done.stdout + done.stderr
    assert "Error" not in done.stdout


def test_rank_that_sleeps_is_given_up_and_the_device_released() -> None:
    """The result of a call that was given up is no number."""
    done = launch(
        """
        mine, whole = cupy.ones(100_000, "float32"), cupy.ones(1000, "int32")
        part, tree = world.dup(timeout=4), world.dup(timeout=4)
        calls = (
            lambda: comm.allreduce(mine),
            lambda: part.allreduce(whole, "max"),
            lambda: ac.allreduce_tree([mine, mine], "sum", comm=tree)[1],
        )
        # So that the device has the kernels, and memory to which no call has to wait for it.
        for one in calls:
            one()
        wait_for_the_device()
        if comm.rank == 1:
            time.sleep(12)
        began, results = time.monotonic(), []
        for one in calls:
            attempt(lambda: results.append(one()))
        if comm.rank == 0:
            wait_for_the_device()
            assert time.monotonic() - began < 6, time.monotonic() - began
            first, second, third = results
            assert not (first == first).any() and not (third == third).any()
            assert (second == -1).all()
            for one in (comm, part, tree):
                attempt(one.barrier)
        """,
        timeout=4,
    )
    said = done.stdout + done.stderr
    assert "rank 0 is through" in done.stdout, said
    assert done.stdout.count("rank 0 CommTimeoutError") == 3, said


@pytest.mark.parametrize("end", ["", "ac.finalize()", "part = comm.dup(); part.allreduce(x)"])
def test_programs_end_well(end: str) -> None:
    done = launch(f"""
        comm.allreduce(x)
        {end}
    """)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nccl_that_cannot_be_used_is_an_error_on_all() -> None:
    done = launch("""
        ac.finalize()
        import os
        os.environ["NCCL_COMM_BLOCKING"] = "1"
        try:
            ac.init("nccl", timeout=30)
        except ac.BackendUnavailableError as error:
            print("refused", error, flush=True)
    """)
    assert done.stdout.count("refused") == 2, done.stdout + done.stderr
    assert "NCCL_COMM_BLOCKING" in done.stdout
