"""Whose memory a gradient of torch's is: reductions write only to memory that nobody else has.

Laws draw the loops; these are gradients of other kinds.
"""

from __future__ import annotations

import numpy as np
import pytest

import arraycomm as ac
from tests.support.on_ranks import each_rank_of

torch = pytest.importorskip("torch")

from properties import test_torch_laws as laws  # noqa: E402
from properties.test_torch_laws import SHAPE, made  # noqa: E402


@each_rank_of(2)
def test_gradients_of_usual_layers_are_not_copied(comm: ac.Communicator) -> None:
    """Their memory is theirs alone: the reduction writes its results there."""
    layers = [torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten()]
    model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(32), torch.nn.LSTM(32, 4))
    ac.synchronize(model, comm=comm)
    parameters = list(model.parameters())
    memory = {}
    for number, parameter in enumerate(parameters):
        # Before the optimizer's own hooks.
        parameter.register_post_accumulate_grad_hook(
            lambda p, number=number: memory.update({number: p.grad.data_ptr()})
        )
    optimizer = ac.DistributedOptimizer(torch.optim.SGD(parameters, 0.1), comm=comm)
    for none in (True, False, True):
        optimizer.zero_grad(set_to_none=none)
        model(torch.randn(3, 1, 6, 6))[0].sum().backward()
        assert [memory[number] for number in range(len(parameters))] == [
            p.grad.data_ptr() for p in parameters
        ]
        optimizer.step()


@each_rank_of(3)
def test_another_optimizers_parameter_keeps_its_gradient(comm: ac.Communicator) -> None:
    """It is this rank's own, and in the same memory as that of the parameter which all ranks share."""
    shared, own = made(2)
    optimizer = ac.DistributedOptimizer(torch.optim.SGD([shared], 0.1), comm=comm)
    plain = torch.optim.SGD([own], 0.1)
    for turn in ((shared, own), (own, shared)):
        plain.zero_grad()
        optimizer.zero_grad()
        total = turn[0].flatten() + turn[1].flatten()
        given = torch.full((6,), float(comm.rank + 1), dtype=torch.float64)
        total.backward(given)
        assert (own.grad == comm.rank + 1).all()
        assert (shared.grad == (comm.size + 1) / 2).all()
        assert (given == comm.rank + 1).all()


@each_rank_of(3)
def test_gradients_from_inference_mode_are_taken(comm: ac.Communicator) -> None:
    """As evolution strategies make them; torch counts no writes to these."""
    (weight,) = made(1)
    before = weight.detach().clone()
    optimizer = ac.DistributedOptimizer(torch.optim.SGD([weight], 0.5, 0.9), comm=comm)
    for _ in range(2):
        with torch.inference_mode():
            estimate = torch.full(SHAPE, float(comm.rank), dtype=torch.float64)
        weight.grad = estimate
        optimizer.step()
        assert (estimate == comm.rank).all()
    mean = (comm.size - 1) / 2
    assert torch.allclose(weight, before - 0.5 * mean * (1 + 1.9))


@each_rank_of(2)
def test_memory_of_numpy_is_not_written_to(comm: ac.Communicator) -> None:
    (weight,) = made(1)
    optimizer = ac.DistributedOptimizer(torch.optim.SGD([weight], 0.5), comm=comm)
    numbers = np.full(6, float(comm.rank))
    weight.view(-1).backward(torch.from_numpy(numbers))
    assert (numbers == comm.rank).all()
    assert (weight.grad == (comm.size - 1) / 2).all()
    optimizer.step()


class TestProcesses:
    """On as many ranks as there are processes; `test_processes` runs them on more."""

    @pytest.mark.parametrize("turn", range(4))
    def test_loops(self, world: ac.Communicator, turn: int) -> None:
        parts = (["by hand"], ["local", "argument"], ["all", "all"], ["derived", "first"])[turn]
        zeros, options = laws.ZEROS[turn], {"op": "sum", "shard": turn == 0, "accumulate": 1}
        steps = [laws.Step("nothing", parts, "nothing", "step", zeros, -1) for _ in range(3)]
        compression = laws.Doubled() if turn == 1 else None
        options |= {"bucket_bytes": (1, 1 << 20)[turn % 2], "compression": compression}
        joins = list(laws.JOINS)[2 * turn + 1]
        case = laws.Case(steps, "momentum", "", joins, options)
        seen, _ = laws.trained(world, case)
        laws.assert_same(seen[:-1], laws.alone(case, world.size)[:-1], laws.SLACK)
        last = [value.numpy().tobytes() for value in seen[-2]]
        assert world.allgather_object(last) == [last] * world.size
