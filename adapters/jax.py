"""JAX: optax transformations that reduce gradients over all ranks, eagerly and under `jax.jit`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from jax.experimental.buffer_callback import buffer_callback

import arraycomm as ac

__all__ = ["DistributedOptimizer", "all_reduce", "synchronize"]

DistributedOptimizer = ac.DistributedOptimizer
synchronize = ac.synchronize


class _Distributed(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """What `DistributedOptimizer` made."""


def check(optimizer: Any) -> None:
    """Raise unless this is an optax transformation that is not distributed already."""
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            "DistributedOptimizer: optimizer must be an optax.GradientTransformation; "
            f"got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, _Distributed):
        raise ValueError("DistributedOptimizer: this transformation is distributed already")


def distribute(
    optimizer: optax.GradientTransformation, group: ac.Communicator, op: str, bucket_bytes: int
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that reduces over `group`, its own, and then applies `optimizer`."""
    inner = optax.with_extra_args_support(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        reduced = _reduce(group, updates, op, bucket_bytes)
        updated: tuple[Any, Any] = inner.update(reduced, state, params, **extra)
        return updated

    return _Distributed(inner.init, update)


def all_reduce(
    *, comm: ac.Communicator | None = None, op: str = "mean", bucket_bytes: int = 25 << 20
) -> optax.GradientTransformation:
    """Return a stateless transformation that reduces updates over all ranks, for `optax.chain`.

    Collective: it works on a duplicate of `comm`, since a program that JAX dispatched may still
    run while the next call is made. Eagerly, a gradient that is None on some ranks counts as zeros
    there; under `jax.jit` the structure is the same on every rank, and what fails inside the
    compiled program is raised by JAX, with the message of arraycomm's error.

    Parameters
    ----------
    comm, op, bucket_bytes
        As for `arraycomm.DistributedOptimizer`.
    """
    group = (comm or ac.world()).dup()

    def init(params: Any) -> optax.EmptyState:
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return _reduce(group, updates, op, bucket_bytes), state

    return optax.GradientTransformation(init, update)


def _reduce(group: ac.Communicator, updates: Any, op: str, bucket_bytes: int) -> Any:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(updates)):
        return _reduce_traced(group, updates, op, bucket_bytes)
    return ac.allreduce_gradients(updates, op, bucket_bytes=bucket_bytes, comm=group)


def _reduce_traced(group: ac.Communicator, updates: Any, op: str, bucket_bytes: int) -> Any:
    """One call out of the compiled program for the whole tree, on the program's own buffers."""
    if group.backend == "threads":
        raise ac.BackendUnavailableError(
            "jitted JAX collectives need a process a rank; run the program under mpiexec"
        )
    if jax.default_backend() != "cpu":
        raise ac.BackendUnavailableError(
            "jitted JAX collectives work on the CPU backend; on a GPU call the transformation "
            "outside jax.jit"
        )
    leaves, structure = jax.tree.flatten(updates, is_leaf=lambda leaf: leaf is None)
    places = [place for place, leaf in enumerate(leaves) if leaf is not None]

    def reduce_buffers(_: Any, results: Any, *buffers: Any) -> None:
        gradients: list[Any] = [None] * len(leaves)
        for place, buffer in zip(places, buffers, strict=True):
            gradients[place] = np.asarray(buffer)
        # The compiled program has no room for a gradient that only other ranks have.
        reduced = ac.allreduce_gradients(
            gradients, op, missing="error", bucket_bytes=bucket_bytes, comm=group
        )
        for place, result in zip(places, results, strict=True):
            np.asarray(result)[...] = reduced[place]

    present = [leaves[place] for place in places]
    types = [jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in present]
    reduced = buffer_callback(reduce_buffers, types, has_side_effect=True)(*present)
    for place, leaf in zip(places, reduced, strict=True):
        leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)
