"""Every schedule, transformation and optimizer of optax, and how each is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any
SHAPES = {"w": (4, 3), "b": (3,)}
ONE = {"w": True, "b": False}


def _adam() -> Any:
    return optax.adam(0.1)


def _schedule() -> Any:
    return optax.linear_schedule(0.1, 0.0, 9)


# What functions of optax are given for their parameters without a default, by name.
GIVEN: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("inner", "tx", "optimizer", "base_optimizer", "fast_optimizer"), _adam),
    **dict.fromkeys(("mask", "freeze_mask"), lambda: ONE),
    **dict.fromkeys(
        ("learning_rate", "clipping", "max_delta", "threshold", "max_norm"), lambda: 0.1
    ),
    **dict.fromkeys(("sync_period", "max_consecutive_errors", "every_k_schedule"), lambda: 2),
    **dict.fromkeys(("max_backtracking_steps", "max_linesearch_steps", "decay_steps"), lambda: 9),
    **dict.fromkeys(("transition_steps", "warmup_steps"), lambda: 2),
    **dict.fromkeys(("init_value", "peak_value", "value", "end_value"), lambda: 0.1),
    **dict.fromkeys(("decay_rate", "decay", "gamma", "slow_step_size", "power"), lambda: 0.5),
    "adv_optimizer": lambda: optax.sgd(0.05),
    "eta": lambda: 0.01,
    "random_seed": lambda: 0,
    "should_transform_fn": lambda: lambda step, **_: step % 2 == 1,
    "transforms": lambda: {"w": optax.sgd(0.1), "b": _adam()},
    "param_labels": lambda: {"w": "w", "b": "b"},
    "step_size": lambda: -0.1,
    "step_size_fn": _schedule,
    "measure_name": lambda: "norm",
    "measure": lambda: optax.global_norm,
    "measures": lambda: {"norm": optax.measure_with_ema(optax.global_norm, 0.9)},
    # Schedules: in lists and dictionaries.
    "schedules": lambda: [lambda n: 0.1, optax.linear_schedule(0.2, 0.0, 4)],
    "boundaries": lambda: [2],
    "cosine_kwargs": lambda: [
        {
            "init_value": 0.0,
            "peak_value": 0.1,
            "decay_steps": 9,
            "warmup_steps": 2,
            "end_value": 0.0,
        }
    ],
    "interpolate_type": lambda: "linear",
    "boundaries_and_scales": lambda: {2: 0.5},
}
# Made otherwise: of a number of arguments, of a function, or for some parameters only.
SPECIAL: dict[str, Callable[[], Any]] = {
    "chain": lambda: optax.chain(optax.clip(0.1), _adam()),
    "named_chain": lambda: optax.named_chain(("a", optax.clip(0.1)), ("b", _adam())),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(_schedule()),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(
        _schedule()
    ),
    "stateless": lambda: optax.stateless(lambda grads, _: jax.tree.map(jnp.negative, grads)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: 0.01 * p - g),
    "MultiSteps": lambda: optax.MultiSteps(_adam(), 2).gradient_transformation(),
    "scale_by_muon": lambda: optax.masked(
        optax.contrib.scale_by_muon(
            weight_dimension_numbers={
                "w": optax.contrib.MuonDimensionNumbers(),
                "b": optax.MaskedNode(),
            }
        ),
        ONE,
    ),
}
# Of single examples, which are refused, as a test of their own says; and part of `monitor`.
LEFT_OUT = {"differentially_private_aggregate", "dpsgd", "measure_with_ema"}
_HUTCHINSON = "hutchinson_estimator_diag_hessian"
# What updates of these take besides gradients.
TAKING_VALUE = {"polyak_sgd", "scale_by_polyak", "momo", "momo_adam", "reduce_on_plateau"}
TAKING_FUNCTION = {"lbfgs", "scale_by_backtracking_linesearch", "scale_by_zoom_linesearch"}
TAKING_OBJECTIVE = {"sophia", _HUTCHINSON}


def _called(function: Callable[..., Any]) -> Any:
    parameters = inspect.signature(function).parameters.values()
    return function(**{p.name: GIVEN[p.name]() for p in parameters if p.default is p.empty})


def _makes_transformation(name: str, function: Any) -> bool:
    returned = str(inspect.signature(function).return_annotation)
    return "GradientTransformation" in returned or name in {"monitor", _HUTCHINSON}


def _makes_schedule(name: str, function: Any) -> bool:
    ends = ("_schedule", "_schedules", "exponential_decay")
    return name.endswith(ends) and not _makes_transformation(name, function)


_FUNCTIONS = {
    name: value
    for module in (optax, optax.contrib)
    for name, value in sorted(vars(module).items())
    if inspect.isfunction(value) and name[0] != "_"
}
TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    name: SPECIAL.get(name) or partial(_called, function)
    for name, function in (_FUNCTIONS | {"MultiSteps": None}).items()
    if name in SPECIAL or (_makes_transformation(name, function) and name not in LEFT_OUT)
}
SCHEDULES = {
    name: _called(function)
    for name, function in _FUNCTIONS.items()
    if _makes_schedule(name, function)
}


class Problem:
    """Least squares of a part of the data, and how an optimizer is trained on it."""

    def __init__(self, rank: int, size: int) -> None:
        random = np.random.default_rng(0)
        part = slice(rank * 12 // size, (rank + 1) * 12 // size)
        self.x, self.y = (jnp.asarray(random.normal(size=(12, n)))[part] for n in (4, 3))

    def start(self, name: str, optimizer: Any) -> tuple[Tree, Tree]:
        params = {name: jnp.full(shape, 0.1, self.x.dtype) for name, shape in SHAPES.items()}
        if name == "lookahead":
            params = optax.LookaheadParams.init_synced(params)
        return params, optimizer.init(params)

    def loss(self, params: Tree) -> Any:
        return jnp.mean((jnp.tanh(self.x @ params["w"]) + params["b"] - self.y) ** 2)

    def step(self, name: str, optimizer: Any, params: Tree, state: Tree) -> tuple[Tree, Tree]:
        value, grads = jax.value_and_grad(self.loss)(getattr(params, "fast", params))
        extra: dict[str, Any] = {}
        if name in TAKING_VALUE | TAKING_FUNCTION:
            extra |= {"value": value}
        if name in TAKING_FUNCTION:
            extra |= {"grad": grads, "value_fn": self.loss}
        if name in TAKING_OBJECTIVE:
            extra |= {"obj_fn": self.loss}
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    def trained(self, name: str, optimizer: Any, *, compiled: bool, steps: int = 3) -> list[Any]:
        """Return the leaves of the parameters and of the state after a few steps."""

        def step(params: Tree, state: Tree) -> tuple[Tree, Tree]:
            return self.step(name, optimizer, params, state)

        made, held = jax.jit(step) if compiled else step, self.start(name, optimizer)
        for _ in range(steps):
            held = made(*held)
        return jax.tree.leaves(held)
