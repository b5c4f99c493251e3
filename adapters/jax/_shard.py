"""Sharded optax transformations: each rank has its own leaves' state, and computes their updates.

A rank applies the transformation to a tree in which the leaves of other ranks are arrays of one
element, and the updates are exchanged. That each leaf is then updated as in the whole tree is seen
in traces: see `_flows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from arraycomm.adapters.jax._flows import compute, leaves_of_state, refusal, text
from arraycomm.adapters.jax._primitive import Call, bind
from arraycomm.adapters.jax._sharded_state import Division, ShardedState, division_of, select


def sharded(inner: Any, shards: Any) -> optax.GradientTransformationExtraArgs:
    """Return a transformation whose updates are those of `inner`, each computed by one rank."""
    sharding = _Sharding(inner, shards)
    return optax.GradientTransformationExtraArgs(sharding.init, sharding.update)


class _Sharding:
    """The two functions of a sharded transformation."""

    def __init__(self, inner: Any, shards: Any) -> None:
        self._inner, self._shards = inner, shards
        # The types of updates that were seen to be independent, for each division and the types of
        # the arguments.
        self._seen: dict[Any, Any] = {}

    def init(self, params: Any) -> ShardedState:
        types = jax.tree.map(_type_of, params)
        traced, state = jax.make_jaxpr(self._inner.init, return_shape=True)(types)
        owners = self._shards.divide(map(_spec, jax.tree.leaves(types)))
        kinds, form = jax.tree.flatten(state)
        unknown = (None,) * len(kinds)
        structure: Any = jax.tree.structure(types)
        division = Division(self._shards, structure, owners, form, tuple(kinds), unknown)
        program = self._trace(types, state, types, {})
        division = replace(division, state_leaves=leaves_of_state(program, division, types))
        # One rank alone may see that it cannot be sharded.
        first: ShardedState = self._shards.guarded(lambda: self._first(traced, params, division))
        return first

    def _first(self, traced: Any, params: Any, division: Division) -> ShardedState:
        """Return the first state; what this rank keeps of it is as in that of the whole tree."""
        others = self._inner.init(division.own(params, "params"))
        if jax.tree.structure(others) != division.state:
            raise refusal("the structure of its state depends on the shapes of leaves")
        kept = compute(traced, division.kept_of_state, jax.tree.leaves(params))
        return division.part(map(jnp.asarray, kept), others)

    def update(
        self, updates: Any, state: ShardedState, params: Any = None, **extra: Any
    ) -> tuple[Any, ShardedState]:
        # Here too one rank alone may see it, or be passed something wrong.
        kinds, (changed, after) = self._shards.guarded(
            lambda: self._updated(updates, state, params, extra)
        )
        division = state.division
        kept = select(jax.tree.leaves(after), division.kept_of_state)
        return self._exchanged(division, kinds, changed), division.part(kept, state.inner)

    def _updated(self, updates: Any, state: ShardedState, params: Any, extra: Any) -> Any:
        """Return the types of the whole tree's updates, and what this rank's part returns."""
        division = division_of(state)
        given = params if params is None else division.own(params, "params")
        whole = updates, state.inner, params, extra
        own = division.own(updates, "updates"), state.inner, given, extra
        return self._types_of_updates(division, whole, own), self._inner.update(*own[:3], **extra)

    def _types_of_updates(self, division: Division, whole: Any, own: Any) -> Any:
        """Return the types of the updates; raise if those of own leaves depend on other leaves."""
        types, structure = jax.tree.flatten(jax.tree.map(_type_of, whole))
        key = division, structure, tuple(types)
        if key in self._seen:
            return self._seen[key]
        updates, state, params, extra = jax.tree.unflatten(structure, types)
        kept = select(jax.tree.leaves(state), division.kept_of_state)
        others = jax.tree.unflatten(division.state, division.state_types)
        state = division.part(kept, others).inner
        program = self._trace(updates, state, params, extra)
        if leaves_of_state(program, division, params) != division.state_leaves:
            raise refusal("which part of its state depends on gradients is not always the same")
        results = division.kept_of_params + division.kept_of_state
        arguments = results + (division.kept_of_params if params is not None else [])
        arguments += [True] * len(jax.tree.leaves(extra))
        part = self._trace(*jax.tree.map(_type_of, own))
        if text(part, results, arguments) != text(program, results, arguments):
            raise refusal("its update of a leaf depends on the shapes of others")
        return self._seen.setdefault(key, tuple(program.out_avals[: len(division.owners)]))

    def _trace(self, updates: Any, state: Any, params: Any, extra: Any) -> Any:
        """Trace an update of arguments of these types."""

        def update(updates: Any, state: Any, params: Any, extra: Any) -> Any:
            return self._inner.update(updates, state, params, **extra)

        trace = jax.make_jaxpr(update, return_shape=True)
        traced, results = trace(updates, state, params, extra)
        for name, found, given in (("updates", results[0], updates), ("state", results[1], state)):
            wanted: Any = jax.tree.structure(given)
            if jax.tree.structure(found) != wanted:
                raise refusal(f"an update gives its {name} another structure")
        return traced

    def _exchanged(self, division: Division, kinds: Any, updates: Any) -> Any:
        """Return the updates of all leaves, of which this rank has computed its own; collective."""
        found = jax.tree.leaves(updates)
        if self._shards.comm.size == 1 or not found:
            return updates
        exchange = _Exchange(self._shards, division.owners, kinds)
        return jax.tree.unflatten(division.params, bind(exchange, found, self._shards.comm))


@dataclass(frozen=True)
class _Exchange(Call):
    """The exchange of updates; those of other ranks' leaves are only like the results."""

    shards: Any
    owners: tuple[int, ...]
    kinds: tuple[Any, ...]
    name = "DistributedOptimizer"

    def results(self, arrays: Sequence[Any], size: int) -> list[jax.ShapeDtypeStruct]:
        rank = self.shards.comm.rank
        for owner, kind, update in zip(self.owners, self.kinds, arrays, strict=True):
            if owner == rank and update.shape != kind.shape:
                raise _not_transformed()
        return list(self.kinds)

    def make(
        self, over: object, place: int, arrays: Sequence[Any], outs: Sequence[Any]
    ) -> list[Any]:
        parameters = [
            (f"update {number}", owner, _spec(kind), update)
            for number, (owner, kind, update) in enumerate(
                zip(self.owners, self.kinds, arrays, strict=True)
            )
        ]
        changed = list(arrays)
        for number, found in self.shards.exchange(parameters):
            changed[number] = found
        return changed

    def check_differentiable(self) -> None:
        raise _not_transformed()


def _not_transformed() -> TypeError:
    return TypeError(
        "DistributedOptimizer: a sharded update cannot be differentiated or batched, since each "
        "rank has only a part of it; pass shard=False"
    )


def _type_of(leaf: Any) -> Any:
    kind = jax.typeof(leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf))
    weak = getattr(kind, "weak_type", False)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=weak)


def _spec(kind: Any) -> tuple[Any, tuple[int, ...]]:
    return np.dtype(kind.dtype), tuple(kind.shape)
