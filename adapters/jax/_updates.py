"""An optimizer's updates: their gradients reduced eagerly or inside a program, and their numbers.

Updates are numbered when they are made, not when they are traced. One that `jax.lax.cond` skips
counts too, so that a rank that skips it alone shows another number in the next one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core

import arraycomm as ac
from arraycomm._training.comparison.verification import Inputs, nothing_shown
from arraycomm._training.gradients import Gradients
from arraycomm._training.numbered import Numbering
from arraycomm._training.programs import GradientCalls
from arraycomm._trees.pytrees import flatten
from arraycomm._trees.static import texts_of
from arraycomm.adapters.jax._primitive import Call, bind
from arraycomm.adapters.jax._tracing import holds_tracers, is_traced

# What the names of parameters begin with; JAX sorts the names of a dict.
_PARAMETERS = "params"
_BRANCHES = ("cond", "switch")
_LOOPS = ("scan", "while_loop", "fori_loop", "map")


@dataclass(frozen=True)
class _Mark(Call):
    """Notes when the program comes to an update."""

    updates: Numbering
    name = "DistributedOptimizer"
    communicates = False

    def make(
        self, over: object, place: int, arrays: Sequence[Any], outs: Sequence[Any]
    ) -> list[Any]:
        self.updates.mark()
        return []


def mark_outside_branches(updates: Numbering, comm: ac.Communicator) -> None:
    """Note an update outside the branches of `jax.lax.cond` that are being traced, if any are.

    The mark and the update share no array: JAX may trace a branch once, and use it in several
    programs.
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
                "DistributedOptimizer: optax.conditionally_transform around a distributed "
                "transformation would apply this rank's own gradients in the steps that it leaves "
                "out; put it inside, DistributedOptimizer(optax.conditionally_transform(...)), or "
                "use optax.conditionally_mask"
            )
        frame = frame.f_back


def _kind_of(trace: Any) -> str:
    """Return for what a function is being traced, or an empty string."""
    info = getattr(getattr(trace, "frame", None), "debug_info", None)
    return str(getattr(info, "traced_for", ""))


class Watched(NamedTuple):
    """What an update depends on besides gradients: see `_training.comparison.verification`."""

    # Whose update it is; None if nothing is compared. A program tells updates apart by what they
    # are of, since JAX hashes what belongs to an operation, and hyperparameters may be lists.
    owner: Updates | None = None
    # Of the arrays: first the parameters, then the leaves of the state.
    names: tuple[str, ...] = ()
    parameters: int = 0
    # Which arrays of the state are one number, such as the count of the steps.
    numbers: tuple[int, ...] = ()
    # What the containers of the parameters hold besides leaves.
    held: tuple[tuple[str, str], ...] = ()

    def inputs(self, arrays: Sequence[Any]) -> Callable[[], Inputs] | None:
        """Return what returns the inputs of an update whose arrays are these; None without any."""
        if self.owner is None:
            return None
        names, count = self.names, self.parameters
        constants = (*self.owner.constants, *self.held)
        return lambda: Inputs(
            (),
            lambda: zip(names[:count], arrays[:count], strict=True),
            lambda: zip(names[count:], arrays[count:], strict=True),
            constants,
            # Under vmap they are rows of numbers, and compared with the other arrays.
            [(names[n], arrays[n].item()) for n in self.numbers if arrays[n].shape == ()],
        )

    def looking(self, arrays: Sequence[Any]) -> Callable[..., Any]:
        """Return what returns this rank's part in a call with these arrays."""
        if self.owner is None:
            return nothing_shown
        return partial(self.owner.look, inputs=self.inputs(arrays))


@dataclass(frozen=True)
class UpdateCall(Call):
    """The call of one update in a program: of its gradients some may be None.

    The arrays are the gradients that are present, what else the call needs, and what is watched.
    """

    calls: GradientCalls
    updates: Numbering
    present: tuple[bool, ...]
    watched: Watched
    name = "DistributedOptimizer"

    @property
    def beside(self) -> int:  # type: ignore[override]
        return len(self.watched.names)

    def run(
        self, leaves: Sequence[Any], beside: Sequence[Any], further: Sequence[Any] = ()
    ) -> list[Any]:
        """Make the call in the program that is traced; `beside` are the arrays watched."""
        mark_outside_branches(self.updates, self.calls.comm)
        arrays = [jnp.asarray(leaf) for leaf in leaves if leaf is not None]
        watched = (jax.lax.stop_gradient(array) for array in beside)
        return bind(self, [*arrays, *further, *watched], self.calls.comm)

    def spread(self, arrays: Iterable[Any]) -> list[Any]:
        """Return arrays of the gradients that are present, with None in the place of others."""
        given = iter(arrays)
        return [next(given) if there else None for there in self.present]

    def look(self, arrays: Sequence[Any]) -> Callable[..., Any]:
        """Return what returns this rank's part in the comparison."""
        return self.watched.looking(arrays[len(arrays) - len(self.watched.names) :])


@dataclass(frozen=True)
class _Reduce(UpdateCall):
    """The reduction of an update's gradients."""

    # All gradients are read before the first result is written.
    in_place = True

    def alone(self) -> Call:
        return replace(self, watched=Watched())

    def results(self, arrays: Sequence[Any], size: int) -> list[jax.ShapeDtypeStruct]:
        given = arrays[: sum(self.present)]
        return [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in given]

    def make(
        self, over: object, place: int, arrays: Sequence[Any], outs: Sequence[Any]
    ) -> list[Any]:
        leaves, look = self.spread(arrays), self.look(arrays)
        # The program has no buffer for a gradient that only other ranks have.
        reduced = self.calls.reduce(leaves, self.updates, place, missing="error", look=look)
        return [leaf for leaf in reduced if leaf is not None]

    def pull_back(self, cotangents: Sequence[Any], comm: ac.Communicator) -> Sequence[Any]:
        return bind(self, cotangents, comm)


def reduce_leaves(
    calls: GradientCalls,
    updates: Numbering,
    leaves: list[Any],
    watched: Watched = Watched(),  # noqa: B008
    beside: Sequence[Any] = (),
    missing: str = "zeros",
) -> list[Any]:
    """Reduce gradients: eagerly, or in one call of a compiled program and on its own buffers.

    `beside` are the arrays that are watched.
    """
    if not is_traced(leaves):
        jax.effects_barrier()
        look = watched.looking(beside)
        made: list[Any] = calls.reduce(leaves, updates, missing=missing, look=look)
        return made
    call = _Reduce(calls, updates, present_of(leaves), watched)
    return call.spread(call.run(leaves, beside))


def present_of(leaves: Sequence[Any]) -> tuple[bool, ...]:
    """Return which gradients are not None."""
    return tuple(leaf is not None for leaf in leaves)


class Updates:
    """The updates of one optimizer: their gradients reduced, eagerly or in programs.

    `constants` are the hyperparameters that do not change.
    """

    def __init__(self, gradients: Gradients, constants: tuple[tuple[str, Any], ...]) -> None:
        self._gradients, self.constants, self.look = gradients, constants, gradients.look
        self.calls = GradientCalls(gradients.comm, gradients.op_of_ranks, gradients.options)
        self.made = Numbering()

    def reduce_step(self, leaves: list[Any], inputs: Any) -> tuple[bool, list[Any]]:
        """Reduce gradients, or add them to earlier ones; return whether reduced, and the result.

        `inputs` is a tree of what the update depends on besides.
        """
        if is_traced(leaves) or self._gradients.accumulate > 1:
            return True, self.reduce(leaves, inputs)
        jax.effects_barrier()
        watched, beside = self.watched(inputs, traced=False)
        return self._gradients.add(leaves, self.made, watched.inputs(beside))

    def reduce(self, leaves: list[Any], inputs: Any = None, missing: str = "zeros") -> list[Any]:
        """Reduce what belongs to one update; compare a tree of inputs, if given, with it."""
        watched, beside = self.watched(inputs, traced=is_traced(leaves))
        return reduce_leaves(self.calls, self.made, leaves, watched, beside, missing)

    def watched(self, inputs: Any, *, traced: bool) -> tuple[Watched, list[Any]]:
        """Return what the next reduction compares, and its arrays; tracers only if it is traced."""
        if not self._gradients.verification.every or inputs is None:
            return Watched(), []
        pairs = jax.tree_util.tree_leaves_with_path(inputs)
        named = {
            _name(path): _words(leaf) for path, leaf in pairs if traced or not holds_tracers(leaf)
        }
        named = {name: leaf for name, leaf in named.items() if leaf is not None}
        parameters = sum(name.startswith(_PARAMETERS) for name in named)
        numbers = (
            n for n, leaf in enumerate(named.values()) if n >= parameters and _is_number(leaf)
        )
        held = tuple(_held(inputs["params"], self.calls.comm))
        watched = Watched(self, tuple(named), parameters, tuple(numbers), held)
        return watched, list(named.values())


def _held(params: Any, comm: ac.Communicator) -> list[tuple[str, str]]:
    """Return what the containers of parameters, and so of gradients, hold besides leaves."""
    return texts_of(flatten(params, _PARAMETERS).static, alone=comm.size == 1)


def _is_number(x: Any) -> bool:
    return x.shape == () and x.dtype.kind in "biuf"


def _name(path: Any) -> str:
    root, *rest = path
    return f"{root.key}{jax.tree_util.keystr(tuple(rest))}"


def _words(leaf: Any) -> Any:
    """Return arrays and numbers as arrays, random keys as their words, other objects as None."""
    if isinstance(leaf, float | complex):
        return np.asarray(leaf)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return None
    array: Any = leaf
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array
