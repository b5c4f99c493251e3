"""Messages that were sent before: the fast paths of `sendrecv` do what a full call does."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._prepared import fast_paths
from tests.support import internals
from tests.support.on_ranks import each_rank_of

Array = np.ndarray[Any, Any]
SHORT, LONG = 40, 20_000


def _ring(comm: Communicator) -> tuple[int, int]:
    """The ranks to send to and to receive from."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def _numbered(*numbers: int, count: int = SHORT) -> Array:
    return np.random.default_rng((count, *numbers)).standard_normal(count)


def _warm(comm: Communicator) -> None:
    """Exchange arrays like `_numbered` until there is a fast path."""
    for turn in range(3):
        _assert_ring(comm, turn)


def _assert_ring(comm: Communicator, *numbers: int) -> None:
    right, left = _ring(comm)
    got = comm.sendrecv(_numbered(comm.rank, *numbers), right, left)
    assert np.array_equal(got, _numbered(left, *numbers))


@each_rank_of("few")
def test_each_call_gets_its_own_elements(comm: Communicator) -> None:
    right, left = _ring(comm)
    status, kept, paths = ac.Status(), [], []
    for turn in range(4):
        mine, theirs = _numbered(comm.rank, turn), _numbered(left, turn)
        kept.append((comm.sendrecv(mine, right, left), theirs))
        out = np.empty(SHORT)
        assert comm.sendrecv(mine, right, left, out=out, status=status) is out
        assert np.array_equal(out, theirs)
        assert (status.source, status.tag, status.nbytes) == (left, 0, out.nbytes)
        assert (status.dtype, status.shape) == (out.dtype, out.shape)
        assert comm.sendrecv(mine, right, left, out=mine) is mine
        assert np.array_equal(mine, theirs)
        strided = np.repeat(_numbered(comm.rank, turn), 2)[::2]
        backwards = np.empty(SHORT)[::-1]
        comm.sendrecv(strided, right, left, out=backwards)
        assert np.array_equal(backwards, theirs)
        paths.append(list(internals.fast_paths(comm)._paths.values()))
    assert all(np.array_equal(got, wanted) for got, wanted in kept)
    assert len(paths[0]) == 2 * (comm.size > 1)
    assert all(one == paths[0] for one in paths)
    if comm.size > 1:
        counts = comm.stats()
        assert (counts["send"]["calls"], counts["send"]["copies"]) == (16, 4)
        assert counts["send"]["bytes"] == 16 * 8 * SHORT
        assert counts["recv"]["calls"] == 16
        assert counts["recv"]["seconds"] > 0


@each_rank_of(3)
def test_wrong_arguments_on_one_rank_are_raised_as_before(comm: Communicator) -> None:
    right, left = _ring(comm)
    _warm(comm)
    mine = _numbered(comm.rank)
    for kind, match, x, wrong in (
        (TypeError, "send: ", [1], {}),
        (ValueError, "recv: ", mine, {"out": np.empty(SHORT + 1)}),
        (TypeError, "recv: ", mine, {"out": np.empty(SHORT, np.float32)}),
        (BufferError, "recv: ", mine, {"out": np.broadcast_to(0.0, SHORT)}),
        (TypeError, "recv: ", mine, {"like": "text"}),
        (TypeError, "status must be", mine, {"status": "text"}),
    ):
        if comm.rank == 0:
            with pytest.raises(kind, match=match):
                comm.sendrecv(x, right, left, **wrong)
        elif left == 0 and x is not mine:
            with pytest.raises(ac.PeerError, match="rank 0 raised instead of sending"):
                comm.sendrecv(mine, right, left)
        else:
            assert np.array_equal(comm.sendrecv(mine, right, left), _numbered(left))
        _assert_ring(comm, 7)


@each_rank_of(2)
def test_fast_paths_are_given_up_when_there_are_many(comm: Communicator, monkeypatch) -> None:
    monkeypatch.setattr(fast_paths, "_MOST", 3)
    right, left = _ring(comm)
    for turn, count in product(range(3), range(5)):
        got = comm.sendrecv(_numbered(comm.rank, turn, count=count), right, left)
        assert np.array_equal(got, _numbered(left, turn, count=count))
        assert len(internals.fast_paths(comm)) <= 3
    with comm.dup() as other:
        _warm(other)
        assert len(internals.fast_paths(other)) == 2
    assert not internals.fast_paths(other)


@each_rank_of(2)
def test_rank_that_does_not_exchange_any_more_is_noticed(comm: Communicator) -> None:
    right, left = _ring(comm)
    part = comm.dup(timeout=0.5)
    _warm(part)
    if comm.rank == 1:
        with pytest.raises(ac.CommTimeoutError, match=f"recv from rank {left} with tag 0"):
            part.sendrecv(_numbered(comm.rank), right, left)
        with pytest.raises(ac.CommunicatorClosedError, match="waited 0"):
            part.sendrecv(_numbered(comm.rank), right, left)
    assert comm.allreduce(1) == comm.size
