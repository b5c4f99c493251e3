"""Whole trees in few messages: leaves are packed into one buffer for each dtype."""

from __future__ import annotations

import ast
import enum
import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm import _algorithms
from arraycomm._buffers import BufferView
from arraycomm._collectives import Call, bcast_object, check_root, deliver
from arraycomm._communicator import Communicator
from arraycomm._dtypes import BY_NAME, DType, check_movable, check_op, check_reducible, name_of
from arraycomm._errors import MismatchError
from arraycomm._folds import fold
from arraycomm._header import Agreement, Signature, Steps, mismatch
from arraycomm._pytrees import Flat, flatten, is_torch
from arraycomm._results import allocate, give
from arraycomm._runtime import world
from arraycomm._transports.base import Bytes
from arraycomm._views import view

DEFAULT_BUCKET_BYTES: Final = 25 << 20
_ALIGNMENT: Final = 64
_NUMBERS: Final = (bool, int, float, complex, np.generic)
_VALUES: Final = (*_NUMBERS, str, bytes, enum.Enum)
_NONE: Final = "None"

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


def synchronize(tree: Any, *, root: int = 0, comm: Communicator | None = None) -> Any:
    """Give every rank the values of `root`.

    Parameters
    ----------
    tree : pytree, torch module, torch optimizer, or None
        Arrays, numbers, strings, bytes and enums take the values of `root` and keep the type they
        have here; None, functions and random generators stay as they are. A rank other than
        `root` may pass None, and then gets the tree of `root` whole (as pickles, from which the
        ranks of a job trust one another).
    root : int
        The rank whose values are taken.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    pytree
        A new tree of the same structure; a torch module or optimizer is changed in place and
        returned.

    Raises
    ------
    MismatchError
        Trees differ between ranks; the message names the path of the first difference.
    TypeError
        A leaf is of a type that cannot be synchronized; the message names its path.
    """
    comm = comm or world()
    return comm._call("synchronize", _synchronize_call, tree, root)


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
            tied = None if isinstance(leaf, _NUMBERS) or leaf is None else seen.get(id(leaf))
            if tied is None:
                tied = seen[id(leaf)] = len(self.views)
                self.views.append(None if leaf is None else view(leaf, f"{operation}: {path}"))
                self.paths.append(path)
            self._index.append(tied)

    def described(self) -> tuple[tuple[str, str], ...]:
        """Path and description of each distinct leaf."""
        said = [
            (path, _NONE if seen is None else describe(seen.dtype, seen.shape))
            for path, seen in zip(self.paths, self.views, strict=True)
        ]
        return tuple(said)

    def ties(self) -> str:
        """Say which leaves are one object."""
        return _ties(self._index)

    def rebuild(self, results: list[Any]) -> Any:
        """Return the tree of these distinct leaves."""
        return self.flat.rebuild([results[index] for index in self._index])


def _ties(index: Sequence[int]) -> str:
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
    present = [index for index in range(len(leaves.views)) if said[index] != _NONE]
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
        descriptions = {said for _, said in leaf} - {_NONE}
        if len(descriptions) > 1:
            raise mismatch(_without_none(details))
        agreed.append(descriptions.pop() if descriptions else _NONE)
    return agreed


def _without_none(details: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The details with None leaves described as some other rank has them."""
    known: dict[str, str] = {}
    for detail in details:
        for path, said in detail["leaves"]:
            if said != _NONE:
                known.setdefault(path, said)
    return [
        {
            **detail,
            "leaves": [
                (path, known.get(path, said) if said == _NONE else said)
                for path, said in detail["leaves"]
            ],
        }
        for detail in details
    ]


# Synchronization


class _Kept:
    """A leaf that stays as it is."""


class _Part(NamedTuple):
    """How one leaf is synchronized: as bytes, as a pickled value, or not at all."""

    description: str
    array: BufferView | None = None
    value: Any = _Kept
    receive: Callable[[Any], Any] = lambda received: received


def _synchronize_call(comm: Communicator, tree: Any, root: int) -> Call:
    root = check_root(comm, root, "synchronize")
    if tree is None:
        return _whole_call(comm, root)
    flat = flatten(tree)
    parts: list[_Part] = []
    first: dict[int, int] = {}
    index: list[int] = []
    for leaf, path in zip(flat.leaves, flat.paths, strict=True):
        number = first.get(id(leaf), -1) if not isinstance(leaf, _VALUES) else -1
        if number < 0:
            number = first[id(leaf)] = len(parts)
            parts.append(_part(leaf, path))
        index.append(number)
    arrays = [part.array for part in parts if part.array is not None]
    packed = Packed(tuple((_RAW, (leaf.array.nbytes,)) for leaf in arrays), 1 << 62)
    is_root = comm.rank == root
    data = np.empty(0, np.uint8)
    if is_root:
        _pack_raw(packed, arrays)
        values = [part.value for part in parts if part.value is not _Kept]
        data = np.frombuffer(pickle.dumps(values, pickle.HIGHEST_PROTOCOL), np.uint8)

    def rebuild(values: list[Any]) -> Any:
        results = _received(parts, packed, iter(values), is_root)
        return flat.rebuild([results[number] for number in index])

    def finish(agreement: Agreement) -> Steps:
        if _someone_has_none(comm, agreement):
            _check_root_has_tree(comm, agreement, root)
            whole = yield from _bcast_whole(comm, tree, root)
            values = _take_from_whole(whole, parts, index, packed, is_root)
            return deliver(rebuild, values)
        received = np.empty(agreement.word(root, 14), np.uint8)
        if is_root:
            received[...] = data
        yield from _algorithms.bcast(comm._link, received, root)
        for memory in packed.memory:
            yield from _algorithms.bcast(comm._link, memory, root)
        return deliver(rebuild, pickle.loads(received.data))

    described = [(path, parts[n].description) for path, n in zip(flat.paths, index, strict=True)]
    return Call(
        Signature("synchronize", None, root, leaves=tuple(described), settings=_ties(index)),
        finish,
        None,
        len(data),
        nbytes=packed.nbytes,
        copies=len(arrays),
    )


_RAW: Final = np.dtype(np.uint8)


def _pack_raw(packed: Packed, arrays: Sequence[BufferView]) -> None:
    for number, place in packed.leaves():
        array = arrays[number].array
        place.view(array.dtype).reshape(array.shape)[...] = array


def _received(parts: Sequence[_Part], packed: Packed, values: Any, is_root: bool) -> list[Any]:
    places = dict(packed.leaves())
    results: list[Any] = []
    arrays = 0
    for part in parts:
        if part.array is not None:
            place = places[arrays].view(part.array.dtype).reshape(part.array.shape)
            results.append(part.receive(give(place, part.array)))
            arrays += 1
        elif part.value is _Kept:
            results.append(part.receive(None))
        else:
            value = next(values)
            results.append(part.receive(part.value if is_root else value))
    return results


def _part(leaf: Any, path: str) -> _Part:
    """Decide how a leaf is synchronized."""
    if leaf is None:
        return _Part(_NONE, receive=lambda _: None)
    if isinstance(leaf, _VALUES):
        return _Part(type(leaf).__name__, value=leaf)
    if is_torch(leaf, "optim", "Optimizer"):
        return _Part("optimizer", value=leaf.state_dict(), receive=_load_into(leaf))
    if _is_typed_key(leaf):
        return _key_part(leaf, path)
    if callable(leaf) or _is_generator(leaf):
        return _Part("kept", receive=lambda _: leaf)
    array = view(leaf, f"synchronize: {path}")
    check_movable(array.dtype, f"synchronize: {path}")
    return _Part(describe(array.dtype, array.shape), array)


def _load_into(optimizer: Any) -> Callable[[Any], Any]:
    def load(state: Any) -> Any:
        optimizer.load_state_dict(state)
        return optimizer

    return load


def _is_generator(leaf: Any) -> bool:
    if isinstance(leaf, (np.random.Generator, np.random.RandomState, random.Random)):
        return True
    return is_torch(leaf, "Generator")


def _is_typed_key(leaf: Any) -> bool:
    """A JAX random key, whose dtype is an extended one."""
    dtype = getattr(leaf, "dtype", None)
    return type(dtype).__module__.startswith("jax.") and str(dtype).startswith("key<")


def _key_part(leaf: Any, path: str) -> _Part:
    import jax

    data = view(jax.random.key_data(leaf), f"synchronize: {path}")
    implementation = jax.random.key_impl(leaf)
    return _Part(
        f"{leaf.dtype} {leaf.shape}",
        data,
        receive=lambda received: jax.random.wrap_key_data(received, impl=implementation),
    )


def _someone_has_none(comm: Communicator, agreement: Agreement) -> bool:
    return any(agreement.word(rank, 3) == 0 for rank in range(comm.size))


def _whole_call(comm: Communicator, root: int) -> Call:
    """The call of a rank that passes None: it takes the tree of `root` whole."""

    def finish(agreement: Agreement) -> Steps:
        if all(agreement.word(rank, 3) == 0 for rank in range(comm.size)):
            return None
        _check_root_has_tree(comm, agreement, root)
        return (yield from _bcast_whole(comm, None, root))

    return Call(Signature("synchronize", None, root), finish)


def _check_root_has_tree(comm: Communicator, agreement: Agreement, root: int) -> None:
    if agreement.word(root, 3) == 0:
        having = next(rank for rank in range(comm.size) if agreement.word(rank, 3))
        raise MismatchError(
            f"synchronize: root {root} passed None, but rank {having} passed a tree; "
            "pass the tree to take on the root"
        )


def _bcast_whole(comm: Communicator, tree: Any, root: int) -> Steps:
    return (yield from comm._steps(bcast_object(comm, tree, root), None))


def _take_from_whole(
    whole: Any, parts: Sequence[_Part], index: Sequence[int], packed: Packed, is_root: bool
) -> list[Any]:
    """Put the arrays of the root's tree into `packed`, and return its other values."""
    values: list[Any] = []
    arrays: list[BufferView] = []
    leaves = dict(zip(index, flatten(whole).leaves, strict=True))
    for number, part in enumerate(parts):
        leaf = leaves[number]
        if part.array is not None:
            arrays.append(_part(leaf, "tree").array or part.array)
        elif part.value is not _Kept:
            values.append(_part(leaf, "tree").value)
    if not is_root:
        _pack_raw(packed, arrays)
    return values
