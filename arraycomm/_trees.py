"""Reductions of whole trees in few messages: leaves are packed into a buffer for each dtype."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm import _algorithms
from arraycomm._buffers import BufferView
from arraycomm._calls import Call, deliver
from arraycomm._communicator import Communicator
from arraycomm._dtypes import BY_NAME, DType, check_movable, check_op, check_reducible, name_of
from arraycomm._folds import fold
from arraycomm._header import Agreement, Signature, Steps, mismatch
from arraycomm._pytrees import Flat, flatten
from arraycomm._results import allocate, give
from arraycomm._runtime import world
from arraycomm._transports.base import Bytes
from arraycomm._views import view

DEFAULT_BUCKET_BYTES: Final = 25 << 20
_ALIGNMENT: Final = 64
NUMBERS: Final = (bool, int, float, complex, np.generic)
NONE: Final = "None"

Spec = tuple[DType, tuple[int, ...]]


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
    return comm._call(name, _reduce_call, name, tree, op, "error", bucket_bytes)


def allreduce_gradients(
    tree: Any,
    op: str = "mean",
    *,
    missing: str = "zeros",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
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
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    pytree
        As for `allreduce_tree`. A leaf that is None on all ranks stays None; one that is None on
        this rank only is an array like the tree's first.
    """
    comm = comm or world()
    return comm._call("allreduce_gradients", _gradients_call, tree, op, missing, bucket_bytes)


# Layout


class Piece(NamedTuple):
    """Where one leaf lies in its bucket, in bytes."""

    leaf: int
    offset: int
    nbytes: int


class Bucket(NamedTuple):
    """One message: leaves of one dtype, each aligned for the frameworks that alias it."""

    dtype: DType
    nbytes: int
    pieces: tuple[Piece, ...]


@lru_cache(maxsize=256)
def lay_out(specs: tuple[Spec, ...], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Distribute leaves over buckets by dtype, in order; a bucket ends once it is full.

    Every bucket but the last of a dtype holds at least `bucket_bytes`; a leaf is never cut.
    """
    waiting: dict[DType, list[Piece]] = {}
    ends: dict[DType, int] = {}
    buckets: list[Bucket] = []
    for leaf, (dtype, shape) in enumerate(specs):
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        offset = ends.get(dtype, 0)
        waiting.setdefault(dtype, []).append(Piece(leaf, offset, nbytes))
        ends[dtype] = offset + nbytes + -nbytes % _ALIGNMENT
        if ends[dtype] >= bucket_bytes:
            buckets.append(Bucket(dtype, ends.pop(dtype), tuple(waiting.pop(dtype))))
    buckets.extend(Bucket(dtype, ends[dtype], tuple(waiting[dtype])) for dtype in waiting)
    return tuple(buckets)


class Packed:
    """Leaves in buckets, and the buckets in one piece of memory where they are small."""

    def __init__(self, specs: tuple[Spec, ...], bucket_bytes: int) -> None:
        self._specs = specs
        self.buckets = lay_out(specs, bucket_bytes)
        self.nbytes = sum(bucket.nbytes for bucket in self.buckets)
        self.memory: list[Bytes] = [
            allocate((bucket.nbytes,), np.dtype(np.uint8)) for bucket in self.buckets
        ]

    def leaves(self) -> Iterable[tuple[int, np.ndarray[Any, Any]]]:
        """Yield each leaf's number and its place, as an array of its dtype and shape."""
        for bucket, memory in zip(self.buckets, self.memory, strict=True):
            for leaf, offset, nbytes in bucket.pieces:
                place = memory[offset : offset + nbytes].view(bucket.dtype)
                yield leaf, place.reshape(self._specs[leaf][1])

    def pack(self, sources: Sequence[BufferView | None]) -> None:
        """Copy the leaves in; None stands for zeros."""
        for bucket, memory in zip(self.buckets, self.memory, strict=True):
            for _, offset, nbytes in bucket.pieces:
                memory[offset + nbytes : offset + nbytes + -nbytes % _ALIGNMENT] = 0
        for leaf, place in self.leaves():
            source = sources[leaf]
            place[...] = 0 if source is None else source.array

    def joined(self) -> Bytes:
        """All buckets, one after the other."""
        return np.concatenate([np.empty(0, np.uint8), *self.memory])

    def take_apart(self, joined: Bytes) -> list[Bytes]:
        """Undo `joined`, without a copy."""
        parts, start = [], 0
        for bucket in self.buckets:
            parts.append(joined[start : start + bucket.nbytes])
            start += bucket.nbytes
        return parts


# Reductions


class _Leaves:
    """The distinct leaves of a tree: which are arrays, and how results get back into the tree."""

    def __init__(self, tree: Any, operation: str) -> None:
        self.flat: Flat = flatten(tree)
        self.views: list[BufferView | None] = []
        self._index: list[int] = []
        self.paths: list[str] = []
        seen: dict[int, int] = {}
        for leaf, path in zip(self.flat.leaves, self.flat.paths, strict=True):
            tied = None if isinstance(leaf, NUMBERS) or leaf is None else seen.get(id(leaf))
            if tied is None:
                tied = seen[id(leaf)] = len(self.views)
                self.views.append(None if leaf is None else view(leaf, f"{operation}: {path}"))
                self.paths.append(path)
            self._index.append(tied)

    def described(self) -> tuple[tuple[str, str], ...]:
        """Path and description of each distinct leaf."""
        said = [
            (path, NONE if seen is None else describe(seen.dtype, seen.shape))
            for path, seen in zip(self.paths, self.views, strict=True)
        ]
        return tuple(said)

    def ties(self) -> str:
        """Say which leaves are one object."""
        return ties(self._index)

    def rebuild(self, results: list[Any]) -> Any:
        """Return the tree of these distinct leaves."""
        return self.flat.rebuild([results[index] for index in self._index])


def ties(index: Sequence[int]) -> str:
    """Say which of the leaves, each given by the number of its object, are tied."""
    return f"tied leaves {list(index)}" if len(set(index)) != len(index) else "no tied leaves"


def describe(dtype: DType, shape: tuple[int, ...]) -> str:
    """Say dtype and shape as headers show them; `_parse` undoes it."""
    return f"{name_of(dtype)} {shape}"


def _parse(description: str) -> Spec:
    name, _, shape = description.partition(" ")
    return BY_NAME[name].dtype, tuple(ast.literal_eval(shape))


def _gradients_call(
    comm: Communicator, tree: Any, op: str, missing: str, bucket_bytes: int
) -> Call:
    if missing not in ("zeros", "error"):
        raise ValueError(
            f'allreduce_gradients: missing must be "zeros" or "error"; got {missing!r}'
        )
    return _reduce_call(comm, "allreduce_gradients", tree, op, missing, bucket_bytes)


def _reduce_call(
    comm: Communicator,
    operation: str,
    tree: Any,
    op: str,
    missing: str,
    bucket_bytes: int,
) -> Call:
    check_op(op, operation)
    leaves = _Leaves(tree, operation)
    for path, leaf in zip(leaves.paths, leaves.views, strict=True):
        if leaf is not None:
            check_movable(leaf.dtype, f"{operation}: {path}")
            check_reducible(leaf.dtype, op, f"{operation}: {path}")
    present = [index for index, leaf in enumerate(leaves.views) if leaf is not None]
    packed, payload = _pack(comm, leaves.views, present, bucket_bytes)

    def finish(agreement: Agreement) -> Steps:
        if agreement.details is not None:
            return (yield from _reduce_missing(comm, leaves, op, agreement.details, bucket_bytes))
        if payload is None:
            yield from _reduce_packed(comm, packed, op)
        else:
            _fold_inline(comm, packed, agreement, op)
        return deliver(lambda: leaves.rebuild(_results(leaves.views, present, packed)))

    return Call(
        Signature(
            operation,
            op,
            leaves=leaves.described(),
            settings=f"bucket_bytes={bucket_bytes}, {leaves.ties()}",
        ),
        finish,
        payload,
        nbytes=packed.nbytes,
        copies=len(present),
        negotiable=missing == "zeros",
    )


def _pack(
    comm: Communicator,
    views: Sequence[BufferView | None],
    present: Sequence[int],
    bucket_bytes: int,
) -> tuple[Packed, Bytes | None]:
    arrays = [leaf for index in present if (leaf := views[index]) is not None]
    packed = Packed(tuple((leaf.dtype, leaf.shape) for leaf in arrays), bucket_bytes)
    packed.pack(arrays)
    return packed, packed.joined() if packed.nbytes <= comm._inline else None


def _reduce_packed(comm: Communicator, packed: Packed, op: str) -> Steps:
    for bucket, memory in zip(packed.buckets, packed.memory, strict=True):
        flat = memory.view(bucket.dtype)
        yield from _algorithms.allreduce(comm._link, flat, flat, op, comm._scratch)


def _fold_inline(comm: Communicator, packed: Packed, agreement: Agreement, op: str) -> None:
    rows = [packed.take_apart(agreement.payload(r, packed.nbytes)) for r in range(comm.size)]
    for number, bucket in enumerate(packed.buckets):
        parts = [row[number].view(bucket.dtype) for row in rows]
        fold(op, bucket.dtype, parts, packed.memory[number].view(bucket.dtype))


def _results(
    views: Sequence[BufferView | None], present: Sequence[int], packed: Packed
) -> list[Any]:
    results: list[Any] = [None] * len(views)
    for number, place in packed.leaves():
        like = views[present[number]]
        assert like is not None
        results[present[number]] = give(place, like)
    return results


def _reduce_missing(
    comm: Communicator,
    leaves: _Leaves,
    op: str,
    details: list[dict[str, Any]],
    bucket_bytes: int,
) -> Steps:
    """Reduce trees in which a leaf may be None on some ranks: the others say what it is."""
    said = _agreed_descriptions(details)
    present = [index for index in range(len(leaves.views)) if said[index] != NONE]
    specs = tuple(_parse(said[index]) for index in present)
    packed = Packed(specs, bucket_bytes)
    packed.pack([leaves.views[index] for index in present])
    yield from _reduce_packed(comm, packed, op)
    example = next((leaf for leaf in leaves.views if leaf is not None), None)
    likes = [leaf or example or view(np.empty(0), "allreduce_gradients") for leaf in leaves.views]
    return deliver(lambda: leaves.rebuild(_results(likes, present, packed)))


def _agreed_descriptions(details: list[dict[str, Any]]) -> list[str]:
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


def _without_none(details: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
