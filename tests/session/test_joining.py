"""How numbered processes find one another, and what each is told if that is not possible. Here they are threads."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from arraycomm import BackendUnavailableError, CommTimeoutError, TransportError
from arraycomm._start import joining
from arraycomm._start.joining import Meeting, join, listen, seconds_to_start
from arraycomm._start.numbering import Numbering, Place
from tests.support.launcher import LAUNCHED

pytestmark = pytest.mark.skipif(LAUNCHED, reason="runs where pytest is alone")

VARIABLES = ("NUMBER", "RANK")
# Seconds in which every process has to hear what is wrong.
SOON = 20.0


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "GRACE", 0.3)


def free_place() -> Place:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return Place("127.0.0.1", found.getsockname()[1])


def local_place() -> Place:
    return Place("", 0, f"{os.getpid()}/{time.monotonic_ns()}")


def outcomes(*processes: Callable[[], object]) -> list[object]:
    """Return what each process returns or raises, at the same time."""

    def outcome(process: Callable[[], object]) -> object:
        try:
            return process()
        except Exception as error:
            return error

    begun = time.monotonic()
    with ThreadPoolExecutor(len(processes)) as threads:
        found = list(threads.map(outcome, processes))
    assert time.monotonic() < begun + SOON
    return found


def process(
    rank: int, size: int, place: Place, limit: float = SOON, **environment: str
) -> Callable[[], Meeting]:
    settings = {joining.LIMIT: str(limit), **environment}
    return lambda: join(Numbering(rank, size, place, VARIABLES), settings)


@pytest.fixture(params=[free_place, local_place], ids=["port", "name"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param()
    return found


def test_all_get_what_one_sets(place: Place) -> None:
    def exchange(rank: int) -> list[bytes]:
        meeting = process(rank, 3, place)()
        meeting.set(f"of/{rank}", str(rank) * 3)
        said = [meeting.get(f"of/{other}") for other in range(3)]
        meeting.leave(well=True)
        return said

    expected = [b"000", b"111", b"222"]
    assert outcomes(*(lambda r=r: exchange(r) for r in range(3))) == [expected] * 3


@pytest.mark.parametrize(
    ("numbers", "error", "said"),
    [
        ([(0, 3), (1, 3), (1, 3)], BackendUnavailableError, "two processes have the number 1: process"),
        ([(0, 3), (0, 3), (1, 3)], BackendUnavailableError, "two processes have the number 0: process"),
        (
            [(0, 3), (1, 4), (2, 3)],
            BackendUnavailableError,
            "process 0 was told that there are 3 processes, and process 1 that there are 4",
        ),
        ([(0, 4), (2, 4)], CommTimeoutError, "2 of 4 processes came to .* in 0.5 s; missing: 1, 3; .*network namespace"),
        ([(1, 2)], CommTimeoutError, "process 0, the coordinator, was not at .* for 0.5 s .*start process 0 .*network namespace"),
    ],
    ids=["same number", "two coordinators", "another size", "some missing", "no coordinator"],
)  # fmt: skip
def test_every_process_is_told_what_is_wrong(numbers, error, said) -> None:
    place = free_place()
    for found in outcomes(*(process(rank, size, place, 0.5) for rank, size in numbers)):
        with pytest.raises(error, match=f"^init: {said}"):
            raise found  # type: ignore[misc]


def test_jobs_with_one_address_start_one_after_the_other(place: Place) -> None:
    jobs = [(0, "A"), (1, "B"), (0, "B"), (1, "A")]
    met = outcomes(*(process(rank, 2, place, SLURM_JOB_ID=job) for rank, job in jobs))
    for meeting, (rank, job) in zip(met, jobs, strict=True):
        assert isinstance(meeting, Meeting), meeting
        meeting.set(f"job/{rank}", job)
    meetings = [meeting for meeting in met if isinstance(meeting, Meeting)]
    said = [(meeting.get("job/0"), meeting.get("job/1")) for meeting in meetings]
    for meeting in meetings:
        meeting.leave(well=True)
    assert said == [(job.encode(), job.encode()) for _, job in jobs]


def test_a_job_that_frees_its_address_ends_no_other_job(place: Place) -> None:
    met = listen(place)  # as that of a coordinator that accepts nobody else
    threading.Timer(0.5, met.close).start()
    found = outcomes(*(process(rank, 2, place) for rank in range(2)))
    for meeting in found:
        assert isinstance(meeting, Meeting), meeting
        meeting.leave(well=True)


def test_processes_of_two_jobs_are_not_one_world(place: Place) -> None:
    first, other = outcomes(
        process(0, 2, place, 0.7, PBS_JOBID="7"), process(1, 2, place, 0.5, PBS_JOBID="8")
    )
    assert isinstance(first, CommTimeoutError)
    assert isinstance(other, BackendUnavailableError)
    jobs = r"two jobs use the coordinator address .*, this one \(PBS_JOBID 8\) and another one \(PBS_JOBID 7\)"
    assert re.search(jobs, str(other)), other


def test_one_that_comes_late_hears_of_the_error_too() -> None:
    place = free_place()

    def late() -> Meeting:
        time.sleep(0.2)
        return process(2, 3, place)()

    found = outcomes(process(0, 3, place), process(1, 3, place), process(1, 3, place), late)
    assert all("two processes have the number 1" in str(error) for error in found)


@pytest.mark.parametrize("well", [None, False], ids=["dies", "gives up"])
def test_others_hear_of_one_that_ends(place: Place, well: bool | None) -> None:
    def ends() -> None:
        meeting = process(1, 3, place)()
        meeting.connection.close() if well is None else meeting.leave(well=well)

    def waits(rank: int) -> object:
        meeting = process(rank, 3, place)()
        try:
            return meeting.get("never set")
        finally:
            meeting.connection.close()

    _, *found = outcomes(ends, lambda: waits(0), lambda: waits(2))
    for error in found:
        assert isinstance(error, TransportError)
        assert "process 1 has ended before all processes were connected" in str(error)


def test_secret_is_the_same_for_all() -> None:
    place = free_place()
    own, other = ({joining.SECRET: secret} for secret in ("a", "b"))
    first, second = outcomes(process(0, 2, place, 0.5, **own), process(1, 2, place, 0.5, **other))
    assert isinstance(first, CommTimeoutError)
    assert isinstance(second, BackendUnavailableError)
    assert "the secret of this process is not that of process 0" in str(second)
    together = outcomes(process(0, 2, place, **own), process(1, 2, place, **own))
    for meeting in together:
        assert isinstance(meeting, Meeting)
        meeting.connection.close()


GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff\x00" * 50,
    b"x" * (2 * joining.LONGEST),
    b"[" * 20_000 + b"\n",
    b'{"rank": 1}\n',
    json.dumps({"rank": 1, "size": 2, "pid": 1, "proof": "\ud800", "nonce": "", "host": "", "name": ""}).encode() + b"\n",
    json.dumps({"rank": True, "size": 2, "pid": 1, "proof": "", "nonce": "", "host": "", "name": ""}).encode() + b"\n",
    b"",
)  # fmt: skip


def test_strangers_do_not_disturb() -> None:
    place = free_place()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(process(0, 2, place))
        silent = None
        for garbage in GARBAGE:
            with _connection(place) as stranger:
                try:
                    stranger.sendall(garbage)
                    if len(garbage) < joining.LONGEST:
                        stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(4096):
                        pass
                except ConnectionError:
                    pass
        silent = _connection(place)
        silent.sendall(b'{"rank": 1, ')  # and no more
        second = process(1, 2, place)()
        assert isinstance(first.result(), Meeting)
        second.set("key", "text")
        assert first.result().get("key") == b"text"
        for connection in (silent, second.connection, first.result().connection):
            connection.close()


def _connection(place: Place) -> socket.socket:
    deadline = time.monotonic() + SOON
    while True:
        try:
            return socket.create_connection((place.host, place.port), timeout=SOON)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextmanager
def answering(reply: bytes) -> Iterator[Place]:
    """Serve connections at a place that is no coordinator's."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(reply)

        threads.submit(serve)
        yield Place("127.0.0.1", listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"220 mail.example ESMTP\r\n", "what answers at 127.0.0.1:.* is no arraycomm"),
        (b'{"arraycomm": 9}\n', "is no arraycomm"),
        (b"z" * (joining.LONGEST + 1), "is no arraycomm"),
        (b"", "process 0, the coordinator, was not at .* for 0.5 s .it closes connections.; start"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_something_else_answers(reply: bytes, said: str, rank: int) -> None:
    with (
        answering(reply) as place,
        pytest.raises((BackendUnavailableError, CommTimeoutError), match=said),
    ):
        process(rank, 2, place, 0.5)()


def test_address_has_to_be_one_of_this_host() -> None:
    with pytest.raises(BackendUnavailableError, match=r"process 0 cannot listen at 192.0.2.1:4321"):
        process(0, 2, Place("192.0.2.1", 4321))()
    with pytest.raises(
        BackendUnavailableError, match=r"the host of the coordinator address .* is not known"
    ):
        process(1, 2, Place("no-such-host.invalid", 4321))()


@pytest.mark.parametrize("said", ["soon", "-1", "nan", "inf", "0"])
def test_limit_is_a_number_of_seconds(said: str) -> None:
    with pytest.raises(
        ValueError, match=f"{joining.LIMIT} must be a number of seconds; got '{said}'"
    ):
        seconds_to_start({joining.LIMIT: said})
    assert seconds_to_start({}) == joining.DEFAULT_LIMIT
