"""A wrong argument on one rank is an error on every rank, and the ranks go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from tests.support.on_ranks import each_rank_of

Case = tuple[type[Exception], str, Callable[[Communicator], Any]]


def rows(c: Communicator, dtype: Any = float) -> Any:
    """A row for each rank."""
    return np.ones((c.size, 2), dtype)


_FROZEN = np.broadcast_to(1.0, (3, 2))

WRONG: dict[str, Case] = {
    "list": (TypeError, "allreduce.*allreduce_tree", lambda c: c.allreduce([1, 2])),
    "string": (TypeError, "bcast_object", lambda c: c.allreduce("no")),
    "object dtype": (TypeError, "Python objects", lambda c: c.allreduce(np.array([{}]))),
    "op of dtype": (TypeError, "'mean' is not defined for int64", lambda c: c.allreduce(1, "mean")),
    "sum of bool": (TypeError, 'use "or"', lambda c: c.allreduce(np.ones(2, bool))),
    "min of complex": (TypeError, "no order", lambda c: c.allreduce(1j, "min")),
    "sum of dates": (TypeError, "only be moved", lambda c: c.allreduce(np.zeros(1, "M8[s]"))),
    "unknown op": (ValueError, "op must be one of sum, mean", lambda c: c.allreduce(1.0, "avg")),
    "op no string": (TypeError, "name of a reduction", lambda c: c.allreduce(1.0, ["sum"])),
    "root too large": (ValueError, "root must be a rank", lambda c: c.bcast(1.0, c.size)),
    "root negative": (ValueError, "root must be a rank", lambda c: c.reduce(1.0, root=-1)),
    "root no integer": (TypeError, "root must be an integer", lambda c: c.bcast(1.0, "0")),
    "nothing to send": (TypeError, "passes the array to send", lambda c: c.bcast(None, c.rank)),
    "big integer": (OverflowError, "allreduce", lambda c: c.allreduce(2**70)),
    "out shape": (ValueError, "shape", lambda c: c.allreduce(np.ones(3), out=np.ones(4))),
    "out dtype": (TypeError, "dtype", lambda c: c.allreduce(np.ones(3), out=np.ones(3, "f4"))),
    "out read-only": (BufferError, "read-only", lambda c: c.allreduce(rows(c), out=_FROZEN)),
    "bcast out read-only": (
        BufferError,
        "read-only",
        lambda c: c.bcast(rows(c), c.size - 1, out=_FROZEN),
    ),
    "color": (TypeError, "color must be an integer", lambda c: c.split("a")),
    "tree leaf": (
        TypeError,
        r"tree\['a'\]\[1\]",
        lambda c: ac.allreduce_tree({"a": [1.0, "x"]}, comm=c),
    ),
    "tree op": (TypeError, r"tree\['n'\].*mean", lambda c: ac.allreduce_tree({"n": 3}, comm=c)),
    "synchronize": (TypeError, r"tree\[0\]", lambda c: ac.synchronize([object()], comm=c)),
    "missing": (
        ValueError,
        "missing must be",
        lambda c: ac.allreduce_gradients([1.0], missing="ones", comm=c),
    ),
    "unpicklable": (Exception, "pickle", lambda c: c.allgather_object(threading.Lock())),
}


@pytest.mark.half_of_the_cases
@pytest.mark.parametrize("case", WRONG)
@each_rank_of(3)
def test_wrong_argument_on_one_rank_raises_on_all_and_the_ranks_go_on(
    comm: Communicator, case
) -> None:
    kind, message, wrong = WRONG[case]
    for culprit in range(comm.size):
        if comm.rank == culprit:
            with pytest.raises(kind, match=message):
                wrong(comm)
        else:
            with pytest.raises(ac.PeerError, match=f"rank {culprit} raised") as caught:
                comm.allreduce(np.ones(5, np.float32))
            assert caught.value.rank == culprit
            assert "test_arguments.py" in caught.value.traceback
        assert comm.allreduce(1) == comm.size
    # On every rank it raises its own. All but one may pass nothing to `bcast`.
    if case != "nothing to send":
        with pytest.raises(kind, match=message):
            wrong(comm)
        assert comm.allreduce(1) == comm.size


# Right calls of what the cases below call wrongly, with the same root.
RIGHT: dict[str, Callable[[Communicator, int], Any]] = {
    "allgatherv": lambda c, _: c.allgatherv(np.ones(c.rank)),
    "gather": lambda c, root: c.gather(1.0, root),
    "gatherv": lambda c, root: c.gatherv(np.ones(c.rank), root),
    "scatter": lambda c, root: c.scatter(None, root),
    "scatterv": lambda c, root: c.scatterv(None, None, root),
    "alltoall": lambda c, _: c.alltoall(rows(c)),
    "alltoallv": lambda c, _: c.alltoallv(np.ones(c.size), [1] * c.size),
    "reduce_scatter": lambda c, _: c.reduce_scatter(rows(c)),
    "scan": lambda c, _: c.scan(1.0),
    "exscan": lambda c, _: c.exscan(1.0),
    "gather_object": lambda c, root: c.gather_object(1, root),
}

_counted = lambda c, counts: c.alltoallv(rows(c), counts)  # noqa: E731
_shared = lambda c, counts: c.scatterv(rows(c), counts, c.rank)  # noqa: E731

WRONG_MOVEMENTS: dict[str, Case] = {
    "allgatherv 0-d": (ValueError, "x must have an axis 0.*allgather", lambda c: c.allgatherv(1.0)),
    "gatherv 0-d": (ValueError, "there is gather$", lambda c: c.gatherv(np.array(1), c.rank)),
    "gatherv root": (ValueError, "root must be a rank", lambda c: c.gatherv(np.ones(2), -1)),
    "gather list": (TypeError, "gather: x must be an array", lambda c: c.gather([1], c.rank)),
    "gather root": (ValueError, "root must be a rank", lambda c: c.gather(1.0, c.size)),
    "gather out shape": (
        ValueError,
        "must have the shape",
        lambda c: c.gather(np.ones(2), c.rank, out=np.ones(2)),
    ),
    "gather out dtype": (
        TypeError,
        "must have dtype",
        lambda c: c.gather(np.ones(2), c.rank, out=rows(c, "f4")),
    ),
    "gather out read-only": (
        BufferError,
        "read-only",
        lambda c: c.gather(np.ones(2), c.rank, out=_FROZEN),
    ),
    "scatter nothing": (TypeError, "x is None on the root", lambda c: c.scatter(None, c.rank)),
    "scatter rows": (
        ValueError,
        "one row for each",
        lambda c: c.scatter(np.ones(c.size + 1), c.rank),
    ),
    "scatter out shape": (
        ValueError,
        "must have the shape",
        lambda c: c.scatter(rows(c), c.rank, out=rows(c)),
    ),
    "scatter out immutable": (
        BufferError,
        "read-only",
        lambda c: c.scatter(None, (c.rank + 1) % c.size, out=_FROZEN),
    ),
    "scatter out number": (
        TypeError,
        "out must be an array",
        lambda c: c.scatter(None, (c.rank + 1) % c.size, out=1.0),
    ),
    "scatter like": (
        TypeError,
        "like must be an array",
        lambda c: c.scatter(None, (c.rank + 1) % c.size, like="torch"),
    ),
    "scatterv nothing": (TypeError, "x is None", lambda c: c.scatterv(None, [1], c.rank)),
    "scatterv 0-d": (ValueError, "there is scatter$", lambda c: c.scatterv(1.0, [1], c.rank)),
    "scatterv no counts": (TypeError, "counts must be a sequence", lambda c: _shared(c, None)),
    "scatterv counts too small": (
        ValueError,
        "3 in all, as x has rows",
        lambda c: _shared(c, [1] * (c.size - 1) + [0]),
    ),
    "scatterv out shape": (
        ValueError,
        "must have the shape",
        lambda c: c.scatterv(rows(c), [1] * c.size, c.rank, out=np.ones((2, 2))),
    ),
    "scatterv out 0-d": (
        ValueError,
        "axis 0",
        lambda c: c.scatterv(None, None, (c.rank + 1) % c.size, out=np.ones(())),
    ),
    "alltoall rows": (ValueError, r"one row .* shape \(3, …\)", lambda c: c.alltoall(np.ones(2))),
    "alltoall out dtype": (
        TypeError,
        "must have dtype",
        lambda c: c.alltoall(rows(c), out=rows(c, int)),
    ),
    "alltoallv 0-d": (ValueError, "there is alltoall$", lambda c: c.alltoallv(1.0, [1])),
    "alltoallv counts too many": (
        ValueError,
        "one length for each",
        lambda c: _counted(c, [1] * c.size + [0]),
    ),
    "alltoallv counts too large": (ValueError, "3 in all", lambda c: _counted(c, [2] * c.size)),
    "alltoallv counts of floats": (TypeError, "integers", lambda c: _counted(c, [1.0] * c.size)),
    "alltoallv counts a number": (TypeError, "sequence of integers", lambda c: _counted(c, 3)),
    "alltoallv counts text": (TypeError, "sequence of integers", lambda c: _counted(c, "111")),
    "reduce_scatter rows": (
        ValueError,
        "one row for each",
        lambda c: c.reduce_scatter(np.ones((c.size + 1, 2))),
    ),
    "reduce_scatter out shape": (
        ValueError,
        "must have the shape",
        lambda c: c.reduce_scatter(rows(c), out=rows(c)),
    ),
    "reduce_scatter counts": (
        ValueError,
        r"one length for each of the 3 ranks, 4 in all, as x has rows; got \[2, 2, 2\]",
        lambda c: c.reduce_scatter(np.ones((4, 2)), counts=[2] * c.size),
    ),
    "reduce_scatter counts a number": (
        TypeError,
        "sequence of integers",
        lambda c: c.reduce_scatter(rows(c), counts=3),
    ),
    "reduce_scatter counts 0-d": (
        ValueError,
        "whose rows counts shares out; got a 0-d array",
        lambda c: c.reduce_scatter(1.0, counts=[1] * c.size),
    ),
    "reduce_scatter counts out": (
        ValueError,
        "must have the shape",
        lambda c: c.reduce_scatter(rows(c), counts=[1] * c.size, out=np.ones(2)),
    ),
    "scan out read-only": (BufferError, "read-only", lambda c: c.scan(rows(c), out=_FROZEN)),
    "exscan bool": (TypeError, 'use "or"', lambda c: c.exscan(np.ones(2, bool))),
    "gather_object root": (ValueError, "root must be", lambda c: c.gather_object(1, c.size)),
    "gather_object unpicklable": (
        Exception,
        "pickle",
        lambda c: c.gather_object(threading.Lock(), c.rank),
    ),
}


@pytest.mark.half_of_the_cases
@pytest.mark.parametrize("case", WRONG_MOVEMENTS)
@each_rank_of(3)
def test_wrong_argument_where_the_others_call_right_raises_on_all(comm: Communicator, case) -> None:
    kind, message, wrong = WRONG_MOVEMENTS[case]
    operation = case.split()[0]
    for culprit in range(comm.size):
        if comm.rank == culprit:
            with pytest.raises(kind, match=message):
                wrong(comm)
        else:
            with pytest.raises(ac.PeerError, match=f"{operation}: rank {culprit} raised"):
                RIGHT[operation](comm, culprit)
        assert comm.allreduce(1) == comm.size
    with pytest.raises(kind, match=message):
        wrong(comm)
    assert comm.allreduce(1) == comm.size


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
