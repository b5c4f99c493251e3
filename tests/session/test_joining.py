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
from contextlib import closing, contextmanager, suppress
from functools import partial

import pytest

from arraycomm import BackendUnavailableError, CommTimeoutError, TransportError
from arraycomm._start import joining
from arraycomm._start.joining import Coordinator, Member, join, listen
from arraycomm._start.numbering import Numbering, Place
from tests.support.launcher import LAUNCHED

pytestmark = pytest.mark.skipif(LAUNCHED, reason="runs where pytest is alone")

Meeting = Coordinator | Member
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
    rank: int, size: int, place: Place, limit: float = SOON, secret: str = "", job: str = ""
) -> Callable[[], Meeting]:
    return lambda: join(Numbering(rank, size, place, VARIABLES, limit, secret, job))


@pytest.fixture(params=[free_place, local_place], ids=["port", "name"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param()
    return found


def test_each_gets_what_all_tell(place: Place) -> None:
    def exchange(rank: int) -> list[list[str]]:
        with closing(process(rank, 3, place)()) as meeting:
            return [meeting.tell("", str(rank) * count) for count in (3, 100_000)]

    expected = [[str(rank) * count for rank in range(3)] for count in (3, 100_000)]
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
    def exchange(rank: int, job: str) -> list[str]:
        with closing(process(rank, 2, place, job=job)()) as meeting:
            return meeting.tell("", job)

    jobs = [(0, "A"), (1, "B"), (0, "B"), (1, "A")]
    said = outcomes(*(lambda r=rank, j=job: exchange(r, j) for rank, job in jobs))
    assert said == [[job] * 2 for _, job in jobs]


def test_a_job_that_frees_its_address_ends_no_other_job(place: Place) -> None:
    met = listen(place)  # as that of a coordinator that accepts nobody else
    threading.Timer(0.5, met.close).start()
    found = outcomes(*(process(rank, 2, place) for rank in range(2)))
    for meeting in found:
        assert isinstance(meeting, Meeting), meeting
        meeting.close()


def test_processes_of_two_jobs_are_not_one_world(place: Place) -> None:
    first, other = outcomes(
        process(0, 2, place, 0.7, job="PBS_JOBID 7"), process(1, 2, place, 0.5, job="PBS_JOBID 8")
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


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("one", [0, 1], ids=["process 0", "another"])
def test_others_hear_of_one_that_ends(place: Place, one: int, rounds: int) -> None:
    def tells(rank: int) -> None:
        with closing(process(rank, 3, place)()) as meeting:
            for _ in range(rounds if rank == one else 2):
                meeting.tell("", "")

    outcome = outcomes(*(lambda r=r: tells(r) for r in range(3)))
    assert outcome.pop(one) is None
    for error in outcome:
        assert isinstance(error, TransportError)
        assert re.search(f"process {one}.* has ended before all processes were", str(error))


def test_one_that_says_no_more_is_named() -> None:
    place = free_place()
    silent, *others = outcomes(*(process(rank, 3, place, 0.5) for rank in (2, 0, 1)))
    for error in outcomes(*(partial(one.tell, "", "") for one in others)):  # type: ignore[attr-defined]
        with pytest.raises(CommTimeoutError, match=r"2 of 3 \w+ have .* in 0.5 s; missing: 2$"):
            raise error  # type: ignore[misc]
    for meeting in (silent, *others):
        meeting.close()  # type: ignore[attr-defined]


def test_secret_is_the_same_for_all() -> None:
    place = free_place()
    first, second = outcomes(process(0, 2, place, 0.5, "a"), process(1, 2, place, 0.5, "b"))
    assert isinstance(first, CommTimeoutError)
    assert isinstance(second, BackendUnavailableError)
    assert "the secret of this process is not that of process 0" in str(second)
    for meeting in outcomes(*(process(rank, 2, place, secret="a") for rank in range(2))):
        assert isinstance(meeting, Meeting)
        meeting.close()


def test_process_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: -1)
    place = local_place()
    first, second = outcomes(process(0, 2, place, 0.5), process(1, 2, place))
    assert isinstance(first, CommTimeoutError)
    assert "a process of another user answers at the socket" in str(second)


HELLO = {"rank": 1, "size": 2, "name": "", "nonce": "", "proof": ""}
GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff\x00" * 50,
    b"x" * (2 * joining.LONGEST),
    b"[" * 20_000 + b"\n",
    b'{"rank": 1}\n',
    b'{"text": ""}\n',
    *(json.dumps(HELLO | wrong).encode() + b"\n" for wrong in ({}, {"proof": "\ud800"}, {"rank": 2}, {"size": "2"})),
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
        said = outcomes(partial(first.result().tell, "", "a"), partial(second.tell, "", "b"))
        assert said == [["a", "b"]] * 2
        for each in (silent, second, first.result()):
            each.close()


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
