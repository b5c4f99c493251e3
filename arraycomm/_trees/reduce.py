"""`allreduce_tree` and `allreduce_gradients`: whole trees reduced in few messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import view
from arraycomm._calls import refusals
from arraycomm._calls.attempts import take_together
from arraycomm._calls.operation import Context, Operation, Share
from arraycomm._calls.placement import HostPlacement
from arraycomm._checks import check_at_least
from arraycomm._dtypes import DType, Kind, check_op, kind_of
from arraycomm._errors import forgiving
from arraycomm._folds import total_dtype
from arraycomm._prepared.small_trees import Given, SmallTree
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.details import CallDetail
from arraycomm._protocol.header import LeafSpec, Settings, Signature
from arraycomm._reduce.chunks import reserve
from arraycomm._transports.base import Bytes, Steps
from arraycomm._trees import device_leaves
from arraycomm._trees.buffers import Packed
from arraycomm._trees.fusion import Fusion, TreeMemory
from arraycomm._trees.layout import Spec
from arraycomm._trees.leaves import NONE, Leaves, Onto, Parts, Total, agreed_leaves, spec_of
from arraycomm._trees.pytrees import flatten

DEFAULT_BUCKET_BYTES: Final = 25 << 20
COMPRESSIONS: Final[dict[str, DType]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


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
    # What puts it on devices, if it is recorded, the tree, and what has been found of it there.
    _recorded: Any = None
    _recorded_tree: Given
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
        self.op, self._compression = op, compression
        self._bucket_bytes = check_at_least(bucket_bytes, 1, "bucket_bytes")
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
        settings = (*settings_of(self._bucket_bytes, compression), *containers, *begun)
        self.signature = Signature(self.name, op, leaves=leaves.described(), settings=settings)
        self.nbytes = self.fusion.nbytes + self.parts.device_bytes
        self.copies = len(self.parts.present) + len(self.parts.on_device)
        if self._given is not None and len(self.parts.on_device) == len(self._given.leaves):
            self._record(self._given)

    def _given_of(self, tree: Any) -> Given | None:
        """Return a tree whose reduction may be recorded, as it is found again."""
        if not self.may_overwrite or self._onto is not None or self._context.given is not None:
            return None
        with forgiving:
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
        super().__init__(self._context, recorded.placement(self._context))
        self._recorded_tree = given
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
            return SmallTree.whole(self._recorded_tree, self._reduced)
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
            self._flat = flatten(self._recorded_tree.tree)
            self.leaves = Leaves(self._flat, self._host.view)
        self.check_taken(calls, agreed)
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

    def check_taken(self, calls: Sequence[CallDetail], agreed: Sequence[LeafSpec]) -> None:
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
            refusals.check_taken(self.name, lacking, self.group.rank, likes[number], dtype)


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
            self.word = refusals.announced(prototypes(self.leaves.views)[0])
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
        onto = Onto.of(total, flatten(tree).paths, alone=context.group.size == 1)
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
