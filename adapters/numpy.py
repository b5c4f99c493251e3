"""Optimizers that are plain objects with a method `update(params, grads)`."""

from __future__ import annotations

import copy
import inspect
from typing import Any, NoReturn

import arraycomm as ac

__all__ = ["DistributedOptimizer", "synchronize"]

DistributedOptimizer = ac.DistributedOptimizer
synchronize = ac.synchronize


def check(optimizer: Any) -> None:
    """Raise unless `optimizer` has a method `update`, and is not distributed already."""
    if isinstance(optimizer, Distributed):
        raise ValueError("DistributedOptimizer: this optimizer is distributed already")
    if not callable(getattr(optimizer, "update", None)):
        raise TypeError(
            "DistributedOptimizer: optimizer must be a torch optimizer, an optax "
            "transformation, or an object with a method update(params, grads); "
            f"got {type(optimizer).__name__}"
        )
    first = _first_argument(optimizer.update)
    if first.startswith("grad") or first == "updates":
        raise TypeError(
            "DistributedOptimizer: update must take the parameters first, update(params, grads); "
            f"{type(optimizer).__name__}.update takes {first!r} first; wrap it in an object that "
            "takes them in this order"
        )


def _first_argument(update: Any) -> str:
    """Return the name of the first argument, or an empty string if it is not known."""
    try:
        return next(iter(inspect.signature(update).parameters), "")
    except (TypeError, ValueError):
        return ""


class Distributed:
    """An optimizer whose gradients are reduced over all ranks before each update.

    Everything but `update` is the wrapped optimizer's own: its attributes can be read and set.
    """

    def __init__(self, optimizer: Any, gradients: Any) -> None:
        vars(self).update(_optimizer=optimizer, _gradients=gradients)

    def update(self, params: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce `grads`, and update with the result; collective.

        If gradients are accumulated and this is not the last step, `params` is returned as it is.

        Parameters
        ----------
        params, grads : pytree
            As the wrapped optimizer takes them; `grads` of the same structure on every rank.
        *args, **kwargs
            Passed on.
        """
        complete, reduced = self._gradients.add(grads)
        return self._optimizer.update(params, reduced, *args, **kwargs) if complete else params

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

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)


distribute = Distributed
