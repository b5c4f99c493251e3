"""A wrong `out` that only its own rank can know of; other wrong arguments are those of the laws."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from tests.support.on_ranks import each_rank_of


@each_rank_of(3)
def test_exscan_looks_at_out_where_there_is_a_result(comm: Communicator) -> None:
    for culprit in range(1, comm.size):
        out = np.ones(5) if comm.rank in (0, culprit) else None
        with pytest.raises(ValueError if comm.rank == culprit else ac.PeerError):
            comm.exscan(np.ones(3), out=out)
    assert comm.exscan(1) == (comm.rank or None)


# What is wrong with an `out` whose shape is known only when all have been heard.
WRONG_OUTS: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "too short": (ValueError, "must have the shape", lambda right: right[:-1].copy()),
    "rows of another shape": (ValueError, "the shape", lambda right: np.ones((len(right), 3))),
    "another dtype": (TypeError, "must have dtype", lambda right: right.astype("f4")),
    "read-only": (
        BufferError,
        "read-only",
        lambda right: np.frombuffer(right.tobytes()).reshape(right.shape),
    ),
    "overlapping itself": (
        BufferError,
        "share memory|read-only",
        lambda right: np.lib.stride_tricks.as_strided(np.ones(2), right.shape, (0, 8)),
    ),
    "no array": (TypeError, "out must be an array", lambda _: "out"),
    "a number": (TypeError, "out must be an array", lambda _: 1.0),
    "a number too large": (OverflowError, "out", lambda _: 2**70),
}


@pytest.mark.half_of_the_cases
@pytest.mark.parametrize("case", WRONG_OUTS)
@pytest.mark.parametrize("name", ["allgatherv", "gatherv", "alltoallv"])
@each_rank_of(3)
def test_wrong_out_of_a_later_known_shape_concerns_its_rank_alone(
    comm: Communicator, name, case
) -> None:
    kind, message, make = WRONG_OUTS[case]

    def call(comm: Communicator, x: Any, root: int, out: Any) -> Any:
        if name == "alltoallv":
            return comm.alltoallv(x, [len(x) // comm.size] * comm.size, out=out)
        return comm.gatherv(x, root, out=out) if name == "gatherv" else comm.allgatherv(x, out=out)

    for length in (3, 9_000):
        x = np.full((length, 2), comm.rank + 1.0)
        for culprit in range(comm.size):
            right = call(comm, x, culprit, None)
            if comm.rank == culprit:
                with pytest.raises(kind, match=f"{name}: .*{message}|{name}: {message}"):
                    call(comm, x, culprit, make(right))
            else:
                assert np.array_equal(call(comm, x, culprit, None), right)
            assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_wrong_length_of_out_of_scatterv_concerns_its_rank_alone(comm: Communicator) -> None:
    for length, culprit in product((3, 9_000), range(1, comm.size)):
        x, counts = np.ones((comm.size * length, 2)), [length] * comm.size
        arguments = (x, counts) if comm.rank == 0 else (None, None)
        if comm.rank == culprit:
            with pytest.raises(ValueError, match="scatterv: out must have the shape"):
                comm.scatterv(out=np.ones((length + 1, 2)))
        else:
            assert (comm.scatterv(*arguments) == x[:length]).all()
        assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_wrong_out_of_a_request_is_raised_by_wait(comm: Communicator) -> None:
    for length in (2, 9_000):
        x = np.ones(length)
        request = comm.iallgatherv(x, out=np.ones(1) if comm.rank == 0 else None)
        good = comm.iallgatherv(x)
        if comm.rank == 0:
            with pytest.raises(ValueError, match="must have the shape"):
                request.wait()
        else:
            assert len(request.wait()) == comm.size * length
        assert len(good.wait()) == comm.size * length


@each_rank_of(3, "jax")
def test_immutable_out_of_a_later_known_shape_concerns_its_rank_alone(
    comm: Communicator, jax
) -> None:
    x = np.ones(2, np.float32)
    if comm.rank == 0:
        with pytest.raises(BufferError, match="immutable"):
            comm.allgatherv(x, out=jax.numpy.ones(2 * comm.size))
    else:
        assert len(comm.allgatherv(x)) == 2 * comm.size
    assert comm.allreduce(1) == comm.size
