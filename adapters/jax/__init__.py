"""JAX: optax transformations that reduce gradients over all ranks, eagerly and under `jax.jit`."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn, Self

import jax
import jax.numpy as jnp
import optax

import arraycomm as ac
from arraycomm import DistributedOptimizer, synchronize
from arraycomm._training.comparison.constants import constants_of
from arraycomm._training.numbered import Numbering
from arraycomm._training.programs import GradientCalls, hidden_dup
from arraycomm._trees.nodes import is_sparse
from arraycomm.adapters.jax._batch import Extra, check_extra
from arraycomm.adapters.jax._collectives import (
    allgather,
    allreduce,
    alltoall,
    bcast,
    make_token,
    reduce_scatter,
    sendrecv,
)
from arraycomm.adapters.jax._shard import sharded
from arraycomm.adapters.jax._sharded_state import gather_state, shard_state
from arraycomm.adapters.jax._tracing import flatten, holds_tracers, is_traced
from arraycomm.adapters.jax._updates import Updates, reduce_leaves
from arraycomm.adapters.jax._virtual import VirtualState, VirtualUpdates

__all__ = [
    "DistributedOptimizer",
    "all_reduce",
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "gather_state",
    "make_token",
    "reduce_scatter",
    "sendrecv",
    "shard_state",
    "synchronize",
]


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
            f"got {type(optimizer).__name__}{_remedy(optimizer)}"
        )
    if isinstance(optimizer, _Distributed):
        raise ValueError("DistributedOptimizer: this transformation is distributed already")
    if is_traced(()):
        raise TypeError(
            "DistributedOptimizer: a distributed transformation cannot be made inside a "
            "transformation of JAX, since making it is a call of all ranks; make it before, and "
            "around optax.inject_hyperparams"
        )


def _remedy(optimizer: Any) -> str:
    return (
        "; pass what its gradient_transformation() returns"
        if hasattr(optimizer, "gradient_transformation")
        else ""
    )


def check_shard(optimizer: Any) -> None:
    """Do nothing: whether a transformation can be sharded is known once it is traced."""


def distribute(
    optimizer: optax.GradientTransformation, gradients: Any
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that reduces gradients, and then applies `optimizer`."""
    takes_extra = _takes_extra(optimizer)
    inner = (
        optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)
        if takes_extra
        else optax.with_extra_args_support(optimizer)
    )
    if gradients.shards is not None:
        inner = sharded(inner, gradients.shards)
    constants = tuple(constants_of(optimizer.update, "update"))
    updates = Updates(gradients, constants)
    steps = _ReducedUpdates(inner, updates, gradients, takes_extra=takes_extra)
    init, update = inner.init, steps.update
    if gradients.virtual is not None:
        rounds = VirtualUpdates(inner, updates, gradients.virtual)
        init, update = rounds.init, _of_states(VirtualState, rounds.update, gradients)
    elif gradients.compression is not None:
        update = steps.update_compressed
    reducing = _Distributed(init, gradients.entry(update))
    if gradients.accumulate == 1:
        return reducing
    made = _accumulating(reducing, inner, gradients.accumulate, updates.made)
    return made._replace(update=_of_states(AccumulatedState, made.update, gradients))


def _of_states(kind: type[Any], update: Any, gradients: Any) -> Any:
    """Return an update of states of this kind; if it gets another, the other ranks hear of it."""

    def checked(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        fits = isinstance(state, kind)
        if not fits or _count_of(state.sums) != _count_of(updates):
            got = "one of other parameters" if fits else type(state).__name__
            with nullcontext() if is_traced((updates, state)) else gradients.announcing():
                raise TypeError(
                    f"DistributedOptimizer: the state must be the {kind.__name__} that its init or "
                    f"update returned for these parameters; got {got}"
                )
        return update(updates, state, params, **extra)

    return checked


def _count_of(tree: Any) -> int:
    """Return how many leaves a tree has: a sparse one is added up to a dense total."""
    return len(jax.tree.leaves(tree, is_leaf=lambda node: node is None or is_sparse(node)))


def _takes_extra(optimizer: optax.GradientTransformation) -> bool:
    """Return whether updates take further arguments, as those of `optax.MultiSteps` do too."""
    parameters = inspect.signature(optimizer.update).parameters.values()
    return isinstance(optimizer, optax.GradientTransformationExtraArgs) or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
    )


class _ReducedUpdates:
    """The updates of one transformation, of gradients and further arguments reduced before."""

    def __init__(self, inner: Any, updates: Updates, gradients: Any, *, takes_extra: bool) -> None:
        self._inner, self._updates, self._gradients = inner, updates, gradients
        self._takes_extra = takes_extra

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """Update with reduced gradients; with none yet if those of a step are accumulated."""
        further = self._further(extra)
        # A list, as under jit and in torch, so that ranks of these may reduce together.
        leaves, structure = flatten(updates)
        inputs = {"params": params, "state": None if self._gradients.shards else state}
        counts, reduced = self._updates.reduce_step([*leaves, *further.leaves], inputs)
        split = len(leaves)
        gradient = jax.tree.unflatten(structure, reduced[:split])
        if not counts:
            return jax.tree.map(jnp.zeros_like, gradient), state
        return self._updated(gradient, state, params, further.pooled(reduced[split:]))

    def _updated(self, gradient: Any, state: Any, params: Any, pooled: Any) -> tuple[Any, Any]:
        try:
            updated: tuple[Any, Any] = self._inner.update(gradient, state, params, **pooled)
            _check_shapes(gradient, updated[0])
        except Exception:
            # Maybe on this rank alone, which then has not taken a step that others took.
            self._gradients.verification.hasten()
            raise
        return updated

    def update_compressed(
        self, updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        """Update with gradients that are sent in the form of an object."""
        gradients, further = self._gradients, self._further(extra)
        if gradients.joined:
            gradients.check_outside_join()
        inputs = {"params": params, "state": None if gradients.shards else state}
        pooled = further.pooled(self._updates.reduce(further.leaves) if further.leaves else [])
        leaves, structure = flatten(updates)
        paths = [f"gradient {number}" for number in range(len(leaves))]
        announcing = nullcontext if holds_tracers(leaves) else gradients.announcing
        with announcing():
            sent = gradients.sent(leaves, paths)
        reduced = self._updates.reduce(sent, inputs, missing="error")
        with announcing():
            received = gradients.received(reduced, leaves, paths)
        gradient = jax.tree.unflatten(structure, received)
        return self._updated(gradient, state, params, pooled)

    def _further(self, extra: dict[str, Any]) -> Extra:
        return Extra(extra if self._takes_extra else {}, self._gradients)


def _check_shapes(gradient: Any, update: Any) -> None:
    """Raise if the transformation takes gradients of single examples, which are this rank's."""
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(update), strict=False)
    for given, made in pairs:
        if jnp.shape(given) != jnp.shape(made):
            raise TypeError(
                "DistributedOptimizer: this transformation makes an update of shape "
                f"{jnp.shape(made)} of a gradient of shape {jnp.shape(given)}, as "
                "optax.contrib.differentially_private_aggregate does of those of single examples: "
                "reduced before, they would be means of examples of several ranks. Put it before "
                "the reduction: optax.chain(it, DistributedOptimizer(...))"
            )


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


def _accumulating(
    reducing: _Distributed, inner: Any, steps: int, updates_made: Numbering
) -> _Distributed:
    """Return a transformation that applies `reducing` to the mean of every `steps` gradients."""

    def init(params: Any) -> AccumulatedState:
        sums = jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), _wide(leaf)), params)
        return AccumulatedState(jnp.zeros((), jnp.int32), sums, reducing.init(params))

    def update(
        updates: Any, state: AccumulatedState, params: Any = None, **extra: Any
    ) -> tuple[Any, AccumulatedState]:
        check_extra(extra, "mean", steps)
        sums = jax.tree.map(
            lambda total, new: total if new is None else total + new, state.sums, updates
        )

        likes = updates if params is None else params

        def mean() -> Any:
            return jax.tree.map(lambda total, like: _mean(total, like, steps), sums, likes)

        def apply() -> tuple[Any, AccumulatedState]:
            changes, kept = reducing.update(mean(), state.inner, params, **extra)
            nothing = jax.tree.map(jnp.zeros_like, sums)
            return changes, AccumulatedState(jnp.zeros_like(state.count), nothing, kept)

        def wait() -> tuple[Any, AccumulatedState]:
            def update() -> Any:
                return inner.update(mean(), state.inner, params, **extra)[0]

            # A program has one type of updates, which need not be that of parameters.
            made = jax.eval_shape(update) if traced else likes
            changes = jax.tree.map(_nothing, sums, made)
            return changes, AccumulatedState(state.count + 1, sums, state.inner)

        traced = is_traced((updates, state))
        if traced:
            chosen: tuple[Any, AccumulatedState] = jax.lax.cond(
                state.count + 1 == steps, apply, wait
            )
            return chosen
        # Inside jax.lax.cond every one of the steps counts.
        updates_made.mark()
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


def all_reduce(
    op: str = "mean",
    *,
    comm: ac.Communicator | None = None,
    bucket_bytes: int = 25 << 20,
    compression: str | None = None,
) -> optax.GradientTransformation:
    """Return a stateless transformation that reduces updates over all ranks, for `optax.chain`.

    Collective: it works on a duplicate of `comm`, since a program that JAX dispatched may still run
    while the next call is made. Eagerly, a gradient that is None on some ranks counts as zeros on
    these ranks. Under `jax.jit` the structure must be the same on every rank.

    Parameters
    ----------
    op, comm, bucket_bytes, compression
        As for `arraycomm.DistributedOptimizer`.
    """
    group = hidden_dup(comm or ac.world())
    calls = GradientCalls(group, op, {"bucket_bytes": bucket_bytes, "compression": compression})
    made = Numbering()

    def init(params: Any) -> optax.EmptyState:
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves, structure = flatten(updates)
        return jax.tree.unflatten(structure, reduce_leaves(calls, made, leaves)), state

    return optax.GradientTransformation(init, update)
