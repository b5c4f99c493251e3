"""Keras 3: optimizers whose gradients are reduced over all ranks before they are applied.

Works in `fit` and in loops of one's own, with JAX, PyTorch and NumPy as Keras's backend.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import chain
from typing import Any, Final

import keras

from arraycomm import DistributedOptimizer, synchronize
from arraycomm._training.comparison.verification import Inputs, plain

__all__ = ["DistributedOptimizer", "synchronize"]

_BACKENDS: Final = ("jax", "torch", "numpy")
_STEP: Final = "_arraycomm_step"
_NO_SCOPE: Final = nullcontext()

# Reduces the gradients of an optimizer's step, given its variables as well; says whether they are
# to be applied: in a program of virtual ranks by an array.
_Reduce = Callable[[Any, list[Any], Any], tuple[Any, list[Any]]]


def check(optimizer: Any) -> None:
    """Raise unless this is an optimizer of Keras that can be distributed, and is not yet."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "DistributedOptimizer: optimizer must be a keras.optimizers.Optimizer; "
            f"got {type(optimizer).__name__}"
        )
    if any(_STEP in vars(part) for part in _parts(optimizer)):
        raise ValueError(
            "DistributedOptimizer: this optimizer, or one inside it, is distributed already; pass "
            "the outermost one, made of plain ones"
        )
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
    if gradients.compression is not None:
        raise TypeError(
            'DistributedOptimizer: compression must be "bfloat16", "float16" or None with Keras; '
            "got an object"
        )
    step = _Step(gradients, _reduction(optimizer, gradients))
    for part in _parts(optimizer):
        # Not a variable that Keras should find and save.
        object.__setattr__(part, _STEP, step)
        kind: Any = type(part)
        part.__class__ = _reducing(kind)
    return optimizer


def _parts(optimizer: Any) -> list[Any]:
    """Return an optimizer, and those inside it, as in a `LossScaleOptimizer`."""
    found = [optimizer]
    # It grows.
    for holder in found:
        for value in vars(holder).values():
            values = value.values() if isinstance(value, dict) else value
            for part in values if isinstance(value, dict | list | tuple) else [value]:
                is_one = isinstance(part, keras.optimizers.Optimizer)
                if is_one and all(part is not other for other in found):
                    found.append(part)
    return found


class _Step:
    """The step of an optimizer, whose gradients are reduced once: by the outermost call.

    What is called inside, such as the optimizer that a `LossScaleOptimizer` holds, gets reduced
    gradients, and so does what decides whether it is called.
    """

    def __init__(self, gradients: Any, reduce: _Reduce) -> None:
        self._gradients, self._reduce = gradients, reduce
        self._is_reduced = False

    def take(
        self,
        optimizer: Any,
        grads: Any,
        variables: Any,
        apply: Callable[[Any], Any],
        *,
        instead: Any = None,
        scope: AbstractContextManager[Any] = _NO_SCOPE,
    ) -> Any:
        """Apply reduced gradients, or return `instead` if they are not to be applied.

        In `scope` the variables have the values that the step begins with.
        """
        if self._is_reduced:
            return apply(grads)
        known = variables or optimizer._trainable_variables
        try:
            _check_outermost()
            _check_variables(known)
        except TypeError as error:
            self._gradients.fail(error)
        with scope:
            applies, reduced = self._reduce(optimizer, list(grads), known)

        def take() -> Any:
            self._is_reduced = True
            try:
                with self._gradients.taking_step():
                    return apply(reduced)
            finally:
                self._is_reduced = False

        if isinstance(applies, bool):
            return take() if applies else instead
        if scope is _NO_SCOPE:
            self._gradients.fail(_assigned_in_program())
        return keras.ops.cond(applies, take, lambda: instead)

    def check_between_steps(self, what: str) -> None:
        """Raise in the middle of rounds of virtual ranks."""
        if self._gradients.virtual is not None:
            self._gradients.virtual.check_between_steps(what)

    def check_reduced(self) -> None:
        """Raise on all ranks outside of a step."""
        if not self._is_reduced:
            self._gradients.fail(
                TypeError(
                    "DistributedOptimizer: update_step would apply this rank's own gradient; call "
                    "apply(grads, variables), which reduces gradients first"
                )
            )


def _assigned_in_program() -> TypeError:
    return TypeError(
        "DistributedOptimizer: with virtual_ranks a compiled program cannot call apply, which "
        "would assign variables in the last round alone; call stateless_apply"
    )


def _check_outermost() -> None:
    """Raise inside the step of an optimizer that is not distributed, unless it only divides."""
    frame = inspect.currentframe()
    while frame is not None:
        # Of methods only: a look at a frame's variables keeps them alive.
        is_method = frame.f_code.co_varnames[:1] == ("self",)
        around = frame.f_locals.get("self") if is_method else None
        if isinstance(around, keras.optimizers.Optimizer) and not (
            _STEP in vars(around) or isinstance(around, keras.optimizers.MultiOptimizer)
        ):
            name = type(around).__name__
            raise TypeError(
                f"DistributedOptimizer: {name} around a distributed optimizer would decide from "
                f"this rank's own gradients; put it inside: DistributedOptimizer({name}(...))"
            )
        frame = frame.f_back


def _check_variables(variables: list[Any]) -> None:
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise TypeError(
                f"DistributedOptimizer: {variable.path} is set to its gradient, as the scales of "
                "float8 are, of which a mean over ranks is wrong; leave the layer in float32, "
                "float16 or bfloat16"
            )


def _reduction(optimizer: Any, gradients: Any) -> _Reduce:
    constants = _constants(optimizer)
    if keras.backend.backend() == "jax":
        return _reduction_in_jax(gradients, constants)

    def reduce(optimizer: Any, grads: list[Any], variables: Any) -> tuple[bool, list[Any]]:
        gradients.place = _place(optimizer)
        known = _named(optimizer.variables)
        numbers = [(name, keras.ops.convert_to_numpy(v).item()) for name, v in known if not v.shape]
        parameters, state = partial(_values, _named(variables)), partial(_values, known)
        inputs = Inputs((), parameters, state, constants, numbers)
        reduced: tuple[bool, list[Any]] = gradients.add(grads, None, lambda: inputs)
        return reduced

    return reduce


def _reduction_in_jax(gradients: Any, constants: Any) -> _Reduce:
    """Return what reduces gradients also inside compiled programs, such as those of `fit`."""
    from arraycomm.adapters.jax._tracing import is_traced
    from arraycomm.adapters.jax._updates import Updates
    from arraycomm.adapters.jax._virtual import add_aside

    updates = Updates(gradients, constants)

    def reduce(optimizer: Any, grads: list[Any], variables: Any) -> tuple[Any, list[Any]]:
        # A program is the same for all steps; there the reductions themselves are numbered.
        gradients.place = () if is_traced(grads) else _place(optimizer)
        inputs = {
            "params": {name: v.value for name, v in _named(variables)},
            "state": {name: v.value for name, v in _named(optimizer.variables)},
        }
        if gradients.virtual is not None and is_traced(grads):
            return add_aside(updates, gradients.virtual, grads, inputs)
        return updates.reduce_step(grads, inputs)

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


def _named(variables: Any) -> list[tuple[str, Any]]:
    return [(_name(number, v.path), v) for number, v in enumerate(variables)]


@cache
def _name(number: int, path: str) -> str:
    """Return a variable's name without the numbers that tell how many layers this rank has made."""
    return f"{number}: {re.sub(r'_[0-9]+', '', path)}"


def _values(variables: Any) -> list[tuple[str, Any]]:
    """Return the values of named variables."""
    return [(name, keras.ops.convert_to_numpy(v)) for name, v in variables]


def _place(optimizer: Any) -> tuple[tuple[str, int], ...]:
    """Return what ranks compare, so that one that has skipped a step is found by the next."""
    iterations = keras.ops.convert_to_numpy(optimizer.iterations)
    return (("iterations of the optimizer", int(iterations)),)


@cache
def _reducing(kind: Any) -> Any:
    """Return a subclass of an optimizer's class that reduces gradients.

    It has the same name, under which Keras saves it: a model that is loaded has a plain optimizer.
    """

    def apply(self: Any, grads: Any, trainable_variables: Any = None, **options: Any) -> Any:
        """Reduce the gradients over all ranks, and apply the result; collective."""
        variables = None if trainable_variables is None else list(trainable_variables)

        def rest(reduced: Any) -> Any:
            return kind.apply(self, reduced, variables, **options)

        return vars(self)[_STEP].take(self, grads, variables, rest)

    def apply_gradients(self: Any, grads_and_vars: Any, **options: Any) -> Any:
        """Reduce the gradients over all ranks, and apply the result; collective."""
        grads, variables = zip(*grads_and_vars, strict=True)

        def rest(reduced: Any) -> Any:
            return kind.apply_gradients(self, zip(reduced, variables, strict=True), **options)

        step = vars(self)[_STEP]
        return step.take(self, grads, variables, rest, instead=self.iterations)

    def stateless_apply(
        self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        """Reduce the gradients over all ranks, and return what applying the result gives."""

        def rest(reduced: Any) -> Any:
            return kind.stateless_apply(self, optimizer_variables, reduced, trainable_variables)

        values = trainable_variables, optimizer_variables
        pairs = map(zip, (self._trainable_variables, self.variables), values)
        scope = keras.StatelessScope(state_mapping=list(chain.from_iterable(pairs)))
        step, before = vars(self)[_STEP], tuple(map(list, values))
        return step.take(self, grads, None, rest, instead=before, scope=scope)

    def update_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Update one variable in a step whose gradients are reduced."""
        vars(self)[_STEP].check_reduced()
        return kind.update_step(self, *args, **kwargs)

    def save_own_variables(self: Any, store: Any) -> None:
        """Save the state, between steps."""
        vars(self)[_STEP].check_between_steps("save_own_variables")
        kind.save_own_variables(self, store)

    def load_own_variables(self: Any, store: Any) -> None:
        """Load the state, between steps."""
        vars(self)[_STEP].check_between_steps("load_own_variables")
        kind.load_own_variables(self, store)

    methods = (
        *(apply, apply_gradients, stateless_apply, update_step),
        *(save_own_variables, load_own_variables),
    )
    namespace = {method.__name__: method for method in methods} | {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), namespace)
