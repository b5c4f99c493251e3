"""`synchronize`: every rank gets the values of one."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import view
from arraycomm._collectives import algorithms
from arraycomm._collectives.objects import bcast_object
from arraycomm._collectives.operation import Call, check_root, deliver
from arraycomm._collectives.pickling import dumps, loads
from arraycomm._communicator import Communicator
from arraycomm._dtypes import check_movable
from arraycomm._errors import MismatchError
from arraycomm._protocol.header import Agreement, Signature, Steps
from arraycomm._session import world
from arraycomm._trees.fusion import Packed, lay_out, places_of
from arraycomm._trees.pytrees import flatten, is_torch
from arraycomm._trees.reduce import NONE, NUMBERS, describe, ties

_VALUES: Final = (*NUMBERS, str, bytes, enum.Enum)


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
    specs = tuple((_RAW, (leaf.array.nbytes,)) for leaf in arrays)
    buckets = lay_out(specs, 1 << 62)
    packed = Packed(buckets, places_of(specs, buckets))
    is_root = comm.rank == root
    data = np.empty(0, np.uint8)
    if is_root:
        _pack_raw(packed, arrays)
        values = [part.value for part in parts if part.value is not _Kept]
        data = dumps(values)

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
        yield from algorithms.bcast(comm._link, received, root)
        for memory in packed.memory:
            yield from algorithms.bcast(comm._link, memory, root)
        return deliver(rebuild, loads(received))

    described = [(path, parts[n].description) for path, n in zip(flat.paths, index, strict=True)]
    return Call(
        Signature("synchronize", None, root, leaves=tuple(described), settings=ties(index)),
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
            results.append(part.receive(to_framework(place, part.array)))
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
        return _Part(NONE, receive=lambda _: None)
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
