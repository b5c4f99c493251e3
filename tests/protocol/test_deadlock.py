"""Ranks that wait for one another on different communicators raise soon; those that can go on do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import Communicator
from arraycomm._protocol.waits.deadlock import DeadlockWatch, Wait, WaitStatus, find_deadlock
from tests.support import internals
from tests.support.on_ranks import alone, each_rank_of

# Seconds; ranks on one node raise after 0.7, and between nodes after two questions, at 0.4 and 0.8.
SOON = 20.0
# Seconds for which a circle has to stay, and those of a wait that takes longer than that and ends by itself.
SURE, WHILE = 0.3, 1.1


@pytest.fixture(autouse=True)
def _soon_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.shorten_deadlock_watch(monkeypatch, SURE)


def _ring(comms: list[Communicator], rank: int) -> None:
    comms[rank].allreduce(np.ones(3))


def _two_requests(comms: list[Communicator], rank: int) -> None:
    ac.waitall([comms[min(rank, 1)].iallreduce(np.ones(3 << k)) for k in range(2)])


def _receive_and_barrier(number: int, comms: list[Communicator], rank: int) -> None:
    if rank == 0:
        comms[number].recv(2, tag=7)
    comms[1].barrier()


def _all_receive_first(comms: list[Communicator], rank: int) -> None:
    ends = (rank + 1) % 3, (rank + 2) % 3
    # Repeated ones take another way, and one that is refused is a message as well.
    assert [comms[1].sendrecv(np.full(2, rank), *ends)[0] for _ in range(3)] == [ends[1]] * 3
    with pytest.raises(TypeError, match="x must be an array"):
        comms[1].sendrecv([1], *ends)
    comms[1].recv(ends[1])


def _all_send_first(comms: list[Communicator], rank: int) -> None:
    comms[1].send(np.ones(20_000), (rank + 1) % 3)


@pytest.mark.parametrize(
    ("wait", "said"),
    [
        (_ring, ["rank 0 waiting in allreduce at test_deadlock", "2 waiting in allreduce"]),
        (_two_requests, ["rank 0 waiting in allreduce at", "ranks 1, 2 waiting in allreduce at"]),
        (partial(_receive_and_barrier, 0), ["recv from rank 2 with tag 7", "2 waiting in barrier"]),
        (partial(_receive_and_barrier, 1), ["recv from rank 2 with tag 7", "2 waiting in barrier"]),
        (_all_receive_first, ["rank 0 waiting in recv from rank 2", "call sendrecv, or begin"]),
        (_all_send_first, ["rank 1 waiting in send to rank 2", "with isend or irecv"]),
    ],
)
def test_ranks_that_wait_for_one_another_raise_soon(
    on_ranks, wait: Callable[..., None], said: list[str]
) -> None:
    def check(comm: Communicator) -> str:
        comms = [comm.dup() for _ in range(3)]
        for other in comms:
            other.allreduce(1)
        started = time.monotonic()
        with pytest.raises(ac.DeadlockError) as caught:
            wait(comms, comm.rank)
        assert time.monotonic() - started < SOON
        text = str(caught.value)
        assert "waiting in" in text
        # It closes the communicators in which ranks waited, and no other.
        assert comm.allreduce(1) == 3
        closed = (ac.CommunicatorClosedError, ac.PeerError)
        with pytest.raises(closed, match=r"DeadlockError|waited in vain"):
            comms[2 if wait is _ring else 1].allreduce(1)
        return text

    texts = on_ranks(3, check)
    # A rank that learns of it later may no longer see what the others have waited in.
    assert [part for part in said if all(part not in text for text in texts)] == []
    assert max(text.count("waiting in") for text in texts) >= 2


def _another_thread_calls(comm: Communicator, other: Communicator) -> None:
    if comm.rank > 0:
        other.allreduce(1)
        comm.barrier()
        return
    thread = threading.Thread(target=lambda: [time.sleep(WHILE), other.allreduce(1)])
    thread.start()
    comm.barrier()
    thread.join()


def _a_request_goes_on(comm: Communicator, other: Communicator) -> None:
    """Rank 0 takes part in calls of `other` that it has started before, which need the last rank."""
    if comm.rank == comm.size - 1:
        time.sleep(WHILE)
    requests = [other.iallreduce(np.ones(4)) for _ in range(2)]
    if comm.rank == 0:
        comm.barrier()
    ac.waitall(requests)
    if comm.rank > 0:
        comm.barrier()


def _a_receive_is_not_waited_for(comm: Communicator, other: Communicator) -> None:
    if comm.rank == 0:
        requests = [comm.irecv(1)]
        comm.recv(2)
    elif comm.rank == 2:
        time.sleep(WHILE)
        comm.send(1, 0)
    other.barrier()
    ac.waitall(requests if comm.rank == 0 else [comm.isend(1, 0)] if comm.rank == 1 else [])


def _a_wait_ends_by_itself(comm: Communicator, other: Communicator) -> None:
    request = comm.ibarrier() if comm.rank == 0 else None
    if request is not None:
        with pytest.raises(ac.CommTimeoutError, match="is not finished"):
            request.wait(timeout=WHILE)
    other.barrier()
    (comm.barrier if request is None else request.wait)()


def _a_communicator_has_a_short_timeout(comm: Communicator, other: Communicator) -> None:
    impatient = other.dup(timeout=WHILE)
    if comm.rank == 1:
        with pytest.raises(ac.CommTimeoutError, match="recv from rank 0") as raised:
            impatient.recv(0)
        assert not isinstance(raised.value, ac.DeadlockError)
    comm.barrier()


@pytest.mark.parametrize(
    "wait",
    [
        *(_another_thread_calls, _a_request_goes_on, _a_receive_is_not_waited_for),
        *(_a_wait_ends_by_itself, _a_communicator_has_a_short_timeout),
    ],
)
@each_rank_of(3)
def test_ranks_that_can_go_on_do_so(comm: Communicator, wait: Callable[..., None]) -> None:
    wait(comm.dup(), comm.dup())
    assert comm.allreduce(1) == 3


_EDGES = st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)))


@alone
@given(st.integers(2, 7), _EDGES, _EDGES, st.sets(st.integers(0, 6)))
def test_a_rank_is_deadlocked_if_confirmed_edges_lead_into_a_circle(
    size: int, missing: set[tuple[int, int]], held: set[tuple[int, int]], in_vain: set[int]
) -> None:
    waits = {
        rank: WaitStatus(
            f"in a call of rank {rank}",
            in_vain=rank in in_vain,
            number=10 + rank,
            missing=tuple(to for r, to in sorted(missing) if r == rank),
            held=tuple((r, 10 + r) for r, by in sorted(held) if by == rank),
        )
        for rank in range(size)
    }
    alive = [r for r in range(size) if r not in in_vain]
    edges = np.zeros((size, size), int)
    for r, to in missing & held:
        if r in alive and to in alive:
            edges[r, to] = 1
    # Only ways that go round in a circle are as long as there are ranks.
    ways = np.linalg.matrix_power(edges, size)
    reached = np.linalg.matrix_power(edges + np.eye(size, dtype=int), size)
    for rank in range(size):
        stuck = [r for r in range(size) if reached[rank, r] and ways[r].any()]
        assert find_deadlock(rank, waits) == (stuck if ways[rank].any() else [])


@alone
@given(
    st.text(min_size=1).filter(lambda text: "\n" not in text),
    st.lists(st.tuples(*[st.integers(0, 99)] * 2)),
    st.integers(0, 300),
)
def test_a_status_that_was_cut_off_still_tells_what_is_waited_in(
    doing: str, held: list[tuple[int, int]], end: int
) -> None:
    status = WaitStatus(doing, call="w:3", missing=(0, 5), counted=(1, 7, 3), held=tuple(held))
    text = status.encode()
    assert WaitStatus.decode(text) == status
    assert WaitStatus.decode(text[: len(doing) + end]) in (status, WaitStatus(doing))
    assert WaitStatus.decode("") is None


@alone
@pytest.mark.parametrize(
    ("call", "there", "here", "idle", "held"),
    [
        ("B:5", (), None, True, True),
        ("B:4", (), None, True, False),
        ("B:5", (), None, False, False),
        ("A:5", (), None, True, False),
        ("A:message 1.9", (), None, True, True),
        ("A:message 1.9", (), None, False, False),
        ("A:message 1.9", (), (), True, False),
        # Of the messages with tag 7, this rank has sent 3 and received 2.
        *(("A:message 1.9", (0, 7, n), here, True, n == 3) for n in (2, 3) for here in (None, ())),
        *(("A:message 1.9", (1, 7, n), (1, 7, 4), True, n == 3) for n in (2, 3)),
        *(("A:message 1.9", (1, 7, 3), (0, tag, 2), True, tag == 8) for tag in (7, 8)),
        ("A:message 1.9", (1, 7, 3), (), True, False),
        ("B:message 1.9", (1, 7, 3), (0, 7, 2), True, True),
    ],
)
def test_a_wait_holds_up_what_its_rank_can_only_do_later(
    call: str, there: tuple[int, ...], here: tuple[int, ...] | None, idle: bool, held: bool
) -> None:
    # This rank waits in A, and the other in a call for which this one has not come, or has: B is at step 4.
    waits = WaitStatus("there", call=call, number=9, missing=(0,), counted=there).encode()
    notes = SimpleNamespace(report_wait=lambda text: None, wait_status=lambda rank: waits)
    control = SimpleNamespace(rank=0, step=4, peers=[1], notes=notes)
    facts = {"size": 2, "family_ranks": [0, 1], "control": control, "closed": None}
    facts |= {"sent": {(1, 7): [3]}, "received": {(1, 7): [2]}}
    mine, other = (SimpleNamespace(name=name, **facts) for name in "AB")
    mine.engine = SimpleNamespace(idle=idle, blocked=threading.get_ident())
    other.engine = SimpleNamespace(idle=idle, blocked=None)
    mine.related = [mine, other]
    watch = DeadlockWatch(mine, certain=True, own_process=True)
    watch.begin("here")
    watch.look(0.0, Wait(lambda: [1], "here", "", None, counted=here), now=True)
    assert watch.status is not None
    assert watch.status.held == (((1, 9),) if held else ())


@alone
def test_a_wait_that_ends_beside_a_look_stays_ended() -> None:
    """The thread that makes progress may look while the call beside it ends the wait."""
    told: list[str] = []
    looking, ended = threading.Event(), threading.Event()

    def wait_status(rank: int) -> str:
        looking.set()
        ended.wait(0.2)
        return ""

    notes = SimpleNamespace(report_wait=told.append, wait_status=wait_status)
    notes.ask_wait_status = lambda ranks: None
    control = SimpleNamespace(rank=0, step=4, peers=[1], notes=notes)
    group = SimpleNamespace(name="A", size=2, family_ranks=[0, 1], control=control, closed=None)
    group.engine = SimpleNamespace(idle=True, blocked=threading.get_ident())
    group.related = [group]
    watch = DeadlockWatch(group, certain=True, own_process=True)
    watch.begin("here")

    def end() -> None:
        looking.wait()
        watch.end(in_vain=False)
        ended.set()

    beside = threading.Thread(target=end)
    beside.start()
    watch.look(0.0, Wait(lambda: [1], "here", "", None, counted=(0, 7, 2)), now=True)
    beside.join()
    assert watch.status is None
    assert told[-1] == ""
