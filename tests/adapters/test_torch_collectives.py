"""Differentiable collectives of torch tensors, against differences of the sum of all ranks' losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraycomm as ac
from tests.support.on_ranks import each_rank_of

torch = pytest.importorskip("torch")
collectives = pytest.importorskip("arraycomm.adapters.torch")
forward_ad = torch.autograd.forward_ad

Tensor = Any
Objective = Callable[[Tensor], Tensor]


class Case(NamedTuple):
    """A collective, and whether it takes a row for each rank."""

    call: Callable[..., Tensor]
    rows: bool = False

    def shape(self, size: int) -> tuple[int, ...]:
        return (size, 2) if self.rows else (2,)


# What else there is of sums and means is held by laws.
CASES = {
    "allreduce": Case(collectives.allreduce),
    "allgather": Case(collectives.allgather),
    "reduce_scatter-mean": Case(partial(collectives.reduce_scatter, op="mean"), rows=True),
    "alltoall": Case(collectives.alltoall, rows=True),
    "bcast-last": Case(lambda x, *, comm: collectives.bcast(x, comm.size - 1, comm=comm)),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def draw(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def objective(case: Case, comm: ac.Communicator) -> Objective:
    """Return a loss of this rank: a polynomial of degree 2 in the result, none like another rank's."""

    def loss(x: Tensor) -> Tensor:
        y = case.call(x, comm=comm)
        weights = draw(comm.rank, y.shape)
        return (weights * (y + y**2)).sum()

    return loss


def gradient(loss: Objective, x: Tensor, **options: Any) -> Tensor:
    x = x.detach().requires_grad_() if not x.requires_grad else x
    (found,) = torch.autograd.grad(loss(x), x, **options)
    return found


# With these steps and factors, differences are exact for polynomials of degree 2, up to rounding.
DIFFERENCES = ((1, 1 / 2), (-1, -1 / 2))


def change(function: Objective, x: Tensor, along: Tensor) -> Tensor:
    """Return how a result of this rank changes if the tensors of all ranks do."""
    total: Tensor = sum(factor * function(x + step * along) for step, factor in DIFFERENCES)
    return total.detach()


def assert_close(got: Tensor, expected: Tensor) -> None:
    # Some hundred operations on numbers below 1e3.
    torch.testing.assert_close(got, expected, rtol=0, atol=1e5 * torch.finfo(torch.float64).eps)


@every_case
@each_rank_of((1, 3))
def test_gradients_are_transposes_and_theirs_are_results(comm: ac.Communicator, case: Case) -> None:
    """Of each collective once; a law draws more of it."""
    x, along = (draw(seed + comm.rank, case.shape(comm.size)) for seed in (100, 200))
    made = case.call(x.requires_grad_(), comm=comm)
    y = draw(300 + comm.rank, made.shape).requires_grad_()
    (slope,) = torch.autograd.grad(made, x, y, create_graph=True)
    products = comm.allreduce(torch.stack([(made * y).sum(), (x * slope).sum()]).detach())
    assert_close(products[0], products[1])
    (found,) = torch.autograd.grad(slope, y, along)
    assert_close(found, case.call(along, comm=comm))


@every_case
@each_rank_of((1, 3))
def test_transforms_of_torch_func(comm: ac.Communicator, case: Case) -> None:
    x = draw(100 + comm.rank, case.shape(comm.size))
    loss = objective(case, comm)
    expected = gradient(loss, x)
    assert_close(torch.func.grad(loss)(x), expected)
    _, pullback = torch.func.vjp(loss, x)
    assert_close(pullback(torch.ones((), dtype=x.dtype))[0], expected)
    # The last axis is mapped over, then the first.
    batch = torch.stack([x, -x, 2 * x], -1)
    call = partial(case.call, comm=comm)
    mapped = torch.func.vmap(call, in_dims=-1)(batch)
    assert_close(mapped, torch.stack([call(part) for part in batch.unbind(-1)]))
    twice = torch.func.vmap(torch.func.vmap(call))(torch.stack([batch.movedim(-1, 0)] * 2))
    assert_close(twice, torch.stack([mapped] * 2))
    slopes = torch.func.vmap(torch.func.grad(loss), in_dims=-1)(batch)
    assert_close(slopes, torch.stack([gradient(loss, part) for part in batch.unbind(-1)]))


@each_rank_of((1, 3))
def test_what_nothing_differentiates_is_the_plain_result(comm: ac.Communicator) -> None:
    for x in (torch.arange(3), torch.tensor([True, False]), torch.arange(3.0)):
        for op in ("min", "max", "or" if x.dtype == torch.bool else "prod"):
            result = collectives.allreduce(x, op, comm=comm)
            assert torch.equal(result, comm.allreduce(x, op))
            assert not result.requires_grad
    w = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        for op in ("sum", "max"):
            assert not collectives.allreduce(w, op, comm=comm).requires_grad


@pytest.mark.parametrize("op", ["max", ac.op(lambda a, b: a)])
@each_rank_of(3)
def test_op_without_a_gradient_is_refused_on_every_rank(comm: ac.Communicator, op: Any) -> None:
    message = r'op must be "sum" or "mean" if x is differentiated.* on ranks \[1\]'
    w = torch.ones(comm.size, requires_grad=comm.rank == 1)
    for call in (collectives.allreduce, collectives.reduce_scatter):
        with pytest.raises(TypeError, match=message):
            call(w, op, comm=comm)
    assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_what_is_no_tensor_is_an_error_on_every_rank(comm: ac.Communicator) -> None:
    for name in ("allreduce", "allgather", "reduce_scatter", "alltoall", "bcast"):
        x = np.ones(comm.size) if comm.rank == 1 else torch.ones(comm.size)
        message = f"{name}: x must be a torch.Tensor; got ndarray"
        with pytest.raises(TypeError if comm.rank == 1 else ac.PeerError, match=message):
            getattr(collectives, name)(x, comm=comm)
    assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_backward_passes_of_different_calls_do_not_meet(comm: ac.Communicator) -> None:
    """Two calls of one shape: without the numbers, the gradient of one would be that of the other."""
    message = (
        r"differentiate the same calls.*rank 0: the backward pass of differentiable call \d+ at "
        r"test_torch_collectives.py:\d+"
    )
    w = torch.ones(3, requires_grad=True)
    first, second = (collectives.allreduce(factor * w, comm=comm) for factor in (1, 2))
    loss = first.sum() if comm.rank else first.sum() + second.sum()
    with pytest.raises(ac.MismatchError, match=message):
        loss.backward()
    w.grad = None
    (first.sum() + 0 * second.sum()).backward()
    assert w.grad is not None
    assert w.grad.tolist() == [comm.size] * 3


@each_rank_of(3)
def test_rank_that_differentiates_nothing_is_a_mismatch(comm: ac.Communicator) -> None:
    y = collectives.allreduce(torch.ones(3, requires_grad=True), comm=comm)
    another_call = partial(collectives.allreduce, y, comm=comm)
    go_on = y.sum().backward if comm.rank else another_call
    said = r"rank 0: a forward call at .*model.eval\(\) may be missing"
    with pytest.raises(ac.MismatchError, match=said) as raised:
        go_on()
    # Not lines of torch, which calls the library in backward passes, and around each function.
    assert str(raised.value).count("test_torch_collectives.py:") == 2
    assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_transforms_that_differ_between_ranks_are_a_mismatch(comm: ac.Communicator) -> None:
    message = "x must be in the same transforms of torch.func on every rank; it is in "
    other = torch.ones(3)

    def loss(x: Tensor) -> Tensor:
        return collectives.allreduce(other if comm.rank else x, comm=comm).sum()

    with pytest.raises(ac.MismatchError, match=message):
        torch.func.grad(loss)(torch.ones(3))
    with pytest.raises(ac.MismatchError, match=message):
        torch.func.vmap(loss)(torch.ones(2, 3))


@each_rank_of((1, 3))
def test_scalars_of_vmap_have_no_row_for_each_rank(comm: ac.Communicator) -> None:
    # As many as there are ranks, so that the batch could be taken for the rows.
    batch = torch.ones(comm.size)
    for call in (collectives.reduce_scatter, collectives.alltoall):
        with pytest.raises(ValueError, match=r"must have an axis of the ranks; got shape \(\)"):
            torch.func.vmap(partial(call, comm=comm))(batch)


@each_rank_of(3)
def test_grad_modes_that_differ_between_ranks_are_a_mismatch(comm: ac.Communicator) -> None:
    w = torch.ones(3, requires_grad=True)
    with torch.set_grad_enabled(comm.rank > 0), pytest.raises(ac.MismatchError):
        collectives.allreduce(w, comm=comm)


@pytest.mark.parametrize("reentrant", [False, True])
@each_rank_of((1, 3))
def test_checkpoints_repeat_the_call(comm: ac.Communicator, reentrant: bool) -> None:
    def squares(x: Tensor) -> Tensor:
        return collectives.allreduce(x, comm=comm).tanh().square().sum()

    expected = gradient(squares, draw(comm.rank, (3,)))
    x = draw(comm.rank, (3,)).requires_grad_()
    torch.utils.checkpoint.checkpoint(squares, x, use_reentrant=reentrant).backward()
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)


# Torch's own, of which the first come with its first use of forward mode, the second if graphs end.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
class TestProcesses:
    """What torch keeps for the process, not for a thread; `test_on_processes` runs these on more ranks."""

    @every_case
    def test_forward_mode(self, world: ac.Communicator, case: Case) -> None:
        x, along = (draw(seed + world.rank, case.shape(world.size)) for seed in (100, 200))
        loss = objective(case, world)
        expected = change(loss, x, along)
        with forward_ad.dual_level():
            dual = loss(forward_ad.make_dual(x, along))
            assert_close(forward_ad.unpack_dual(dual).tangent, expected)
        assert_close(torch.func.jvp(loss, (x,), (along,))[1], expected)
        slope = torch.func.grad(loss)
        curvature = torch.func.jvp(slope, (x,), (along,))[1]
        assert_close(curvature, change(slope, x, along))
        columns = torch.func.jacfwd(lambda factor: slope(x + factor * along))
        assert_close(columns(torch.zeros((), dtype=x.dtype)), curvature)

    def test_tangents_on_some_ranks_are_a_mismatch(self, world: ac.Communicator) -> None:
        if world.size == 1:
            pytest.skip("ranks can differ only if there are several")
        x = torch.ones(3)
        with forward_ad.dual_level():
            x = forward_ad.make_dual(x, x) if world.rank == 1 else x
            with pytest.raises(
                ac.MismatchError, match=r"tangent .* it has one on ranks \[1\] of 3"
            ):
                collectives.allgather(x)
            with pytest.raises(TypeError, match=r'op must be "sum" or "mean"'):
                collectives.allreduce(x, "max")

    def test_compiled_functions_call_between_two_graphs(self, world: ac.Communicator) -> None:
        graphs = []

        def keep(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        def loss(x: Tensor) -> Tensor:
            return collectives.allreduce(2 * x).square().sum()

        x = draw(world.rank, (3,))
        compiled = torch.compile(loss, backend=keep)
        torch.testing.assert_close(gradient(compiled, x), gradient(loss, x))
        assert len(graphs) == 2
