"""Reductions of whole trees in few messages: leaves are packed into a buffer for each dtype."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.results import allocate, to_framework
from arraycomm._arrays.views import view
from arraycomm._collectives.operation import Call, deliver
from arraycomm._collectives.placement import DevicePlacement, HostPlacement
from arraycomm._communicator import Communicator
from arraycomm._dtypes import (
    BY_NAME,
    DType,
    Kind,
    check_movable,
    check_op,
    check_reducible,
    kind_of,
    name_of,
)
from arraycomm._protocol.header import Agreement, Signature, Steps, mismatch
from arraycomm._session import world
from arraycomm._training.join import bits_of, optimizer_of, taking_part, weights_of
from arraycomm._training.weights import check_weight
from arraycomm._trees import device_leaves
from arraycomm._trees.fusion import Fusion, Packed, Spec
from arraycomm._trees.pytrees import Flat, flatten

DEFAULT_BUCKET_BYTES: Final = 25 << 20
COMPRESSIONS: Final[dict[str, DType]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
NUMBERS: Final = (bool, int, float, complex, np.generic)
NONE: Final = "None"


def allreduce_tree(
    tree: Any,
    op: str = "mean",
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    comm: Communicator | None = None,
) -> Any:
    """Reduce every leaf of a tree over the ranks, in few messages.

    Parameters
    ----------
    tree : pytree of arrays and Python numbers
        The same structure, shapes and dtypes on every rank; frameworks may differ. None stays.
    op : str
        As for `Communicator.allreduce`.
    bucket_bytes : int
        Leaves are fused into messages of about this many bytes.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    pytree
        A new tree of the same structure, each leaf like the one passed. Leaves that are one object
        stay one object. A torch module is changed in place.

    Raises
    ------
    MismatchError
        Trees differ between ranks; the message names the path of the first difference.
    TypeError
        A leaf cannot be reduced; the message names its path.

    Notes
    -----
    Each byte is copied once, into a buffer for its dtype; results are parts of that buffer.
    """
    comm = comm or world()
    name = "allreduce_tree"
    return comm._call(name, _reduce_call, name, tree, op, "error", bucket_bytes, None)


def allreduce_gradients(
    tree: Any,
    op: str = "mean",
    *,
    missing: str = "zeros",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    compression: str | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Reduce a tree of gradients, some of which a rank may not have.

    Parameters
    ----------
    tree : pytree of arrays, Python numbers and None
        The same structure on every rank.
    op : str
        As for `Communicator.allreduce`.
    missing : str
        "zeros": None on some ranks counts as zeros of the other ranks' shape and dtype. "error":
        it is a `MismatchError`.
    bucket_bytes : int
        Leaves are fused into messages of about this many bytes.
    compression : str, optional
        "bfloat16" or "float16": float32 and float64 leaves travel rounded to these 16 bits, are
        accumulated in float32, rounded once more, and come back in their own dtype. Beyond 65504
        float16 is infinite. Other leaves travel as they are.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    pytree
        As for `allreduce_tree`. A leaf that is None on all ranks stays None; one that is None on
        this rank only is an array like the tree's first.

    Notes
    -----
    Gradients are reduced in every step, so memory for results of these shapes is kept until other
    shapes come: twice the tree's bytes at most, used again once the results in it are gone.
    """
    comm = comm or world()
    name = "allreduce_gradients"
    return comm._call(name, gradients_call, tree, op, missing, bucket_bytes, compression)


# Reductions


class Leaves:
    """The distinct leaves of a tree: which are arrays, and how results get back into the tree."""

    def __init__(self, flat: Flat, operation: str, placement: HostPlacement) -> None:
        self._flat = flat
        self.all_paths = flat.paths
        self.views: list[BufferView | None] = []
        self.index: list[int] = []
        self.paths: list[str] = []
        seen: dict[int, int] = {}
        for leaf, path in zip(flat.leaves, flat.paths, strict=True):
            tied = seen.get(id(leaf))
            if tied is None or leaf is None or isinstance(leaf, NUMBERS):
                tied = seen[id(leaf)] = len(self.views)
                self.views.append(None if leaf is None else placement.view(leaf, operation, path))
                self.paths.append(path)
            self.index.append(tied)

    def check_reducible(self, op: str, operation: str) -> None:
        """Raise, with its path, for a leaf that does not have this reduction."""
        for path, leaf in zip(self.paths, self.views, strict=True):
            if leaf is not None:
                check_movable(leaf.dtype, f"{operation}: {path}")
                check_reducible(leaf.dtype, op, f"{operation}: {path}")

    def described(self) -> tuple[tuple[str, str], ...]:
        """Path and description of each distinct leaf."""
        said = [
            (path, NONE if seen is None else describe(seen.dtype, seen.shape))
            for path, seen in zip(self.paths, self.views, strict=True)
        ]
        return tuple(said)

    def dtypes(self) -> list[DType]:
        """The dtype of each leaf that is an array."""
        return [leaf.dtype for leaf in self.views if leaf is not None]

    def ties(self) -> str:
        """Say which leaves are one object."""
        return ties(self.index)

    def rebuild(self, results: list[Any]) -> Any:
        """Return the tree of these distinct leaves."""
        return self._flat.rebuild([results[index] for index in self.index])


def ties(index: Sequence[int]) -> str:
    """Say which of the leaves, each given by the number of its object, are tied."""
    return f"tied leaves {list(index)}" if len(set(index)) != len(index) else "no tied leaves"


def describe(dtype: DType, shape: tuple[int, ...]) -> str:
    """Say dtype and shape as headers show them; `parse` undoes it."""
    return f"{name_of(dtype)} {shape}"


def parse(description: str) -> Spec:
    """Return dtype and shape as `describe` says them."""
    name, _, shape = description.partition(" ")
    return BY_NAME[name].dtype, tuple(map(int, re.findall(r"\d+", shape)))


def gradients_call(
    comm: Communicator,
    tree: Any,
    op: str,
    missing: str,
    bucket_bytes: int,
    compression: str | None,
    note: str = "",
) -> Call:
    """One rank's part in `allreduce_gradients`; inside `join`, `note` says of which optimizer."""
    name = "allreduce_gradients"
    if missing not in ("zeros", "error"):
        raise ValueError(f'{name}: missing must be "zeros" or "error"; got {missing!r}')
    check_compression(compression, name)
    return _reduce_call(comm, name, tree, op, missing, bucket_bytes, compression, note)


def check_compression(compression: object, operation: str) -> None:
    """Raise unless `compression` is None or the name of a dtype to compress to."""
    if compression is not None and compression not in COMPRESSIONS:
        raise ValueError(
            f'{operation}: compression must be "bfloat16", "float16" or None; got {compression!r}'
        )


def _reduce_call(
    comm: Communicator,
    operation: str,
    tree: Any,
    op: str,
    missing: str,
    bucket_bytes: int,
    compression: str | None,
    note: str = "",
) -> Call:
    check_op(op, operation)
    flat = flatten(tree)
    placement = tree_placement(comm, flat)
    leaves = Leaves(flat, operation, placement)
    leaves.check_reducible(op, operation)
    if comm._join is not None:
        settings = _settings(bucket_bytes, compression, leaves.ties())
        return _joined_call(comm, leaves, op, f"{settings}, joined{note}", compression)
    parts = Parts(leaves.views, [_compressed(dtype, compression) for dtype in leaves.dtypes()])
    keep = operation == "allreduce_gradients"
    fusion = _fusion(comm, parts.specs, bucket_bytes, keep=keep)
    packed = fusion.take()
    inline = fusion.nbytes <= comm._inline
    if inline:
        packed.pack(parts.sources)

    def finish(agreement: Agreement | None) -> Steps:
        if agreement is not None and agreement.details is not None:
            there = (
                leaves
                if not parts.on_device
                else Leaves(flat, operation, comm._host_tree_placement)
            )
            return (
                yield from _reduce_missing(
                    comm, there, op, agreement.details, bucket_bytes, compression
                )
            )
        if not inline:
            yield from fusion.reduce(comm, packed, parts.sources, op)
        elif agreement is not None:
            fusion.fold_payloads(comm, packed, agreement, op)
        reduced = yield from reduce_on_device(placement, parts, op, bucket_bytes)
        return deliver(
            lambda: leaves.rebuild(results(leaves.views, parts.present, packed, given=reduced))
        )

    return Call(
        Signature(
            operation,
            op,
            leaves=leaves.described(),
            settings=_settings(bucket_bytes, compression, leaves.ties()),
        ),
        finish,
        packed.block if inline else None,
        nbytes=fusion.nbytes + parts.device_bytes,
        copies=len(parts.present) + len(parts.on_device),
        negotiable=missing == "zeros",
        ahead=missing != "zeros",
        placement=placement,
    )


def tree_placement(comm: Communicator, flat: Flat) -> HostPlacement:
    """Return the way of a tree's leaves, unless the call was given one."""
    if comm._placement is not comm._host_placement:
        return comm._placement
    # Inside `join` ranks take part that have no tree to look at.
    if comm._join is not None:
        return comm._host_tree_placement
    return comm._devices.placement_of_tree(flat.leaves)


class Parts:
    """Which leaves are reduced as host memory, and which where they are.

    Attributes
    ----------
    present, on_device : list of int
        The numbers of the leaves of either kind.
    sources : list of BufferView
        The leaves that are host memory.
    specs : tuple of (dtype, shape)
        What of these is sent.
    """

    def __init__(self, views: Sequence[BufferView | None], dtypes: Sequence[DType]) -> None:
        self.views = views
        some = [(index, leaf) for index, leaf in enumerate(views) if leaf is not None]
        self.present = [index for index, leaf in some if leaf.device_buffer is None]
        self.on_device = [index for index, leaf in some if leaf.device_buffer is not None]
        self.sources = [leaf for _, leaf in some if leaf.device_buffer is None]
        self.specs = tuple(
            (dtype, leaf.array.shape)
            for dtype, (_, leaf) in zip(dtypes, some, strict=True)
            if leaf.device_buffer is None
        )
        self.device_bytes = sum(
            leaf.device_buffer.nbytes for _, leaf in some if leaf.device_buffer is not None
        )


def reduce_on_device(
    placement: HostPlacement, parts: Parts | None, op: str, bucket_bytes: int
) -> Steps:
    """Return the results of the leaves that are on a device, by their numbers."""
    if parts is None or not parts.on_device or not isinstance(placement, DevicePlacement):
        return {}
    there = [leaf for index in parts.on_device if (leaf := parts.views[index]) is not None]
    reduced = yield from device_leaves.reduce(placement, there, op, bucket_bytes)
    return dict(zip(parts.on_device, reduced, strict=True))


def _settings(bucket_bytes: int, compression: str | None, said_ties: str) -> str:
    """What decides how a tree travels, beside its leaves."""
    compressed = "" if compression is None else f"compression={compression}, "
    return f"bucket_bytes={bucket_bytes}, {compressed}{said_ties}"


def _compressed(dtype: DType, compression: str | None) -> DType:
    if compression is None or kind_of(dtype) is not Kind.FLOAT:
        return dtype
    return COMPRESSIONS[compression]


def _fusion(
    comm: Communicator, specs: tuple[Spec, ...], bucket_bytes: int, *, keep: bool
) -> Fusion:
    kept = comm._gradients if keep else None
    if kept is None or kept.specs != specs or kept.bucket_bytes != bucket_bytes:
        kept = Fusion(specs, bucket_bytes)
        if keep:
            comm._gradients = kept
    return kept


def results(
    views: Sequence[BufferView | None],
    present: Sequence[int],
    packed: Packed,
    dtypes: Sequence[DType] | None = None,
    given: Mapping[int, Any] | None = None,
) -> list[Any]:
    """Hand out the leaves in `packed`, as arrays like the views of those that are present.

    `dtypes` are those wanted, where the views do not tell; `given` are results that need no making.
    """
    made: list[Any] = [None] * len(views)
    for index, result in (given or {}).items():
        made[index] = result
    for number, place in packed.leaves():
        like = views[present[number]]
        assert like is not None
        wanted = like.array.dtype if dtypes is None else dtypes[number]
        array = place if place.dtype == wanted else place.astype(wanted)
        made[present[number]] = to_framework(array, like)
    return made


def _reduce_missing(
    comm: Communicator,
    leaves: Leaves,
    op: str,
    details: list[dict[str, Any]],
    bucket_bytes: int,
    compression: str | None,
) -> Steps:
    """Reduce trees in which a leaf may be None on some ranks: the others say what it is."""
    said = _agreed_descriptions(details)
    present = [index for index in range(len(leaves.views)) if said[index] != NONE]
    specs = [parse(said[index]) for index in present]
    sent = tuple((_compressed(dtype, compression), shape) for dtype, shape in specs)
    fusion = Fusion(sent, bucket_bytes)
    packed = fusion.take()
    yield from fusion.reduce(comm, packed, [leaves.views[index] for index in present], op)
    example = next((leaf for leaf in leaves.views if leaf is not None), None)
    likes = [leaf or example or view(np.empty(0), "allreduce_gradients") for leaf in leaves.views]
    dtypes = [dtype for dtype, _ in specs]
    return deliver(lambda: leaves.rebuild(results(likes, present, packed, dtypes)))


# Inside join


def _joined_call(
    comm: Communicator, leaves: Leaves, op: str, settings: str, compression: str | None
) -> Call:
    """Reduce by weight, together with ranks that have no data."""
    if op not in ("mean", "sum"):
        raise ValueError(f'allreduce_gradients: inside join op must be "mean" or "sum"; got {op!r}')
    block = comm._join
    assert block is not None
    weight = check_weight(block.weight, "allreduce_gradients: join")

    def finish(agreement: Agreement) -> Steps:
        said = [text for _, text in leaves.described()]
        if agreement.details is not None:
            said = _agreed_descriptions(taking_part(agreement.details))
        weights = weights_of(agreement, comm.size)
        block.stepped(weights)
        factor = weight if op == "mean" else float(weight > 0)
        reduced = yield from _reduce_joined(
            comm, said, leaves.views, factor, weights, op, compression
        )
        example = next((leaf for leaf in leaves.views if leaf is not None), None)
        likes = [leaf or example or view(np.empty(0), "join") for leaf in leaves.views]
        return deliver(
            lambda: leaves.rebuild(
                [
                    None if array is None else to_framework(array, like)
                    for array, like in zip(reduced, likes, strict=True)
                ]
            )
        )

    signature = Signature("allreduce_gradients", op, leaves=leaves.described(), settings=settings)
    return Call(signature, finish, length=bits_of(weight), negotiable=True)


def shadow_gradients(
    comm: Communicator, agreement: Agreement, live: Sequence[dict[str, Any]]
) -> Steps:
    """Take part in other ranks' reduction without gradients of one's own.

    Returns this rank's optimizer whose step it is, the sum of the weights, and the gradients.
    """
    said = _agreed_descriptions(live)
    settings, head = live[0]["settings"], live[0]["head"]
    compression = next((name for name in COMPRESSIONS if f"compression={name}," in settings), None)
    op = "mean" if "mean" in head else "sum"
    weights = weights_of(agreement, comm.size)
    nothing: list[BufferView | None] = [None] * len(said)
    reduced = yield from _reduce_joined(comm, said, nothing, 0.0, weights, op, compression)
    return optimizer_of(comm, settings), sum(weights), reduced


def _reduce_joined(
    comm: Communicator,
    said: Sequence[str],
    views: Sequence[BufferView | None],
    factor: float,
    weights: Sequence[float],
    op: str,
    compression: str | None,
) -> Steps:
    """Return the weighted mean, or the sum, of each leaf as a NumPy array; None where nobody has one."""
    present = [index for index, text in enumerate(said) if text != NONE]
    specs = [parse(said[index]) for index in present]
    sent = tuple((_compressed(_wide(dtype), compression), shape) for dtype, shape in specs)
    sources: list[BufferView | None] = []
    for index, (dtype, _) in zip(present, specs, strict=True):
        leaf = views[index]
        sources.append(None if leaf is None or not factor else _times(leaf, factor, _wide(dtype)))
    fusion = Fusion(sent, DEFAULT_BUCKET_BYTES)
    packed = fusion.take()
    yield from fusion.reduce(comm, packed, sources, "sum")
    total = sum(weights)
    reduced: list[Any] = [None] * len(said)
    for number, place in packed.leaves():
        dtype, shape = specs[number]
        array = place.astype(_wide(dtype), copy=False)
        with np.errstate(all="ignore"):
            if op == "mean" and total:
                parts = array.reshape(-1).view(array.real.dtype)
                np.divide(parts, parts.dtype.type(total), out=parts)
            result = allocate(shape, dtype)
            result[...] = array
        reduced[present[number]] = result
    return reduced


def _times(leaf: BufferView, factor: float, dtype: DType) -> BufferView:
    """Return w·g, in which the parts of a complex number are multiplied as reals."""
    made = allocate(leaf.shape, dtype)
    with np.errstate(all="ignore"):
        made[...] = leaf.array
        if factor != 1:
            parts = made.reshape(-1).view(made.real.dtype)
            np.multiply(parts, parts.dtype.type(factor), out=parts)
    return BufferView(made, "numpy", made, False)


def _wide(dtype: DType) -> DType:
    return np.dtype(np.float32) if kind_of(dtype) is Kind.NARROW else dtype


def _agreed_descriptions(details: Sequence[dict[str, Any]]) -> list[str]:
    """What each leaf is, where ranks differ in None only; raises `MismatchError` otherwise."""
    trees = [detail["leaves"] for detail in details]
    if len({detail["settings"] for detail in details}) > 1:
        raise mismatch(_without_none(details))
    if any([path for path, _ in tree] != [path for path, _ in trees[0]] for tree in trees):
        raise mismatch(details)
    agreed = []
    for leaf in zip(*trees, strict=True):
        descriptions = {said for _, said in leaf} - {NONE}
        if len(descriptions) > 1:
            raise mismatch(_without_none(details))
        agreed.append(descriptions.pop() if descriptions else NONE)
    return agreed


def _without_none(details: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The details with None leaves described as some other rank has them."""
    known: dict[str, str] = {}
    for detail in details:
        for path, said in detail["leaves"]:
            if said != NONE:
                known.setdefault(path, said)
    return [
        {
            **detail,
            "leaves": [
                (path, known.get(path, said) if said == NONE else said)
                for path, said in detail["leaves"]
            ],
        }
        for detail in details
    ]
