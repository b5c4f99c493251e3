"""Optimizers that are plain objects, and some of arraycomm's own for arrays of every framework."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, NoReturn

import arraycomm as ac
from arraycomm.adapters._array_optimizers import SGD, Adam, Momentum

__all__ = ["SGD", "Adam", "DistributedOptimizer", "Momentum", "synchronize"]

DistributedOptimizer = ac.DistributedOptimizer
synchronize = ac.synchronize

_METHODS: Final = ("update", "step", "__call__")
_PROTOCOL: Final = (
    "a torch optimizer, an optax transformation, a thinc optimizer, an object with a method "
    "update(params, grads), update(params, grads, state) or step(params, grads), or a function of these"
)


def check(optimizer: Any) -> None:
    """Raise unless `optimizer` follows the protocol, and is not distributed already."""
    if isinstance(optimizer, Distributed):
        raise ValueError("DistributedOptimizer: this optimizer is distributed already")
    if isinstance(optimizer, type):
        raise TypeError(
            f"DistributedOptimizer: optimizer must be an object; got the class {optimizer.__name__}; "
            f"pass an instance, {optimizer.__name__}(...)"
        )
    found = _methods_of(optimizer)
    if not found:
        raise TypeError(
            f"DistributedOptimizer: optimizer must be {_PROTOCOL}; got {type(optimizer).__name__}"
        )
    refusals = [_refusal(optimizer, name) for name in found]
    if None not in refusals:
        raise TypeError(f"DistributedOptimizer: {refusals[0]}")


def _methods_of(optimizer: Any) -> list[str]:
    """Return those of the protocol's methods that an object has; containers' are something else."""
    if isinstance(optimizer, dict | set | frozenset | list | tuple):
        return []
    return [name for name in _METHODS if callable(getattr(optimizer, name, None))]


def _refusal(optimizer: Any, name: str) -> str | None:
    """Say why a method cannot take parameters and gradients in this order, if it cannot."""
    signature = _signature_of(_method(optimizer, name))
    called = type(optimizer).__name__ + ("" if name == "__call__" else f".{name}")
    if inspect.isroutine(optimizer):
        called = getattr(optimizer, "__name__", called)
    if signature is None:
        return None
    first = next(iter(signature.parameters), "")
    if first.startswith("grad") or first == "updates":
        return (
            f"an optimizer must take the parameters first, (params, grads); {called} takes {first!r} "
            "first; wrap it in an object that takes them in this order"
        )
    try:
        signature.bind_partial(None, None)
    except TypeError:
        return (
            f"an optimizer must take parameters and gradients, (params, grads), and return the new "
            f"parameters; got {called}{signature}; wrap it in an object with a method "
            "update(params, grads)"
        )
    return None


def _method(optimizer: Any, name: str) -> Any:
    # The signature of a function is its own, not that of its __call__.
    return optimizer if name == "__call__" else getattr(optimizer, name)


def _signature_of(method: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(method)
    except (TypeError, ValueError):
        return None


def _takes_state(method: Any) -> bool:
    """Tell whether the argument after the gradients is the optimizer's state."""
    signature = _signature_of(method)
    names = [] if signature is None else list(signature.parameters)
    return len(names) > 2 and "state" in names[2]


class Distributed:
    """An optimizer whose gradients are reduced over all ranks before each step.

    `update`, `step` and calls of the object itself, as far as the wrapped optimizer has them, reduce
    the gradients, which are the second argument, and call the wrapped one with the result;
    collective. What it returns is returned. A step whose gradients are only accumulated returns the
    first argument, or a pair of it and the state if a state is passed as the third.

    Everything else is the wrapped optimizer's own: its attributes can be read and set.
    """

    def __init__(self, optimizer: Any, gradients: Any) -> None:
        refusals = {name: _refusal(optimizer, name) for name in _methods_of(optimizer)}
        vars(self).update(_optimizer=optimizer, _gradients=gradients, _refusals=refusals)

    def __call__(self, params: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a step, if the wrapped optimizer is called itself."""
        if "__call__" not in self._refusals:
            raise TypeError(f"{type(self._optimizer).__name__} cannot be called; use its methods")
        return self._step("__call__", params, grads, *args, **kwargs)

    def _step(self, name: str, params: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        method = _method(self._optimizer, name)
        refusal = self._refusals.get(name)
        if refusal is not None:
            self._gradients.fail(TypeError(f"DistributedOptimizer: {refusal}"))
        complete, reduced = self._gradients.add(grads)
        if complete:
            with self._gradients.taking_step():
                return method(params, reduced, *args, **kwargs)
        if _takes_state(method) and (args or "state" in kwargs):
            return params, args[0] if args else kwargs["state"]
        return params

    def compression_state(self) -> dict[int, Any]:
        """Return what a compression remembers on this rank, to be saved; local.

        Returns
        -------
        dict
            Of plain containers and arrays, by the numbers of the gradients' leaves; empty without an
            object as `compression`.
        """
        states = self._gradients.compressor.states
        return {} if states is None else states.saved()

    def load_compression_state(self, saved: dict[int, Any]) -> None:
        """Go on from what `compression_state` has returned, on this rank; local.

        Parameters
        ----------
        saved : dict
            What this rank has saved.
        """
        if self._gradients.compressor.states is not None:
            self._gradients.compressor.states.load(saved)

    def __copy__(self) -> Distributed:
        return Distributed(copy.copy(self._optimizer), self._gradients.copy())

    def __deepcopy__(self, memo: dict[int, Any]) -> Distributed:
        return Distributed(copy.deepcopy(self._optimizer, memo), self._gradients.copy())

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # The wrapped optimizer's own state could be pickled, but not that it is distributed.
        raise TypeError(
            "DistributedOptimizer: a distributed optimizer cannot be pickled, since it stands for "
            "ranks of this process; pickle the plain optimizer, and pass it to DistributedOptimizer "
            "in each process"
        )

    def __arraycomm_tree__(self) -> tuple[Any, Callable[[Any], Any]]:
        def rebuild(leaves: list[Any]) -> Distributed:
            [vars(self)["_optimizer"]] = leaves
            return self

        return [self._optimizer], rebuild

    def __getattr__(self, name: str) -> Any:
        if name in {"_optimizer", "_refusals"}:
            raise AttributeError(name)
        found = getattr(self._optimizer, name)
        return functools.partial(self._step, name) if name in self._refusals else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)


distribute = Distributed
