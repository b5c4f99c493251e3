"""What may differ between ranks that train together, and what the errors advise where it may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from tests.support.on_ranks import each_rank_of

torch: Any = pytest.importorskip("torch")
Comm = ac.Communicator


def net(value: float = 0.5) -> Any:
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def steps(comm: Comm, model: Any, optimizer: Any, count: int = 3) -> None:
    for step in range(count):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + comm.rank + step)).square().mean().backward()
        optimizer.step()


def distributed(comm: Comm, plain: Any) -> Any:
    return ac.DistributedOptimizer(plain, comm=comm, verify_every=1)


class Scratch(torch.optim.SGD):  # type: ignore[misc]
    """Keeps memory of this rank in its state, from the start or anew in each step."""

    def __init__(self, model: Any, rank: int, key: str, when: str, groups: bool = False) -> None:
        super().__init__(model.parameters(), lr=0.01, momentum=0.9)
        self.rank, self.key, self.when = rank, key, when
        if groups:
            self.param_groups[0][key] = f"/tmp/rank{rank}"
        if when in ("start", "never"):
            self.fill(rank)

    def fill(self, value: float) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter][self.key] = torch.full((2,), float(value))

    def step(self, closure: Any = None) -> Any:
        if self.when in ("start", "always"):
            self.fill(self.rank if self.when == "always" else 0)
        return super().step(closure)


class Buffered:
    """Has an array like a parameter's in an attribute."""

    def __init__(self, key: str, rank: int) -> None:
        setattr(self, key, np.full(3, float(rank)))

    def update(self, params: Any, grads: Any) -> Any:
        return params - grads


@each_rank_of(2, "optax")
def test_a_dict_of_transformations_may_be_filled_in_any_order(comm: Comm, optax: Any) -> None:
    names = ["a", "b"][:: 1 - 2 * comm.rank]
    rates, params = {"a": 0.5, "b": 0.25}, {"a": np.zeros(2), "b": np.zeros(2)}
    plain = optax.multi_transform({n: optax.sgd(rates[n]) for n in names}, {"a": "a", "b": "b"})
    optimizer = distributed(comm, plain)
    changes, _ = optimizer.update(dict.fromkeys(params, np.ones(2)), optimizer.init(params), params)
    assert {name: change.tolist() for name, change in changes.items()} == {
        name: [-rate] * 2 for name, rate in rates.items()
    }


def of_torch(**options: Any) -> Callable[[Comm, str], None]:
    def train(comm: Comm, key: str) -> None:
        model = net()
        steps(comm, model, distributed(comm, Scratch(model, comm.rank, key, **options)))

    return train


def of_numpy(comm: Comm, key: str) -> None:
    optimizer = distributed(comm, Buffered(key, comm.rank))
    for _ in range(3):
        optimizer.update(np.ones(3), np.ones(3))


def of_a_function(comm: Comm, key: str) -> None:
    variables: dict[str, Any] = {}
    exec(f"def make({key}):\n    return lambda p, g: (p - g, {key})[0]", variables)
    optimizer = distributed(comm, variables["make"](f"rank{comm.rank}"))
    optimizer(np.ones(3), np.ones(3))


OF_A_RANK = {
    "state": (of_torch(when="always"), "the state of parameter 0, {key} is"),
    "state that nobody writes": (of_torch(when="never"), "the state of parameter 0, {key} is"),
    "group": (of_torch(when="", groups=True), "{key} of group 0 is"),
    "attribute": (of_numpy, "{key} is"),
    "variable": (of_a_function, "{key} of"),
}


@pytest.mark.parametrize("case", OF_A_RANK)
@each_rank_of(2)
def test_what_is_of_a_rank_is_named_with_an_underscore(comm: Comm, case: str) -> None:
    train, says = OF_A_RANK[case]
    with pytest.raises(ac.MismatchError) as error:
        train(comm, "scratch")
    assert says.format(key="scratch") in str(error.value)
    assert "variable that begins with an underscore: these are not compared" in str(error.value)
    train(comm, "_scratch")


@pytest.mark.parametrize("when", ["start", "never"])
@each_rank_of(2)
def test_memory_that_was_not_written_yet_is_not_compared(comm: Comm, when: str) -> None:
    model = net()
    optimizer = distributed(comm, Scratch(model, comm.rank, "scratch", when))
    if when == "never":
        # As the error advises.
        ac.synchronize((model, optimizer), comm=comm)
    steps(comm, model, optimizer)
    optimizer.state[model.weight]["momentum_buffer"][0, 0] += comm.rank
    with pytest.raises(ac.MismatchError, match="the state of parameter 0, momentum_buffer"):
        steps(comm, model, optimizer, 1)


@each_rank_of(2)
def test_a_state_that_one_rank_loaded_is_an_error_before_its_first_use(comm: Comm) -> None:
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if comm.rank == 1:
        plain.state[model.weight]["momentum_buffer"] = torch.ones(3, 4)
    before = [p.tolist() for p in model.parameters()]
    with pytest.raises(ac.MismatchError, match=r"state of parameter 0, momentum_buffer.*missing"):
        steps(comm, model, distributed(comm, plain), 1)
    assert [p.tolist() for p in model.parameters()] == before


@each_rank_of(2)
def test_horovods_order_is_an_error_that_says_what_to_do(comm: Comm) -> None:
    """A program for Horovod may broadcast after the first step."""
    model = net(comm.rank)
    optimizer = distributed(comm, torch.optim.Adam(model.parameters()))
    with pytest.raises(ac.MismatchError, match="first step, also if Horovod's broadcast came aft"):
        steps(comm, model, optimizer, 1)
    model = net(comm.rank)
    optimizer = distributed(comm, torch.optim.Adam(model.parameters()))
    ac.synchronize((model, optimizer), comm=comm)
    steps(comm, model, optimizer)


@each_rank_of(2)
def test_lazy_modules_train_once_they_were_called(comm: Comm) -> None:
    from arraycomm.adapters.torch import convert_sync_batchnorm

    model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    says = "parameter 0 has no shape yet; call the lazy module once on every rank, and then array"
    for options in ({}, {"shard": True}, {"module": model}):
        with pytest.raises(TypeError, match=says):
            ac.DistributedOptimizer(plain, comm=comm, **options)
    grown = distributed(comm, torch.optim.SGD(net().parameters(), lr=0.1))
    with pytest.raises(TypeError, match="parameter 2 has no shape yet"):
        grown.add_param_group({"params": model.parameters()})
    says = "no shape yet; call the lazy module once on every rank before"
    calls = [(ac.synchronize, dict(model.named_parameters()))]
    calls += [(c, model) for c in (ac.synchronize, ac.raise_on_difference, ac.allreduce_tree)]
    for call, tree in calls:
        with pytest.raises(TypeError, match=says):
            call(tree, comm=comm)
    with pytest.raises(ValueError, match="call the module once first"):
        convert_sync_batchnorm(model, comm=comm)
    with torch.no_grad():
        model(torch.ones(2, 4))
    ac.synchronize(convert_sync_batchnorm(model, comm=comm), comm=comm)
    options = {"module": model, "verify_every": 1}
    steps(comm, model, ac.DistributedOptimizer(plain, comm=comm, **options))
