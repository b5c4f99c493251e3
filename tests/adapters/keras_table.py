"""Keras's optimizers, with options and inside others, over every entry: against one process with the sum."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

import arraycomm as ac
from tests.support.pairwise import EVERY

STEPS = 4
RATE = 0.05
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    **{name: {} for name in ("AdamW", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "RMSprop")},
    **{name: {} for name in ("Lion", "Lamb", "Muon", "Adafactor", "ScheduleFreeAdamW")},
}
SCHEDULES = keras.optimizers.schedules
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "gradient_accumulation_steps": lambda: {"gradient_accumulation_steps": 2},
    "use_ema": lambda: {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2},
    "clipnorm": lambda: {"clipnorm": 0.1},
    "global_clipnorm": lambda: {"global_clipnorm": 0.1},
    "clipvalue": lambda: {"clipvalue": 0.1},
    "weight_decay": lambda: {"weight_decay": 0.1},
    "loss_scale_factor": lambda: {"loss_scale_factor": 4.0},
    # It keeps lists.
    "schedule": lambda: {
        "learning_rate": SCHEDULES.PiecewiseConstantDecay([1, 2], [0.1, 0.2, 0.3])
    },
}


def _own(**methods: Any) -> Callable[[Any], Any]:
    """Return what makes a subclass of an optimizer's class with methods that are passed its class first."""

    def made(optimizer: Any) -> Any:
        kind = type(optimizer)
        bound = {
            name: lambda self, *args, method=method: method(kind, self, *args)
            for name, method in methods.items()
        }
        optimizer.__class__ = type("Own", (kind,), bound)
        return optimizer

    return made


def _halved(grads: Any) -> list[Any]:
    """Decide from gradients, as clipping does."""
    return [None if g is None else keras.ops.where(keras.ops.max(g) > 0.5, g / 2, g) for g in grads]


def _outside_scopes(kind: Any, self: Any, state: Any, grads: Any, values: Any) -> Any:
    return kind.stateless_apply(self, state, _halved(grads), values)


class Around(keras.optimizers.Optimizer):
    """An optimizer that holds another one, and has an entry of its own."""

    def __init__(self, inner: Any) -> None:
        super().__init__(learning_rate=0.0)
        self.inner = inner

    @property
    def variables(self) -> Any:
        return self.inner.variables

    @property
    def iterations(self) -> Any:
        return self.inner.iterations

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.inner.build(variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.inner.apply(_halved(grads), trainable_variables)

    def apply_by_another_name(self, grads: Any, variables: Any) -> None:
        self.inner.apply(grads, variables)


def _several(optimizer: Any) -> Any:
    rest = keras.optimizers.OptimizerMap(keras.optimizers.SGD(RATE), {".*kernel": optimizer})
    return keras.optimizers.MultiOptimizer(rest)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda optimizer: optimizer,
    # A loss scale that grows, and shrinks with the infinity in a step.
    "LossScaleOptimizer": lambda o: keras.optimizers.LossScaleOptimizer(o, 4.0, 2),
    "MultiOptimizer": _several,
    "own update_step": _own(
        update_step=lambda kind, self, g, v, rate: kind.update_step(self, 2 * g, v, rate)
    ),
    "own apply": _own(
        apply=lambda kind, self, grads, *args: kind.apply(self, _halved(grads), *args)
    ),
    "own apply_gradients": _own(
        apply_gradients=lambda kind, self, pairs: kind.apply(
            self, *map(list, zip(*((2 * g, v) for g, v in pairs), strict=True))
        )
    ),
    "own stateless_apply": _own(stateless_apply=_outside_scopes),
    "own around another": Around,
}


def _apply(optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
    optimizer.apply(grads, variables)


def _apply_gradients(optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
    optimizer.apply_gradients(zip(grads, variables, strict=True))


def _stateless_apply(optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
    if not optimizer.built:
        optimizer.build(variables)
        if keras.backend.backend() == "jax":
            import jax

            object.__setattr__(optimizer, "compiled", jax.jit(optimizer.stateless_apply))
    state = [v.value for v in optimizer.variables]
    step = getattr(optimizer, "compiled", optimizer.stateless_apply)
    found, new = step(state, grads, [v.value for v in variables])
    for v, value in zip([*variables, *optimizer.variables], [*found, *new], strict=True):
        v.assign(value)


ENTRIES = {
    "apply": _apply,
    "apply_gradients": _apply_gradients,
    "stateless_apply": _stateless_apply,
}


class Row(NamedTuple):
    """An optimizer with an option, inside another one, that takes steps by one of its entries."""

    optimizer: str
    option: str
    wrapper: str
    entry: str

    def made(self) -> Any:
        options = OPTIMIZERS[self.optimizer] | OPTIONS[self.option]()
        kind = getattr(keras.optimizers, self.optimizer)
        return WRAPPERS[self.wrapper](kind(**{"learning_rate": RATE} | options))

    def gradients(self, rank: int, step: int) -> list[Any]:
        draw = np.random.default_rng((rank, step)).normal
        grads = [draw(size=shape).astype(np.float32) for shape in ((3, 4), (4,))]
        if self.wrapper == "LossScaleOptimizer" and (rank, step) == (0, 1):
            grads[1][0] = np.inf
        return grads

    def trained(self, optimizer: Any, grads_of_step: Callable[[int], list[Any]]) -> list[Any]:
        """Return the parameters and the optimizer's variables after steps with these gradients."""
        variables = [
            keras.Variable(np.full(shape, 0.5, np.float32), name=name)
            for name, shape in (("kernel", (3, 4)), ("bias", (4,)))
        ]
        for step in range(STEPS):
            grads = list(map(keras.ops.convert_to_tensor, grads_of_step(step)))
            ENTRIES[self.entry](optimizer, grads, variables)
        held = [*variables, *optimizer.variables]
        return [np.array(keras.ops.convert_to_numpy(v.value)) for v in held]


def rows() -> list[Row]:
    """Return every optimizer inside every other one; of those that JAX compiles, one inside each."""
    known = {name for name in vars(keras.optimizers) if _is_known(name)}
    assert known <= {*OPTIMIZERS, *WRAPPERS, "Optimizer", "TFOptimizer"}, known
    options, entries = list(OPTIONS), list(ENTRIES)
    made = [
        Row(optimizer, options[(8 * i + j) % 9], wrapper, entries[(i + j) % 3])
        for (i, optimizer), (j, wrapper) in itertools.product(
            enumerate(OPTIMIZERS), enumerate(WRAPPERS)
        )
    ]
    if keras.backend.backend() != "jax" or EVERY:
        return made
    return [row._replace(entry="stateless_apply") for row in made[::13]]


def _is_known(name: str) -> bool:
    kind = getattr(keras.optimizers, name)
    return isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer)


def check(row: Row, comm: ac.Communicator) -> bool:
    """Compare ranks' steps with those of one process; return whether Keras can take them at all."""
    ranks = range(comm.size)

    def total(step: int) -> list[Any]:
        parts = zip(*(row.gradients(rank, step) for rank in ranks), strict=True)
        return [np.sum(part, 0, np.float32) for part in parts]

    try:
        expected = row.trained(row.made(), total)
    except Exception:
        return False
    # A sum, since a mean of means would be the same.
    optimizer = ac.DistributedOptimizer(row.made(), comm=comm, op="sum")
    found = row.trained(optimizer, lambda step: row.gradients(comm.rank, step))
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5, err_msg=str(row))
    return True
