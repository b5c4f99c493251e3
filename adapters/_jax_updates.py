"""An optimizer's updates: their gradients reduced eagerly or inside a program, and their numbers.

Updates are numbered when they are made, not when they are traced. One that `jax.lax.cond` skips counts too, so
that a rank that skips it alone shows another number in the next one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core

import arraycomm as ac
from arraycomm._training.numbered import Numbering
from arraycomm._training.programs import GradientCalls
from arraycomm.adapters._jax_callbacks import Make
from arraycomm.adapters._jax_primitive import Call, bind

_BRANCHES = ("cond", "switch")
_LOOPS = ("scan", "while_loop", "fori_loop", "map")


@dataclass(frozen=True)
class _Mark(Call):
    """Notes when the program comes to an update."""

    updates: Numbering
    name = "DistributedOptimizer"
    communicates = False

    def results(self, arrays: Sequence[Any], size: int) -> list[jax.ShapeDtypeStruct]:
        return []

    def open(self, comm: ac.Communicator) -> Make:
        def make(place: int, arrays: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
            self.updates.mark()
            return []

        return make


def mark_outside_branches(updates: Numbering, comm: ac.Communicator) -> None:
    """Note an update outside the branches of `jax.lax.cond` that are being traced, if there are any.

    The mark and the update share no array: JAX may trace a branch once, and use it in several programs.
    """
    outside, trace = None, core.trace_ctx.trace
    while trace is not None:
        kind, above = _kind_of(trace), getattr(trace, "parent_trace", None)
        if kind in _LOOPS:
            break
        if kind in _BRANCHES:
            outside = above
        trace = above
    if outside is not None:
        _refuse_what_passes_gradients_on()
        with core.set_current_trace(outside):
            bind(_Mark(updates), [], comm)


def _refuse_what_passes_gradients_on() -> None:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_qualname == "conditionally_transform.<locals>.update_fn":
            raise TypeError(
                "DistributedOptimizer: optax.conditionally_transform around a distributed transformation would apply "
                "this rank's own gradients in the steps that it leaves out; put it inside, "
                "DistributedOptimizer(optax.conditionally_transform(...)), or use optax.conditionally_mask"
            )
        frame = frame.f_back


def _kind_of(trace: Any) -> str:
    """Return for what a function is being traced, or an empty string."""
    info = getattr(getattr(trace, "frame", None), "debug_info", None)
    return str(getattr(info, "traced_for", ""))


@dataclass(frozen=True)
class _Reduce(Call):
    """The reduction of an update's gradients, of which some may be None."""

    calls: GradientCalls
    updates: Numbering
    present: tuple[bool, ...]
    name = "DistributedOptimizer"
    # All gradients are read before the first result is written.
    in_place = True

    def results(self, arrays: Sequence[Any], size: int) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]

    def open(self, comm: ac.Communicator) -> Make:
        return self._make

    def _make(self, place: int, arrays: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
        given = iter(arrays)
        leaves = [next(given) if there else None for there in self.present]
        # The program has no buffer for a gradient that only other ranks have.
        reduced = self.calls.reduce(leaves, self.updates, place, missing="error")
        made = [leaf for leaf in reduced if leaf is not None]
        for out, leaf in zip(outs, made, strict=True):
            if out is not None:
                out[...] = leaf
        return made

    def pull_back(self, cotangents: Sequence[Any], comm: ac.Communicator) -> Sequence[Any]:
        return bind(self, cotangents, comm)


def reduce_traced(calls: GradientCalls, updates: Numbering, leaves: Sequence[Any]) -> list[Any]:
    """Reduce gradients, in one call of the compiled program and on the program's own buffers."""
    mark_outside_branches(updates, calls.comm)
    present = tuple(leaf is not None for leaf in leaves)
    arrays = [jnp.asarray(leaf) for leaf in leaves if leaf is not None]
    reduced = iter(bind(_Reduce(calls, updates, present), arrays, calls.comm))
    return [next(reduced) if there else None for there in present]
