"""What every transport promises: one suite, one thin subclass each.

The MPI ones run where every rank of an MPI job runs this file in step, the others where pytest is
alone.
"""

from __future__ import annotations

import mmap
import os
import time
import traceback
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from arraycomm import Communicator
from arraycomm._protocol.waits.waiting import wait_for
from arraycomm._transports.base import Blocks, Transport
from arraycomm._transports.control import PAYLOAD
from arraycomm._transports.lives import Lives
from arraycomm._transports.notes import FAILED, GAVE_UP, GONE
from arraycomm._transports.processes.transport import ProcessesTransport, memory_bytes
from tests.support import internals
from tests.support.on_ranks import (
    LAUNCH,
    SIZES,
    TIMEOUT,
    OnRanks,
    alone,
    each_rank_of,
    on_ranks,
    transport,
)

pytestmark = pytest.mark.both_control_channels

__all__ = ["on_ranks", "transport"]


# One, and several; under MPI as many as there are.
@pytest.fixture(params=[1, 3] if LAUNCH is None else [n for n in SIZES if n != 2])
def size(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
def several() -> int:
    return 3 if LAUNCH is None else SIZES[-1]


def _blocks(counts: list[int], fill: int = 0) -> Blocks:
    offsets = [sum(counts[:r]) for r in range(len(counts))]
    return Blocks(np.full(sum(counts), fill, np.uint8), counts, offsets)


def _neighbours(comm: Communicator) -> tuple[Transport, int, int]:
    """Return the transport, and the ranks to send to and to receive from."""
    return internals.transport(comm), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


class TransportContract:
    """Subclasses say which transport; `on_ranks` passes a communicator over it."""

    @each_rank_of("size")
    def test_board_shows_every_rank_what_the_others_wrote(self, comm: Communicator) -> None:
        control = internals.transport(comm).control
        for number in range(20):
            payload = np.full(control.payload, number * 7 + comm.rank, np.uint8)
            control.mine[(control.step + 1) & 1][PAYLOAD:] = payload
            control.post()
            wait_for(control.done, 0, lambda waited: None)
            assert control.missing() == []
            rows = control.rows[control.step & 1]
            for rank in range(comm.size):
                assert (rows[rank, PAYLOAD:] == number * 7 + rank).all()

    @each_rank_of("size")
    def test_board_shows_what_is_used_of_each_slot(self, comm: Communicator, size: int) -> None:
        control = internals.transport(comm).control
        # The same for all, none for some, and another for each, in no multiple of a word.
        for number, lengths in enumerate(([13] * size, [0, 2001] * size, range(5, 999, 111))):
            own = control.mine[(control.step + 1) & 1]
            own[PAYLOAD:] = bytes(control.payload)
            own[8:16] = number.to_bytes(8, "little")
            own[PAYLOAD : PAYLOAD + lengths[comm.rank]] = (
                bytes([comm.rank + 1]) * lengths[comm.rank]
            )
            control.post(lengths[comm.rank])
            wait_for(control.done, 0, lambda waited: None)
            for rank in range(comm.size):
                row = control.rows[control.step & 1][rank]
                assert row[8] == number
                assert (row[PAYLOAD : PAYLOAD + lengths[rank]] == rank + 1).all()

    @each_rank_of("size")
    def test_memory_that_one_rank_offers_is_shared_by_all(self, comm: Communicator) -> None:
        link, nbytes = internals.transport(comm), 4096
        offered = link.offer_memory(nbytes) if comm.rank == 0 else ""
        name = comm.bcast_object(offered)
        memory = link.open_memory(name, nbytes)
        comm.barrier()
        if comm.rank == 0 and offered:
            link.close_memory(offered)
        comm.barrier()
        if internals.control(comm).shared:
            assert len(memory) == nbytes
            memory[comm.rank] = comm.rank + 1
            comm.barrier()
            assert memory[: comm.size].tolist() == list(range(1, comm.size + 1))
            assert link.open_memory(name, nbytes) is None

    @each_rank_of("size")
    def test_alltoall_of_different_lengths(self, comm: Communicator) -> None:
        for scale in (0, 1, 1000):
            send = _blocks([scale * (r + comm.rank) for r in range(comm.size)])
            for rank in range(comm.size):
                send.block(rank)[...] = 10 * comm.rank + rank
            recv = _blocks([scale * (comm.rank + r) for r in range(comm.size)], 255)
            internals.finish(internals.transport(comm).alltoall(send, recv))
            for rank in range(comm.size):
                assert (recv.block(rank) == 10 * rank + comm.rank).all()

    @each_rank_of("size")
    def test_allgather_is_in_place(self, comm: Communicator) -> None:
        for scale in (0, 3, 5000):
            recv = _blocks([scale * (r + 1) for r in range(comm.size)], 255)
            recv.block(comm.rank)[...] = comm.rank
            internals.finish(internals.transport(comm).allgather(recv))
            for rank in range(comm.size):
                assert (recv.block(rank) == rank).all()

    @each_rank_of("size")
    def test_gather_reaches_every_root(self, comm: Communicator) -> None:
        for root in range(comm.size):
            recv = _blocks([100 * r for r in range(comm.size)], 255)
            send = np.full(100 * comm.rank, comm.rank, np.uint8)
            into = recv if comm.rank == root else None
            internals.finish(internals.transport(comm).gather(send, into, root))
            for rank in range(comm.size):
                want = rank if comm.rank == root else 255
                assert (recv.block(rank) == want).all()

    @each_rank_of("size")
    def test_scatter_from_every_root(self, comm: Communicator) -> None:
        for root in range(comm.size):
            for scale in (0, 1, 50_000):
                send = _blocks([scale * r for r in range(comm.size)])
                for rank in range(comm.size):
                    send.block(rank)[...] = 10 * root + rank
                recv = np.full(scale * comm.rank, 255, np.uint8)
                mine = send if comm.rank == root else None
                internals.finish(internals.transport(comm).scatter(mine, recv, root))
                assert (recv == 10 * root + comm.rank).all()

    @each_rank_of("size")
    def test_scatter_of_blocks_that_stand_in_any_order(self, comm: Communicator) -> None:
        memory = np.arange(7 * comm.size).astype(np.uint8)
        offsets = [7 * (comm.size - 1 - rank) + 2 for rank in range(comm.size)]
        send = Blocks(memory, [5] * comm.size, offsets) if comm.rank == 0 else None
        recv = np.zeros(5, np.uint8)
        internals.finish(internals.transport(comm).scatter(send, recv, 0))
        assert recv.tolist() == memory[offsets[comm.rank] :][:5].tolist()

    @each_rank_of("size")
    def test_bcast_from_every_root(self, comm: Communicator) -> None:
        for root in range(comm.size):
            for count in (0, 5, 100_000):
                buffer = np.full(count, comm.rank, np.uint8)
                internals.finish(internals.transport(comm).bcast(buffer, root))
                assert (buffer == root).all()

    @each_rank_of("size")
    def test_messages_of_one_tag_arrive_in_order(self, comm: Communicator) -> None:
        link, right, left = _neighbours(comm)
        counts = [0, 7, 4096, 4097, 300_000, 1]
        into = [np.full(count, 255, np.uint8) for count in counts]
        recvs = [link.recv(buffer, left, 3) for buffer in into]
        mine = [np.full(n, 10 * comm.rank + k, np.uint8) for k, n in enumerate(counts)]
        internals.finish(*(link.send(buffer, right, 3) for buffer in mine), *recvs)
        for k, buffer in enumerate(into):
            assert (buffer == 10 * left + k).all()

    @each_rank_of("size")
    def test_messages_of_different_tags_go_past_one_another(self, comm: Communicator) -> None:
        link, right, left = _neighbours(comm)
        tags = [0, 1, (1 << 21) - 1]
        sends = [link.send(np.full(100_000, t & 7, np.uint8), right, t) for t in tags]
        for tag in reversed(tags):
            into = np.empty(100_000, np.uint8)
            receiving = link.recv(into, left, tag)
            internals.finish(receiving)
            assert (into == tag & 7).all()
        internals.finish(*sends)

    @each_rank_of("size")
    def test_message_may_be_shorter_than_the_buffer_it_goes_into(self, comm: Communicator) -> None:
        link, right, left = _neighbours(comm)
        into = np.full(100, 255, np.uint8)
        receiving = link.recv(into, left, 0)
        internals.finish(link.send(np.zeros(40, np.uint8), right, 0), receiving)
        assert (into[:40] == 0).all()
        assert (into[40:] == 255).all()

    @each_rank_of("size")
    def test_short_message_to_oneself_waits_for_nothing(self, comm: Communicator) -> None:
        mine = np.arange(100, dtype=np.uint8)
        internals.finish(internals.transport(comm).send(mine, comm.rank, 0))
        mine[...] = 255
        into = np.empty(100, np.uint8)
        internals.finish(internals.transport(comm).recv(into, comm.rank, 0))
        assert (into == np.arange(100)).all()

    @each_rank_of("size")
    def test_receive_is_not_finished_before_its_message_is_sent(self, comm: Communicator) -> None:
        link, right, left = _neighbours(comm)
        receiving = link.recv(np.empty(10, np.uint8), left, 0)
        assert not any(receiving.done() for _ in range(100))
        comm.barrier()
        internals.finish(link.send(np.zeros(10, np.uint8), right, 0), receiving)

    @each_rank_of("size")
    def test_long_message_is_not_finished_before_it_is_received(self, comm: Communicator) -> None:
        link, right, left = _neighbours(comm)
        sending = link.send(np.zeros(10**6, np.uint8), right, 0)
        assert not any(sending.done() for _ in range(100))
        comm.barrier()
        internals.finish(sending, link.recv(np.empty(10**6, np.uint8), left, 0))

    @each_rank_of("size")
    def test_first_receive_gets_the_first_message_whichever_is_looked_at_first(
        self, comm: Communicator
    ) -> None:
        link, right, left = _neighbours(comm)
        into = np.full((3, 5_000), 255, np.uint8)
        recvs = [link.recv(row, left, 0) for row in into]
        sends = [link.send(np.full(5_000, k, np.uint8), right, 0) for k in range(3)]
        internals.finish(*reversed(recvs), *sends)
        assert (into == [[0], [1], [2]]).all()

    @each_rank_of("size")
    def test_messages_go_beside_movements(self, comm: Communicator) -> None:
        link, right, left = _neighbours(comm)
        into, buffer = np.empty(10**5, np.uint8), np.full(10**5, comm.rank, np.uint8)
        receiving, moving = link.recv(into, left, 0), link.bcast(buffer, 0)
        internals.finish(moving, receiving, link.send(np.full(10**5, 9, np.uint8), right, 0))
        assert (buffer == 0).all()
        assert (into == 9).all()

    @each_rank_of("size")
    def test_messages_of_split_groups_do_not_mix(self, comm: Communicator) -> None:
        link, right, left = _neighbours(comm)
        links = [link, link.split(0, list(range(comm.size)))]
        sends = [link.send(np.full(9, k, np.uint8), right, 0) for k, link in enumerate(links)]
        for k, link in reversed(list(enumerate(links))):
            into = np.empty(9, np.uint8)
            internals.finish(link.recv(into, left, 0))
            assert (into == k).all()
        internals.finish(*sends)
        links[1].free()

    @each_rank_of("size")
    def test_split_numbers_members_in_the_order_given(self, comm: Communicator) -> None:
        members = list(range(comm.size))[::-1]
        link: Transport | None = internals.transport(comm).split(0, members)
        assert link is not None
        assert (link.rank, link.size) == (members.index(comm.rank), comm.size)
        buffer = np.full(10, comm.rank, np.uint8)
        internals.finish(link.bcast(buffer, 0))
        assert (buffer == members[0]).all()
        link.free()

    @each_rank_of("several")
    def test_farewell_is_seen(self, comm: Communicator) -> None:
        other = comm.dup()
        control = internals.control(other)
        assert not control.notes.exit_notices()
        comm.barrier()
        control.notes.announce_exit(FAILED, 7, f"bye from {comm.rank}")
        # The last is that of a thread which is late: the rank has left already.
        for state in (GONE, GAVE_UP):
            control.notes.announce_exit(state, 9, "late")
        comm.barrier()
        said = {peer: (GONE, 7, f"bye from {peer}") for peer in control.peers}
        deadline = time.monotonic() + 10
        while control.notes.exit_notices() != said and time.monotonic() < deadline:
            internals.transport(comm).progress()
        assert control.notes.exit_notices() == said
        comm.barrier()


@alone
class TestThreads(TransportContract):
    pass


@pytest.mark.skipif(LAUNCH is None, reason="needs to be run under mpiexec")
class TestMPI(TransportContract):
    pass


@alone
class TestSelf(TransportContract):
    @pytest.fixture
    def size(self) -> int:
        return 1

    @pytest.fixture
    def several(self) -> int:
        pytest.skip("one rank alone")

    @pytest.fixture
    def on_ranks(self) -> OnRanks:
        from arraycomm._transports.threads import SelfTransport

        return lambda _, fn, *args: [fn(internals.communicator(SelfTransport()), *args)]


@alone
class TestProcesses(TransportContract):
    @pytest.fixture
    def on_ranks(self) -> OnRanks:
        return _run_forked


def _run_forked(size: int, fn: Callable[[Communicator], None]) -> None:
    """Run on ranks that are forked processes, which have mapped the same memory before."""
    memory = np.frombuffer(mmap.mmap(-1, memory_bytes(size)), np.uint8)
    ranks = [_fork(memory, rank, size, fn) for rank in range(size)]
    assert [os.waitpid(pid, 0)[1] for pid in ranks] == [0] * size


def _fork(memory: np.ndarray, rank: int, size: int, fn: Callable[[Communicator], None]) -> int:
    with warnings.catch_warnings():
        # JAX warns of its threads, if another test has imported it.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid:
        return pid
    try:
        transport = ProcessesTransport(memory, rank, size, Lives({}))
        fn(internals.communicator(transport, timeout=TIMEOUT))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
