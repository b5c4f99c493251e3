from __future__ import annotations

import copy

import numpy as np
import pytest

import arraycomm as ac
from tests.support.on_ranks import each_rank_of

mx = pytest.importorskip("mlx.core", exc_type=ImportError)
optimizers = pytest.importorskip("mlx.optimizers", exc_type=ImportError)
from mlx import nn  # noqa: E402

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.array(WEIGHT)
        self.inner = {"bias": mx.zeros(2)}


def gradients_of(rank: int) -> dict:
    return {"weight": mx.full((2, 3), float(rank)), "inner": {"bias": mx.array([1.0, float(rank)])}}


def weights_of(model: Model) -> bytes:
    return np.array(model.weight).tobytes() + np.array(model.inner["bias"]).tobytes()


def alone(steps: int) -> bytes:
    """Return what one process with the mean gradient of three ranks comes to."""
    model, optimizer = Model(), optimizers.Adam(learning_rate=0.1)
    for _ in range(steps):
        optimizer.update(model, gradients_of(1))
    return weights_of(model)


@each_rank_of(3)
def test_update_takes_the_mean_gradient(comm: ac.Communicator) -> None:
    model = Model()
    optimizer = ac.DistributedOptimizer(optimizers.Adam(learning_rate=0.1), comm=comm)
    for _ in range(3):
        optimizer.update(model, gradients_of(comm.rank))
    assert optimizer.step.item() == 3
    optimizer.learning_rate = 0.5
    assert optimizer.learning_rate.item() == 0.5
    assert weights_of(model) == alone(3)


@each_rank_of(3)
def test_applied_gradients_are_reduced_too(comm: ac.Communicator) -> None:
    model = Model()
    optimizer = ac.DistributedOptimizer(optimizers.Adam(learning_rate=0.1), comm=comm)
    model.update(optimizer.apply_gradients(gradients_of(comm.rank), model))
    assert weights_of(model) == alone(1)


@each_rank_of(3)
def test_several_optimizers_in_one_and_copies_reduce(comm: ac.Communicator) -> None:
    model, made = Model(), [optimizers.Adam(learning_rate=0.1) for _ in range(2)]
    both = optimizers.MultiOptimizer(made, [lambda path, _: "bias" in path])
    optimizer = copy.copy(ac.DistributedOptimizer(both, comm=comm))
    model.update(optimizer.apply_gradients(gradients_of(comm.rank), model))
    assert weights_of(model) == alone(1)


@each_rank_of(3)
def test_accumulated_gradients_are_applied_in_the_last_step(comm: ac.Communicator) -> None:
    model, found = Model(), []
    optimizer = ac.DistributedOptimizer(optimizers.Adam(learning_rate=0.1), comm=comm, accumulate=2)
    for factor in (0, 2):
        scaled = nn.utils.tree_map(lambda g, f=factor: f * g, gradients_of(comm.rank))
        optimizer.update(model, scaled)
        found.append(weights_of(model))
    assert found == [weights_of(Model()), alone(1)]


@pytest.mark.parametrize(
    ("wrap", "error", "wrong"),
    [
        (lambda opt, comm: ac.DistributedOptimizer(opt, comm=comm, shard=True), TypeError, "mlx"),
        (
            lambda opt, comm: ac.DistributedOptimizer(
                ac.DistributedOptimizer(opt, comm=comm), comm=comm
            ),
            ValueError,
            "distributed already",
        ),
    ],
)
@each_rank_of(2)
def test_optimizer_that_cannot_be_distributed_is_refused(
    comm: ac.Communicator, wrap, error, wrong
) -> None:
    with pytest.raises(error, match=wrong):
        wrap(optimizers.SGD(learning_rate=0.1), comm)


@pytest.mark.parametrize(
    ("rate", "weight", "says"),
    [
        (0.2, 0.0, "learning_rate.* is not the same"),
        (0.1, 1.0, r"params\['weight'\] is not the same"),
    ],
)
@each_rank_of(3)
def test_a_step_that_another_rank_would_take_otherwise_is_an_error(
    comm: ac.Communicator, rate, weight, says
) -> None:
    model = Model()
    if comm.rank:
        model.weight += weight
    plain = optimizers.SGD(learning_rate=rate if comm.rank else 0.1)
    optimizer = ac.DistributedOptimizer(plain, comm=comm)
    before = weights_of(model)
    with pytest.raises(ac.MismatchError, match=says):
        optimizer.update(model, gradients_of(comm.rank))
    assert weights_of(model) == before
