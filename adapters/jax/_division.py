"""Which rank keeps which part of an optax transformation's state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp


class Elsewhere(NamedTuple):
    """Stands for a leaf that another rank keeps; to JAX it is a tree without leaves."""


@dataclass(frozen=True)
class Division:
    """Which rank owns each leaf of the parameters, and each leaf of the state."""

    # Exchanges updates; see `arraycomm._training.shards`.
    shards: Any
    # The structures of the parameters, and of the whole state.
    params: Any
    state: Any
    # The rank that owns each leaf of the parameters.
    owners: tuple[int, ...]
    # To which of these each leaf of the state belongs; None for what every rank keeps.
    state_leaves: tuple[int | None, ...]
    # The dtype and shape of each leaf of the whole state.
    state_types: tuple[Any, ...]

    def __hash__(self) -> int:
        # JAX asks for it in every call of a compiled function.
        return hash((id(self.shards), self.owners))

    def __deepcopy__(self, memo: dict[int, Any]) -> Division:
        return self

    @property
    def kept_of_params(self) -> list[bool]:
        """Which leaves of the parameters this rank owns."""
        rank = self.shards.comm.rank
        return [owner == rank for owner in self.owners]

    @property
    def kept_of_state(self) -> list[bool]:
        """Which leaves of the state this rank keeps."""
        own = self.kept_of_params
        return [leaf is None or own[leaf] for leaf in self.state_leaves]

    def kept(self, leaves: Iterable[Any]) -> ShardedState:
        """Return a state with these leaves, those that this rank keeps."""
        whole = jax.tree.unflatten(self.state, filled(leaves, self.kept_of_state))
        return ShardedState(whole, self)


@jax.tree_util.register_pytree_with_keys_class
class ShardedState:
    """The part of an optimizer's state that a rank keeps.

    Attributes
    ----------
    inner : pytree
        The state of the plain transformation, with `Elsewhere()` in place of every leaf that
        belongs to another rank.
    division : Division
        Which rank owns what; the same object in all states of a loop.
    """

    def __init__(self, inner: Any, division: Division) -> None:
        self.inner, self.division = inner, division

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        return ((jax.tree_util.GetAttrKey("inner"), self.inner),), self.division

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.inner,), self.division

    @classmethod
    def tree_unflatten(cls, division: Division, children: Any) -> ShardedState:
        return cls(children[0], division)

    def __copy__(self) -> ShardedState:
        return ShardedState(self.inner, self.division)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedState:
        return ShardedState(jax.tree.map(jnp.copy, self.inner), self.division)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "this state is sharded, so what this rank has of it is not whole; call "
            "arraycomm.adapters.jax.gather_state(state) on all ranks for the whole state, and give "
            "each rank its part of that with shard_state(whole, like)"
        )


def filled(leaves: Iterable[Any], kept: Sequence[bool]) -> list[Any]:
    """Return the leaves that are kept, and a mark in place of each other one."""
    rest = iter(leaves)
    return [next(rest) if is_kept else Elsewhere() for is_kept in kept]


def select(inputs: Sequence[Any], used: Sequence[bool]) -> list[Any]:
    """Return the inputs that are used."""
    return [x for x, is_used in zip(inputs, used, strict=True) if is_used]


def is_elsewhere(part: Any) -> bool:
    """Return whether a leaf stands for one that another rank keeps."""
    return isinstance(part, Elsewhere)


def division_of(state: Any) -> Division:
    """Return the division of the state passed to an update; raise if the state is not sharded."""
    if not isinstance(state, ShardedState):
        raise TypeError(
            "DistributedOptimizer: the state of a sharded transformation must be what its init or "
            f"update returned; got {type(state).__name__}; give each rank its part of a whole "
            "state with shard_state(whole, like=optimizer.init(params))"
        )
    return state.division
