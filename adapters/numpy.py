"""Optimizers that are plain objects with a method `update(params, grads)`."""

from __future__ import annotations

from typing import Any

import arraycomm as ac

__all__ = ["DistributedOptimizer", "synchronize"]

synchronize = ac.synchronize


class DistributedOptimizer:
    """An optimizer whose gradients are reduced over all ranks before each update.

    Everything but `update` is the wrapped optimizer's own: its attributes can be read and set.

    Parameters
    ----------
    optimizer : object
        With a method `update(params, grads, …)`.
    comm, op, bucket_bytes
        As for `arraycomm.DistributedOptimizer`.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        comm: ac.Communicator | None = None,
        op: str = "mean",
        bucket_bytes: int = 25 << 20,
    ) -> None:
        if not callable(getattr(optimizer, "update", None)):
            raise TypeError(
                "DistributedOptimizer: optimizer must be a torch optimizer, an optax "
                "transformation, or an object with a method update(params, grads); "
                f"got {type(optimizer).__name__}"
            )
        vars(self).update(
            _optimizer=optimizer, _comm=comm or ac.world(), _op=op, _bucket_bytes=bucket_bytes
        )

    def update(self, params: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce `grads`, and update with the result; collective.

        Parameters
        ----------
        params, grads : pytree
            As the wrapped optimizer takes them; `grads` of the same structure on every rank.
        *args, **kwargs
            Passed on.
        """
        reduced = ac.allreduce_gradients(
            grads, self._op, bucket_bytes=self._bucket_bytes, comm=self._comm
        )
        return self._optimizer.update(params, reduced, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)
