"""Laws of trees and of the data container."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm._trees import lay_out
from arraycomm.testing import run
from properties.strategies import dtypes, sizes

EXAMPLES = settings(max_examples=60, deadline=None)

leaves = st.one_of(
    st.none(),
    st.floats(allow_nan=False),
    st.tuples(st.sampled_from(["float32", "float64"]), st.integers(0, 4), st.integers(0, 9)),
)
shapes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text("abc", max_size=2), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=8,
)


def _grow(shape: Any, rank: int) -> Any:
    """Make a tree of arrays from its drawn description, with values of this rank."""
    match shape:
        case None:
            return None
        case float():
            return shape + rank
        case (str(dtype), int(count), int(value)):
            return np.full((count, 2), value + rank, dtype)
        case dict():
            return {key: _grow(inner, rank) for key, inner in shape.items()}
        case _:
            return type(shape)(_grow(inner, rank) for inner in shape)


@EXAMPLES
@given(shapes, sizes, st.data())
def test_synchronize_gives_the_roots_tree_and_is_idempotent(shape, size, data) -> None:
    root = data.draw(st.integers(0, size - 1))

    def check(comm: ac.Communicator) -> None:
        once = ac.synchronize(_grow(shape, comm.rank), root=root, comm=comm)
        assert repr(once) == repr(_grow(shape, root))
        assert repr(ac.synchronize(once, root=root, comm=comm)) == repr(once)

    run(size, check)


@EXAMPLES
@given(shapes, sizes)
def test_rank_that_passes_none_gets_the_roots_tree(shape, size) -> None:
    def check(comm: ac.Communicator) -> None:
        mine = _grow(shape, 0) if comm.rank == 0 else None
        assert repr(ac.synchronize(mine, comm=comm)) == repr(_grow(shape, 0))

    run(size, check)


@EXAMPLES
@given(shapes, sizes)
def test_allreduce_tree_reduces_each_leaf_as_allreduce_does(shape, size) -> None:
    def check(comm: ac.Communicator) -> None:
        mine = _grow(shape, comm.rank)
        got = ac.allreduce_tree(mine, "sum", comm=comm)
        assert repr(got) == repr(_each(comm, mine))

    run(size, check)


def _each(comm: ac.Communicator, tree: Any) -> Any:
    match tree:
        case None:
            return None
        case dict():
            return {key: _each(comm, inner) for key, inner in tree.items()}
        case list() | tuple():
            return type(tree)(_each(comm, inner) for inner in tree)
        case _:
            return comm.allreduce(tree)


@given(
    st.lists(st.tuples(dtypes, st.lists(st.integers(0, 5), max_size=3).map(tuple)), max_size=12),
    st.integers(1, 300),
)
def test_every_leaf_has_one_place_of_its_own(specs, bucket_bytes) -> None:
    buckets = lay_out(tuple(specs), bucket_bytes)
    assert sorted(p.leaf for b in buckets for p in b.pieces) == list(range(len(specs)))
    for bucket in buckets:
        end = 0
        for piece in bucket.pieces:
            dtype, shape = specs[piece.leaf]
            assert dtype == bucket.dtype
            assert piece.nbytes == dtype.itemsize * int(np.prod(shape))
            assert piece.offset >= end
            assert piece.offset % 64 == 0
            end = piece.offset + piece.nbytes
        assert end <= bucket.nbytes
        assert bucket.pieces[-1].offset < bucket_bytes


@given(st.integers(0, 200), st.integers(1, 9), st.booleans(), st.integers(0, 3))
def test_container_holds_every_item_exactly_once(count, size, shuffle, epoch) -> None:
    items: list[int] = []
    for rank in range(size):
        part = ac.DistributedDataContainer(
            range(count), comm=SimpleNamespace(rank=rank, size=size), shuffle=shuffle
        )
        part.set_epoch(epoch)
        items.extend(part)
    assert sorted(items) == list(range(count))
