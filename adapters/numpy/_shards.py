"""Sharded optimizers that are plain objects: each rank updates lists of its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

import arraycomm as ac
from arraycomm._trees.pytrees import flatten

# Where a state has no value.
_NOTHING: Final = object()


def check_per_parameter(optimizer: Any) -> None:
    """Raise unless an object says that it treats each parameter by itself."""
    declared = getattr(type(optimizer), "per_parameter", None)
    if declared is not True:
        raise TypeError(
            f"DistributedOptimizer: {type(optimizer).__qualname__} cannot be sharded: "
            f"per_parameter of its class is {declared!r}; set per_parameter = True if it takes "
            "lists of parameters and gradients, and updates each parameter from its own gradient "
            "and state; or pass shard=False"
        )


class Sharding:
    """Which rank owns each parameter of one optimizer."""

    def __init__(self, shards: Any) -> None:
        self._shards = shards
        self._structure: str | None = None
        self._rebuild: Callable[[list[Any]], Any] = list
        self._items_of: Callable[[Any], Any] = lambda value: None
        self._specs: list[Any] = []
        self._owners: tuple[int, ...] = ()

    def update(self, update: Callable[[Any, Any], Any], params: Any, grads: Any) -> Any:
        """Return the parameters, each updated by its owner; collective."""
        self.adopt(params)
        flat = flatten(params, "params")
        leaves, own = list(flat.leaves), self._owned_by(self._shards.comm.rank)
        updated = self._shards.guarded(lambda: self._updated(update, leaves, grads, own))
        for number, array in zip(own, updated, strict=True):
            leaves[number] = array
        parameters = zip(flat.paths, self._owners, self._specs, list(leaves), strict=True)
        for number, values in self._shards.exchange(parameters):
            leaves[number] = values
        return flat.rebuild(leaves)

    def _owned_by(self, rank: int) -> list[int]:
        return [number for number, owner in enumerate(self._owners) if owner == rank]

    def adopt(self, params: Any) -> None:
        """Divide the parameters over the ranks, at the first call; raise if others come later."""
        flat = flatten(params, "params")
        specs = [
            self._shards.spec_of(leaf, path)
            for leaf, path in zip(flat.leaves, flat.paths, strict=True)
        ]
        if self._structure is None:
            self._structure, self._rebuild, self._specs = flat.structure, flat.rebuild, specs
            self._items_of = self._shards.items_like(params)
            self._owners = self._shards.divide(specs)
        elif specs != self._specs or flat.structure != self._structure:
            self._shards.fail(
                ValueError(
                    "the parameters of a sharded optimizer must be the same in every step, with "
                    f"their dtypes and shapes; got {len(specs)} after {len(self._specs)}, or "
                    "others; make a new optimizer for others"
                )
            )

    def _updated(
        self,
        update: Callable[[Any, Any], Any],
        leaves: Sequence[Any],
        grads: Any,
        own: Sequence[int],
    ) -> list[Any]:
        gradients = flatten(grads, "grads").leaves
        if len(gradients) != len(leaves):
            raise ValueError(
                f"grads must have the structure of params; got {len(gradients)} leaves for "
                f"{len(leaves)}"
            )
        returned = update([leaves[n] for n in own], [gradients[n] for n in own])
        if not isinstance(returned, (list, tuple)) or len(returned) != len(own):
            raise TypeError(
                f"update must return the {len(own)} parameters that it was given as a list; "
                f"got {type(returned).__name__}"
            )
        return list(returned)

    # State

    def gather(self, optimizer: Any, root: int) -> Any:
        """Return the whole state on `root`, None elsewhere; collective."""
        comm = self._shards.comm
        parts = comm.gather_object(state_of(optimizer), root)
        if parts is None:
            return None
        return parts[root] if self._structure is None else self._merged("state", parts)

    def load(self, optimizer: Any, state: Any, params: Any) -> None:
        """Give an optimizer this rank's part of a whole state."""
        self.adopt(params)
        set_state(optimizer, {name: self._cut(value) for name, value in state.items()})

    def _merged(self, path: str, parts: Sequence[Any]) -> Any:
        """Return a value of the whole state, made of every rank's."""
        whole = self._merged_list(parts)
        if whole is not _NOTHING:
            return whole
        first = parts[0]
        if all(isinstance(part, dict) and part.keys() == first.keys() for part in parts):
            return {key: self._merged(f"{path}[{key!r}]", [p[key] for p in parts]) for key in first}
        if not all(_equal(first, part) for part in parts):
            raise TypeError(
                f"gather_state: {path} is not the same on all ranks, and no list with one array "
                "for each parameter of its rank, so it is not known what it is in the whole state; "
                "keep what belongs to a parameter in such a list, or in a dict of such lists"
            )
        return first

    def _merged_list(self, parts: Sequence[Any]) -> Any:
        """Return the ranks' lists as a tree like the parameters; `_NOTHING` if they do not fit."""
        whole: list[Any] = [_NOTHING] * len(self._owners)
        for rank, part in enumerate(parts):
            own = self._owned_by(rank)
            if not isinstance(part, list) or len(part) != len(own):
                return _NOTHING
            for number, item in zip(own, part, strict=True):
                whole[number] = item
        if not self._fit(whole):
            return _NOTHING
        # Such as {"velocity": ...} for each parameter: no tree of arrays like the parameters.
        return whole if any(map(_is_container, whole)) else self._rebuild(whole)

    def _cut(self, value: Any) -> Any:
        """Return this rank's part of a value of the whole state."""
        is_list = isinstance(value, list) and len(value) == len(self._specs)
        items = value if is_list and any(map(_is_container, value)) else self._items_of(value)
        if items is not None and self._fit(items):
            rank = self._shards.comm.rank
            pairs = zip(items, self._owners, strict=True)
            return [item for item, owner in pairs if owner == rank]
        if isinstance(value, dict):
            return {key: self._cut(each) for key, each in value.items()}
        return value

    def _fit(self, items: Sequence[Any]) -> bool:
        """Return whether these may belong to the parameters, one to each."""
        pairs = zip(items, self._specs, strict=True)
        return bool(items) and all(self._fits(item, shape) for item, (_, shape) in pairs)

    def _fits(self, item: Any, shape: tuple[int, ...]) -> bool:
        if item is None:
            return True
        if _is_container(item):
            leaves = flatten(item, "state").leaves
            return not leaves or any(hasattr(leaf, "shape") for leaf in leaves)
        return tuple(getattr(item, "shape", (-1,))) == shape


def _is_container(item: Any) -> bool:
    return isinstance(item, (list, tuple, dict))


def state_of(optimizer: Any) -> Any:
    """Return the state of a plain object."""
    own = getattr(optimizer, "state_dict", None)
    return dict(own() if callable(own) else vars(optimizer))


def set_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Give a plain object a state."""
    own = getattr(optimizer, "load_state_dict", None)
    if callable(own):
        own(state)
    else:
        vars(optimizer).update(state)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two ranks have the same value, which may have arrays in it."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if hasattr(one, "shape"):
        mine, theirs = (ac.exchange(each, "numpy") for each in (one, other))
        return bool(np.array_equal(mine, theirs, equal_nan=mine.dtype.kind in "fc"))
    return bool(one == other)
