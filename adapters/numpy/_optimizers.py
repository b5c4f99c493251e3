"""SGD, Momentum and Adam, written once over the array API."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import optree
from array_api_compat import array_namespace


class ArrayOptimizer(ABC):
    """An optimizer of trees of arrays, of any framework that has the array API.

    Attributes
    ----------
    learning_rate : float
        May be set between steps.
    state : list of dict, or None
        What it remembers of each leaf of the parameters, in their order: arrays and numbers. None
        before `init` and the first step, and if there is nothing to remember.
    """

    # Each parameter's update depends on its own gradient and state alone.
    per_parameter: ClassVar[bool] = True
    # Whether there is anything to remember.
    _has_state: ClassVar[bool] = True

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = _number(learning_rate, "learning_rate", 0, math.inf)
        self.state: list[dict[str, Any]] | None = None

    def init(self, params: Any) -> None:
        """Begin anew, with the state that comes before the first step.

        The first step does so by itself. Call it on ranks that are to take the state of another one
        by `arraycomm.synchronize`, which compares structures.

        Parameters
        ----------
        params : pytree of arrays and floats
            As for `update`.
        """
        state = []
        for number, leaf in enumerate(optree.tree_leaves(params, none_is_leaf=True)):
            with _naming(params, number):
                state.append({} if leaf is None else self._begin(leaf))
        self.state = state if self._has_state else None

    def update(self, params: Any, grads: Any) -> Any:
        """Return the parameters after a step; neither they nor the gradients are changed.

        Parameters
        ----------
        params : pytree of arrays and floats
            Real or complex floating-point numbers; dicts, lists, tuples, and types that are
            registered with optree.
        grads : pytree
            Of the same structure, each leaf of its parameter's framework and shape. A parameter
            whose gradient is None stays as it is.

        Returns
        -------
        pytree
            New arrays of the parameters' framework, dtype and device.

        Raises
        ------
        ValueError
            The structures differ from one another, or from those of the steps before.
        TypeError
            A parameter cannot be updated; the message has its path.
        """
        leaves, structure = optree.tree_flatten(params, none_is_leaf=True)
        slopes, other = optree.tree_flatten(grads, none_is_leaf=True)
        if structure != other:
            raise ValueError(
                f"grads must have the structure of params; got {other} for {structure}"
            )
        if self.state is None:
            self.init(params)
        states = [{}] * len(leaves) if self.state is None else self.state
        if len(states) != len(leaves):
            raise ValueError(
                f"params must have the same leaves in every step; got {len(leaves)} after "
                f"{len(states)}"
            )
        updated, kept = [], []
        for number, (leaf, slope, before) in enumerate(zip(leaves, slopes, states, strict=True)):
            with _naming(params, number):
                new, state = (leaf, before) if slope is None else self._step(leaf, slope, before)
            updated.append(new)
            kept.append(state)
        self.state = kept if self._has_state else None
        return optree.tree_unflatten(structure, updated)

    def _begin(self, param: Any) -> dict[str, Any]:
        array = _array(param)
        xp = array_namespace(array)
        return self._start(xp, _wide(xp, xp.zeros_like(array), array))

    def _step(self, param: Any, grad: Any, state: Any) -> tuple[Any, Any]:
        array, slope = _array(param), _array(grad)
        xp = _namespace_of(array, slope)
        change, state = self._change(xp, _wide(xp, slope, array), state)
        new = array - float(self.learning_rate) * change
        if isinstance(param, float):
            return float(new), state
        return xp.astype(_array(new), array.dtype, copy=False), state

    def _start(self, xp: Any, zeros: Any) -> dict[str, Any]:
        """Return the state of a parameter before its first step, given zeros like it."""
        return {}

    @abstractmethod
    def _change(self, xp: Any, grad: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return what is subtracted, before the learning rate, and the new state."""

    def __arraycomm_tree__(self) -> tuple[Any, Callable[[Any], Any]]:
        def rebuild(leaves: dict[str, Any]) -> ArrayOptimizer:
            vars(self).update(leaves)
            return self

        return dict(vars(self)), rebuild


class SGD(ArrayOptimizer):
    """Gradient descent: p ← p − η g.

    One code for NumPy, PyTorch, JAX, CuPy, array-api-strict and every other framework with the
    array API. See `update`.

    Parameters
    ----------
    learning_rate : float
        η, not negative.

    Examples
    --------
    >>> import numpy as np
    >>> from arraycomm.adapters.numpy import SGD
    >>> SGD(0.5).update({"w": np.ones(2)}, {"w": np.ones(2)})
    {'w': array([0.5, 0.5])}
    """

    _has_state = False

    def __init__(self, learning_rate: float = 0.01) -> None:
        super().__init__(learning_rate)

    def _change(self, xp: Any, grad: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return grad, state


class Momentum(ArrayOptimizer):
    """Gradient descent with momentum: v ← μ v + g; p ← p − η v.

    As `SGD` otherwise.

    Parameters
    ----------
    learning_rate : float
        η, not negative.
    momentum : float
        μ, from 0 to 1.
    nesterov : bool
        Whether p moves by g + μ v instead of v.
    """

    def __init__(
        self, learning_rate: float = 0.01, momentum: float = 0.9, *, nesterov: bool = False
    ) -> None:
        super().__init__(learning_rate)
        self.momentum = _number(momentum, "momentum", 0, 1)
        self.nesterov = nesterov

    def _start(self, xp: Any, zeros: Any) -> dict[str, Any]:
        return {"velocity": zeros}

    def _change(self, xp: Any, grad: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        velocity = self.momentum * state["velocity"] + grad
        change = grad + self.momentum * velocity if self.nesterov else velocity
        return change, {"velocity": velocity}


class Adam(ArrayOptimizer):
    """Adam, with the moments of Kingma and Ba (2015), corrected for their start at 0.

    m ← β₁ m + (1−β₁) g; v ← β₂ v + (1−β₂) |g|²; p ← p − η m̂ / (√v̂ + ε). As `SGD` otherwise. The
    moments have the dtype of their parameter, and are of float32 if that has 16 or 8 bits.

    Parameters
    ----------
    learning_rate : float
        η, not negative.
    beta1, beta2 : float
        β₁ and β₂, from 0 to 1, below 1.
    epsilon : float
        ε, positive.
    """

    def __init__(
        self,
        learning_rate: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
    ) -> None:
        super().__init__(learning_rate)
        self.beta1 = _number(beta1, "beta1", 0, math.nextafter(1, 0))
        self.beta2 = _number(beta2, "beta2", 0, math.nextafter(1, 0))
        self.epsilon = _number(epsilon, "epsilon", 0, math.inf)

    def _start(self, xp: Any, zeros: Any) -> dict[str, Any]:
        # Not one array for both, which would count as tied.
        squares = xp.zeros_like(xp.real(zeros) if _is_complex(zeros) else zeros)
        return {"count": 0, "mean": zeros, "square": squares}

    def _change(self, xp: Any, grad: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        count, beta1, beta2 = state["count"] + 1, self.beta1, self.beta2
        size = xp.abs(grad) if _is_complex(grad) else grad
        mean = beta1 * state["mean"] + (1 - beta1) * grad
        square = beta2 * state["square"] + (1 - beta2) * (size * size)
        root = xp.sqrt(square / (1 - beta2**count))
        change = mean / (1 - beta1**count) / (root + self.epsilon)
        return change, {"count": count, "mean": mean, "square": square}


def _number(value: Any, name: str, low: float, high: float) -> float:
    if isinstance(value, str) or not low <= float(value) <= high:
        raise ValueError(f"{name} must be a number from {low} to {high}; got {value!r}")
    return float(value)


@contextmanager
def _naming(params: Any, number: int) -> Iterator[None]:
    """Let a TypeError name the leaf of this number by its path."""
    try:
        yield
    except TypeError as error:
        accessor = optree.tree_accessors(params, none_is_leaf=True)[number]
        raise TypeError(f"{accessor.codify('params')}: {error}") from error


def _array(x: Any) -> Any:
    """Return an array, NumPy's of numbers: it computes scalars of arrays without dimensions."""
    return np.asarray(x) if isinstance(x, float | np.generic) else x


def _wide(xp: Any, array: Any, param: Any) -> Any:
    """Return an array in which a parameter's steps are computed: in float32 if it is narrower."""
    is_narrow = any(name in str(param.dtype) for name in ("float16", "float8"))
    return xp.astype(array, xp.float32 if is_narrow else param.dtype, copy=False)


def _is_complex(x: Any) -> bool:
    # By name: namespaces do not know bfloat16 as a dtype.
    return "complex" in str(getattr(x, "dtype", ""))


def _namespace_of(param: Any, grad: Any) -> Any:
    """Return the namespace of a parameter and its gradient; raise if it cannot be updated."""
    xp = array_namespace(param, grad)
    if not ("float" in str(param.dtype) or _is_complex(param)):
        raise TypeError(
            f"a parameter must be an array of floating-point numbers; got {param.dtype}"
        )
    if param.shape != grad.shape:
        raise TypeError(
            f"a gradient must have the shape of its parameter; got {tuple(grad.shape)} for "
            f"{tuple(param.shape)}"
        )
    if getattr(param, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
        raise TypeError(
            "the parameter requires gradients, and the step would become part of their history; "
            "call update inside torch.no_grad()"
        )
    return xp
