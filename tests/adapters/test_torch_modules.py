"""The module of a torch optimizer: its buffers are compared, and it names parameters."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import arraycomm as ac
from tests.support.on_ranks import each_rank_of

torch: Any = pytest.importorskip("torch")
adapter: Any = pytest.importorskip("arraycomm.adapters.torch")
names_of = pytest.importorskip("arraycomm.adapters.torch._modules").names_of

Comm = ac.Communicator
EYE = torch.eye(3)


def net(**buffers: Any) -> Any:
    """Return a model that is the same on every rank, with these buffers in its second part."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Identity(), torch.nn.Linear(3, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    for name, buffer in buffers.items():
        model[1].register_buffer(name, buffer, persistent=name != "mask")
    return model


def with_statistics() -> Any:
    model = net()
    model[1] = torch.nn.BatchNorm1d(3)
    return model


def distributed(comm: Comm, model: Any, module: Any = None, **options: Any) -> Any:
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    made = {"verify_every": 1, "module": model if module is None else module, **options}
    return ac.DistributedOptimizer(adam, comm=comm, **made)


def train(comm: Comm, model: Any, optimizer: Any, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.linspace(0, 1, 20).view(5, 4) * (1.0 + comm.rank + step)
        model(x).square().mean().backward()
        optimizer.step()


def raised(comm: Comm, call: Callable[[], Any]) -> str:
    """Return the error that is the same on every rank."""
    with pytest.raises(ac.MismatchError) as error:
        call()
    said = str(error.value)
    assert set(comm.allgather_object(said)) == {said}
    return said


# A buffer on a rank: the same on all but for what is of one.
BUFFERS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "average": (r"1.average is not .*1.0 at \[2\]", lambda r: torch.tensor([0.0, 0.0, r])),
    "count": ("1.count is not .*: 0, at .*: 1, at", torch.tensor),
    "mask": (r"1.mask is not .*False at \[1\]", lambda r: torch.tensor([True, r == 0])),
    "angles": (r"1.angles is not .*1j at \[0\]", lambda r: torch.tensor([r * 1j])),
    "book": (r"1.book is not .*float32 \(2,\).*float32 \(3,\)", lambda r: torch.ones(2 + r)),
    "late": ("1.late is not .*missing", lambda r: torch.ones(2) if r else None),
    "edges": (r"1.edges, values is not .*2.0 at", lambda r: (EYE * (1 + r)).to_sparse()),
    "rows": (r"1.rows, values is not .*2.0 at", lambda r: (EYE * (1 + r)).to_sparse_csr()),
    "columns": (r"1.columns, ccol_in", lambda r: EYE.roll(r, 0).tril().to_sparse_csc()),
}


@pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning")
@pytest.mark.parametrize("name", BUFFERS)
@each_rank_of(2)
def test_every_kind_of_buffer_is_compared_and_may_be_left_out(comm: Comm, name: str) -> None:
    says, make = BUFFERS[name]
    model = net(**{name: make(comm.rank)})
    said = raised(comm, lambda: train(comm, model, distributed(comm, model)))
    assert re.search(f"buffer {says}", said, re.DOTALL), said
    assert f"by name: module._ddp_params_and_buffers_to_ignore = ['1.{name}']" in said
    model._ddp_params_and_buffers_to_ignore = [f"1.{name}"]
    train(comm, model, distributed(comm, model))
    same = net(**{name: make(1)})
    train(comm, same, distributed(comm, same))


@pytest.mark.filterwarnings("ignore::UserWarning")
@each_rank_of(2)
def test_a_buffer_that_cannot_be_read_is_named(comm: Comm) -> None:
    model = net(narrow=torch.zeros(2).to(torch.float8_e8m0fnu))
    with pytest.raises(TypeError, match=r"buffer 1.narrow cannot be compared.*ignore = \['1.narr"):
        train(comm, model, distributed(comm, model))


OPTIONS = {
    "plain": {},
    "sharded": {"shard": True},
    "accumulated": {"accumulate": 2},
    "compressed": {"compression": "bfloat16"},
}
WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "DataParallel": torch.nn.DataParallel,
    "both": lambda model: torch.compile(torch.nn.DataParallel(model), backend="eager"),
}


@pytest.mark.parametrize("case", [*OPTIONS, *WRAPPERS])
@each_rank_of(2)
def test_statistics_of_each_rank_s_own_are_an_error_with_ways_out(comm: Comm, case: str) -> None:
    options, wrap = OPTIONS.get(case, {}), WRAPPERS.get(case, lambda model: model)

    def loop(change: Callable[[Any], Any]) -> Any:
        model = change(with_statistics())
        wrapped = wrap(model)
        train(comm, model, distributed(comm, model, wrapped, **options), 4)
        return model

    said = raised(comm, lambda: loop(lambda model: model))
    assert "buffer 1.running_mean is not the same" in said
    assert "Call arraycomm.synchronize(module) before the first step" in said
    assert "convert_sync_batchnorm(module)" in said
    loop(lambda model: adapter.convert_sync_batchnorm(model, comm=comm))
    ignore = torch.nn.parallel.DistributedDataParallel

    def ignoring(model: Any) -> Any:
        names = ["1.running_mean", "1.running_var"]
        ignore._set_params_and_buffers_to_ignore_for_model(model, names)
        return model

    loop(ignoring)


@each_rank_of(2)
def test_a_copy_compares_the_buffers_of_the_copied_module(comm: Comm) -> None:
    model = net(mask=torch.zeros(1))
    optimizer = distributed(comm, model)
    for turned in (False, True):
        pair = copy.deepcopy([optimizer, model] if turned else [model, optimizer])
        copied, of_copy = pair[::-1] if turned else pair
        model[1].mask.fill_(comm.rank)
        train(comm, copied, of_copy)
        copied[1].mask.fill_(comm.rank)
        assert "buffer 1.mask" in raised(comm, lambda: train(comm, copied, of_copy))  # noqa: B023
        model[1].mask.fill_(0)
        optimizer = distributed(comm, model)


@pytest.mark.parametrize("cycle", [False, True])
@each_rank_of(1)
def test_a_module_goes_with_its_optimizer(comm: Comm, cycle: bool) -> None:
    """A container that nobody else holds is compared as well."""
    model = net(mask=torch.zeros(1))
    container = torch.nn.ModuleList([model])
    optimizer = distributed(comm, model, container)
    if cycle:
        model.optimizer = optimizer
    watched = [weakref.ref(each) for each in (model, container, optimizer)]
    del container
    train(comm, model, optimizer)
    assert None not in [each() for each in watched]
    gc.disable()
    try:
        del model, optimizer
        assert cycle or [each() for each in watched] == [None] * 3
    finally:
        gc.enable()
    gc.collect()
    assert [each() for each in watched] == [None] * 3


class Doubling:
    def update(self, params: Any, grads: Any) -> Any:
        return params


@each_rank_of(2)
def test_a_wrong_module_is_refused(comm: Comm) -> None:
    model = net()
    with pytest.raises(ValueError, match=r"module must be the one .*a Sequential that has none of"):
        distributed(comm, model, net())
    with pytest.raises(TypeError, match=r"module must be a torch.nn.Module; got list"):
        distributed(comm, model, [model])
    for name, plain in (("numpy", Doubling()), ("jax", pytest.importorskip("optax").sgd(0.1))):
        with pytest.raises(TypeError, match=f"module must be None for optimizers of {name}"):
            ac.DistributedOptimizer(plain, comm=comm, module=model)
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ac.MismatchError, match="100 with module"):
        ac.DistributedOptimizer(adam, comm=comm, module=model if comm.rank else None)


@each_rank_of(2)
def test_names_of_the_module_are_in_errors(comm: Comm) -> None:
    model = net()
    optimizer = distributed(comm, model, torch.compile(model, backend="eager"))
    train(comm, model, optimizer)
    with torch.no_grad():
        optimizer.state[model[0].bias]["exp_avg"][1] = comm.rank
    said = raised(comm, lambda: train(comm, model, optimizer, 1))
    assert "the state of parameter 1 (0.bias), exp_avg is not the same" in said
    inner = torch.nn.Sequential(torch.compile(torch.nn.Linear(1, 1), backend="eager"))
    assert sorted(names_of(inner).values()) == ["0.bias", "0.weight"]


@each_rank_of(2)
def test_ranks_without_data_show_no_buffers(comm: Comm) -> None:
    model = net(mask=torch.zeros(1))
    optimizer = distributed(comm, model)
    with ac.join(comm) as joined:
        train(comm, model, optimizer, 1 + comm.rank)
        model[1].mask.add_(1 + comm.rank)
    joined.synchronize(model)
    train(comm, model, optimizer)
