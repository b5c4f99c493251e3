"""What the step of an optimizer that is a plain object depends on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from arraycomm._arrays.dlpack import offered
from arraycomm._arrays.exchange import exchange
from arraycomm._training.comparison.constants import OF_A_RANK, constants_of
from arraycomm._training.comparison.verification import Inputs, is_private, plain, scalar
from arraycomm._trees.pytrees import flatten


class StepInputs:
    """What the steps of one optimizer depend on.

    Its hyperparameters are the attributes that its class takes as arguments, if they are numbers or
    text, and those of a function the numbers with which it computes; its state are the arrays in
    its attributes that have the shape of a parameter, and the numbers beside these. An object may
    have attributes of another kind, and private ones, which may differ between ranks.
    If it is sharded, each rank has a part of the state, which is not compared.
    """

    def __init__(self, optimizer: Any, *, is_sharded: bool) -> None:
        self._optimizer, self._is_sharded = optimizer, is_sharded
        kind = type(optimizer)
        is_function = inspect.isroutine(optimizer)
        signature = None if is_function else signature_of(kind)
        self._arguments = [] if signature is None else sorted(signature.parameters)
        self._constants = (
            ("the class of the optimizer", f"{kind.__module__}.{kind.__qualname__}"),
        )
        if is_function or not hasattr(optimizer, "__dict__"):
            self._constants += tuple(constants_of(optimizer, "the optimizer"))

    def of(self, params: Any, state: Any = None) -> Callable[[], Inputs]:
        """Return a function that returns a step's inputs: parameters, and the state if passed."""

        def inputs() -> Inputs:
            numbers = [] if state is None else _numbers(state, "state")
            return Inputs(
                list(self._attributes()),
                lambda: _arrays_in(params, "params"),
                lambda: self._state(params, state),
                self._constants,
                numbers,
            )

        return inputs

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for name in self._arguments:
            value = scalar(getattr(self._optimizer, name, None))
            is_own = name in OF_A_RANK or is_private(name)
            if value is not None and plain(value) and not is_own:
                yield name, value

    def _state(self, params: Any, state: Any) -> Iterator[tuple[str, Any]]:
        if self._is_sharded:
            return
        if state is not None:
            yield from _arrays_in(state, "state")
            return
        shapes = {array.shape for _, array in _arrays_in(params, "params")} - {()}
        for name, value in sorted(getattr(self._optimizer, "__dict__", {}).items()):
            if is_private(name):
                continue
            with suppress(TypeError, ValueError):
                found = [
                    (path, x)
                    for path, x in _arrays_in(value, name, int | float)
                    if x.shape in {(), *shapes}
                ]
                # Numbers belong to the state if they are beside such arrays, as counts of steps
                # are.
                yield from found if any(x.shape in shapes for _, x in found) else ()


def signature_of(function: Any) -> inspect.Signature | None:
    """Return what arguments a function or a class takes, if it says so."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _numbers(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Return the numbers in a state, such as the count of the steps."""
    flat = flatten(tree, name)
    pairs = ((path, scalar(leaf)) for path, leaf in zip(flat.paths, flat.leaves, strict=True))
    return [(path, value) for path, value in pairs if isinstance(value, int | float | complex)]


def _arrays_in(tree: Any, name: str, numbers: Any = float) -> Iterator[tuple[str, Any]]:
    """Return the arrays of a tree, and numbers of these types."""
    flat = flatten(tree, name)
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if isinstance(leaf, numbers):
            yield path, np.asarray(leaf)
        elif hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
            yield path, leaf
        elif offered(leaf):
            # What cannot be read is no array: an optimizer may have attributes of any kind.
            with suppress(BufferError, TypeError):
                yield path, exchange(leaf, "numpy")
