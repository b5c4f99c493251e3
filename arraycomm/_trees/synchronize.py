"""`synchronize`: every rank gets the values of one rank."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.dlpack import offered
from arraycomm._arrays.results import check_result, to_framework
from arraycomm._arrays.views import view
from arraycomm._calls.arguments import check_root
from arraycomm._calls.attempts import attempt_together, take_together
from arraycomm._calls.operation import Context, Operation
from arraycomm._calls.pickles import dumps, loads
from arraycomm._errors import MismatchError
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.announced import check_size, malformed
from arraycomm._protocol.details import Detail, Nothing, exchange_details
from arraycomm._protocol.header import LeafSpec, Signature, digest
from arraycomm._reduce import algorithms
from arraycomm._transports.base import Bytes, Steps
from arraycomm._trees.buffers import Packed
from arraycomm._trees.layout import lay_out, slots_of
from arraycomm._trees.leaves import NONE, NUMBERS, array_leaf, tied
from arraycomm._trees.nodes import ExtraState, is_torch
from arraycomm._trees.pytrees import Flat, flatten
from arraycomm._trees.static import taken_over, texts_of

_VALUES: Final = (*NUMBERS, str, bytes, enum.Enum)
_RAW: Final = np.dtype(np.uint8)
_ON_ALL_RANKS: Final = (
    "pass the tree on all ranks, each of which keeps its own functions, or on the root a tree that "
    "has none, such as equinox.filter(tree, equinox.is_array)"
)


@dataclass(frozen=True, slots=True)
class PickledBytes(Detail):
    """The number of bytes of a pickle of the root."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class HeldDigests(Detail):
    """Digests of what each container of a rank's tree holds besides leaves."""

    digests: tuple[int, ...]


class Synchronize(Operation):
    """See `arraycomm.synchronize`."""

    name, code = "synchronize", 13

    def __init__(self, context: Context, tree: Any, root: int) -> None:
        self.root = check_root(root, context.group.size)
        super().__init__(context)
        self._tree = tree
        self._is_root = self.group.rank == self.root
        self._data: Bytes = np.empty(0, np.uint8)
        self._received: Bytes | None = None
        # The pickle of what of that the root has sent.
        self._static: Bytes | None = None
        self._take_whole = False
        if tree is None:
            self.signature = Signature(self.name, None, self.root)
            return
        self._flat = flatten(tree)
        self._view_leaves()
        arrays = [part.array for part in self._parts if part.array is not None]
        specs = tuple((_RAW, (leaf.array.nbytes,)) for leaf in arrays)
        buckets = lay_out(specs, 1 << 62)
        self._packed = Packed(buckets, slots_of(specs, buckets))
        if self._is_root:
            _pack_raw(self._packed, arrays)
            self._data = dumps(
                [part.value for part in self._parts if part.value is not _Kept], "tree"
            )
        self.word = len(self._data)
        self.nbytes, self.copies = self._packed.nbytes, len(arrays)
        # What containers hold besides leaves may differ: all ranks take that of the root.
        structure, *static = self._flat.settings(alone=self.group.size == 1)
        self.further_words = (digest(static),)
        # Objects that are changed in place are the same ones on all ranks, and arrays need not be.
        settings = structure, ("objects", self._objects())
        self.signature = Signature(
            self.name, None, self.root, leaves=self._described(), settings=settings
        )

    def _view_leaves(self) -> None:
        """Decide how each leaf is synchronized."""
        pairs = zip(self._flat.leaves, self._flat.paths, strict=True)
        self._parts = [_part(leaf, path) for leaf, path in pairs]
        self._parts.extend(_part(extra, extra.path) for extra in self._flat.extras)

    def _objects(self) -> str | None:
        """Say which leaves that are changed in place are one object; None if each is another."""
        first: dict[int, int] = {}
        same = [
            (number, found)
            for number, (leaf, part) in enumerate(zip(self._flat.leaves, self._parts, strict=False))
            if part.load is not None and (found := first.setdefault(id(leaf), number)) != number
        ]
        return f"one at {same}" if same else None

    def _described(self) -> tuple[LeafSpec, ...]:
        """Return what the ranks compare: leaves, what their states need, and what is no leaf."""
        count = len(self._flat.leaves)
        leaves = (part.leaf for part in self._parts[:count])
        beside = (spec for part in self._parts for spec in part.beside)
        extras = (part.leaf for part in self._parts[count:])
        return *leaves, *beside, *extras

    def steps(self, agreement: Agreement) -> Steps:
        having = [rank for rank in range(self.group.size) if agreement.array_digest(rank)]
        if not having and self._tree is not None:
            raise malformed(self.group.rank, "no tree, although it has one")
        if not having:
            return
        if self.root not in having:
            raise MismatchError(
                f"synchronize: root {self.root} passed None, but rank {having[0]} passed a tree; "
                "pass the tree to take on the root"
            )
        self._take_whole = len(having) < self.group.size
        if self._take_whole:
            self._received = yield from self._bcast_object(
                lambda: dumps(self._tree, "tree", _ON_ALL_RANKS)
            )
            return
        differs = len({words[1] for words in agreement.all_words()}) > 1
        length = len(self._data) if self._is_root else agreement.lengths()[self.root]
        received = yield from self._received_bytes(length, self._data)
        transport = self.group.transport
        yield from algorithms.bcast(transport, received, self.root)
        for memory in self._packed.memory:
            yield from algorithms.bcast(transport, memory, self.root)
        self._received = received
        if differs:
            yield from self._bcast_static()

    def _bcast_static(self) -> Steps:
        """Send what the root's containers hold besides leaves, where ranks differ in it."""
        held = self._flat.static
        local = HeldDigests(tuple(digest(texts_of([each], alone=False)) for each in held))
        replies = yield from exchange_details(self.group.control, local, HeldDigests)
        ranks = zip(*(reply.digests for reply in replies), strict=True)
        differing = [n for n, digests in enumerate(ranks) if len(set(digests)) > 1]
        paths = ", ".join(path for n in differing for path, _ in held[n].parts[:1])
        self._static = yield from self._bcast_object(
            lambda: dumps(
                {n: held[n].value for n in differing},
                f"what ranks differ in besides the leaves ({paths})",
                "make it the same on all ranks before",
            )
        )

    def _bcast_object(self, pickled: Callable[[], Bytes]) -> Steps:
        """Return the bytes of a pickle that the root makes, if it can."""
        attempt = pickled if self._is_root else None
        data = yield from attempt_together(self.group, self.name, attempt)
        local: Detail = PickledBytes(len(data)) if self._is_root else Nothing()
        replies = yield from exchange_details(self.group.control, local, Nothing, PickledBytes)
        announced = replies[self.root]
        if not isinstance(announced, PickledBytes):
            raise malformed(self.root, "no tree")
        received = yield from self._received_bytes(announced.nbytes, data)
        yield from algorithms.bcast(self.group.transport, received, self.root)
        return received

    def _received_bytes(self, length: int, data: Bytes | None) -> Steps:
        """Return memory for the bytes of the root; on the root, with these bytes in it."""
        check_size(self.root, [length])

        def take() -> Bytes:
            received = np.empty(length, np.uint8)
            if self._is_root and data is not None:
                received[...] = data
            return received

        return (yield from take_together(self.group, self.name, length, take))

    def result(self, agreement: Agreement) -> Any:
        received = None if self._received is None else loads(self.root, self._received)
        if self._tree is None:
            return received
        values: Any = received
        given = {} if self._static is None else loads(self.root, self._static)
        if self._take_whole:
            whole = flatten(received)
            given = {n: each.value for n, each in enumerate(whole.static)}
            values = _take_from_whole(whole, self._parts, self._packed, self._is_root)
        results = _received(self._parts, self._packed, iter(values), self._is_root)
        leaves, held = self._flat.leaves, [each.value for each in self._flat.static]
        for number, value in () if self._is_root else given.items():
            held[number] = taken_over(held[number], value)
        return self._flat.rebuild(tied(leaves, results[: len(leaves)]), held)


class _Kept:
    """The value of a leaf that stays as it is."""


class Part(NamedTuple):
    """How one leaf is synchronized: as bytes, as a pickled value, or not at all.

    `beside` describes what else the ranks compare. `load` changes the leaf in place, but for the
    root's.
    """

    leaf: LeafSpec
    array: BufferView | None = None
    value: Any = _Kept
    receive: Callable[[Any], Any] = lambda received: received
    beside: Sequence[LeafSpec] = ()
    load: Callable[[Any], Any] | None = None


def _pack_raw(packed: Packed, arrays: Sequence[BufferView]) -> None:
    for slot, source in zip(packed.leaves(), arrays, strict=True):
        slot.view(source.dtype).reshape(source.shape)[...] = source.array


def _received(parts: Sequence[Part], packed: Packed, values: Any, is_root: bool) -> list[Any]:
    slots = iter(packed.leaves())
    results: list[Any] = []
    for part in parts:
        if part.array is not None:
            slot = next(slots).view(part.array.dtype).reshape(part.array.shape)
            results.append(part.receive(to_framework(slot, part.array)))
        elif part.value is _Kept:
            results.append(part.receive(None))
        else:
            value = next(values)
            if part.load is not None and not is_root:
                part.load(value)
            results.append(part.receive(part.value if is_root else value))
    return results


def _part(leaf: Any, path: str) -> Part:
    """Decide how a leaf is synchronized."""
    if leaf is None:
        return Part(LeafSpec(path, NONE), receive=lambda _: None)
    if isinstance(leaf, _VALUES):
        return Part(LeafSpec(path, type(leaf).__name__), value=leaf)
    if (state := state_of(leaf, path)) is not None:
        return state
    if _is_typed_key(leaf):
        return _key_part(leaf, path)
    array = view(leaf, path)
    check_result(array.shape, array.dtype, array)
    return Part(array_leaf(path, array), array)


def state_of(leaf: Any, path: str) -> Part | None:
    """Return how a torch object is synchronized whose state is sent whole; None for other leaves.

    The object stays: it keeps its state on the root, and loads that of the root elsewhere.
    """
    beside: Iterable[LeafSpec] = ()
    if isinstance(leaf, ExtraState):
        kind = f"extra state of {type(leaf.module).__name__}"
        value, load = leaf.module.get_extra_state(), leaf.module.set_extra_state
    elif is_torch(leaf, "optim", "Optimizer"):
        kind, beside = type(leaf).__name__, _described_parameters(leaf, path)
        value, load = leaf.state_dict(), partial(_load_optimizer, leaf)
    elif is_torch(leaf, "optim", "lr_scheduler", "LRScheduler"):
        kind, value, load = _described_scheduler(leaf), leaf.state_dict(), leaf.load_state_dict
    elif is_torch(leaf, "amp", "GradScaler"):
        # One that is disabled has no state.
        kind = "GradScaler" if leaf.is_enabled() else "disabled GradScaler"
        value, load = leaf.state_dict(), leaf.load_state_dict
    else:
        return None
    described = LeafSpec(path, kind)
    return Part(described, None, value, lambda _: leaf, tuple(beside), load)


def _described_parameters(optimizer: Any, path: str) -> Iterator[LeafSpec]:
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            where = f"{path}.param_groups[{number}]['params'][{position}]"
            yield LeafSpec(where, "parameter", tuple(parameter.shape))


def _described_scheduler(scheduler: Any) -> str:
    """Return the type of a scheduler, with those of the schedulers that it is made of."""
    inner = ", ".join(map(_described_scheduler, getattr(scheduler, "_schedulers", ())))
    return f"{type(scheduler).__name__}({inner})" if inner else type(scheduler).__name__


def _load_optimizer(optimizer: Any, state: Any) -> None:
    """Load a state with the dtypes that it has; torch gives it those of the parameters."""
    optimizer.load_state_dict(state)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in enumerate(parameters):
        own = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(number, {}).items():
            loaded = own.get(name)
            if is_torch(loaded, "Tensor") and is_torch(value, "Tensor"):
                own[name] = loaded if loaded.dtype == value.dtype else value.to(loaded.device)


def _is_typed_key(leaf: Any) -> bool:
    """Return whether a leaf is a JAX random key, which has an extended dtype."""
    dtype = leaf.dtype if offered(leaf, "dtype") else None
    return type(dtype).__module__.startswith("jax.") and str(dtype).startswith("key<")


def _key_part(leaf: Any, path: str) -> Part:
    import jax

    data = view(jax.random.key_data(leaf), path)
    implementation = jax.random.key_impl(leaf)
    return Part(
        LeafSpec(path, str(leaf.dtype), tuple(leaf.shape)),
        data,
        receive=lambda received: jax.random.wrap_key_data(received, impl=implementation),
    )


def _take_from_whole(flat: Flat, parts: Sequence[Part], packed: Packed, is_root: bool) -> list[Any]:
    """Put the arrays of the root's tree into `packed`, and return its other values."""
    values: list[Any] = []
    arrays: list[BufferView] = []
    for part, leaf in zip(parts, (*flat.leaves, *flat.extras), strict=True):
        if part.array is not None:
            arrays.append(_part(leaf, "tree").array or part.array)
        elif part.value is not _Kept:
            values.append(_part(leaf, "tree").value)
    if not is_root:
        _pack_raw(packed, arrays)
    return values
