"""JAX: optax transformations that reduce gradients over all ranks, eagerly and under `jax.jit`."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.buffer_callback import buffer_callback

import arraycomm as ac
from arraycomm.adapters._jax_compression import compressing
from arraycomm.adapters._jax_shard import gather_state, shard_state, sharded

__all__ = ["DistributedOptimizer", "all_reduce", "gather_state", "shard_state", "synchronize"]

DistributedOptimizer = ac.DistributedOptimizer
synchronize = ac.synchronize


class _Distributed(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """A transformation that `DistributedOptimizer` made."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "DistributedOptimizer: a distributed transformation cannot be pickled, since it stands "
            "for ranks of this process; save its state, which is a pytree, and make the "
            "transformation anew in each process"
        )


def check(optimizer: Any) -> None:
    """Raise unless this is an optax transformation that is not distributed already."""
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            "DistributedOptimizer: optimizer must be an optax.GradientTransformation; "
            f"got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, _Distributed):
        raise ValueError("DistributedOptimizer: this transformation is distributed already")


def check_shard(optimizer: Any) -> None:
    """Do nothing: whether a transformation can be sharded is known once it is traced."""


def distribute(
    optimizer: optax.GradientTransformation, gradients: Any
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that reduces gradients, and then applies `optimizer`."""
    inner = optax.with_extra_args_support(optimizer)
    if gradients.shards is not None:
        inner = sharded(inner, gradients.shards)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if _is_traced(updates) or gradients.accumulate > 1:
            reduced = _reduce(gradients.comm, updates, gradients.op, gradients.options)
        else:
            # A list, as under jit and in torch, so that ranks of these may reduce together.
            leaves, structure = jax.tree.flatten(updates, is_leaf=_is_none)
            counts, listed = gradients.add(leaves)
            reduced = jax.tree.unflatten(structure, listed)
            if not counts:
                return jax.tree.map(jnp.zeros_like, reduced), state
        updated: tuple[Any, Any] = inner.update(reduced, state, params, **extra)
        return updated

    init = inner.init
    if gradients.compressor.states is not None:
        init, update = compressing(
            inner,
            gradients,
            lambda sent: _reduce(gradients.comm, sent, gradients.op, gradients.options),
        )
    reducing = _Distributed(init, gradients.entry(update))
    return reducing if gradients.accumulate == 1 else _accumulating(reducing, gradients.accumulate)


class AccumulatedState(NamedTuple):
    """State of an optimizer that is applied every few steps.

    Attributes
    ----------
    count : array of int32, shape ()
        Steps whose gradients are in `sums`.
    sums : pytree
        Sums of this rank's gradients, each of its parameter's shape.
    inner : pytree
        The optimizer's own state.
    """

    count: Any
    sums: Any
    inner: Any


def _accumulating(reducing: _Distributed, steps: int) -> _Distributed:
    """Return a transformation that applies `reducing` to the mean gradient of every `steps` steps."""

    def init(params: Any) -> AccumulatedState:
        sums = jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), _wide(leaf)), params)
        return AccumulatedState(jnp.zeros((), jnp.int32), sums, reducing.init(params))

    def update(
        updates: Any, state: AccumulatedState, params: Any = None, **extra: Any
    ) -> tuple[Any, AccumulatedState]:
        sums = jax.tree.map(
            lambda total, new: total if new is None else total + new, state.sums, updates
        )

        def apply() -> tuple[Any, AccumulatedState]:
            likes = updates if params is None else params
            means = jax.tree.map(lambda total, like: _mean(total, like, steps), sums, likes)
            changes, inner = reducing.update(means, state.inner, params, **extra)
            nothing = jax.tree.map(jnp.zeros_like, sums)
            return changes, AccumulatedState(jnp.zeros_like(state.count), nothing, inner)

        def wait() -> tuple[Any, AccumulatedState]:
            likes = updates if params is None else params
            changes = jax.tree.map(_nothing, sums, likes)
            return changes, AccumulatedState(state.count + 1, sums, state.inner)

        if _is_traced((updates, state)):
            chosen: tuple[Any, AccumulatedState] = jax.lax.cond(
                state.count + 1 == steps, apply, wait
            )
            return chosen
        return apply() if int(state.count) + 1 == steps else wait()

    return _Distributed(init, update)


def _wide(leaf: Any) -> Any:
    """Return the dtype in which gradients like this one are added up."""
    dtype = jax.dtypes.result_type(leaf)
    return jnp.promote_types(dtype, jnp.float32) if dtype.itemsize < 4 else dtype


def _mean(total: Any, like: Any, steps: int) -> Any:
    mean = total / steps
    return mean if like is None else mean.astype(jax.dtypes.result_type(like))


def _nothing(total: Any, like: Any) -> Any:
    return jnp.zeros_like(total if like is None else like)


def _is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def all_reduce(
    op: str = "mean",
    *,
    comm: ac.Communicator | None = None,
    bucket_bytes: int = 25 << 20,
    compression: str | None = None,
) -> optax.GradientTransformation:
    """Return a stateless transformation that reduces updates over all ranks, for `optax.chain`.

    Collective: it works on a duplicate of `comm`, since a program that JAX dispatched may still
    run while the next call is made. Eagerly, a gradient that is None on some ranks counts as zeros
    on these ranks. Under `jax.jit` the structure must be the same on every rank, and JAX raises an
    error inside the compiled program with the message of arraycomm's error.

    Parameters
    ----------
    op, comm, bucket_bytes, compression
        As for `arraycomm.DistributedOptimizer`.
    """
    group = (comm or ac.world()).dup()
    options = {"bucket_bytes": bucket_bytes, "compression": compression}

    def init(params: Any) -> optax.EmptyState:
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return _reduce(group, updates, op, options), state

    return optax.GradientTransformation(init, update)


def _reduce(group: ac.Communicator, updates: Any, op: str, options: dict[str, Any]) -> Any:
    if _is_traced(updates):
        return _reduce_traced(group, updates, op, options)
    leaves, structure = jax.tree.flatten(updates, is_leaf=_is_none)
    return jax.tree.unflatten(structure, ac.allreduce_gradients(leaves, op, comm=group, **options))


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _reduce_traced(group: ac.Communicator, updates: Any, op: str, options: dict[str, Any]) -> Any:
    """Reduce the whole tree in one callback of the compiled program, on the program's own buffers."""
    if group.backend == "threads":
        raise ac.BackendUnavailableError(
            "jitted JAX collectives need a process a rank; run the program under mpiexec"
        )
    if jax.default_backend() != "cpu":
        raise ac.BackendUnavailableError(
            "jitted JAX collectives work on the CPU backend; on a GPU call the transformation "
            "outside jax.jit"
        )
    leaves, structure = jax.tree.flatten(updates, is_leaf=_is_none)
    numbers = [number for number, leaf in enumerate(leaves) if leaf is not None]

    def reduce_buffers(_: Any, results: Any, *buffers: Any) -> None:
        gradients: list[Any] = [None] * len(leaves)
        for number, buffer in zip(numbers, buffers, strict=True):
            gradients[number] = np.asarray(buffer)
        # The compiled program has no buffer for a gradient that only other ranks have.
        reduced = ac.allreduce_gradients(gradients, op, missing="error", comm=group, **options)
        for number, result in zip(numbers, results, strict=True):
            np.asarray(result)[...] = reduced[number]

    present = [leaves[number] for number in numbers]
    types = [jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in present]
    reduced = buffer_callback(reduce_buffers, types, has_side_effect=True)(*present)
    for number, leaf in zip(numbers, reduced, strict=True):
        leaves[number] = leaf
    return jax.tree.unflatten(structure, leaves)
