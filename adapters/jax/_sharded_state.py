"""The state of a sharded optax transformation: which rank keeps which part, and the whole of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np


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


def gather_state(state: Any, *, root: int = 0) -> Any:
    """Return the whole state of sharded transformations on one rank.

    Parameters
    ----------
    state : pytree
        The state of a transformation that `DistributedOptimizer` has sharded, or one in which there
        are such, for example of an `optax.chain`.
    root : int
        The rank that gets the whole state.

    Returns
    -------
    pytree or None
        On `root` what the state would be if nothing were sharded; None on the other ranks.

    Raises
    ------
    ValueError
        There is no sharded state in `state`.

    Notes
    -----
    Collective, and not for `jax.jit`.

    Examples
    --------
    >>> import jax, optax
    >>> import arraycomm as ac
    >>> from arraycomm.adapters.jax import gather_state, shard_state
    >>> from arraycomm.testing import run
    >>> params = {"a": jax.numpy.zeros(2), "b": jax.numpy.zeros(2)}
    >>> def train(comm):
    ...     optimizer = ac.DistributedOptimizer(optax.trace(0.9), comm=comm, shard=True)
    ...     state = optimizer.init(params)
    ...     _, state = optimizer.update(params, state)
    ...     whole = gather_state(state)
    ...     return len(jax.tree.leaves(state)), len(jax.tree.leaves(whole))
    >>> run(2, train)
    [(1, 2), (1, 0)]
    """
    found = [part for part in jax.tree.leaves(state, is_leaf=_is_sharded) if _is_sharded(part)]
    if not found:
        raise ValueError(
            "gather_state: there is no sharded state in this tree; pass the state of a "
            "transformation that DistributedOptimizer(..., shard=True) returned"
        )
    gathered = iter([_gather(part, root) for part in found])
    whole = jax.tree.map(
        lambda part: next(gathered) if _is_sharded(part) else part, state, is_leaf=_is_sharded
    )
    return whole if found[0].division.shards.comm.rank == root else None


def shard_state(whole: Any, like: Any) -> Any:
    """Return this rank's part of a whole state.

    Parameters
    ----------
    whole : pytree
        What `gather_state` returned, also in a job with another number of ranks.
    like : pytree
        A state of the sharded transformation, such as its `init(params)` returns.

    Returns
    -------
    pytree
        A state like `like` with the values of `whole`.

    Raises
    ------
    ValueError
        `whole` is not the state of the same transformation and parameters.

    Notes
    -----
    Local.

    Examples
    --------
    >>> import jax, optax
    >>> import arraycomm as ac
    >>> from arraycomm.adapters.jax import shard_state
    >>> from arraycomm.testing import run
    >>> params = {"a": jax.numpy.zeros(2), "b": jax.numpy.zeros(2)}
    >>> whole = optax.trace(0.9).init(params)
    >>> def resume(comm):
    ...     optimizer = ac.DistributedOptimizer(optax.trace(0.9), comm=comm, shard=True)
    ...     state = shard_state(whole, like=optimizer.init(params))
    ...     return len(jax.tree.leaves(state))
    >>> run(2, resume)
    [1, 1]
    """
    parts, structure = jax.tree.flatten(like, is_leaf=_is_sharded)
    found: Any = structure
    try:
        values = found.flatten_up_to(whole)
    except ValueError:
        raise _other_state(f"its structure is {jax.tree.structure(whole)}") from None
    return found.unflatten(list(map(_cut, parts, values)))


def _other_state(why: str) -> ValueError:
    return ValueError(
        "shard_state: whole must be the whole state of the transformation and parameters of "
        f"`like`, as gather_state returns it; {why}"
    )


def _cut(part: Any, value: Any) -> Any:
    if not isinstance(part, ShardedState):
        return value
    division = part.division
    leaves, structure = jax.tree.flatten(value)
    if structure != division.state:
        raise _other_state(f"it has {structure} in place of {division.state}")
    for leaf, kind in zip(leaves, division.state_types, strict=True):
        if np.shape(leaf) != kind.shape:
            raise _other_state(f"it has shape {np.shape(leaf)} in place of {kind.shape}")
    return division.kept(map(jnp.asarray, select(leaves, division.kept_of_state)))


def _gather(part: ShardedState, root: int) -> Any:
    division = part.division
    comm, leaves = division.shards.comm, jax.tree.leaves(part.inner, is_leaf=is_elsewhere)
    kept = zip(leaves, division.state_leaves, division.kept_of_state, strict=True)
    sent = {
        number: np.asarray(leaf)
        for number, (leaf, belongs, is_kept) in enumerate(kept)
        if is_kept and belongs is not None and comm.rank != root
    }
    parts = comm.gather_object(sent, root)
    if parts is None:
        return None
    for each in parts:
        for number, values in each.items():
            leaves[number] = jnp.asarray(values)
    return jax.tree.unflatten(division.state, leaves)


def _is_sharded(part: Any) -> bool:
    return isinstance(part, ShardedState)
