"""Training loops in the benchmark, one for each adapter, with the adapter and written by hand.

All train a small network on this rank's batch; a step of the whole batch of all ranks is the mean, or the sum, of
the ranks' steps. `mean` is what a loop written by hand does with a gradient; None stands for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple

import numpy as np

import arraycomm
from arraycomm import Communicator
from arraycomm._arrays.buffer import Array

WIDTHS: Final = (64, 1024, 1024, 10)
BATCH: Final = 64
EVALUATIONS: Final = 5
_RATE: Final = 0.01
# Large enough that the rounding of a gradient near zero does not decide about a step.
_EPSILON: Final = 1e-4

# Takes the mean of an array over ranks, in place.
Mean = Callable[[Any], None]


class Data(NamedTuple):
    """The samples of some ranks, with one-hot targets, and the network's first parameters."""

    x: Array
    y: Array
    parameters: Sequence[Array]

    def copies(self) -> list[Array]:
        """Return parameters that may be changed."""
        return [parameter.copy() for parameter in self.parameters]


class Loop(NamedTuple):
    """A loop: takes a step, and says what the parameters are."""

    step: Callable[[], Any]
    parameters: Callable[[], Sequence[Any]]


class Workload(NamedTuple):
    """What one adapter trains: which packages it needs, and the loop, with the adapter or by hand."""

    needs: tuple[str, ...]
    adapted: Callable[[Data, Communicator], Loop]
    by_hand: Callable[[Data, Mean | None], Loop]


# NumPy, and other arrays with the same optimizers ----------------------------------------------------


def _gradients(parameters: Sequence[Array], x: Array, y: Array) -> tuple[float, list[Array]]:
    """Return the mean square of a network's errors, and its gradients."""
    inputs, masks = [x], []
    *hidden, last = zip(parameters[::2], parameters[1::2], strict=True)
    for weights, bias in hidden:
        made = inputs[-1] @ weights + bias
        masks.append(made > 0)
        inputs.append(made * masks[-1])
    errors = inputs[-1] @ last[0] + last[1] - y
    slope, found = errors * errors.dtype.type(2 / errors.size), []
    for number in range(len(inputs) - 1, -1, -1):
        found += [slope.sum(0), inputs[number].T @ slope]
        if number:
            slope = (slope @ parameters[2 * number].T) * masks[number - 1]
    return float(np.square(errors).mean()), found[::-1]


def _numpy_loop(make: Callable[[], Any], data: Data, mean: Mean | None) -> Loop:
    return _plain_loop(make(), data, mean)


def _numpy_adapted(make: Callable[[], Any], data: Data, comm: Communicator) -> Loop:
    return _plain_loop(arraycomm.DistributedOptimizer(make(), comm=comm), data, None)


def _plain_loop(optimizer: Any, data: Data, mean: Mean | None) -> Loop:
    held = [data.copies()]

    def step() -> None:
        _, gradients = _gradients(held[0], data.x, data.y)
        _reduce(gradients, mean)
        held[0] = optimizer.update(held[0], gradients)

    return Loop(step, lambda: held[0])


def _reduce(gradients: Sequence[Any], mean: Mean | None) -> None:
    if mean is not None:
        for gradient in gradients:
            mean(gradient)


def _optimizer(name: str) -> Any:
    module: Any = import_module("arraycomm.adapters.numpy")
    extra = {"epsilon": _EPSILON} if name == "Adam" else {}
    return getattr(module, name)(_RATE, **extra)


def _numpy(name: str) -> Workload:
    make = partial(_optimizer, name)
    return Workload((), partial(_numpy_adapted, make), partial(_numpy_loop, make))


def _array_api_loop(optimizer: Any, data: Data, mean: Mean | None) -> Loop:
    import torch

    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    held = [[torch.from_numpy(parameter) for parameter in data.copies()]]

    def step() -> None:
        given = [parameter.requires_grad_() for parameter in held[0]]
        gradients = list(torch.autograd.grad(_torch_loss(given, x, y), given))
        _reduce(gradients, mean)
        given = [parameter.detach() for parameter in given]
        held[0] = optimizer.update(given, gradients)

    return Loop(step, lambda: [parameter.detach() for parameter in held[0]])


def _torch_loss(parameters: Sequence[Any], x: Any, y: Any) -> Any:
    *hidden, last = zip(parameters[::2], parameters[1::2], strict=True)
    for weights, bias in hidden:
        x = (x @ weights + bias).relu()
    return (x @ last[0] + last[1] - y).square().mean()


def _array_api_adapted(data: Data, comm: Communicator) -> Loop:
    optimizer = arraycomm.DistributedOptimizer(_optimizer("Adam"), comm=comm)
    return _array_api_loop(optimizer, data, None)


# Frameworks -----------------------------------------------------------------------------------------


def _torch_loop(data: Data, mean: Mean | None, comm: Communicator | None = None) -> Loop:
    import torch

    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    parameters = [torch.nn.Parameter(torch.from_numpy(each)) for each in data.copies()]
    optimizer: Any = torch.optim.SGD(parameters, lr=_RATE)
    if comm is not None:
        optimizer = arraycomm.DistributedOptimizer(optimizer, comm=comm)

    def step() -> None:
        optimizer.zero_grad()
        _torch_loss(parameters, x, y).backward()
        _reduce([parameter.grad for parameter in parameters], mean)
        optimizer.step()

    return Loop(step, lambda: [parameter.detach() for parameter in parameters])


def _torch_adapted(data: Data, comm: Communicator) -> Loop:
    return _torch_loop(data, None, comm)


def _jax_loss(parameters: Sequence[Any], x: Any, y: Any) -> Any:
    import jax.numpy as jnp

    *hidden, last = zip(parameters[::2], parameters[1::2], strict=True)
    for weights, bias in hidden:
        x = jnp.maximum(x @ weights + bias, 0)
    return jnp.square(x @ last[0] + last[1] - y).mean()


def _jax_compiled(optimizer: Any, data: Data) -> Loop:
    """Return a loop whose step is one program, to which parameters and state are donated."""
    import jax
    import jax.numpy as jnp
    import optax

    x, y = jnp.array(data.x), jnp.array(data.y)
    parameters = [jnp.array(parameter) for parameter in data.parameters]
    held = [(parameters, optimizer.init(parameters))]

    @partial(jax.jit, donate_argnums=0)
    def program(train: Any) -> Any:
        parameters, state = train
        gradients = jax.grad(_jax_loss)(parameters, x, y)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    def step() -> None:
        held[0] = jax.block_until_ready(program(held[0]))

    return Loop(step, lambda: held[0][0])


def _jax_by_hand(data: Data, mean: Mean | None) -> Loop:
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.sgd(_RATE)
    if mean is None:
        return _jax_compiled(optimizer, data)
    x, y = jnp.array(data.x), jnp.array(data.y)
    parameters = [jnp.array(parameter) for parameter in data.parameters]
    held = [(parameters, optimizer.init(parameters))]
    slopes = jax.jit(jax.grad(_jax_loss))

    @partial(jax.jit, donate_argnums=0)
    def update(train: Any, gradients: Any) -> Any:
        parameters, state = train
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    def step() -> None:
        gradients = [np.array(gradient) for gradient in slopes(held[0][0], x, y)]
        _reduce(gradients, mean)
        held[0] = jax.block_until_ready(update(held[0], gradients))

    return Loop(step, lambda: held[0][0])


def _jax_adapted(data: Data, comm: Communicator) -> Loop:
    import optax

    return _jax_compiled(arraycomm.DistributedOptimizer(optax.sgd(_RATE), comm=comm), data)


def _thinc_loop(data: Data, mean: Mean | None, comm: Communicator | None = None) -> Loop:
    api: Any = import_module("thinc.api")
    *hidden, last = (len(bias) for bias in data.parameters[1::2])
    layers = [*map(api.Relu, hidden), api.Linear(last)]
    model = api.chain(*layers).initialize(data.x, data.y)
    owned = [(node, name) for node in layers for name in ("W", "b")]
    for (node, name), parameter in zip(owned, data.parameters, strict=True):
        # thinc's weights have a row for each output.
        node.set_param(name, parameter.T.copy(order="C"))
    optimizer = api.SGD(_RATE, L2=0.0, grad_clip=0.0)
    if comm is not None:
        optimizer = arraycomm.DistributedOptimizer(optimizer, comm=comm)

    def step() -> None:
        made, backprop = model(data.x, is_train=True)
        backprop((made - data.y) * np.float32(2 / data.y.size))
        if mean is not None:
            _reduce([node.get_grad(name) for node, name in owned], mean)
        model.finish_update(optimizer)

    return Loop(step, lambda: [node.get_param(name).T for node, name in owned])


def _thinc_adapted(data: Data, comm: Communicator) -> Loop:
    return _thinc_loop(data, None, comm)


def _scipy_loop(
    minimize: Callable[..., Any], data: Data, total: Callable[[Any], Any], share: float
) -> Loop:
    """Return a loop whose step is a descent of a few evaluations, each rank's a share of the sum."""
    shapes = [parameter.shape for parameter in data.parameters]
    ends = np.cumsum([parameter.size for parameter in data.parameters])[:-1]
    start = np.concatenate([parameter.ravel() for parameter in data.parameters]).astype(np.float64)
    x, y = data.x.astype(np.float64), data.y.astype(np.float64)
    held: list[Any] = [start]

    def evaluate(vector: Any) -> tuple[float, Any]:
        parts = np.split(vector, ends)
        parameters = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        value, gradients = _gradients(parameters, x, y)
        packed = np.concatenate([[value], *(gradient.ravel() for gradient in gradients)])
        packed = total(packed * share)
        return packed[0], packed[1:]

    def step() -> None:
        held[0] = minimize(evaluate, start, jac=True, method=_descend).x

    return Loop(step, lambda: [held[0]])


def _descend(fun: Any, start: Any, *_: Any, jac: Any, **__: Any) -> Any:
    """A method of `scipy.optimize.minimize` that takes a given number of evaluations."""
    found, value = start, 0.0
    for _evaluation in range(EVALUATIONS):
        value = fun(found)
        found = found - _RATE * jac(found)
    return import_module("scipy.optimize").OptimizeResult(x=found, fun=value)


def _scipy_by_hand(data: Data, mean: Mean | None) -> Loop:
    def total(packed: Any) -> Any:
        _reduce([packed], mean)
        return packed

    return _scipy_loop(import_module("scipy.optimize").minimize, data, total, 1.0)


def _scipy_adapted(data: Data, comm: Communicator) -> Loop:
    minimize = partial(import_module("arraycomm.adapters.scipy").minimize, comm=comm)
    return _scipy_loop(minimize, data, lambda packed: packed, 1 / comm.size)


def _sklearn_loop(fit: Callable[..., Any], data: Data, mean: Mean | None) -> Loop:
    network: Any = import_module("sklearn.neural_network").MLPClassifier(
        [len(bias) for bias in data.parameters[1:-2:2]],
        solver="sgd",
        alpha=0.0,
        learning_rate_init=_RATE,
        batch_size=len(data.x),
        random_state=0,
    )
    labels, classes = data.y.argmax(1), np.arange(data.y.shape[1])

    def learnt() -> list[Any]:
        return [*network.coefs_, *network.intercepts_]

    def step() -> None:
        fit(network, data.x, labels, classes=classes)
        if mean is not None:
            _reduce([*learnt(), *vars(network)["_optimizer"].velocities], mean)

    return Loop(step, learnt)


def _fit_alone(network: Any, x: Any, y: Any, classes: Any) -> None:
    network.partial_fit(x, y, classes=classes)


def _sklearn_by_hand(data: Data, mean: Mean | None) -> Loop:
    return _sklearn_loop(_fit_alone, data, mean)


def _sklearn_adapted(data: Data, comm: Communicator) -> Loop:
    fit = partial(import_module("arraycomm.adapters.sklearn").partial_fit, comm=comm)
    return _sklearn_loop(fit, data, None)


WORKLOADS: Final = {
    "torch, SGD": Workload(("torch",), _torch_adapted, _torch_loop),
    "JAX, optax.sgd": Workload(("jax", "optax"), _jax_adapted, _jax_by_hand),
    "NumPy, SGD": _numpy("SGD"),
    "NumPy, Momentum": _numpy("Momentum"),
    "NumPy, Adam": _numpy("Adam"),
    "array API (torch), Adam": Workload(
        ("torch",),
        _array_api_adapted,
        lambda data, mean: _array_api_loop(_optimizer("Adam"), data, mean),
    ),
    "thinc, SGD": Workload(("thinc",), _thinc_adapted, _thinc_loop),
    f"SciPy, {EVALUATIONS} evaluations": Workload(("scipy",), _scipy_adapted, _scipy_by_hand),
    "scikit-learn, partial_fit": Workload(("sklearn",), _sklearn_adapted, _sklearn_by_hand),
}
