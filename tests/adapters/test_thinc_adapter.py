"""thinc's models and optimizers over ranks, against one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from arraycomm.testing import run
from tests.support.on_ranks import each_rank_of

pytest.importorskip("thinc")

from sklearn.datasets import load_digits
from thinc.api import SGD, Adam, Linear, Model, RAdam, Relu, Softmax_v2, chain
from thinc.schedules import compounding, warmup_linear

from arraycomm.adapters import thinc as adapter

STEPS = 6
IMAGES, DIGITS = load_digits(return_X_y=True)
# A multiple of all numbers of ranks, so that the mean of the ranks' means is that of all.
X = (IMAGES[:48] / 16).astype(np.float32)
Y = np.eye(10, dtype=np.float32)[DIGITS[:48]]

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adam": lambda: Adam(warmup_linear(0.01, 2, 50), L2=1e-3),
    "RAdam": lambda: RAdam(0.01, L2=1e-2, L2_is_weight_decay=False),
    "SGD": lambda: SGD(compounding(0.01, 0.1, 1.5), grad_clip=0.5, use_averages=False),
}


def _model(seed: int) -> Model[Any, Any]:
    model = chain(Relu(16), Softmax_v2())
    model.initialize(X[:2], Y[:2])
    random = np.random.default_rng(seed)
    for node in model.walk():
        for name in node.param_names:
            shape = node.get_param(name).shape
            node.set_param(name, (0.3 * random.standard_normal(shape)).astype(np.float32))
    return model


def _parameters(model: Model[Any, Any]) -> list[Any]:
    return [node.get_param(name).copy() for node in model.walk() for name in node.param_names]


def _step(model: Model[Any, Any], optimizer: Any, x: Any, y: Any) -> None:
    predicted, backprop = model.begin_update(x)
    backprop((predicted - y) / len(x))
    model.finish_update(optimizer)


def _train(model: Model[Any, Any], optimizer: Any, x: Any, y: Any) -> Any:
    for _ in range(STEPS):
        _step(model, optimizer, x, y)
        optimizer.step_schedules()
    averages = optimizer.averages or {}
    return _parameters(model), [averages[key] for key in sorted(averages)], optimizer.step


@pytest.mark.parametrize(("kind", "size"), [("Adam", 1), *((kind, 3) for kind in OPTIMIZERS)])
def test_training_is_that_of_one_process(kind: str, size: int) -> None:
    alone = _train(_model(0), OPTIMIZERS[kind](), X, Y)
    # Made one after the other, since ids of nodes are counted for the whole process.
    models = [_model(rank) for rank in range(size)]

    def train(comm: Communicator) -> Any:
        model = ac.synchronize(models[comm.rank], comm=comm)
        assert model is models[comm.rank]
        optimizer = ac.DistributedOptimizer(OPTIMIZERS[kind](), comm=comm)
        return _train(model, optimizer, X[comm.rank :: size], Y[comm.rank :: size])

    results = run(size, train)
    for parameters, averages, step in results:
        assert step == STEPS
        for number, got in enumerate([*parameters, *averages]):
            assert got.tobytes() == [*results[0][0], *results[0][1]][number].tobytes()
    # A gradient's 48 terms are added in another order, and Adam divides it by its own size.
    bound = 0 if size == 1 else STEPS * 48 * 64 * np.finfo(np.float32).eps * 0.1
    for got, want in zip([*results[0][0], *results[0][1]], [*alone[0], *alone[1]], strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=bound)


@each_rank_of(3)
def test_accumulated_steps_and_missing_gradients(comm: Communicator) -> None:
    model, want, parts = _model(0), _model(0), np.split(np.arange(48), 2)
    optimizer = ac.DistributedOptimizer(SGD(0.1, grad_clip=0.0), comm=comm, accumulate=2)
    before = _parameters(model)
    for number, part in enumerate(parts):
        if comm.rank == 2:
            model.finish_update(optimizer)
        else:
            _step(model, optimizer, X[part], Y[part])
        if number == 0:
            assert all(map(np.array_equal, before, _parameters(model)))
    # Another round: what was accumulated is gone.
    for _ in parts:
        model.finish_update(optimizer)
    _step(want, SGD(0.1 * 2 / 3, grad_clip=0.0), X, Y)
    _assert_near(model, want)


def _assert_near(model: Model[Any, Any], want: Model[Any, Any]) -> None:
    for one, other in zip(_parameters(model), _parameters(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=48 * np.finfo(np.float32).eps)


@each_rank_of(3)
def test_one_parameter_at_a_time_has_a_reduction_of_its_own(comm: Communicator) -> None:
    optimizer = ac.DistributedOptimizer(SGD(0.5, grad_clip=0.0), comm=comm, op="sum")
    gradient = np.full(3, 1.0 + comm.rank, np.float32)
    weights, zeros = optimizer((comm.rank, "W"), np.zeros(3, np.float32), gradient)
    assert not gradient.any()
    assert not zeros.any()
    several = ac.DistributedOptimizer(SGD(0.5), comm=comm, accumulate=2)
    with pytest.raises(ValueError, match=r"'W'; call model.finish_update\(optimizer\)"):
        several((1, "W"), np.zeros(3, np.float32), gradient)
    assert weights.tolist() == [-3.0] * 3


@each_rank_of(3)
def test_models_are_trees_with_their_arrays(comm: Communicator) -> None:
    model = chain(Relu(4), Linear(2)).initialize(X[:2], Y[:2, :2])
    model.layers[0].attrs["mask"] = np.full(2, comm.rank)
    model.layers[1].set_param("b", np.full(2, comm.rank, np.float32))
    assert ac.allreduce_tree({"m": model}, "max", comm=comm)["m"] is model
    assert model.layers[0].attrs["mask"].tolist() == [2, 2]
    assert model.layers[1].get_param("b").tolist() == [2, 2]
    other = chain(Relu(4), Linear(2))
    if comm.rank != 1:
        other.initialize(X[:2], Y[:2, :2])
    with pytest.raises(ac.MismatchError, match=r"tree\['m'\]"):
        ac.synchronize({"m": other}, comm=comm.dup())


@each_rank_of(3)
def test_an_update_that_one_rank_leaves_out_is_a_mismatch_on_all(comm: Communicator) -> None:
    model, optimizer = _model(0), ac.DistributedOptimizer(Adam(0.01), comm=comm)

    def loop() -> None:
        for step in range(STEPS):
            if (comm.rank, step) != (1, 1):
                _step(model, optimizer, X, Y)
            optimizer.step_schedules()

    said = r"step of the optimizer=1 .* step of the optimizer=2"
    with pytest.raises(ac.MismatchError, match=said):
        loop()
    assert optimizer.step == 1 + (comm.rank == 1)


@pytest.mark.parametrize("steps", [(1, 3), (3, 1)])
@each_rank_of(2)
def test_ranks_with_fewer_batches_join(comm: Communicator, steps: tuple[int, int]) -> None:
    model, want = _model(0), _model(0)
    optimizer = ac.DistributedOptimizer(SGD(0.1, grad_clip=0.0), comm=comm)
    with ac.join(comm) as joined:
        for step in range(steps[comm.rank]):
            _step(model, optimizer, X[step * 8 :][:8], Y[step * 8 :][:8])
            optimizer.step_schedules()
    for step in range(max(steps)):
        # Where both have a batch, it is the same one.
        _step(want, SGD(0.1, grad_clip=0.0), X[step * 8 :][:8], Y[step * 8 :][:8])
    _assert_near(joined.synchronize(model), want)


class _Foreign:
    """Stands for what a layer of another framework keeps."""


@each_rank_of(2)
def test_what_thinc_does_not_know_is_refused(comm: Communicator) -> None:
    last = comm.rank == comm.size - 1
    kind = TypeError if last else ac.PeerError
    foreign = Model("theirs", lambda model, x, is_train: (x, lambda d: d), shims=[_Foreign()])
    wrapped = ac.DistributedOptimizer(Adam(0.1), comm=comm)
    with pytest.raises(kind, match=r"tree\[0\]: layer 'theirs' belongs to another framework"):
        ac.synchronize([foreign if last else _model(0)], comm=comm)
    with pytest.raises(kind, match="model: layer 'theirs' belongs to another framework"):
        (foreign if last else _model(0)).finish_update(wrapped)
    for optimizer in (Adam(0.1), wrapped):
        with pytest.raises(kind, match="an optimizer of thinc cannot be part of a tree"):
            ac.synchronize([optimizer if last else 1], comm=comm)
    with pytest.raises(ValueError, match="distributed already"):
        ac.DistributedOptimizer(wrapped, comm=comm)
    assert comm.allreduce(1) == comm.size


def test_plain_optimizers_go_on_without_ranks() -> None:
    assert Model.finish_update.__name__ == "finish_update"
    assert adapter.DistributedOptimizer is ac.DistributedOptimizer
    model = _model(0)
    before = _parameters(model)
    _step(model, Adam(0.1), X, Y)
    assert not all(map(np.array_equal, before, _parameters(model)))
