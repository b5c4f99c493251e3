"""thinc: models as trees, and optimizers that reduce gradients over all ranks, model by model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from thinc.api import Model, Optimizer

from arraycomm import DistributedOptimizer, synchronize
from arraycomm._training.comparison.verification import Inputs
from arraycomm.adapters import numpy as plain

__all__ = ["DistributedOptimizer", "synchronize"]

_finish_update: Final = Model.finish_update
_CLASS: Final = (("the class of the optimizer", "thinc.api.Optimizer"),)


def check(optimizer: Any) -> None:
    """Raise unless this is an optimizer of thinc that is not distributed already."""
    if isinstance(optimizer, Distributed):
        raise ValueError("DistributedOptimizer: this optimizer is distributed already")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "DistributedOptimizer: optimizer must be a thinc.api.Optimizer; "
            f"got {type(optimizer).__name__}"
        )


class Distributed(plain.Distributed):
    """An optimizer of thinc whose gradients are reduced over all ranks before each update.

    `model.finish_update(optimizer)` reduces all gradients of the model together, and then updates
    it as thinc does: with schedules, L2, clipping and averages. Everything else is the wrapped
    optimizer's own.
    """

    def finish_update(self, model: Model[Any, Any]) -> None:
        """Reduce the model's gradients, and update it with the result; collective.

        If gradients are accumulated and this is not the last step, the model's are set to zero.
        """
        # A rank that leaves out an update, but not `step_schedules`, is behind by its own count.
        self._gradients.place = (("step of the optimizer", self._optimizer.step),)
        complete, reduced = self._gradients.add(
            _GradientsOf(model), None, lambda: self._inputs_of_model(_parameters(model))
        )
        named = _parameters(model)
        if not complete:
            for node, name in named.values():
                if node.has_grad(name):
                    node.get_grad(name)[...] = 0
            return
        with self._gradients.taking_step():
            for key, (node, name) in named.items():
                if reduced[key] is not None:
                    _put_gradient(node, name, reduced[key])
            _finish_update(model, self._optimizer)

    def _inputs_of_model(self, named: dict[str, tuple[Any, str]]) -> Inputs:
        optimizer = self._optimizer
        rates = [
            (name, float(getattr(optimizer, name)(optimizer.step)))
            for name in ("learn_rate", "b1", "b2", "eps", "L2", "grad_clip")
        ]
        flags = [(name, getattr(optimizer, name)) for name in ("use_radam", "L2_is_weight_decay")]

        def parameters() -> Iterator[tuple[str, Any]]:
            return ((key, node.get_param(name)) for key, (node, name) in named.items())

        def state() -> Iterator[tuple[str, Any]]:
            for of in ("mom1", "mom2", "averages"):
                known = getattr(optimizer, of) or {}
                for key, (node, name) in named.items():
                    if (node.id, name) in known:
                        yield f"{of} of {key}", known[node.id, name]

        return Inputs([*rates, *flags], parameters, state, _CLASS)

    def __call__(
        self, key: tuple[int, str], weights: Any, gradient: Any, *, lr_scale: float = 1.0
    ) -> Any:
        """Update one parameter, with a reduction of its own; collective."""
        if self._gradients.accumulate > 1 or self._gradients.virtual is not None:
            self._gradients.fail(
                ValueError(
                    "DistributedOptimizer: gradients that are accumulated must come together; got "
                    f"one parameter, {key[1]!r}; call model.finish_update(optimizer)"
                )
            )
        # Ids of nodes are this process's alone.
        _, reduced = self._gradients.add({key[1]: gradient})
        with self._gradients.taking_step():
            # In place, since thinc expects its gradient to be zero afterwards.
            gradient[...] = reduced[key[1]]
            return self._optimizer(key, weights, gradient, lr_scale=lr_scale)


distribute = Distributed


@functools.wraps(_finish_update)
def _finish_update_together(model: Model[Any, Any], optimizer: Any) -> None:
    if isinstance(optimizer, Distributed):
        optimizer.finish_update(model)
    else:
        _finish_update(model, optimizer)


# thinc calls an optimizer parameter by parameter, and does not tell it the model.
_model_class: Any = Model
_model_class.finish_update = _finish_update_together


def open_tree(x: Any, path: str) -> tuple[Any, Callable[[Any], Any]] | None:
    """Return a model's parameters and its attributes that are arrays; see `synchronize`."""
    if isinstance(x, Optimizer):
        raise TypeError(
            f"{path}: an optimizer of thinc cannot be part of a tree, since it knows parameters by "
            "numbers of this process; synchronize the model, and make a new optimizer on every rank"
        )
    if not isinstance(x, Model):
        return None
    parameters, attributes = _parameters(x, path), dict(_array_attributes(x))
    leaves = {key: node.get_param(name) for key, (node, name) in parameters.items()}
    arrays = {key: node.attrs[name] for key, (node, name) in attributes.items()}

    def rebuild(new: dict[str, Any]) -> Model[Any, Any]:
        for key, (node, name) in parameters.items():
            node.set_param(name, new[key])
        for key, (node, name) in attributes.items():
            node.attrs[name] = new[key]
        return x

    return leaves | arrays, rebuild


def _parameters(model: Model[Any, Any], path: str = "model") -> dict[str, tuple[Any, str]]:
    """Return the node and name of each parameter that is set, by names that all ranks share."""
    found = {}
    for number, node in enumerate(model.walk()):
        if node.shims:
            raise TypeError(
                f"{path}: layer {node.name!r} belongs to another framework, whose parameters thinc "
                "does not know; synchronize that framework's module, and use its optimizer"
            )
        for name in node.param_names:
            if node.has_param(name):
                found[f"{number:03}.{node.name}.{name}"] = (node, name)
    return found


def _array_attributes(model: Model[Any, Any]) -> Iterator[tuple[str, tuple[Any, str]]]:
    for number, node in enumerate(model.walk()):
        for name, value in node.attrs.items():
            if isinstance(value, np.ndarray) or hasattr(value, "__dlpack__"):
                yield f"{number:03}.{node.name}.attrs.{name}", (node, name)


class _GradientsOf:
    """The gradients of a model, read inside the call, so that the others hear of its errors."""

    def __init__(self, model: Model[Any, Any]) -> None:
        self._model = model

    def __arraycomm_tree__(self) -> tuple[Any, Callable[[Any], Any]]:
        named = _parameters(self._model)
        return {key: node.maybe_get_grad(name) for key, (node, name) in named.items()}, dict


def _put_gradient(node: Any, name: str, reduced: Any) -> None:
    if node.has_grad(name):
        node.get_grad(name)[...] = reduced
    else:
        node.set_grad(name, reduced.copy())
