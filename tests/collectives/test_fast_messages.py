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
def test_calls_like_one_before_have_one_path_for_each_half(comm: Communicator) -> None:
    """What they bring is a law."""
    right, left = _ring(comm)
    paths = []
    for turn in range(4):
        out = np.empty(SHORT)
        strided = np.repeat(_numbered(comm.rank, turn), 2)[::2]
        comm.sendrecv(_numbered(comm.rank, turn), right, left, out=out, status=ac.Status())
        comm.sendrecv(strided, right, left, out=out[::-1])
        assert np.array_equal(out[::-1], _numbered(left, turn))
        paths.append(list(internals.fast_paths(comm)._paths.values()))
    assert len(paths[0]) == 2 * (comm.size > 1)
    assert all(one == paths[0] for one in paths)
    if comm.size > 1:
        assert comm.stats()["send"]["copies"] == 4
        assert comm.stats()["recv"]["seconds"] > 0


@pytest.mark.parametrize("before", [True, False])
@each_rank_of(3)
def test_wrong_arguments_on_one_rank_are_raised_as_before(comm: Communicator, before: bool) -> None:
    """The next exchange gets the next arrays, whether or not there is a fast path."""
    right, left = _ring(comm)
    if before:
        _warm(comm)
    for kind, match, x, wrong in (
        (TypeError, "send: ", [1], {}),
        (ValueError, "recv: ", None, {"out": np.empty(SHORT + 1)}),
        (TypeError, "recv: ", None, {"out": np.empty(SHORT, np.float32)}),
        (BufferError, "recv: ", None, {"out": np.broadcast_to(0.0, SHORT)}),
        (TypeError, "recv: ", None, {"like": "text"}),
        (TypeError, "status must be", None, {"status": "text"}),
        (ValueError, "timeout must be", None, {"timeout": -1}),
    ):
        for count in (SHORT, LONG) if x is None and "out" not in wrong else (SHORT,):
            mine = _numbered(comm.rank, count=count)
            if comm.rank == 0:
                with pytest.raises(kind, match=match):
                    comm.sendrecv(mine if x is None else x, right, left, **wrong)
            elif left == 0 and (x is not None or "timeout" in wrong):
                with pytest.raises(ac.PeerError, match="rank 0 raised instead of sending"):
                    comm.sendrecv(mine, right, left)
            else:
                got = comm.sendrecv(mine, right, left)
                assert np.array_equal(got, _numbered(left, count=count))
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
