"""Keras 3: optimizers whose gradients are reduced over all ranks before they are applied.

Works in `fit` and in loops of one's own, with JAX, PyTorch and NumPy as Keras's backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, Final

import keras

from arraycomm import DistributedOptimizer, synchronize
from arraycomm._training.comparison.verification import Inputs, plain

__all__ = ["DistributedOptimizer", "synchronize"]

_BACKENDS: Final = ("jax", "torch", "numpy")
_REDUCE: Final = "_arraycomm_reduce"

# Reduces the gradients of an optimizer's step, given its variables as well; tells whether they are
# to be applied.
_Reduce = Callable[[Any, list[Any], Any], tuple[bool, list[Any]]]


def check(optimizer: Any) -> None:
    """Raise unless this is an optimizer of Keras that can be distributed, and is not yet."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "DistributedOptimizer: optimizer must be a keras.optimizers.Optimizer; "
            f"got {type(optimizer).__name__}"
        )
    if _REDUCE in vars(optimizer):
        raise ValueError("DistributedOptimizer: this optimizer is distributed already")
    backend = keras.backend.backend()
    if backend not in _BACKENDS:
        raise TypeError(
            f"DistributedOptimizer: the backend of Keras must be one of {', '.join(_BACKENDS)}; "
            f"got {backend}; set KERAS_BACKEND before Keras is imported"
        )


def distribute(optimizer: Any, gradients: Any) -> Any:
    """Let an optimizer reduce the gradients that it is to apply; it is changed in place."""
    if gradients.accumulate > 1:
        raise ValueError(
            "DistributedOptimizer: accumulate must be 1 with Keras, whose optimizers accumulate "
            f"by themselves; got {gradients.accumulate}; pass gradient_accumulation_steps to the "
            "optimizer instead"
        )
    if gradients.compressor.states is not None or gradients.compressor.hook is not None:
        raise TypeError(
            'DistributedOptimizer: compression must be "bfloat16", "float16" or None with Keras, '
            "whose optimizers keep no state of a compression; got an object"
        )
    # Not a variable that Keras should find and save.
    object.__setattr__(optimizer, _REDUCE, _reduction(optimizer, gradients))
    kind: Any = type(optimizer)
    optimizer.__class__ = _reducing(kind)
    return optimizer


def _reduction(optimizer: Any, gradients: Any) -> _Reduce:
    constants = _constants(optimizer)
    if keras.backend.backend() == "jax":
        return _reduction_in_jax(gradients, constants)

    def reduce(optimizer: Any, grads: list[Any], variables: Any) -> tuple[bool, list[Any]]:
        gradients.place = _place(optimizer)
        numbers = [
            (v.path, keras.ops.convert_to_numpy(v).item())
            for v in optimizer.variables
            if not v.shape
        ]
        parameters, state = partial(_values, variables), partial(_values, optimizer.variables)
        inputs = Inputs((), parameters, state, constants, numbers)
        reduced: tuple[bool, list[Any]] = gradients.add(grads, None, lambda: inputs)
        return reduced

    return reduce


def _reduction_in_jax(gradients: Any, constants: Any) -> _Reduce:
    """Return what reduces gradients also inside compiled programs, such as those of `fit`."""
    from arraycomm.adapters.jax._tracing import is_traced
    from arraycomm.adapters.jax._updates import Updates

    updates = Updates(gradients, constants)

    def reduce(optimizer: Any, grads: list[Any], variables: Any) -> tuple[bool, list[Any]]:
        # A program is the same for all steps; there the reductions themselves are numbered.
        gradients.place = () if is_traced(grads) else _place(optimizer)
        inputs = {
            "params": {v.path: v.value for v in variables},
            "state": {v.path: v.value for v in optimizer.variables},
        }
        _, reduced = updates.reduce_step(grads, inputs)
        return True, reduced

    return reduce


def _constants(optimizer: Any) -> tuple[tuple[str, Any], ...]:
    """Return what does not change: the class, and numbers that are no variables."""
    kind = type(optimizer)
    settings = _plain(optimizer.get_config(), "")
    return ("the class of the optimizer", f"{kind.__module__}.{kind.__qualname__}"), *settings


def _plain(config: Any, name: str) -> Iterator[tuple[str, Any]]:
    for key in sorted(config):
        value = config[key]
        if isinstance(value, dict):
            yield from _plain(value, f"{name}{key}.")
        elif plain(value) and key != "name":
            yield f"{name}{key}", value


def _values(variables: Any) -> list[tuple[str, Any]]:
    """Return the values of variables with their names."""
    return [(v.path, keras.ops.convert_to_numpy(v)) for v in variables]


def _place(optimizer: Any) -> tuple[tuple[str, int], ...]:
    """Return what ranks compare, so that one that has skipped a step is found by the next."""
    iterations = keras.ops.convert_to_numpy(optimizer.iterations)
    return (("iterations of the optimizer", int(iterations)),)


@cache
def _reducing(kind: Any) -> Any:
    """Return a subclass of an optimizer's class that reduces gradients.

    It has the same name, under which Keras saves it: a model that is loaded has a plain optimizer.
    """

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        """Reduce the gradients over all ranks, and apply the result; collective."""
        variables = trainable_variables or []
        applies, reduced = vars(self)[_REDUCE](self, list(grads), variables)
        if applies:
            kind.apply(self, reduced, trainable_variables)

    namespace = {
        "apply": apply,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), namespace)
