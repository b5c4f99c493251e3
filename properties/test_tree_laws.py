"""Laws of the plan by which leaves are fused."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from arraycomm._trees.layout import cut, lay_out
from arraycomm.testing import strategies as ranked

specs_of_leaves = st.lists(
    st.tuples(ranked.dtypes().map(np.dtype), ranked.shapes(large=False)), max_size=12
).map(tuple)


@given(specs=specs_of_leaves, bucket_bytes=st.integers(1, 300))
def test_every_leaf_has_one_place_of_its_own(specs, bucket_bytes) -> None:
    buckets = lay_out(specs, bucket_bytes)
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


@given(specs=specs_of_leaves, bucket_bytes=st.integers(1, 300), data=st.data())
def test_leaves_of_one_dtype_keep_their_order(specs, bucket_bytes, data) -> None:
    placed: dict[object, list[int]] = {}
    for bucket in lay_out(specs, bucket_bytes):
        placed.setdefault(bucket.dtype, []).extend(piece.leaf for piece in bucket.pieces)
    assert all(leaves == sorted(leaves) for leaves in placed.values())


specs_of_long_leaves = st.lists(
    st.tuples(ranked.dtypes().map(np.dtype), st.tuples(st.integers(0, 300))), max_size=12
).map(tuple)


@given(specs=specs_of_long_leaves, bucket_bytes=st.integers(1, 3000), chunks=st.integers(1, 3))
def test_every_byte_of_every_leaf_lies_in_one_chunk(specs, bucket_bytes, chunks) -> None:
    buckets, end = lay_out(specs, bucket_bytes), 0
    found: dict[int, int] = dict.fromkeys(range(len(specs)), 0)
    for chunk in cut(buckets, 64 * chunks):
        assert chunk.start == end
        assert 0 < chunk.stop - chunk.start <= 64 * chunks
        end, filled = chunk.stop, 0
        for leaf, first, last, at in chunk.parts:
            assert specs[leaf][0] == chunk.dtype
            # The parts of a leaf follow one another, and do not overlap those of others.
            assert found[leaf] == first < last
            assert filled <= at
            found[leaf], filled = last, at + last - first
        assert filled <= chunk.stop - chunk.start
    assert end == sum(bucket.nbytes for bucket in buckets)
    for leaf, (dtype, shape) in enumerate(specs):
        assert found[leaf] == dtype.itemsize * int(np.prod(shape))
