"""Training steps: gradients reduced during backward passes, beside torch's own way."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import numpy as np

import arraycomm
from arraycomm._arrays.buffer import Array
from docs.studies.benchmarks.cases import Calls, Field

_FLOAT: Final = np.dtype(np.float32)
_RATE: Final = 0.01
# A step changes parameters by less than 1; sums in another order change that by a few roundings.
_TOLERANCE: Final = 1e-5


class Workload(NamedTuple):
    """A model, and the shapes of one rank's batch and of one of its targets."""

    model: Callable[[Any], Any]
    batch: tuple[int, ...]
    target: tuple[int, ...]


def _mlp(nn: Any) -> Any:
    layers = [nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, 10))


def _cnn(nn: Any) -> Any:
    layers: list[Any] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


def _transformer(nn: Any) -> Any:
    return nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)


def _many(nn: Any) -> Any:
    import torch

    class Many(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(1000)])

        def forward(self, x: Any) -> Any:
            return torch.stack([part.sum() for part in self.parts]).mean() * x

    return Many()


MODELS: Final = {
    "1,000 parameters of 4 elements": Workload(_many, (1,), ()),
    "MLP of 20 M parameters": Workload(_mlp, (32, 784), (10,)),
    "small CNN": Workload(_cnn, (32, 3, 32, 32), (10,)),
    "transformer block": Workload(_transformer, (8, 64, 512), (64, 512)),
}


class TrainCase:
    """A model and every rank's batch; each contender trains a copy of the model."""

    dtype_name = _FLOAT.name

    def __init__(self, name: str, field: Field) -> None:
        import torch

        torch.manual_seed(0)
        self.workload, self._rank, self._size = MODELS[name], field.rank, field.size
        self.model = self.workload.model(torch.nn)
        self.nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        self.batch, self.target = self._data(slice(field.rank, field.rank + 1))

    def _data(self, ranks: slice) -> tuple[Any, Any]:
        """Return the batches of some ranks, one after the other."""
        batch, target = self.workload.batch, self.workload.target
        generator = np.random.default_rng(1)
        shapes = (self._size, *batch), (self._size, batch[0], *target)
        made = (generator.standard_normal(shape, _FLOAT)[ranks] for shape in shapes)
        x, y = (arraycomm.exchange(np.concatenate(list(each)), "torch") for each in made)
        return x, y

    @cached_property
    def _expected(self) -> Array:
        """The parameters after one step of one process on all batches."""
        model = deepcopy(self.model)
        _step(model, _sgd(model), *self._data(slice(None)))
        return parameters_of(model)

    def verify(self, framework: str, answer: Callable[[], Array | None]) -> str:
        """Return what is wrong with a contender's first step on this rank, or an empty string."""
        if (found := answer()) is None:
            return ""
        furthest = float(np.abs(found - self._expected).max())
        if furthest <= _TOLERANCE:
            return ""
        return (
            f"after one step a parameter is {furthest:.1e} from that of one process on all batches"
        )


def step_of(key: str, field: Field, case: TrainCase, framework: str) -> Calls:
    """Return the calls that train a copy of the model; what one rank learns alone has no right answer."""
    model = deepcopy(case.model)
    optimizer = _sgd(model)
    forward = model
    if key == "step":
        optimizer = arraycomm.DistributedOptimizer(optimizer, comm=field.comm)
    elif key == "ddp":
        field.torch_distributed("gloo")
        forward = _distributed(model)

    def call() -> None:
        _step(forward, optimizer, case.batch, case.target)

    return call, call if key == "local" else lambda: _after(call, model)


def _distributed(model: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    # Its quickest way: gradients are reduced where they are.
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=_RATE)


def _step(model: Any, optimizer: Any, batch: Any, target: Any) -> None:
    optimizer.zero_grad()
    (model(batch) - target).square().mean().backward()
    optimizer.step()


def _after(call: Callable[[], None], model: Any) -> Array:
    call()
    return parameters_of(model)


def parameters_of(model: Any) -> Array:
    """Return all parameters of a model in one row."""
    rows = [parameter.detach().numpy().reshape(-1) for parameter in model.parameters()]
    return np.concatenate(rows)


WAYS: Final = {key: partial(step_of, key) for key in ("step", "local", "ddp")}
