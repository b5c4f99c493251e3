"""What an update takes besides gradients: what depends on the batch is reduced too, or refused."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import arraycomm as ac
from arraycomm._training.gradients import Gradients
from arraycomm.adapters.jax._callbacks import are_alike
from arraycomm.adapters.jax._linear import Pooled, call, replicated
from arraycomm.adapters.jax._primitive import Call, bind
from arraycomm.adapters.jax._tracing import flatten, is_eager

# Optax's names, and those of its contributed transformations.
_REDUCED: Final = ("value", "grad", "loss")
_OBJECTIVES: Final = ("value_fn", "obj_fn")
_GRADIENTS: Final = ("grad_fn",)


class Extra:
    """The further arguments of one update."""

    def __init__(self, given: Mapping[str, Any], gradients: Gradients) -> None:
        self._given, self._op, self._comm = dict(given), gradients.op, gradients.comm
        try:
            check_extra(self._given, gradients.op, gradients.accumulate)
        except (TypeError, ValueError) as error:
            # Unless a program is being traced, the other ranks reduce now.
            if not is_eager():
                raise
            gradients.fail(error)
        reduced = {name: given[name] for name in _REDUCED if name in given}
        # What is to be reduced with the gradients; some may be None.
        self.leaves, self._structure = flatten(reduced)

    def pooled(self, reduced: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments for all ranks' batches, given the reduced leaves."""
        made: dict[str, Any] = self._given | jax.tree.unflatten(self._structure, reduced)
        for name in made.keys() & set(_OBJECTIVES):
            made[name] = _pooled_objective(made[name], name, self._op, self._comm)
        for name in made.keys() & set(_GRADIENTS):
            made[name] = _pooled_gradients(made[name], self._op, self._comm)
        self._compare_others()
        return made

    def _compare_others(self) -> None:
        """Raise on all ranks if an argument differs that every rank has to pass alike."""
        local = _taken_by([self._given[name] for name in _OBJECTIVES if name in self._given])
        known = {*_REDUCED, *_OBJECTIVES, *_GRADIENTS, *local}
        others = {name: value for name, value in self._given.items() if name not in known}
        leaves = [leaf for leaf in jax.tree.leaves(others) if isinstance(leaf, _ARRAYS)]
        if leaves:
            bind(_Compare(tuple(sorted(others))), [_plain(leaf) for leaf in leaves], self._comm)


_ARRAYS: Final = (jax.Array, np.ndarray, np.generic, int, float, complex)


def _plain(leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def check_extra(given: Mapping[str, Any], op: str, accumulate: int) -> None:
    """Raise for arguments that cannot be reduced."""
    for name, value in given.items():
        if callable(value) and name not in (*_OBJECTIVES, *_GRADIENTS):
            raise TypeError(
                "DistributedOptimizer: update takes functions as "
                f"{', '.join(_OBJECTIVES + _GRADIENTS)}, whose results are reduced over all ranks; "
                f"got {name}, of which it is not known what depends on the batch. Reduce that with "
                "arraycomm.adapters.jax.allreduce, and call the plain transformation"
            )
    pooled = [name for name in given if name in (*_REDUCED, *_OBJECTIVES, *_GRADIENTS)]
    if pooled and accumulate > 1:
        raise ValueError(
            f"DistributedOptimizer: with accumulate={accumulate} update takes gradients only, "
            f"since nothing else is added up over steps; got {', '.join(pooled)}. Pass "
            f"optax.MultiSteps(optimizer, {accumulate}).gradient_transformation() to "
            "DistributedOptimizer instead, without accumulate"
        )
    if op == "sum" and not given.keys().isdisjoint(_OBJECTIVES):
        raise ValueError(
            'DistributedOptimizer: op must be "mean" for an update with value_fn, since values and '
            'gradients that optax keeps in the state would be added up again; got "sum"'
        )


def _taken_by(functions: Sequence[Callable[..., Any]]) -> set[str]:
    """Return the names of arguments that go to functions of this rank's batch."""
    return {name for function in functions for name in inspect.signature(function).parameters}


def _pooled_objective(
    function: Callable[..., Any], name: str, op: str, comm: ac.Communicator
) -> Callable[..., Any]:
    """Return the reduction of all ranks' values, with its derivatives."""

    @functools.wraps(function)
    def pooled(params: Any, *args: Any, **kwargs: Any) -> Any:
        same = jax.tree.map(lambda leaf: replicated(jnp.asarray(leaf), op, comm), params)
        value = function(same, *args, **kwargs)
        if not isinstance(value, _ARRAYS) or jnp.shape(value):
            raise TypeError(
                f"DistributedOptimizer: {name} must return one number, which is reduced over all "
                f"ranks; got {value!r}"
            )
        return call(Pooled(op), jnp.asarray(value), comm)

    return pooled


def _pooled_gradients(
    function: Callable[..., Any], op: str, comm: ac.Communicator
) -> Callable[..., Any]:
    """Return the reduction of all ranks' gradients."""

    @functools.wraps(function)
    def pooled(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        return jax.tree.map(lambda leaf: call(Pooled(op), jnp.asarray(leaf), comm), found)

    return pooled


@dataclass(frozen=True)
class _Compare(Call):
    """Raises on all ranks if the arguments of these names are not the same."""

    names: tuple[str, ...]
    name = "DistributedOptimizer"

    def make(
        self, over: ac.Communicator, place: int, arrays: Sequence[Any], outs: Sequence[Any]
    ) -> list[Any]:
        if not are_alike(arrays, over):
            raise ac.MismatchError(
                f"DistributedOptimizer: {', '.join(self.names)} must be the same on every rank, as "
                "every argument of update besides value, grad, value_fn and what value_fn takes; "
                "they differ. Reduce or broadcast what depends on the batch"
            )
        return []
