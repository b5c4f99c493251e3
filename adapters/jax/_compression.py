"""Optax transformations that compress gradients by an object, and keep its state in their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from arraycomm.adapters.jax._tracing import flatten, holds_tracers

# Reduces a list of gradients as it is.
Reduce = Callable[[Any], Any]


class CompressedState(NamedTuple):
    """State of an optimizer whose gradients are compressed by an object.

    Attributes
    ----------
    compression : tuple of pytree or None
        What the object remembers of each parameter on this rank.
    inner : pytree
        The optimizer's own state, the same on all ranks.
    """

    compression: Any
    inner: Any


def compressing(
    inner: Any, gradients: Any
) -> tuple[Callable[[Any], Any], Callable[..., tuple[Any, Any]]]:
    """Return functions of a transformation that compresses gradients, and then applies `inner`.

    The second one, `update`, is passed a `Reduce` first.
    """
    change = _fed_back if gradients.compressor.hook is None else _hooked

    def init(params: Any) -> CompressedState:
        leaves, _ = flatten(params)
        states = (
            None if leaf is None else gradients.compressor.states.compression.init(leaf)
            for leaf in leaves
        )
        return CompressedState(tuple(states), inner.init(params))

    def update(
        reduce: Reduce, updates: Any, state: CompressedState, params: Any = None, **extra: Any
    ) -> tuple[Any, CompressedState]:
        if gradients.joined:
            gradients.compressor.check_outside_join()
        leaves, structure = flatten(updates)
        reduced, states = change(gradients, leaves, state.compression, reduce)
        changes, own = inner.update(
            jax.tree.unflatten(structure, reduced), state.inner, params, **extra
        )
        return changes, CompressedState(states, own)

    return init, update


def _fed_back(
    gradients: Any, leaves: list[Any], states: tuple[Any, ...], reduce: Reduce
) -> tuple[Any, tuple[Any, ...]]:
    """Reduce gradients with error feedback; a missing one leaves its residual as it is."""
    try:
        pairs = gradients.compressor.fed_back_with(leaves, states)
    except Exception as error:
        if holds_tracers(leaves):
            raise
        gradients.fail(error)
    return reduce([sent for sent, _ in pairs]), tuple(state for _, state in pairs)


def _hooked(
    gradients: Any, leaves: list[Any], states: tuple[Any, ...], reduce: Reduce
) -> tuple[Any, tuple[Any, ...]]:
    """Reduce gradients by an object's own `reduce`."""
    if holds_tracers((leaves, states)):
        raise TypeError(
            f"DistributedOptimizer: compression={gradients.compressor.described} makes collectives "
            "that JAX cannot compile; call the transformation outside jax.jit, or pass "
            'ErrorFeedback("bfloat16")'
        )
    # What the ranks' steps depend on is compared with a reduction.
    reduce([])
    reduced, new = gradients.compressor.hook.reduce_with(leaves, states)
    return reduced, new
