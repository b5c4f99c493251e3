"""The state of a sharded optax transformation: which rank keeps which part, and the whole of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Division:
    """Which rank owns each leaf of the parameters, and each leaf of the state."""

    # Exchanges updates; see `arraycomm._training.shards`.
    shards: Any
    # The structure of the parameters, and the rank that owns each of their leaves.
    params: Any
    owners: tuple[int, ...]
    # The structure of the whole state, and the dtypes and shapes of its leaves.
    state: Any
    state_types: tuple[Any, ...]
    # To which parameter each of its leaves belongs; None for what every rank keeps.
    state_leaves: tuple[int | None, ...]

    def __hash__(self) -> int:
        # JAX asks for it in every call of a compiled function.
        return hash((id(self.shards), self.owners))

    def __deepcopy__(self, memo: dict[int, Any]) -> Division:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "this state is sharded, so what this rank has of it is not whole; call "
            "arraycomm.adapters.jax.gather_state(state) on all ranks for the whole state, and give "
            "each rank its part of that with shard_state(whole, like)"
        )

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

    def own(self, tree: Any, name: str) -> Any:
        """Return a tree like the parameters with one element in place of other ranks' leaves.

        With them the transformation, and XLA, see as many leaves as without sharding. For XLA
        compiles the update of one leaf otherwise than that of several, and noise is drawn for all.
        """
        leaves, structure = jax.tree.flatten(tree)
        if structure != self.params:
            raise ValueError(f"{name} must have the structure {self.params}; got {structure}")
        given = [
            leaf if is_own else jnp.asarray(np.ones((1,) * np.ndim(leaf), jnp.result_type(leaf)))
            for leaf, is_own in zip(leaves, self.kept_of_params, strict=True)
        ]
        return jax.tree.unflatten(structure, given)

    def part(self, kept: Iterable[Any], others: Any) -> ShardedState:
        """Return a state of the leaves that this rank keeps, with the rest of the tree `others`."""
        rest, (leaves, structure) = iter(kept), jax.tree.flatten(others)
        found = [
            # No two states share an array: either may be donated.
            next(rest) if is_kept else copy(leaf)
            for leaf, is_kept in zip(leaves, self.kept_of_state, strict=True)
        ]
        return ShardedState(jax.tree.unflatten(structure, found), self)


@partial(jax.tree_util.register_dataclass, data_fields=["inner"], meta_fields=["division"])
@dataclass(eq=False)
class ShardedState:
    """The part of an optimizer's state that a rank keeps.

    Attributes
    ----------
    inner : pytree
        The state of the plain transformation. Of a leaf of another rank's it is the first state of
        an array with one element.
    division : Division
        Which rank owns what; the same object in all states of a loop.
    """

    inner: Any
    division: Division

    def __arraycomm_tree__(self) -> tuple[Any, Callable[[Any], ShardedState]]:
        # Without other ranks' leaves, so that ranks see that they keep different ones.
        kept = self.division.kept_of_state
        leaves = {n: leaf for n, leaf in enumerate(jax.tree.leaves(self.inner)) if kept[n]}
        return leaves, lambda new: self.division.part(new.values(), self.inner)


def select(inputs: Sequence[Any], used: Sequence[bool]) -> list[Any]:
    """Return the inputs that are used."""
    return [x for x, is_used in zip(inputs, used, strict=True) if is_used]


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
    >>> params = {"a": jax.numpy.zeros(9), "b": jax.numpy.zeros(9)}
    >>> def train(comm):
    ...     optimizer = ac.DistributedOptimizer(optax.trace(0.9), comm=comm, shard=True)
    ...     state = optimizer.init(params)
    ...     _, state = optimizer.update(params, state)
    ...     whole = gather_state(state)
    ...     return [leaf.size for leaf in jax.tree.leaves((state, whole))]
    >>> run(2, train)
    [[9, 1, 9, 9], [1, 9]]
    """
    parts, structure = jax.tree.flatten(state, is_leaf=_is_sharded)
    found = list(filter(_is_sharded, parts))
    if not found:
        raise ValueError(
            "gather_state: there is no sharded state in this tree; pass the state of a "
            "transformation that DistributedOptimizer(..., shard=True) returned"
        )
    whole = [_gather(part, root) if _is_sharded(part) else part for part in parts]
    rank = found[0].division.shards.comm.rank
    return jax.tree.unflatten(structure, whole) if rank == root else None


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
    >>> params = {"a": jax.numpy.zeros(9), "b": jax.numpy.zeros(9)}
    >>> whole = optax.trace(0.9).init(params)
    >>> def resume(comm):
    ...     optimizer = ac.DistributedOptimizer(optax.trace(0.9), comm=comm, shard=True)
    ...     state = shard_state(whole, like=optimizer.init(params))
    ...     return [leaf.size for leaf in jax.tree.leaves(state)]
    >>> run(2, resume)
    [[9, 1], [1, 9]]
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
    found = [
        # Of `like` only shapes and dtypes count: it may be what `jax.eval_shape` returns.
        jnp.asarray(leaf) if is_kept else jax.lax.full_like(other, 1)
        for leaf, other, is_kept in zip(
            leaves, jax.tree.leaves(part.inner), division.kept_of_state, strict=True
        )
    ]
    return ShardedState(jax.tree.unflatten(structure, found), division)


def _gather(part: ShardedState, root: int) -> Any:
    division = part.division
    comm, leaves = division.shards.comm, jax.tree.leaves(part.inner)
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
