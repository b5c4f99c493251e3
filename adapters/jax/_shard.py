"""Sharded optax transformations: each rank has its own leaves' state, and computes their updates.

The transformation is traced on the whole tree. From the trace follows which part of the state
belongs to which leaf, and whether any update depends on the gradient of another leaf. Each rank
then updates the whole tree with arrays of one element in place of the other ranks' leaves, and the
updates are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from arraycomm.adapters.jax._flows import leaves_of_state, needed, refusal, text
from arraycomm.adapters.jax._primitive import Call, bind
from arraycomm.adapters.jax._sharded_state import (
    Division,
    ShardedState,
    division_of,
    is_elsewhere,
    select,
)
from arraycomm.adapters.jax._tracing import is_traced


def sharded(inner: Any, shards: Any) -> optax.GradientTransformationExtraArgs:
    """Return a transformation whose updates are those of `inner`, each computed by one rank."""
    sharding = _Sharding(inner, shards)
    return optax.GradientTransformationExtraArgs(sharding.init, sharding.update)


class _Sharding:
    """The two functions of a sharded transformation."""

    def __init__(self, inner: Any, shards: Any) -> None:
        self._inner, self._shards = inner, shards
        # What this rank computes, for the dtypes and shapes met so far.
        self._parts: dict[Any, _Part] = {}

    def init(self, params: Any) -> ShardedState:
        leaves, structure = jax.tree.flatten(params)
        types = tuple(map(_type_of, leaves))
        whole = jax.tree.unflatten(structure, types)
        traced, state = jax.make_jaxpr(self._inner.init, return_shape=True)(whole)
        owners = self._shards.divide(map(_spec, types))
        division = Division(
            self._shards,
            structure,
            jax.tree.structure(state),
            owners,
            (),
            tuple(map(_of_type, traced.out_avals)),
        )
        inputs = _Types(types, division.state_types, types)
        program = self._trace(division, inputs, inputs.all())
        division = replace(division, state_leaves=leaves_of_state(program, division))
        compute, used = needed(traced, division.kept_of_state)
        return division.kept(compute(*select(leaves, used)))

    def update(
        self, updates: Any, state: ShardedState, params: Any = None, **extra: Any
    ) -> tuple[Any, ShardedState]:
        division = division_of(state)
        leaves = _flatten_like(division.params, updates, "updates")
        params_leaves = [] if params is None else _flatten_like(division.params, params, "params")
        state_leaves = jax.tree.leaves(state.inner, is_leaf=is_elsewhere)
        extra_leaves, extra_structure = jax.tree.flatten(extra)
        types = _Types(
            tuple(map(_type_of, leaves)),
            tuple(map(_type_unless_elsewhere, state_leaves, division.state_types)),
            tuple(map(_type_of, params_leaves)),
            tuple(map(_type_of, extra_leaves)),
            extra_structure,
        )
        # Whether it can be sharded may be seen on some ranks alone.
        part = self._shards.guarded(lambda: self._part_of(division, types))
        inputs = [*leaves, *state_leaves, *params_leaves, *extra_leaves]
        filled = [
            own if other is None else other for own, other in zip(inputs, part.others, strict=True)
        ]
        updated, after = self._shards.guarded(lambda: self._updated(division, types, filled))
        changed = self._exchanged(division, part.types, leaves[:1], jax.tree.leaves(updated))
        kept = select(jax.tree.leaves(after), division.kept_of_state)
        return jax.tree.unflatten(division.params, changed), division.kept(kept)

    def _part_of(self, division: Division, types: _Types) -> _Part:
        """Return how this rank computes its part of an update."""
        part = self._parts.get((division, types))
        if part is None:
            program = self._trace(division, types, types.all())
            if leaves_of_state(program, division) != division.state_leaves:
                raise refusal("which part of its state depends on gradients is not always the same")
            count = len(division.owners)
            others = self._others(division, types)
            self._check_others(division, types, program, others)
            updates = tuple(map(_of_type, program.out_avals[:count]))
            part = self._parts[division, types] = _Part(others, updates)
        return part

    def _others(self, division: Division, types: _Types) -> list[Any]:
        """Return stand-ins for the inputs that belong to other ranks, arrays of one element.

        With them the transformation, and XLA, see as many leaves as without sharding. For XLA
        compiles the update of one leaf otherwise than that of several, and noise is drawn for all.
        """
        shapes = [
            kind.shape if is_own else (1,) * len(kind.shape)
            for kind, is_own in zip(types.updates, division.kept_of_params, strict=True)
        ]
        small = jax.eval_shape(self._inner.init, _params_like(division, types, shapes))
        found, structure = jax.tree.flatten(small)
        if structure != division.state:
            raise refusal("the structure of its state depends on the shapes of leaves")
        shapes += [kind.shape for kind in found]
        shapes += shapes[: len(types.params)]
        shapes += [kind.shape for kind in types.extra]
        kept = _kept_of_inputs(division, types)
        with jax.ensure_compile_time_eval():
            return [
                None if is_kept else jnp.ones(shape, kind.dtype)
                for is_kept, shape, kind in zip(kept, shapes, types.all(), strict=True)
            ]

    def _check_others(
        self, division: Division, types: _Types, program: Any, others: Sequence[Any]
    ) -> None:
        """Raise if this rank's part of an update is another one with stand-ins for other leaves."""
        inputs = [
            kind if other is None else _type_of(other)
            for kind, other in zip(types.all(), others, strict=True)
        ]
        results = division.kept_of_params + division.kept_of_state
        kept = results, _kept_of_inputs(division, types)
        if text(self._trace(division, types, inputs), *kept) != text(program, *kept):
            raise refusal("its update of a leaf depends on the shapes of others")

    def _updated(self, division: Division, types: _Types, inputs: Sequence[Any]) -> tuple[Any, Any]:
        """Update with the leaves of all arguments."""
        parts = types.split(inputs)
        updates = jax.tree.unflatten(division.params, parts[0])
        state = jax.tree.unflatten(division.state, parts[1])
        params = jax.tree.unflatten(division.params, parts[2]) if types.params else None
        extra = {} if types.structure is None else jax.tree.unflatten(types.structure, parts[3])
        updated: tuple[Any, Any] = self._inner.update(updates, state, params, **extra)
        return updated

    def _trace(self, division: Division, types: _Types, inputs: Sequence[Any]) -> Any:
        """Trace an update of inputs of these dtypes and shapes."""
        update = partial(self._updated, division, types)
        traced, (changed, state) = jax.make_jaxpr(
            lambda *leaves: update(leaves), return_shape=True
        )(*inputs)
        for name, tree, wanted in (
            ("updates", changed, division.params),
            ("state", state, division.state),
        ):
            if jax.tree.structure(tree) != wanted:
                raise refusal(f"an update gives its {name} another structure")
        return traced

    def _exchanged(
        self,
        division: Division,
        types: Sequence[Any],
        reduced: Sequence[Any],
        updates: Sequence[Any],
    ) -> list[Any]:
        """Return all leaves' updates, of which this rank has its own and stand-ins; collective."""
        shards = self._shards
        if shards.comm.size == 1 or not updates:
            return list(updates)
        exchange = _Exchange(shards, division.owners, tuple(types))
        if is_traced((*reduced, *updates)):
            return bind(exchange, [jnp.asarray(update) for update in updates], shards.comm)
        return exchange.exchanged(updates)


class _Types(NamedTuple):
    """The dtypes and shapes of an update's arguments, and the structure of the extra ones."""

    updates: tuple[Any, ...]
    state: tuple[Any, ...]
    params: tuple[Any, ...]
    extra: tuple[Any, ...] = ()
    structure: Any = None

    def all(self) -> tuple[Any, ...]:
        """Return the types of all inputs."""
        return (*self.updates, *self.state, *self.params, *self.extra)

    def split(self, inputs: Sequence[Any]) -> list[list[Any]]:
        """Return which inputs belong to each argument."""
        rest = iter(inputs)
        return [[next(rest) for _ in part] for part in self[:4]]


class _Part(NamedTuple):
    """How a rank computes its part of an update."""

    # Stand-ins for the inputs that belong to other ranks; None for this rank's.
    others: list[Any]
    # The dtype and shape of the update of each leaf, also of other ranks.
    types: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _Exchange(Call):
    """The exchange of updates; those of other ranks' leaves are only like the results."""

    shards: Any
    owners: tuple[int, ...]
    types: tuple[Any, ...]
    name = "DistributedOptimizer"

    def results(self, arrays: Sequence[Any], size: int) -> list[jax.ShapeDtypeStruct]:
        rank = self.shards.comm.rank
        for owner, kind, update in zip(self.owners, self.types, arrays, strict=True):
            if owner == rank and update.shape != kind.shape:
                raise _not_transformed()
        return list(self.types)

    def make(
        self, over: object, place: int, arrays: Sequence[Any], outs: Sequence[Any]
    ) -> list[Any]:
        return self.exchanged(arrays)

    def exchanged(self, updates: Sequence[Any]) -> list[Any]:
        """Exchange updates that are not traced."""
        parameters = [
            (f"update {number}", owner, _spec(kind), leaf)
            for number, (owner, kind, leaf) in enumerate(
                zip(self.owners, self.types, updates, strict=True)
            )
        ]
        changed = list(updates)
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


def _params_like(division: Division, types: _Types, shapes: Sequence[tuple[int, ...]]) -> Any:
    """Return parameters of these shapes, of which only these and the dtypes are known."""
    kinds = types.params or types.updates
    leaves = [
        jax.ShapeDtypeStruct(shape, kind.dtype) for shape, kind in zip(shapes, kinds, strict=True)
    ]
    return jax.tree.unflatten(division.params, leaves)


def _kept_of_inputs(division: Division, types: _Types) -> list[bool]:
    """Which inputs of an update belong to this rank."""
    own = division.kept_of_params
    params = own if types.params else []
    return [*own, *division.kept_of_state, *params, *(True for _ in types.extra)]


def _flatten_like(structure: Any, tree: Any, name: str) -> list[Any]:
    leaves, found = jax.tree.flatten(tree)
    if found != structure:
        raise ValueError(f"{name} must have the structure {structure}; got {found}")
    return list(leaves)


def _type_unless_elsewhere(leaf: Any, otherwise: Any) -> Any:
    return otherwise if is_elsewhere(leaf) else _type_of(leaf)


def _type_of(leaf: Any) -> Any:
    return _of_type(jax.typeof(jnp.asarray(leaf) if not hasattr(leaf, "dtype") else leaf))


def _of_type(aval: Any) -> Any:
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)


def _spec(kind: Any) -> tuple[Any, tuple[int, ...]]:
    return np.dtype(kind.dtype), tuple(kind.shape)
