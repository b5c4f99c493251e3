"""Python objects from rank to rank, and looks for messages."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import ANY_SOURCE, ANY_TAG, Communicator
from arraycomm._transports.notes import FAILED
from tests.support.internals import announce_exit
from tests.support.on_ranks import each_rank_of


def ring(comm: Communicator) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


@each_rank_of("few")
def test_what_is_received_as_what_it_is_not_is_an_error_and_lost(comm: Communicator) -> None:
    right, left = ring(comm)
    for nbytes in (10, 100_000):
        started = [comm.isend_object(b"x" * nbytes, right), comm.isend(np.ones(nbytes), right)]
        with pytest.raises(TypeError, match=f"rank {left} has sent an object; .* by recv_object"):
            comm.recv(left)
        with pytest.raises(TypeError, match=f"rank {left} has sent an array; receive it by recv"):
            comm.recv_object(left)
        ac.waitall(started)
    assert comm.iprobe(ANY_SOURCE, ANY_TAG) is None


@each_rank_of("few")
def test_object_that_cannot_be_pickled_is_an_error_on_both_ranks(comm: Communicator) -> None:
    right, left = ring(comm)
    sending = comm.isend_object(threading.Lock(), right)
    with pytest.raises(ac.PeerError, match=f"rank {left} raised instead of sending"):
        comm.recv_object(left)
    with pytest.raises(TypeError, match="send: obj cannot be pickled"):
        sending.wait()
    assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_probe_is_of_no_rank_that_has_failed(comm: Communicator) -> None:
    part = comm.dup()
    if comm.rank == 0:
        announce_exit(part, FAILED, "lost my way")
    else:
        with pytest.raises(ac.PeerError, match="lost my way"):
            _poll(part, 0)
        with pytest.raises(ac.PeerError, match="lost my way"):
            part.probe(0)
        with pytest.raises(ac.CommunicatorClosedError, match="iprobe: "):
            part.iprobe(0)


@each_rank_of(3)
def test_what_a_former_communicator_left_in_mpi_hides_nothing(comm: Communicator) -> None:
    if comm.mpi_comm is None:
        pytest.skip("needs MPI")
    right, _ = ring(comm)
    left_behind = comm.mpi_comm.Isend(b"x" * 40, right, 1 << 21)
    sending = comm.isend(np.ones(3), right, 5)
    receiving = comm.irecv(ANY_SOURCE, ANY_TAG)
    while not receiving.test():
        time.sleep(1e-3)
    sending.wait()
    left_behind.Wait()


@each_rank_of(3)
def test_probe_has_a_limit(comm: Communicator) -> None:
    with pytest.raises(
        ac.CommTimeoutError, match=r"probe from rank 0 with tag 0 at .*timeout 0.05"
    ):
        comm.dup().probe(0, timeout=0.05)


def _poll(comm: Communicator, source: int) -> None:
    while comm.iprobe(source) is None:
        time.sleep(1e-3)
