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


@pytest.mark.parametrize(
    "call",
    [
        "comm.allreduce(x[: 50_000 + 1000 * comm.rank])",
        'comm.allreduce(x, "sum" if comm.rank else "max")',
        "comm.allreduce(x) if comm.rank else comm.allgather(x)",
        "comm.bcast(x, comm.rank)",
        'comm.allreduce(x.astype("float64" if comm.rank else "float32"))',
    ],
)
def test_disagreement_is_an_error_on_all_and_hangs_nobody(call: str) -> None:
    # The other rank may have been seen to disagree before this one's call is over.
    done = launch(f"""
        attempt(lambda: {call})
        wait_for_the_device()
        attempt(comm.barrier)
    """)
    said = done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} is through" in done.stdout, said
        assert f"rank {rank} MismatchError" in done.stdout, said


def test_disagreement_of_trees_is_an_error_on_all() -> None:
    done = launch("""
        tree = {"a": x, "b": x[: 5 + comm.rank]}
        attempt(lambda: ac.allreduce_tree(tree, "sum", comm=comm))
        wait_for_the_device()
        attempt(comm.barrier)
    """)
    for rank in range(2):
        assert f"rank {rank} MismatchError" in done.stdout, done.stdout + done.stderr
        assert f"rank {rank} is through" in done.stdout


def test_rank_that_raises_releases_the_others_device() -> None:
    done = launch("""
        if comm.rank == 1:
            raise RuntimeError("out of data")
        attempt(lambda: comm.allreduce(x))
        wait_for_the_device()
        attempt(comm.barrier)
    """)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "out of data" in done.stderr
    assert "rank 0 is through" in done.stdout, said
    assert "rank 0 PeerError" in done.stdout, said


def test_rank_that_raises_in_a_call_is_heard_by_the_others() -> None:
    done = launch("""
        try:
            comm.allreduce(x if comm.rank else "no array")
        except (TypeError, ac.ArrayCommError) as error:
            say(type(error).__name__)
        wait_for_the_device()
        attempt(comm.barrier)
    """)
    said = done.stdout + done.stderr
    assert "rank 0 TypeError" in done.stdout, said
    assert "rank 1 is through" in done.stdout, said
    assert "rank 1 PeerError" in done.stdout, said


def test_rank_that_sleeps_is_given_up_and_the_device_released() -> None:
    done = launch(
        """
        if comm.rank == 1:
            time.sleep(20)
        began = time.monotonic()
        attempt(lambda: comm.allreduce(x))
        wait_for_the_device()
        if comm.rank == 0:
            assert time.monotonic() - began < 15, time.monotonic() - began
        attempt(comm.barrier)
        """,
        timeout=4,
    )
    said = done.stdout + done.stderr
    assert "rank 0 is through" in done.stdout, said
    assert "rank 0 CommTimeoutError" in done.stdout, said


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


def test_result_of_a_call_that_was_given_up_is_no_number() -> None:
    done = launch(
        """
        mine, whole = cupy.ones(100_000, "float32"), cupy.ones(1000, "int32")
        part, tree = world.dup(timeout=4), world.dup(timeout=4)
        for one in (part, tree):
            one.allreduce(mine)
        if comm.rank == 1:
            time.sleep(15)
        results = []
        attempt(lambda: results.append(comm.allreduce(mine)))
        attempt(lambda: results.append(part.allreduce(whole, "max")))
        attempt(lambda: results.append(ac.allreduce_tree([mine, mine], "sum", comm=tree)[1]))
        if comm.rank == 0:
            first, second, third = results
            assert not (first == first).any() and not (third == third).any()
            assert (second == -1).all()
            for one in (comm, part, tree):
                attempt(one.barrier)
        """,
        timeout=4,
    )
    assert done.stdout.count("rank 0 CommTimeoutError") == 3, done.stdout + done.stderr


def test_device_is_of_use_after_an_error() -> None:
    done = launch("""
        attempt(lambda: comm.allreduce(x[: 50_000 + 1000 * comm.rank]))
        wait_for_the_device()
        attempt(comm.barrier)
        assert float((x * 2).sum()) == 200_000
        say("goes on")
    """)
    assert done.stdout.count("goes on") == 2, done.stdout + done.stderr


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
