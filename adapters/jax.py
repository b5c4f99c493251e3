"""JAX: optax transformations that reduce gradients over all ranks, eagerly and under `jax.jit`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from jax.experimental.buffer_callback import buffer_callback

import arraycomm as ac

__all__ = ["DistributedOptimizer", "all_reduce", "synchronize"]

synchronize = ac.synchronize


def DistributedOptimizer(  # noqa: N802
    optimizer: optax.GradientTransformation,
    *,
    comm: ac.Communicator | None = None,
    op: str = "mean",
    bucket_bytes: int = 25 << 20,
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that reduces the gradients over all ranks, then applies `optimizer`.

    Collective, since it works on a communicator of its own. Its state is that of `optimizer`.

    Parameters
    ----------
    optimizer : optax.GradientTransformation
        Any.
    comm, op, bucket_bytes
        As for `arraycomm.DistributedOptimizer`.
    """
    inner = optax.with_extra_args_support(optimizer)
    reduction = all_reduce(comm=comm, op=op, bucket_bytes=bucket_bytes)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        reduced, _ = reduction.update(updates, optax.EmptyState(), params)
        updated: tuple[Any, Any] = inner.update(reduced, state, params, **extra)
        return updated

    return optax.GradientTransformationExtraArgs(inner.init, update)


def all_reduce(
    *, comm: ac.Communicator | None = None, op: str = "mean", bucket_bytes: int = 25 << 20
) -> optax.GradientTransformation:
    """Return a stateless transformation that reduces updates over all ranks, for `optax.chain`.

    Collective: a program that JAX dispatched may still run while the next call is made, so the
    transformation works on a duplicate of `comm`.

    Parameters
    ----------
    comm, op, bucket_bytes
        As for `arraycomm.DistributedOptimizer`.
    """
    group = (comm or ac.world()).dup()

    def init(params: Any) -> optax.EmptyState:
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(updates)):
            return _reduce_traced(group, updates, op, bucket_bytes), state
        reduced = ac.allreduce_gradients(updates, op, bucket_bytes=bucket_bytes, comm=group)
        return reduced, state

    return optax.GradientTransformation(init, update)


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
    leaves, structure = jax.tree.flatten(updates)
    if not leaves:
        return updates

    def reduce_buffers(_: Any, results: Any, *buffers: Any) -> None:
        arrays = [np.asarray(buffer) for buffer in buffers]
        reduced = ac.allreduce_gradients(arrays, op, bucket_bytes=bucket_bytes, comm=group)
        for result, array in zip(results, reduced, strict=True):
            np.asarray(result)[...] = array

    types = [jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in leaves]
    reduced = buffer_callback(reduce_buffers, types, has_side_effect=True)(*leaves)
    return jax.tree.unflatten(structure, reduced)
