"""Laws of the plan by which leaves are fused, and of the memory through which they are reduced."""

from __future__ import annotations

import os
import pickle
from collections import defaultdict
from contextlib import nullcontext
from enum import Enum
from fractions import Fraction
from functools import partial
from itertools import chain

import numpy as np
import optree
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arraycomm import MismatchError, allreduce_gradients, allreduce_tree, synchronize
from arraycomm._reduce import segment
from arraycomm._training.rounds import Bucket, Part, Place, Rounds
from arraycomm._trees import fusion, layout, pytrees
from arraycomm._trees.layout import cut, lay_out, slots_of, transfers
from arraycomm.testing import given as given_on_ranks
from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays.frameworks import elements_of
from arraycomm.testing._arrays.oracle import expected, same_bits
from arraycomm.testing.conformance._checks import check_elements, leaves_of, native
from arraycomm.testing.conformance._tree_inputs import Colour, gradients, reducible_trees
from tests.support import internals

NO_OPTIONS = {"bucket_bytes": 1 << 20, "compression": None}
# Each example makes some tens of calls.
_EXAMPLES = int(os.environ.get("EXAMPLES") or "15")
FEW, MANY = (settings(max_examples=count) for count in (max(1, _EXAMPLES // 3), 4 * _EXAMPLES))

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


@given(specs=specs_of_leaves, bucket_bytes=st.integers(1, 300), large=st.integers(0, 300))
def test_large_leaves_of_one_dtype_and_the_others_keep_their_order(
    specs, bucket_bytes, large
) -> None:
    placed: dict[object, list[int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "LARGE", large)
        buckets = lay_out.__wrapped__(specs, bucket_bytes)
    for bucket in buckets:
        # No bucket has both.
        (is_large,) = {piece.nbytes >= large for piece in bucket.pieces}
        places = placed.setdefault((bucket.dtype, is_large), [])
        places.extend(piece.leaf for piece in bucket.pieces)
    assert all(leaves == sorted(leaves) for leaves in placed.values())
    assert sorted(chain(*placed.values())) == list(range(len(specs)))


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


@MANY
@given(specs=specs_of_long_leaves, bucket_bytes=st.integers(1, 3000), least=st.integers(1, 600))
def test_every_leaf_lies_in_one_message_and_a_large_one_alone(specs, bucket_bytes, least) -> None:
    buckets, end = lay_out(specs, bucket_bytes), 0
    slots = slots_of(specs, buckets)
    places = [slot.elements.start * slot.dtype.itemsize for slot in slots]
    sizes = [dtype.itemsize * int(np.prod(shape)) for dtype, shape in specs]
    found: set[int] = set()
    for dtype, start, stop, alone in transfers(buckets, least):
        # Messages follow one another, with gaps behind leaves.
        assert 0 <= start - end < 64
        assert start % 64 == 0
        assert start < stop
        end = stop
        inside = {
            leaf
            for leaf, place in enumerate(places)
            if sizes[leaf] and start <= place and place + sizes[leaf] <= stop
        }
        assert all(specs[leaf][0] == dtype for leaf in inside)
        if alone is None:
            assert all(sizes[leaf] < least for leaf in inside)
        else:
            assert inside == {alone}
            assert stop - start == sizes[alone] >= least
        assert not found & inside
        found |= inside
    assert found == {leaf for leaf, nbytes in enumerate(sizes) if nbytes}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut trees into chunks of a few leaves, of which larger ones may be written over."""
    monkeypatch.setattr(segment, "_CHUNK_BYTES", 1024)
    monkeypatch.setattr(fusion, "LARGE", 64)


def check_tree(comm, drawn, inline=-1, **options) -> None:
    """Fail unless leaves that are fused are reduced as each is alone."""
    op, tree = drawn
    leaves = [leaf for (leaf,) in leaves_of(tree)]
    wants = [None if x is None else elements_of(comm.allreduce(x, op)) for x in leaves]
    # Nothing of more bytes travels with the header, or in a few steps of the control channel.
    internals.set_inline_bytes(comm, inline)
    for reduce in (allreduce_tree, allreduce_gradients):
        got = reduce(leaves, op, comm=comm, **options)
        for leaf, want in zip(got, wants, strict=True):
            assert (leaf is None) == (want is None)
            if want is not None:
                check_elements(elements_of(leaf), want, op)


@FEW
@pytest.mark.usefixtures("small_chunks")
@given_on_ranks(ranks=range(1, 6), drawn=reducible_trees())
def test_shared_memory_does_not_matter(comm, drawn) -> None:
    check_tree(comm, drawn)


@FEW
@given_on_ranks(drawn=reducible_trees(), bucket_bytes=st.integers(1, 300))
def test_buckets_do_not_matter(comm, drawn, bucket_bytes) -> None:
    with internals.forbid_segment(comm):
        check_tree(comm, drawn, bucket_bytes=bucket_bytes)


@pytest.mark.usefixtures("small_chunks")
@MANY
@given_on_ranks(ranks=range(1, 6), drawn=gradients(), overlap=st.booleans())
def test_results_may_be_written_over_gradients(comm, drawn, overlap) -> None:
    """Optimizers allow it, unless gradients share memory; those that are no results stay."""
    op, leaves = drawn[0], 3 * drawn[1]
    mine = [leaf.build(comm.rank) for leaf in leaves]
    elements = [leaf.elements() for leaf in leaves]
    whole = (np.arange(100) % 2).astype(elements[0][0].dtype)
    for part in (whole[:-8], whole[8:]) if overlap else ():
        mine.append(part)
        elements.append([part.copy()] * comm.size)
    rounds, bucket = Rounds(comm, op, NO_OPTIONS), Bucket(0, range(len(mine)))
    internals.set_inline_bytes(comm, -1)
    got = rounds.reduce(
        Part(bucket, lambda: dict(enumerate(mine)), Place(), may_overwrite=True)
    ).leaves
    is_apart = comm.size > 1 and internals.is_shared(comm) and not overlap
    for number, (leaf, rows) in enumerate(zip(mine, elements, strict=True)):
        check_elements(elements_of(got[number]), expected(rows, op), op)
        if got[number] is not leaf:
            assert same_bits(native(elements_of(leaf)), rows[comm.rank])
            plain = type(leaf) is np.ndarray and leaf.flags.carray and leaf.dtype.isnative
            assert not (is_apart and plain and leaf.nbytes >= 64)
        else:
            assert is_apart


@optree.register_pytree_node_class(namespace=optree.registry.__dict__["__GLOBAL_NAMESPACE"])
class Holder:
    """A container that holds something besides its leaf."""

    def __init__(self, leaf: object, held: object) -> None:
        self.leaf, self.held = leaf, held

    def tree_flatten(self) -> object:
        return [self.leaf], self.held

    @classmethod
    def tree_unflatten(cls, held: object, children: list[object]) -> Holder:
        return cls(children[0], held)


COLOURS = st.sampled_from(Colour)
PLAIN = st.integers(-9, 9) | st.text("a'é")
VALUES = PLAIN | st.none() | st.booleans() | st.floats(allow_nan=False) | st.binary() | st.dates()
KEYS = st.recursive(
    VALUES | COLOURS | st.sampled_from((int, len, -1j)),
    lambda each: st.frozensets(each, max_size=4) | st.tuples(each) | st.tuples(each, each),
    max_leaves=5,
)
unique = partial(st.lists, max_size=6, unique=True)
# Equal in Python, or of equal texts, are not always the same.
HELD = st.recursive(
    VALUES
    | COLOURS
    | st.sampled_from((int, len, 1, 1.0, True, "1", np.int64(1), np.arange(3), np.zeros((3, 0)))),
    lambda each: (
        st.lists(each, max_size=2) | st.tuples(each) | st.dictionaries(PLAIN, each, max_size=1)
    ),
    max_leaves=4,
)


@given_on_ranks(ranks=range(1, 4), held=HELD, other=HELD, as_text=st.booleans(), data=st.data())
def test_what_containers_hold_is_compared_and_sent(comm, held, other, as_text, data) -> None:
    other = str(held) if as_text else other
    root = data.draw(st.integers(0, comm.size - 1))
    copied = pickle.loads(pickle.dumps(held))
    tree = {"a": [Holder(comm.rank + 1.0, copied if comm.rank else held)]}
    total = allreduce_tree(tree, "sum", comm=comm)["a"][0]
    assert total.leaf == comm.size * (comm.size + 1) / 2
    assert total.held is tree["a"][0].held
    differs = comm.size > 1 and repr(held) != repr(other)
    mine = Holder(comm.rank, other if comm.rank == root else held)
    got = synchronize(mine, root=root, comm=comm)
    assert (got.leaf, repr(got.held)) == (root, repr(other))
    with pytest.raises(MismatchError) if differs else nullcontext():
        allreduce_tree(mine, "sum", comm=comm)


Letter = Enum("Letter", {"A": "a"}, type=str)
EQUAL = {str: lambda x: Letter.A if x == "a" else np.str_(x), int: Fraction, bool: int}
# Sets that are equal come in the order in which they were made, where hashes collide.
EQUAL[frozenset] = lambda x: frozenset([*x][::-1])
SETS = st.frozensets(PLAIN, min_size=3, max_size=4)


@given(
    keys=st.sampled_from((KEYS, PLAIN, COLOURS, SETS)).flatmap(unique),
    default=st.booleans(),
    data=st.data(),
)
def test_keys_come_in_one_order_whatever_that_of_their_insertion(keys, default, data) -> None:
    """Ranks may have keys of other types, if they are equal."""
    container = partial(defaultdict, list) if default else dict
    items = [(key, [number]) for number, key in enumerate(keys)]
    others = data.draw(st.permutations(items))
    others = [(EQUAL.get(type(key), lambda key: key)(key), number) for key, number in others]
    other, flat = (pytrees.flatten(container(each)) for each in (others, items))
    mine, theirs = ([*f.paths, f.structure, *f.leaves] for f in (flat, other))
    assert mine == theirs
    assert len(set(flat.paths)) == len(items)
    again = other.rebuild([10 * leaf for leaf in other.leaves])
    assert list(again.items()) == [(key, [10 * number]) for key, [number] in others]
    assert type(again) is type(container(()))
