"""MLX: optimizers whose gradients are reduced over all ranks before each update."""

from __future__ import annotations

from typing import Any, Final

from mlx.nn import Module
from mlx.optimizers import Optimizer

from arraycomm import DistributedOptimizer, synchronize
from arraycomm.adapters import numpy as plain

__all__ = ["DistributedOptimizer", "synchronize"]


def check(optimizer: Any) -> None:
    """Raise unless this is an optimizer of MLX that is not distributed already."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "DistributedOptimizer: optimizer must be an mlx.optimizers.Optimizer; "
            f"got {type(optimizer).__name__}"
        )


class Distributed(plain.Distributed):
    """An optimizer of MLX whose gradients are reduced over all ranks before each update.

    Everything but its updates is the wrapped optimizer's own: its attributes can be read and set.
    """

    @staticmethod
    def _find_methods(optimizer: Any) -> dict[str, plain.Method]:
        # Not looked for as on other objects: a MultiOptimizer raises if it is asked for `step`.
        return {"update": plain.Method(None)}

    def _inputs_of(self, params: Any, state: Any) -> Any:
        trained = params.trainable_parameters() if isinstance(params, Module) else params
        return self._inputs.of(trained, self._optimizer.state)

    def update(self, model: Any, gradients: Any) -> None:
        """Reduce the gradients, and update the model's parameters with the result; collective.

        Parameters
        ----------
        model : mlx.nn.Module
            The model whose parameters are updated in place.
        gradients : pytree of mlx.core.array
            This rank's gradients, as `mlx.nn.value_and_grad` returns them.
        """
        self._step("update", model, gradients)

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """Reduce the gradients, and return the parameters updated with the result; collective.

        Parameters
        ----------
        gradients, parameters : pytree of mlx.core.array
            This rank's gradients, and the parameters, which are the same on every rank.

        Returns
        -------
        pytree of mlx.core.array
            The new parameters; those passed, if the gradients were only accumulated.
        """
        inputs = self._inputs_of(parameters, None)
        complete, reduced = self._gradients.add(gradients, None, inputs)
        if not complete:
            return parameters
        with self._gradients.taking_step():
            return self._optimizer.apply_gradients(reduced, parameters)


distribute: Final = Distributed
