"""Whole states of sharded transformations: collected on one rank, and given out again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from arraycomm.adapters.jax._division import ShardedState, is_elsewhere, select


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
