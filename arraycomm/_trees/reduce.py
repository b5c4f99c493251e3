"""`allreduce_tree` and `allreduce_gradients`: whole trees reduced in few messages.

Calls of small trees that repeat are prepared by the tree's structure, without a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import ml_dtypes
import numpy as np
import optree

from arraycomm._arrays.buffer import Array, BufferView, allocate
from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import view
from arraycomm._calls.attempts import take_together
from arraycomm._calls.operation import Context, Operation, Share
from arraycomm._calls.placement import HostPlacement
from arraycomm._calls.refusals import announced, check_taken
from arraycomm._calls.runner import OperationClass, Runner
from arraycomm._calls.statistics import Count
from arraycomm._dtypes import DType, Kind, check_op, kind_of
from arraycomm._folds import fold, total_dtype
from arraycomm._prepared.fast_path import Exchanged, call
from arraycomm._prepared.fast_paths import FastPath
from arraycomm._prepared.steps import Call, Form, Step
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.details import CallDetail
from arraycomm._protocol.header import LeafSpec, Settings, Signature
from arraycomm._reduce.chunks import reserve
from arraycomm._transports.base import Bytes, Steps
from arraycomm._trees import device_leaves
from arraycomm._trees.buffers import BYTE, Packed
from arraycomm._trees.fusion import Fusion, TreeMemory
from arraycomm._trees.held import hold
from arraycomm._trees.layout import Spec, slots_of
from arraycomm._trees.leaves import (
    NONE,
    NUMBERS,
    Leaves,
    Onto,
    Parts,
    Total,
    agreed_leaves,
    spec_of,
    tied,
)
from arraycomm._trees.pytrees import Outline, flatten, outline_of

DEFAULT_BUCKET_BYTES: Final = 25 << 20
COMPRESSIONS: Final[dict[str, DType]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


# To look at more leaves takes longer than a call in full does besides.
_MOST_LEAVES: Final = 256
# The trees of one communicator whose reductions on devices are recorded.
_MOST_RECORDED: Final = 64

# Frameworks of numbers, which have no arrays.
_NUMBERS: Final = ("python", "numpy_scalar")


class TreeReduction(Operation):
    """A reduction of a tree's leaves by `op`, those on the host in the buffers of a fusion."""

    op: str
    fusion: Fusion

    def view_leaves(self) -> Leaves:
        """Return the leaves with their views."""
        raise NotImplementedError

    def share(self) -> Share:
        return Share(range(self.group.size), 0, self.op)


class AllreduceTree(TreeReduction):
    """See `arraycomm.allreduce_tree`."""

    name, code = "allreduce_tree", 14
    independent_on_devices = True
    # Whether results may be written over leaves, which are then the results themselves.
    may_overwrite = False
    # What puts it on devices, if it is recorded, and what that has found there.
    _recorded: Any = None
    _found: Any = None

    def __init__(
        self,
        context: Context,
        memory: TreeMemory,
        tree: Any,
        op: str,
        bucket_bytes: int,
        compression: str | None = None,
        onto: Onto | None = None,
    ) -> None:
        check_op(op)
        self._context, self._host = context, context.host_tree
        self._memory, self._onto = memory, onto
        self.op, self._bucket_bytes, self._compression = op, bucket_bytes, compression
        self._given = self._given_of(tree)
        if self._given is not None and self._repeat_on_device(self._given):
            return
        self._flat = flatten(tree)
        # Totals are added up by the folds of the host.
        on_host = onto is not None
        place = context.host_tree if on_host else context.place_tree(self._flat.leaves)
        super().__init__(context, place)
        self.leaves = leaves = Leaves(self._flat, self.placement.view)
        leaves.check_reducible(op)
        # What this rank adds.
        self.added = leaves.views if onto is None else onto.join(leaves, self.group.rank)
        dtypes = [leaf.dtype for leaf in self.added if leaf is not None]
        self.parts = Parts(self.added, [compressed(dtype, compression) for dtype in dtypes])
        self.fusion = self.fusion_of(self.parts.specs)
        self.packed = self.fusion.acquire()
        containers = self._flat.settings(alone=self.group.size == 1)
        begun = () if onto is None else (onto.setting,)
        settings = (*settings_of(bucket_bytes, compression), *containers, *begun)
        self.signature = Signature(self.name, op, leaves=leaves.described(), settings=settings)
        self.nbytes = self.fusion.nbytes + self.parts.device_bytes
        self.copies = len(self.parts.present) + len(self.parts.on_device)
        if self._given is not None and len(self.parts.on_device) == len(self._given.leaves):
            self._record(self._given)

    def _given_of(self, tree: Any) -> Given | None:
        """Return a tree whose reduction may be recorded, as it is found again."""
        if not self.may_overwrite or self._onto is not None or self._context.given is not None:
            return None
        with suppress(Exception):
            return Given(None, tree, (self.op, self._bucket_bytes, self._compression))
        return None

    def _repeat_on_device(self, given: Given) -> bool:
        """Return whether the reduction is recorded; look then at nothing but where leaves are."""
        self._recorded = recorded = self._memory.recorded.get(given.key)
        if recorded is None or recorded.prepared is None:
            return False
        self._found = recorded.prepared.look(given.leaves, None, beside=self._context.is_request)
        if self._found is None:
            return False
        super().__init__(self._context, self._context.placements.of_recorded_tree())
        # Of the leaves on the host, of which there are none.
        self.fusion, self.packed, self.parts = recorded.fusion, recorded.packed, recorded.parts
        self.signature = recorded.signature
        self.nbytes, self.copies = recorded.nbytes, recorded.copies
        return True

    def _record(self, given: Given) -> None:
        """Record the reduction, if one like it has been made before."""
        kept = self._memory.recorded
        if given.key not in kept:
            if len(kept) >= _MOST_RECORDED:
                kept.clear()
            kept[given.key] = None
        elif kept[given.key] is None:
            arguments = self._memory, given.tree, self.op, self._bucket_bytes, self._compression
            prepared = device_leaves.record(
                self._context,
                given.leaves,
                lambda context: AllreduceGradients(context, *arguments),
                SmallTree.taken_apart,
            )
            kept[given.key] = device_leaves.Recorded(
                prepared,
                self.signature,
                self.nbytes,
                self.copies,
                self.fusion,
                self.packed,
                Parts([], []),
            )

    def view_leaves(self) -> Leaves:
        return self.leaves

    def fusion_of(self, specs: tuple[Spec, ...]) -> Fusion:
        """Return the fusion of leaves of these specs on the host."""
        return Fusion(specs, self._bucket_bytes)

    def pack(self, room: int) -> Bytes | None:
        if self.fusion.nbytes > room:
            reserve(self.group.transport, self.fusion.nbytes)
            return None
        self.packed.pack(self.parts.sources)
        return self.packed.buffer

    def steps(self, agreement: Agreement) -> Steps:
        if self._found is not None and agreement.calls is None:
            self._reduced = self._recorded.put(self._context, self._found)
            return
        if agreement.calls is not None:
            yield from self._reduce_missing(agreement.calls)
            return
        overwritten: frozenset[int] = frozenset()
        if self.payload is None:
            overwritten = yield from self.fusion.reduce(
                self._memory,
                self.packed,
                self.parts.sources,
                self.op,
                may_overwrite=self.may_overwrite,
            )
        elif self.fusion.nbytes:
            self.fusion.fold_payloads(self.group, self.packed, agreement, self.op)
        self._reduced = yield from reduce_on_device(
            self.placement, self.parts, self.op, self._bucket_bytes
        )
        for leaf in overwritten:
            self._reduced[self.parts.present[leaf]] = self.parts.sources[leaf].source

    def result(self, agreement: Agreement) -> Any:
        if self._found is not None and agreement.calls is None:
            return SmallTree.whole(self._given, self._reduced)
        views = self.leaves.views
        if self._onto is not None:
            return self._totals(agreement)
        if agreement.calls is None:
            made = results(views, self.parts.present, self.packed, ready=self._reduced)
        else:
            made = results(prototypes(views), self._present, self.packed, self._dtypes)
        return self.leaves.rebuild(made)

    def _totals(self, agreement: Agreement) -> list[Total | None]:
        """Return the totals of those leaves that any rank has."""
        present, dtypes = self.parts.present, self.leaves.dtypes()
        if agreement.calls is not None:
            present, dtypes = self._present, self._dtypes
        made: list[Total | None] = [None] * len(self.leaves.views)
        for index, slot, dtype in zip(present, self.packed.leaves(), dtypes, strict=True):
            made[index] = Total(slot, dtype)
        return made

    def _reduce_missing(self, calls: Sequence[CallDetail]) -> Steps:
        """Reduce trees in which a leaf may be None on some ranks; the others know its spec."""
        agreed = agreed_leaves(calls)
        if self._found is not None:
            self._flat = flatten(self._given.tree)
            self.leaves = Leaves(self._flat, self._host.view)
        self._check_taken(calls, agreed)
        if self.parts.on_device:
            self.leaves = Leaves(self._flat, self._host.view)
        if self._onto is None:
            self.added = self.leaves.views
        self._present = [n for n, leaf in enumerate(agreed) if leaf.kind != NONE]
        specs = [spec_of(agreed[n]) for n in self._present]
        self._dtypes = [dtype for dtype, _ in specs]
        sent = tuple((self._sent(dtype), shape) for dtype, shape in specs)
        fusion = self.fusion_of(sent)
        self.packed = yield from take_together(self.group, self.name, fusion.nbytes, fusion.acquire)
        sources = [self._source(n) for n in self._present]
        yield from fusion.reduce(self._memory, self.packed, sources, self.op)

    def _sent(self, dtype: DType) -> DType:
        """Return the dtype in which leaves of a dtype are sent."""
        return compressed(dtype, self._compression) if self._onto is None else total_dtype(dtype)

    def _source(self, number: int) -> BufferView | None:
        """Return what this rank adds for a leaf that some rank has; None stands for zeros."""
        own = self.added[number]
        return own if own or self._onto is None else self._onto.missing(number, self.group.rank)

    def _check_taken(self, calls: Sequence[CallDetail], agreed: Sequence[LeafSpec]) -> None:
        """Raise on all ranks if one of them cannot have a gradient that only others have."""
        likes = prototypes(self.leaves.views)
        for number, leaf in enumerate(agreed):
            if leaf.kind == NONE:
                continue
            lacking = [
                call.word if call.leaves and call.leaves[number].kind == NONE else 0
                for call in calls
            ]
            dtype, _ = spec_of(leaf)
            check_taken(self.name, lacking, self.group.rank, likes[number], dtype)


class AllreduceGradients(AllreduceTree):
    """See `arraycomm.allreduce_gradients`."""

    name, code = "allreduce_gradients", 15

    def __init__(
        self,
        context: Context,
        memory: TreeMemory,
        tree: Any,
        op: str,
        bucket_bytes: int,
        compression: str | None,
        missing: str = "zeros",
        onto: Onto | None = None,
    ) -> None:
        if missing not in ("zeros", "error"):
            raise ValueError(f'missing must be "zeros" or "error"; got {missing!r}')
        check_compression(compression)
        super().__init__(context, memory, tree, op, bucket_bytes, compression, onto)
        self.negotiable = missing == "zeros"
        if self.negotiable and self._found is None and None in self.leaves.views:
            self.word = announced(prototypes(self.leaves.views)[0])
        self.independent_on_devices = missing != "zeros"

    def fusion_of(self, specs: tuple[Spec, ...]) -> Fusion:
        return self._memory.gradients(specs, self._bucket_bytes)


class ReduceOnto(AllreduceGradients):
    """`allreduce_gradients` with `onto`."""

    def __init__(
        self,
        context: Context,
        memory: TreeMemory,
        tree: Any,
        op: str,
        total: Any,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        compression: str | None = None,
        missing: str = "zeros",
    ) -> None:
        if op != "sum":
            raise ValueError(
                f'with onto op must be "sum"; got {op!r}; divide the last total by their number'
            )
        if compression is not None:
            raise ValueError(f"with onto compression must be None; got {compression!r}")
        onto = Onto.of(total, flatten(tree).paths)
        super().__init__(context, memory, tree, op, bucket_bytes, None, missing, onto)
        self._total = onto

    def result(self, agreement: Agreement) -> Any:
        totals = self._total.completed(super().result(agreement))
        pairs = zip(totals, prototypes(self.leaves.views), strict=True)
        return self.leaves.rebuild(
            [None if total is None else to_framework(total.array, like) for total, like in pairs]
        )


def check_compression(compression: object) -> None:
    """Raise unless `compression` is None or the name of a dtype to compress to."""
    known = compression is None or (isinstance(compression, str) and compression in COMPRESSIONS)
    if not known:
        objects = "; only a DistributedOptimizer takes objects" * hasattr(compression, "decompress")
        raise ValueError(
            f'compression must be "bfloat16", "float16" or None; got {compression!r}{objects}'
        )


def compressed(dtype: DType, compression: str | None) -> DType:
    """Return the dtype in which leaves of a dtype are sent."""
    if compression is None or kind_of(dtype) is not Kind.FLOAT:
        return dtype
    return COMPRESSIONS[compression]


def settings_of(bucket_bytes: int, compression: str | None) -> Settings:
    """Return the settings, besides the tree, that decide how it is sent."""
    return ("bucket_bytes", bucket_bytes), ("compression", compression)


def reduce_on_device(
    placement: HostPlacement, parts: Parts | None, op: str, bucket_bytes: int
) -> Steps:
    """Return the results of the leaves that are on a device, by their numbers."""
    if parts is None or not parts.on_device:
        return {}
    there = [leaf for index in parts.on_device if (leaf := parts.views[index]) is not None]
    reduced = yield from device_leaves.reduce(placement.of_device, there, op, bucket_bytes)
    return dict(zip(parts.on_device, reduced, strict=True))


def prototypes(views: Sequence[BufferView | None]) -> list[BufferView]:
    """Return the prototype of each result; for a leaf that is None here, the first array."""
    example = next((leaf for leaf in views if leaf and leaf.framework not in _NUMBERS), None)
    return [leaf or example or view(np.empty(0)) for leaf in views]


def results(
    views: Sequence[BufferView | None],
    present: Sequence[int],
    packed: Packed,
    dtypes: Sequence[DType] | None = None,
    ready: Mapping[int, Any] | None = None,
) -> list[Any]:
    """Return the leaves in `packed` as arrays like the views of those that are present.

    `dtypes` are the dtypes of these, by default those of the views. `ready` has the results of
    other leaves, by their numbers.
    """
    made = dict(ready or {})
    for number, (index, slot) in enumerate(zip(present, packed.leaves(), strict=True)):
        like = views[index]
        assert like is not None
        if index in made:
            continue
        wanted = like.array.dtype if dtypes is None else dtypes[number]
        array = slot if slot.dtype == wanted else slot.astype(wanted)
        made[index] = to_framework(array, like)
    return [made.get(index) for index in range(len(views))]


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
    except Exception:
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


class SmallTree(Exchanged):
    """The fast path of reductions of trees whose leaves travel with the header."""

    # There is none on the host.
    room = 0

    def __init__(self, runner: Runner, call: Call, step: Step, made: TreeReduction) -> None:
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
        return optree.tree_unflatten(x.spec, tied(x.leaves, results))

    def __call__(self, x: Given, out: Any) -> Any:
        leaves = x.leaves
        try:
            sent = allocate(self._sends.shape, self._sends.dtype)
            received = allocate(self._gets.shape, BYTE) if self._folds else sent
            slots = [np.ndarray(shape, dtype, sent, start) for dtype, shape, start in self._slots]
            # Also the bytes between leaves.
            sent.fill(0)
            likes = self._fill(leaves, slots, sent)
        except Exception:
            return NotImplemented
        if likes is None:
            return NotImplemented
        result = self._make(sent, received, x, None)
        if result is not received:
            return result
        if self._folds:
            self._fold(received.reshape(self._group.size, -1), sent)
        return self.handed_over(
            lambda: optree.tree_unflatten(x.spec, _results(leaves, slots, likes))
        )

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


def _check_prepared(call: Call, made: TreeReduction) -> None:
    """Raise for a tree that goes no fast path."""
    leaves = made.view_leaves()
    flat, views = leaves.flat, [leaf for leaf in leaves.views if leaf is not None]
    if not _has_outline(call, made) or made.payload is None:
        raise ValueError("a tree without a fast path")
    sent = tuple((leaf.dtype, leaf.shape) for leaf in views)
    if sent != made.fusion.specs or not all(map(_is_there, flat.leaves, views)):
        raise ValueError("a tree of which each call makes copies")


def _has_outline(call: Call, made: TreeReduction) -> bool:
    """Return whether a tree has no containers that only the full call opens."""
    flat = made.view_leaves().flat
    return bool(Outline(tuple(flat.paths), flat.structure) == call.key[3])


def _is_there(leaf: Any, found: BufferView) -> bool:
    """Return whether a leaf was read where it is, or is a number, which is nowhere."""
    return not found.copied or isinstance(leaf, NUMBERS)


def _results(leaves: list[Any], slots: list[Array], likes: list[BufferView | None]) -> list[Any]:
    """Return results like the leaves; one for leaves that are one, if they are the same bits."""
    made: list[Any] = [
        slot if like is None else to_framework(slot, like)
        for slot, like in zip(slots, likes, strict=True)
    ]
    if len(set(map(id, leaves))) < len(leaves):
        first: dict[tuple[int, bytes], Any] = {}
        for number, (leaf, slot) in enumerate(zip(leaves, slots, strict=True)):
            made[number] = first.setdefault((id(leaf), slot.tobytes()), made[number])
    return made
