"""Calls of small trees that repeat: prepared by the tree's structure, without a plan."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import optree

from arraycomm._arrays.buffer import Array, BufferView, allocate
from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import view
from arraycomm._calls.runner import OperationClass, Runner
from arraycomm._calls.statistics import Count
from arraycomm._errors import raise_interrupt
from arraycomm._folds import fold
from arraycomm._prepared.exchanged import Exchanged, nbytes_of
from arraycomm._prepared.fast_path import call
from arraycomm._prepared.fast_paths import FastPath
from arraycomm._prepared.steps import Call, Form, Step
from arraycomm._trees.buffers import BYTE
from arraycomm._trees.held import hold
from arraycomm._trees.layout import slots_of
from arraycomm._trees.leaves import NUMBERS, tied
from arraycomm._trees.pytrees import outline_of, unflatten

# To look at more leaves takes longer than a call in full does besides.
_MOST_LEAVES: Final = 256


def call_tree(
    runner: Runner,
    timeout: float | None,
    operation: OperationClass[...],
    by: Any,
    tree: Any,
    rest: tuple[Any, ...] = (),
    place: object = None,
) -> Any:
    """Make a call `operation(context, by, tree, *rest)`, by its fast path if there is one.

    Calls have fast paths in common if they have a `place` in common.
    """
    try:
        given = Given(by, tree, place)
    except Exception as error:
        raise_interrupt(error)
        # The full call looks at it more closely, and lets the other ranks know of an error.
        return runner.call_within(timeout, operation, by, tree, *rest)
    return call(runner, timeout, operation, given, rest, None, SmallTree)


class Given:
    """A small tree as a call is given it.

    Calls are found again by its outline and its leaves, as those of an array are by its shape and
    dtype. Trees that are not of plain containers, or have None, raise; their calls are not found.
    """

    def __init__(self, by: Any, tree: Any, place: object) -> None:
        self.by, self.tree = by, tree
        self.leaves, self.spec = optree.tree_flatten(tree, none_is_leaf=True)
        if len(self.leaves) > _MOST_LEAVES:
            raise ValueError("a tree of many leaves")
        self.shape = outline_of(self.spec, "tree")
        looks = [
            type(leaf) if type(leaf) in NUMBERS else (type(leaf), leaf.dtype, leaf.shape)
            for leaf in self.leaves
        ]
        self.dtype = place, tuple(looks)
        self.key = self.shape, self.dtype
        # As of an array, which may be of one type on the host and on a device.
        self.is_cuda = getattr(self.leaves[0], "is_cuda", None) if self.leaves else None

    def made_of(self, results: list[Any]) -> Any:
        """Return such a tree of other leaves."""
        return unflatten(self.spec, self.shape.holders, self.tree, results)


class SmallTree(Exchanged):
    """The fast path of reductions of trees whose leaves travel with the header."""

    # There is none on the host.
    room = 0

    def __init__(self, runner: Runner, call: Call, step: Step, made: Any) -> None:
        _check_prepared(call, made)
        fusion, size = made.fusion, runner.group.size
        dtypes = {bucket.dtype for bucket in fusion.buckets}
        # Leaves of one dtype are folded at once; those of several by dtype, from all ranks' slots.
        self._folds = [] if len(dtypes) == 1 else fusion.buckets
        dtype = BYTE if self._folds else min(dtypes, default=BYTE)
        self._sends = Form(dtype, (fusion.nbytes // dtype.itemsize,))
        self._gets = self._sends
        if self._folds:
            self._gets = Form(BYTE, (size * fusion.nbytes,))
            step = step._replace(share=step.share._replace(op=None))
        super().__init__(runner, call, step._replace(sends=self._sends, gets=self._gets), made)
        self._placement, self._negotiable = runner.placements.host_tree, made.negotiable
        # Each leaf's dtype and shape, and from which byte on it is sent.
        self._slots = [
            (slot.dtype, slot.shape, slot.elements.start * slot.dtype.itemsize)
            for slot in slots_of(fusion.specs, fusion.buckets)
        ]
        # Bytes between leaves, which are sent too.
        self._has_gaps = sum(nbytes_of(Form(*slot[:2])) for slot in self._slots) < fusion.nbytes
        self._op, self._nbytes, self._table = made.op, fusion.nbytes, fusion.whole
        self._specs = tuple(zip(*fusion.specs, strict=True)) or ((), ())
        self._make = self.exchange.make

    @staticmethod
    def arguments(x: Any, rest: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        return x.by, x.tree, *rest

    @staticmethod
    def arrays(x: Any) -> list[Any]:
        leaves: list[Any] = x.leaves
        return leaves

    @staticmethod
    def fits(call: Call, made: Any) -> bool:
        return _has_outline(call, made)

    @staticmethod
    def taken_apart(result: Any) -> list[Any]:
        return optree.tree_leaves(result, none_is_leaf=True)

    @staticmethod
    def whole(x: Given, results: list[Any]) -> Any:
        return x.made_of(tied(x.leaves, results))

    def __call__(self, x: Given, out: Any) -> Any:
        leaves = x.leaves
        try:
            sent = allocate(self._sends.shape, self._sends.dtype)
            received = allocate(self._gets.shape, BYTE) if self._folds else sent
            slots = [np.ndarray(shape, dtype, sent, start) for dtype, shape, start in self._slots]
            if self._has_gaps:
                sent.fill(0)
            likes = self._fill(leaves, slots, sent)
        except Exception as error:
            raise_interrupt(error)
            return NotImplemented
        if likes is None:
            return NotImplemented
        result = self._make(sent, received, x, None)
        if result is not received:
            return result
        if self._folds:
            self._fold(received.reshape(self._group.size, -1), sent)
        return self.handed_over(lambda: x.made_of(_results(leaves, slots, likes)))

    def _fill(
        self, leaves: list[Any], slots: list[Array], sent: Array
    ) -> list[BufferView | None] | None:
        """Copy the leaves into what is sent, and return the views of those that are not NumPy's.

        None if they are not as the call has to have them.
        """
        likes: list[BufferView | None] = [None] * len(leaves)
        if (held := hold(leaves, *self._specs)) is not None:
            held.fill(sent, self._table)
            return likes
        for number, (leaf, slot) in enumerate(zip(leaves, slots, strict=True)):
            # By such an array's own dtype and shape the call was found.
            like = likes[number] = None if type(leaf) is np.ndarray else view(leaf)
            if like is None:
                slot[...] = leaf
            elif _is_there(leaf, like) and like.dtype == slot.dtype and like.shape == slot.shape:
                slot[...] = like.array
            else:
                return None
        return likes

    def _fold(self, rows: Array, into: Array) -> None:
        start = 0
        for bucket in self._folds:
            part = slice(start, start := start + bucket.nbytes)
            if bucket.nbytes:
                parts = [row[part].view(bucket.dtype) for row in rows]
                fold(self._op, bucket.dtype, parts, into[part].view(bucket.dtype))

    def free(self) -> None:
        super().free()
        self._make = FastPath()

    def count(self) -> Count:
        calls, seconds = self.exchange.counts()
        name, copies = self._call.operation.name, calls * len(self._slots)
        return Count(name, calls, calls * self._nbytes, seconds, copies)


def _check_prepared(call: Call, made: Any) -> None:
    """Raise for a tree that goes no fast path."""
    leaves = made.view_leaves()
    flat, views = leaves.flat, [leaf for leaf in leaves.views if leaf is not None]
    if not _has_outline(call, made) or made.payload is None:
        raise ValueError("a tree without a fast path")
    sent = tuple((leaf.dtype, leaf.shape) for leaf in views)
    if sent != made.fusion.specs or not all(map(_is_there, flat.leaves, views)):
        raise ValueError("a tree of which each call makes copies")


def _has_outline(call: Call, made: Any) -> bool:
    """Return whether a tree has no containers that only the full call opens."""
    flat = made.view_leaves().flat
    return bool(call.key[3][:2] == (tuple(flat.paths), flat.structure))


def _is_there(leaf: Any, found: BufferView) -> bool:
    """Return whether a leaf was read where it is, or is a number, which is nowhere."""
    return not found.copied or isinstance(leaf, NUMBERS)


def _results(leaves: list[Any], slots: list[Array], likes: list[BufferView | None]) -> list[Any]:
    """Return results like the leaves; one for leaves that are one, if they are the same bits."""
    made: list[Any] = [
        slot if like is None else to_framework(slot, like)
        for slot, like in zip(slots, likes, strict=True)
    ]
    return tied(leaves, made)
