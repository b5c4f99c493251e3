"""Arrays of `empty`: which calls reduce them where they lie, their memory, and wrong arguments."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._collectives import shared_arrays
from arraycomm._communicator import Communicator
from arraycomm._native import compiled
from arraycomm.testing._arrays.frameworks import elements_of
from tests.support import internals
from tests.support.device import linked_devices
from tests.support.frameworks import make
from tests.support.on_ranks import each_rank_of

COUNT = 70_001
# What each rank passes: where x and out lie; and from how many ranks on it is not reduced where it lies.
PLACES = {
    "both": lambda c, a, b: (a[:COUNT], b[:COUNT]),
    "in place": lambda c, a, b: (a[:COUNT], a[:COUNT]),
    "parts": lambda c, a, b: (a[3 : COUNT + 3], b[5 : COUNT + 5]),
    "two parts of one": lambda c, a, b: (b[:COUNT], b[COUNT : 2 * COUNT]),
    "no out": lambda c, a, b: (a[:COUNT], None),
    "ordinary out": lambda c, a, b: (a[:COUNT], np.empty(COUNT, a.dtype)),
    "overlapping": lambda c, a, b: (b[:COUNT], b[7 : COUNT + 7]),
    "ordinary x": lambda c, a, b: (np.empty(COUNT, a.dtype), b[:COUNT]),
    "strided x": lambda c, a, b: (b[: 2 * COUNT : 2], a[:COUNT]),
    "other places": lambda c, a, b: (a[c.rank : COUNT + c.rank], b[:COUNT]),
    "other places of out": lambda c, a, b: (a[:COUNT], b[c.rank : COUNT + c.rank]),
    "in place on one rank": lambda c, a, b: (a[:COUNT], a[:COUNT] if c.rank == 0 else b[:COUNT]),
    "ordinary on one rank": lambda c, a, b: (
        a[:COUNT] if c.rank else np.empty(COUNT, a.dtype),
        b[:COUNT],
    ),
}
WHERE_IT_LIES = {"both", "in place", "parts", "two parts of one"}
BY_FEW_RANKS = {"no out", "ordinary out", "overlapping"}


@pytest.fixture
def reduced(monkeypatch) -> list[int]:
    """The bytes of the arrays that were reduced where they lie."""
    found: list[int] = []
    allreduce = shared_arrays.allreduce

    def spy(link, source, target, op):
        found.append(source.nbytes)
        return allreduce(link, source, target, op)

    monkeypatch.setattr(shared_arrays, "allreduce", spy)
    return found


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.half_of_the_cases
@pytest.mark.both_control_channels
@each_rank_of("several")
def test_arrays_at_one_place_are_reduced_there(comm: Communicator, case, reduced) -> None:
    a, b = (comm.empty(2 * COUNT + 9, np.float32) for _ in range(2))
    a[...] = b[...] = 0
    x, out = PLACES[case](comm, a, b)
    values = np.random.default_rng(comm.rank).standard_normal((3, COUNT)).astype(np.float32)
    want = [comm.allreduce(value) for value in values]
    comm.barrier()
    reduced.clear()
    comm.barrier()
    for value, expected in zip(values, want, strict=True):
        x[...] = value
        result = comm.allreduce(x, out=out)
        assert out is None or result is out
        np.testing.assert_array_equal(result, expected)
        if case not in {"in place", "overlapping", "in place on one rank"}:
            np.testing.assert_array_equal(x, value)
    np.testing.assert_array_equal(comm.allreduce(values[0]), want[0])
    comm.barrier()
    few = comm.size <= 3 and compiled is not None
    there = case in WHERE_IT_LIES or (case in BY_FEW_RANKS and few)
    assert bool(reduced) == (internals.is_shared(comm) and there)


@each_rank_of(3)
def test_calls_without_a_header_and_requests(comm: Communicator, reduced) -> None:
    unchecked = comm.dup(check=False)
    x = unchecked.empty((300, 301), "bfloat16")
    x[...] = comm.rank + 1
    total = comm.size * (comm.size + 1) // 2
    request = unchecked.iallreduce(x, out=x)
    # Ordinary arrays need a header as well now, on every rank.
    other = unchecked.allreduce(np.ones(COUNT))
    assert (request.wait() == total).all()
    assert (other == comm.size).all()
    assert unchecked.allreduce(x, ac.op(np.maximum), out=x) is x
    assert (x == total).all()


@each_rank_of(3)
def test_memory_is_kept_for_views_and_then_given_back(comm: Communicator) -> None:
    made = comm.empty((10, COUNT), np.int16)
    count = int(internals.is_shared(comm))
    blocks = internals.shared_blocks(comm)
    view = made.reshape(-1)[5:9].view(np.uint8)
    del made
    gc.collect()
    assert len(blocks) == count
    view[...] = 1
    del view
    gc.collect()
    assert not blocks


@pytest.mark.parametrize(("framework", "dtype"), [("torch", "bfloat16"), ("jax", "float32")])
@each_rank_of(3)
def test_arrays_of_frameworks(comm: Communicator, framework, dtype, reduced) -> None:
    like = make(framework, np.ones(1, np.float32))
    x, out = comm.empty((3, COUNT), dtype, like), comm.empty((3, COUNT), dtype)
    assert type(x) is type(like)
    assert x.shape == (3, COUNT)
    elements_of(x) if framework == "jax" else x.fill_(comm.rank + 1)
    assert comm.allreduce(x, out=out) is out
    assert framework == "jax" or (out == comm.size * (comm.size + 1) // 2).all()
    comm.barrier()
    assert bool(reduced) == internals.is_shared(comm)


@each_rank_of("few")
def test_small_and_empty_arrays(comm: Communicator) -> None:
    for shape in ((), 0, (0, 5), 3, (2, 3)):
        x = comm.empty(shape, np.complex64)
        assert x.shape == np.empty(shape).shape
        x[...] = 1j
        assert (comm.allreduce(x) == 1j * comm.size).all()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("3", float), TypeError, "empty: shape must be an integer"),
        ((-1, float), ValueError, "empty: shape must not be negative"),
        ((3, object), TypeError, "empty: dtype object holds Python objects"),
        ((3, "no such"), TypeError, "no such"),
        ((3, float, 1.5), TypeError, "empty: like must be an array; got 1.5"),
        ((1 << 60, float), MemoryError, "an array of shape"),
    ],
)
@each_rank_of("few")
def test_wrong_arguments(comm: Communicator, arguments, error, match) -> None:
    if comm.rank == comm.size - 1:
        with pytest.raises(error, match=match):
            comm.empty(*arguments)
    else:
        with pytest.raises(ac.PeerError):
            comm.empty(3, float)
    assert comm.empty(3, float).shape == (3,)


def test_arrays_on_devices_and_shapes_that_differ(on_ranks) -> None:
    def check(comm: Communicator) -> None:
        import cupy

        with pytest.raises(ValueError, match="empty: like must be in host memory"):
            comm.empty(3, float, cupy.ones(3))
        with pytest.raises(ac.MismatchError, match="empty float64"):
            comm.empty(COUNT + comm.rank, float)

    with linked_devices():
        on_ranks(3, check)


@each_rank_of(3)
def test_explain(comm: Communicator) -> None:
    x = comm.empty(COUNT, float)
    said, other = (ac.explain(array, comm=comm) for array in (x, np.ones(COUNT)))
    assert other.algorithm != "shared"
    if internals.is_shared(comm):
        assert (said.algorithm, said.copies, said.sent) == ("shared", 0, 0)
        assert "out of the memory of all ranks" in str(said)
        assert ac.explain(x[::2], comm=comm).algorithm != "shared"
    else:
        assert said == other
