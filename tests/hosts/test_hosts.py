"""Ranks on several hosts: the laws, the same bits as on one, and the end of a host."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.session.launching import HEAD
from tests.support import hosts
from tests.support.hosts import Hosts
from tests.support.launched import ROOT, WITHOUT_PLUGINS
from tests.support.launcher import is_open_mpi

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "there are")

# Seconds within which all ranks have ended after the processes of a host were killed.
_AT_LAST: Final = 15
# Seconds after which a job hangs.
_LIMIT: Final = 90


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts.hosts(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts.hosts(3, tmp_path_factory.mktemp("three")) as made:
        yield made


# What a job on hosts runs: the laws, and the digests of results, which are those of one host.
_TESTS: Final = [
    "properties/test_laws.py::TestSharedMemory",
    "tests/collectives/test_reproducible.py::test_same_bits_on_every_transport_and_by_every_way",
]
# Reduces until the network is gone, and writes down its error.
_CUT: Final = """
import pathlib
comm = ac.init(timeout=4)
comm.barrier()
sys.stdout.write("begun\\n")
try:
    while True:
        comm.allreduce(1.0)
        comm.allreduce(np.ones(1_000_000))
except ac.CommTimeoutError as error:
    pathlib.Path(sys.argv[1], f"error-{comm.rank}").write_text(str(error))
    raise
"""
# Reduces until a rank is gone. Small and large arrays go by different messages.
_ENDLESS: Final = """
comm = ac.init()
comm.barrier()
sys.stdout.write("begun\\n")
while True:
    comm.allreduce(1.0)
    comm.allreduce(np.ones(1_000_000))
"""
# One rank ends its program while the other one is in a call, which catches the error and ends well.
_LEAVES: Final = """
comm = ac.init()
try:
    for _ in range(3 - comm.rank):
        comm.allreduce(np.ones(10))
except ac.PeerError as error:
    sys.stdout.write(f"{type(error).__name__}: {error}\\n")
"""
# The last rank sends an array of this many bytes to all, and each rank this many.
_SENT: Final = 32 << 20
_EACH: Final = 1 << 20
_BROADCAST: Final = f"""
# Neighbours are on different hosts, so that a message to the next rank goes by the network.
world = ac.init()
comm = world.split(0, key=world.local_rank)
x = np.random.default_rng(0).integers(0, 256, {_SENT}, np.uint8)
root = comm.size - 1
assert (comm.bcast(x if comm.rank == root else None, root) == x).all()
rows = comm.allgather(np.full({_EACH}, comm.rank, np.uint8))
assert (rows == np.arange(comm.size)[:, None]).all()
"""
# Laws of each kind of movement, and of ranks that disagree, fail or leave.
_SOME: Final = "TestSharedMemory and (disagree or order or is_an_error)"
_LAWS: Final = (
    f"{_SOME} or TestSharedMemory and (uneven or tree or arrive or give or groups or out)"
)


@pytest.mark.each_mpi
def test_laws_and_bits_are_those_of_one_host(two: Hosts) -> None:
    before = two.received(0)
    _run_tests(two, 1, f"mpi-shared or {_LAWS}")
    # They went by the network, and not by memory of the machine.
    assert two.received(0) - before > 1_000_000


@pytest.mark.at_night
def test_laws_and_bits_are_those_of_one_host_with_two_ranks_on_each_of_three(three: Hosts) -> None:
    _run_tests(three, 2, f"mpi-shared-4 or {_SOME}")


def _run_tests(made: Hosts, each: int, chosen: str) -> None:
    job = made.start(
        each,
        *("-m", "pytest", "-q", "--color=no", *WITHOUT_PLUGINS, "-k", chosen),
        *(str(ROOT / test) for test in _TESTS),
        EXAMPLES="1",
        EVERY="1",
        PYTHONPATH=str(ROOT),
    )
    out = _output(made, job)
    assert job.returncode == 0, out
    assert " passed" in out, out


# An interpreter in a container of its own: with other numbers of processes, and another /dev/shm.
_CONTAINER: Final = """#!/bin/sh
exec unshare --pid --fork --kill-child --mount-proc --mount sh -c 'mount -t tmpfs tmpfs /dev/shm; exec "$0" "$@"' {python} "$@"
"""


@pytest.mark.each_mpi
def test_results_are_right_if_each_rank_of_two_hosts_has_a_container(
    two: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(_CONTAINER.format(python=sys.executable), encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    job = two.start(2, "-m", "tests.session.namespaces", PYTHONPATH=str(ROOT))
    out = _output(two, job)
    assert job.returncode == 0, out
    assert out.split().count("right") == 4, out


@pytest.mark.each_mpi
@pytest.mark.at_night("Open MPI")
def test_each_host_gets_one_copy_of_what_all_ranks_get(tmp_path: Path) -> None:
    count, each = 5, 2
    with hosts.hosts(count, tmp_path) as made:
        before = [made.received(number) for number in range(count)]
        job = made.start(each, "-c", HEAD + _BROADCAST, PYTHONPATH=str(ROOT))
        out = _output(made, job)
        assert job.returncode == 0, out
        *others, own = (made.received(number) - b for number, b in enumerate(before))
    gathered = (count - 1) * each * _EACH
    # And what starts a job, with the headers of TCP.
    more = 0.25 * _SENT
    assert all(0 <= received - _SENT - gathered < more for received in others)
    assert 0 <= own - gathered < more


@pytest.mark.each_mpi
def test_nothing_goes_on_when_a_host_dies(two: Hosts) -> None:
    job = two.start(2, "-u", "-c", HEAD + _ENDLESS, PYTHONPATH=str(ROOT))
    _wait_for(4, job)
    killed = time.monotonic()
    two.kill(1)
    _output(two, job)
    # Open MPI's launcher ends with 0 if it loses a host.
    assert is_open_mpi() or job.returncode != 0
    assert time.monotonic() - killed < _AT_LAST
    assert _ended(two)


@pytest.mark.each_mpi
def test_nobody_waits_for_a_rank_that_left_during_a_call(two: Hosts) -> None:
    started = time.monotonic()
    out = _output(two, two.start(1, "-u", "-c", HEAD + _LEAVES, PYTHONPATH=str(ROOT)))
    assert "PeerError: rank 1 has reached the end of its program" in out
    assert time.monotonic() - started < _AT_LAST
    assert _ended(two)


def test_ranks_of_a_host_that_is_cut_off_time_out_as_all_others_do(two, tmp_path) -> None:
    job = two.start(1, "-u", "-c", HEAD + _CUT, str(tmp_path), PYTHONPATH=str(ROOT))
    _wait_for(2, job)
    two.connect(1, connected=False)
    try:
        deadline = time.monotonic() + _AT_LAST
        errors: list[str] = []
        while len(errors) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            errors = [text for path in tmp_path.iterdir() if (text := path.read_text())]
        assert len(errors) == 2
        assert all("(timeout 4 s)" in error for error in errors), errors
    finally:
        # The launcher cannot end what it does not reach.
        two.connect(1)
        _output(two, job)
    assert job.returncode != 0
    assert _ended(two)


def _wait_for(ranks: int, job: subprocess.Popen[str]) -> None:
    """Return once this many ranks have said that they have begun."""
    assert job.stdout is not None
    said: list[str] = []
    # Launchers say something too, now and then.
    while said.count("begun\n") < ranks and (line := job.stdout.readline()):
        said.append(line)
    assert said.count("begun\n") == ranks, said


def _output(made: Hosts, job: subprocess.Popen[str]) -> str:
    """Return what a job has printed, once it has ended."""
    try:
        return job.communicate(timeout=_LIMIT)[0]
    except subprocess.TimeoutExpired:
        for number in range(made.count):
            made.kill(number)
        pytest.fail(f"the job took over {_LIMIT} s:\n{job.communicate()[0]}")


def _ended(made: Hosts) -> bool:
    """Return whether no process is left on any host, or will not be in a moment."""
    deadline = time.monotonic() + 5
    while any(made.processes(number) for number in range(made.count)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
