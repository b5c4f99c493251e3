"""Messages from any rank and with any tag: each goes to the first receive that takes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._messages.matching import Matcher
from arraycomm._transports.threads import SelfTransport
from arraycomm.testing import run
from tests.support.on_ranks import alone, each_rank_of

# Elements of float64 that travel with the envelope, and that follow it.
SHORT, LONG = 5, 20_000


def _gather_by_messages(comm: Communicator, source: Any, tag: Any, own_tag: int) -> None:
    """Every rank sends several messages to rank 0, itself included."""
    counts = [SHORT, LONG, 0, LONG, SHORT]
    sent = [comm.isend(np.full(n, 10.0 * comm.rank + k), 0, own_tag) for k, n in enumerate(counts)]
    if comm.rank == 0:
        arrived: dict[int, list[int]] = {rank: [] for rank in range(comm.size)}
        for _ in range(comm.size * len(counts)):
            got = comm.recv(source, tag, status=(status := ac.Status()))
            assert status.source is not None
            number = len(arrived[status.source])
            assert (got == 10.0 * status.source + number).all()
            assert status.shape == got.shape == (counts[number],)
            assert (status.dtype, status.nbytes) == (np.dtype("f8"), got.nbytes)
            arrived[status.source].append(status.tag or 0)
        for rank, tags in arrived.items():
            want = own_tag if tag is not ac.ANY_TAG else rank + 3
            assert tags == [want] * len(counts)
    ac.waitall(sent)


@each_rank_of("few")
def test_messages_of_any_rank_and_tag_arrive_in_the_order_of_each(comm: Communicator) -> None:
    _gather_by_messages(comm, ac.ANY_SOURCE, 4, 4)
    comm.barrier()
    _gather_by_messages(comm, ac.ANY_SOURCE, ac.ANY_TAG, comm.rank + 3)


@alone
@pytest.mark.parametrize("seed", range(4))
def test_every_interleaving_gives_each_message_to_one_receive(seed) -> None:
    def check(comm: Communicator) -> None:
        _gather_by_messages(comm, ac.ANY_SOURCE, ac.ANY_TAG, comm.rank + 3)
        _first_receives_first(comm)

    run(3, check, schedule=seed, timeout=10.0)


def _first_receives_first(comm: Communicator) -> None:
    if comm.rank == 0:
        statuses = [ac.Status() for _ in range(4)]
        receives = [
            comm.irecv(ac.ANY_SOURCE, ac.ANY_TAG, status=statuses[0]),
            comm.irecv(1, 7, status=statuses[1]),
            comm.irecv(1, ac.ANY_TAG, status=statuses[2]),
            comm.irecv(ac.ANY_SOURCE, 7, status=statuses[3]),
        ]
        comm.barrier()
        assert [request.wait().tolist() for request in reversed(receives)] == [[3], [2], [1], [0]]
        assert [(status.source, status.tag) for status in statuses] == [(1, 7)] * 4
    else:
        comm.barrier()
        if comm.rank == 1:
            for number in range(4):
                comm.send(np.array([number]), 0, 7)


test_first_receive_gets_the_first_message = each_rank_of(3)(_first_receives_first)


@each_rank_of(2)
def test_receives_that_take_some_of_the_same_messages_do_not_hold_one_another_up(
    comm: Communicator,
) -> None:
    if comm.rank == 0:
        waiting = comm.irecv(ac.ANY_SOURCE, 3)
        other = comm.irecv(1, ac.ANY_TAG)
        exact = comm.irecv(1, 6)
        assert exact.wait() == 6
        assert other.wait() == 5
        comm.send(0, 1)
        assert waiting.wait() == 3
    elif comm.rank == 1:
        comm.send(5, 0, 5)
        comm.send(6, 0, 6)
        comm.recv(0)
        comm.send(3, 0, 3)


@each_rank_of(3)
def test_status_of_other_forms(comm: Communicator) -> None:
    right, status = (comm.rank + 1) % comm.size, ac.Status()
    got = comm.sendrecv(np.ones((2, 3), "f4"), right, ac.ANY_SOURCE, 2, status=status)
    assert status == ac.Status((comm.rank - 1) % comm.size, 2, np.dtype("f4"), (2, 3), 24)
    assert got.shape == (2, 3)
    request = comm.irecv(ac.ANY_SOURCE, status=(later := ac.Status()))
    assert later == ac.Status()
    comm.barrier()
    if comm.rank == 0:
        with pytest.raises(TypeError, match="send"):
            comm.send("no array", right)
    else:
        comm.send(1.5, right)
    if comm.rank == 1:
        with pytest.raises(ac.PeerError, match="rank 0 raised instead of sending"):
            request.wait()
        assert later == ac.Status(0, 0)
    else:
        assert request.wait() == 1.5
        assert (later.shape, later.nbytes) == ((), 8)


@pytest.mark.parametrize("how", ["recv", "irecv"])
@each_rank_of(3)
def test_wait_ends_once_all_senders_have_left(comm: Communicator, transport, how) -> None:
    if transport == "mpi-messages":
        pytest.skip(
            "a rank says there that it has left when it is asked, which pytest's do not hear"
        )
    if comm.rank:
        comm.send(comm.rank, 0)
        return
    assert sorted(int(comm.recv(ac.ANY_SOURCE)) for _ in range(2)) == [1, 2]
    with pytest.raises(ac.PeerError, match=r"rank 1 has reached the end of its program"):
        comm.recv(ac.ANY_SOURCE) if how == "recv" else comm.irecv(ac.ANY_SOURCE).wait()


@each_rank_of(2)
def test_rank_whose_peers_have_left_may_still_send_to_itself(comm: Communicator) -> None:
    if comm.rank == 0:
        request = comm.irecv(ac.ANY_SOURCE)
        with pytest.raises(ac.CommTimeoutError):
            comm.irecv(0, 5).wait(timeout=0.8)
        comm.send(8, 0)
        assert request.wait() == 8
        comm.send(9, 0, 5)


@each_rank_of(3)
def test_timeout_names_what_was_waited_for(comm: Communicator) -> None:
    impatient = comm.dup(timeout=0.3)
    if comm.rank == 0:
        with pytest.raises(ac.CommTimeoutError) as caught:
            impatient.recv(ac.ANY_SOURCE, ac.ANY_TAG)
        text = str(caught.value)
        assert "recv from any rank with any tag at " in text
        assert all(f"; rank {rank} " in text for rank in range(1, comm.size))
    comm.barrier()


class _Late:
    """A transport to which a message comes right after a receive has looked for it in vain."""

    def __init__(self) -> None:
        self.found = [None, (1, 7)]
        self.taken: list[Any] = []

    def probe(self, source: int | None, tags: range) -> tuple[int, int] | None:
        return self.found.pop(0) if self.found else None

    def recv(self, buffer: Any, source: int, tag: int) -> Any:
        self.taken.append(buffer)
        return SelfTransport().send(np.zeros(1, np.uint8), 0, 0)


@alone
def test_message_that_comes_between_two_looks_goes_to_the_first_receive() -> None:
    transport = _Late()
    matcher = Matcher(transport)  # type: ignore[arg-type]
    first = matcher.recv(np.zeros(1, np.uint8), None, range(9))
    second = matcher.recv(np.ones(1, np.uint8), 1, range(9))
    assert not second.done()
    assert first.done()
    assert (first.source, first.tag) == (1, 7)
    assert [buffer.tolist() for buffer in transport.taken] == [[0]]


@alone
def test_probe_finds_no_message_that_a_receive_under_way_takes() -> None:
    matcher = Matcher(_Late())  # type: ignore[arg-type]
    first = matcher.recv(np.zeros(1, np.uint8), None, range(9))
    assert matcher.probe(None, range(9)) is None
    assert (first.source, first.tag) == (1, 7)
