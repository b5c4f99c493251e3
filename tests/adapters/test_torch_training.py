"""Training loops as people write them: on ranks they give what one process on the whole batch gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._training import rounds
from arraycomm.testing import run
from tests.support.on_ranks import each_rank_of

torch = pytest.importorskip("torch")
slots = pytest.importorskip("arraycomm.adapters.torch._slots")

from arraycomm.adapters.torch import _hooks as _torch_hooks  # noqa: E402
from arraycomm.adapters.torch import no_sync  # noqa: E402
from properties.test_torch_laws import Broken  # noqa: E402

STEPS, SAMPLES, INPUTS = 4, 6, 5
SLACK = 1000 * np.finfo(np.float64).eps


# Loops, beside what the laws draw: each trains on batches with an optimizer, as in one process

Batch = tuple[Any, Any]


def made() -> Any:
    layers = [torch.nn.Linear(INPUTS, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)]
    model = torch.nn.Sequential(*layers).double()
    # Not by torch's generator, which the threads share.
    random = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(random.normal(size=tuple(parameter.shape))))
    return model


def batch(rank: int, step: int, *, infinite: bool = False) -> Batch:
    random = np.random.default_rng((rank, step))
    x = torch.from_numpy(random.normal(size=(SAMPLES, INPUTS)))
    y = torch.from_numpy(random.normal(size=(SAMPLES, 1)) * (1 + rank))
    if infinite and rank == 1 and step == 1:
        y[0] = torch.inf
    return x, y


def joined(batches: list[Batch]) -> Batch:
    x, y = map(torch.cat, zip(*batches, strict=True))
    return x, y


def take(model: Any, optimizer: Any, each: Batch) -> None:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(each[0]), each[1]).backward()
    optimizer.step()


def scaling(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(torch.nn.functional.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        scaler.step(optimizer)
        scaler.update()


def adamw(model: Any, comm: ac.Communicator | None = None) -> Any:
    # With an epsilon so large that the size of the gradients matters, not their sign alone.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1, weight_decay=0.1)
    if comm is not None:
        # Small buckets are reduced one by one while the backward pass goes on.
        ac.DistributedOptimizer(optimizer, comm=comm, bucket_bytes=100, shard=comm.size == 3)
    return optimizer


def values(model: Any) -> list[Any]:
    return [parameter.detach().numpy() for parameter in model.parameters()]


def train(comm: ac.Communicator, count: int = STEPS) -> list[Any]:
    """Train on this rank's batches, inside `join` if there are not as many on every rank."""
    model = made()
    optimizer = adamw(model, comm)
    with nullcontext() if count == STEPS else ac.join(comm):
        scaling(model, optimizer, (batch(comm.rank, s, infinite=True) for s in range(count)))
    # All ranks are in the same step.
    take(model, optimizer, batch(comm.rank, STEPS))
    return values(model)


def assert_near(results: list[list[Any]], counts: Sequence[int]) -> None:
    """All ranks have the same bits, which are those of one process but for rounding."""
    model, infinite = made(), len(counts) > 1
    steps = (
        joined([batch(r, s, infinite=infinite) for r, n in enumerate(counts) if s < n])
        for s in range(max(counts))
    )
    optimizer = adamw(model)
    scaling(model, optimizer, steps)
    take(model, optimizer, joined([batch(rank, STEPS) for rank in range(len(counts))]))
    for parameters in results:
        for got, first, one in zip(parameters, results[0], values(model), strict=True):
            assert got.tobytes() == first.tobytes()
            np.testing.assert_allclose(got, one, rtol=SLACK, atol=SLACK)


@pytest.mark.parametrize("counts", [(4, 4, 4), (3, 1, 2)])
def test_ranks_train_as_one_process_on_the_whole_batch(counts: Sequence[int]) -> None:
    assert_near(run(len(counts), lambda comm: train(comm, counts[comm.rank])), counts)


# What each rank passes, gets, and is told


def weight_and_optimizer(comm: ac.Communicator, **options: Any) -> tuple[Any, Any]:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    return weight, ac.DistributedOptimizer(optimizer, comm=comm, op="sum", **options)


@each_rank_of(2)
def test_a_gradient_may_be_a_conjugate(comm: ac.Communicator) -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = ac.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), comm=comm)
    (weight.conj() * (1 + 1j * comm.rank)).sum().real.backward()
    optimizer.step()
    assert weight.tolist() == [-0.5j, -0.5j]


@each_rank_of(2)
def test_a_scaler_is_compared_in_the_steps_that_it_takes(comm: ac.Communicator) -> None:
    weight, optimizer = weight_and_optimizer(comm)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update(2.0 + comm.rank)
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == [-4.0, -4.0]


@pytest.mark.parametrize("accumulate", [1, 2])
@each_rank_of(2)
def test_clipped_zeros_are_gradients_of_a_step(comm: ac.Communicator, accumulate: int) -> None:
    weight, optimizer = weight_and_optimizer(comm, accumulate=accumulate)
    weight.data += 1
    optimizer.param_groups[0]["weight_decay"] = 0.5
    for step in range(2 * accumulate):
        optimizer.zero_grad()
        if comm.rank == 0 or accumulate > 1:
            (0 * weight).sum().backward()
        if weight.grad is not None and step % accumulate == accumulate - 1:
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()
    assert weight.tolist() == [0.25, 0.25]


@each_rank_of(3)
def test_gradients_are_reduced_when_backward_returns(comm: ac.Communicator) -> None:
    weight, optimizer = weight_and_optimizer(comm)
    (weight * (comm.rank + 1)).sum().backward()
    seen = weight.grad
    assert seen.tolist() == [6.0, 6.0]
    (weight * 10 * comm.rank).sum().backward()
    # As autograd does, in the same memory.
    assert seen is weight.grad
    assert seen.tolist() == [36.0, 36.0]
    optimizer.step()
    assert weight.tolist() == [-36.0, -36.0]
    # The same gradient once more, which is reduced already.
    optimizer.step()
    assert weight.tolist() == [-72.0, -72.0]
    # Torch does not see that this is another one.
    weight.grad.numpy()[:] = comm.rank
    optimizer.step()
    assert weight.tolist() == [-75.0, -75.0]
    weight.grad.data.fill_(comm.rank)
    optimizer.step()
    assert weight.tolist() == [-78.0, -78.0]


@each_rank_of(3)
def test_after_an_exception_in_backward_training_goes_on(comm: ac.Communicator) -> None:
    """Also from gradients whose reduction was under way: of these a law knows nothing."""
    weights = [torch.nn.Parameter(torch.ones(150_000)) for _ in range(3)]
    first, middle, last = weights
    optimizer = torch.optim.SGD(weights, lr=1.0)
    ac.DistributedOptimizer(optimizer, comm=comm, op="sum", bucket_bytes=100)

    def loss(through: Callable[[Any], Any]) -> Any:
        """Let the gradient of `last` come first, and that of `first` last."""
        return (through(first) * middle.clone() * last * (comm.rank + 1)).sum()

    for step in range(2):
        optimizer.zero_grad()
        with torch.no_grad():
            for weight in weights:
                weight.fill_(1)
        if step == 1:
            with pytest.raises(KeyError, match="broken"):
                loss(Broken.apply).backward()
            # That of `last` was under way. Nothing is written to it any more.
            assert last.grad.unique().tolist() == [6.0]
            assert middle.grad.unique().tolist() == [comm.rank + 1]
        loss(torch.clone).backward()
        optimizer.step()
    assert [weight[0].item() for weight in weights] == [-5.0, -11.0, -11.0]


@each_rank_of(3)
def test_large_gradients_are_reduced_where_they_are(comm: ac.Communicator) -> None:
    weights = [torch.nn.Parameter(torch.zeros(n)) for n in (200_000, 7, 130_000, 300_001)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    ac.DistributedOptimizer(optimizer, comm=comm, op="sum", bucket_bytes=1 << 20)
    seen: list[Any] = []
    parts: set[float] = set()

    def look(weight: Any) -> None:
        seen.append(weight.grad)
        parts.update(weight.grad.unique().tolist())

    for weight in weights:
        weight.register_post_accumulate_grad_hook(look)
    for step in range(2):
        sum((w * (comm.rank + 1 + step)).sum() for w in weights).backward()
        for grad in seen:
            assert grad.unique().tolist() == [6 + 3 * step]
            # Autograd is told that it has changed.
            assert grad._version > 0
        assert {id(weight.grad) for weight in weights} == set(map(id, seen))
        assert parts == {comm.rank + 1 + step}
        seen.clear()
        parts.clear()
        optimizer.step()
        optimizer.zero_grad()
    trained = [w.detach().numpy().tobytes() for w in weights]
    assert comm.allgather_object(trained) == [trained] * comm.size


@each_rank_of(2)
def test_a_dropped_optimizer_reduces_no_more(comm: ac.Communicator) -> None:
    weight, optimizer = weight_and_optimizer(comm)
    weight.sum().backward()
    del optimizer
    if comm.rank == 0:
        weight.sum().backward()
        assert weight.grad.tolist() == [3.0, 3.0]


# Errors


def skipping(comm: ac.Communicator, *skipped: int, **options: Any) -> None:
    """Leave out a step on one rank."""
    weight, optimizer = weight_and_optimizer(comm, **options)
    for step in range(4):
        optimizer.zero_grad()
        weight.sum().backward()
        if (comm.rank, step) != skipped:
            optimizer.step()


def different_numbers_of_evaluations(comm: ac.Communicator) -> None:
    class Evaluating(torch.optim.SGD):  # type: ignore[misc, name-defined]
        def step(self, closure: Any = None) -> Any:
            for _ in range(1 + comm.rank):
                closure()

    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = ac.DistributedOptimizer(Evaluating([weight], lr=1.0), comm=comm)
    for _ in range(2):
        optimizer.step(lambda: weight.sum().backward())


def raising(comm: ac.Communicator) -> None:
    """Go on after a step that has raised on one rank."""
    weight, optimizer = weight_and_optimizer(comm)
    for step in range(8):
        optimizer.zero_grad()
        weight.sum().backward()
        handle = optimizer.register_step_pre_hook(lambda *_: [None][comm.rank * (step == 3)])  # noqa: B023
        with suppress(IndexError):
            optimizer.step()
        handle.remove()


@pytest.mark.parametrize(
    ("size", "train", "match"),
    [
        (2, raising, r"not take the same step: parameter 0 .* rank 0: -10.0 .* rank 1: -8.0"),
        (
            3,
            lambda comm: skipping(comm, 1, 2),
            (
                r"ranks 0, 2: step 3, in step\(\) after 1 backward\(\), at test_torch_training.py:\d+; "
                r"rank 1: step 4 \(after a skipped step\), in its backward\(\) 1, at test_torch_train"
            ),
        ),
        (2, lambda comm: skipping(comm, 0, 0, accumulate=2), r"rank 0: step 3.*rank 1: step 2"),
        (
            2,
            different_numbers_of_evaluations,
            r"rank 0: evaluation 1 of the closure in step 2.*rank 1: evaluation 2 .* step 1",
        ),
    ],
)
@each_rank_of("size")
def test_ranks_in_different_steps_raise_on_all(comm: ac.Communicator, train, match: str) -> None:
    with pytest.raises(ac.MismatchError, match=match):
        train(comm)


@pytest.mark.parametrize("virtual_ranks", [None, 3])
def test_a_step_after_a_whole_backward_pass_is_prepared_by_the_first(
    monkeypatch: pytest.MonkeyPatch, virtual_ranks: int | None
) -> None:
    in_steps: list[int] = []
    look = rounds.AllreduceGradients.__init__

    def noted(self: Any, *arguments: Any, **options: Any) -> None:
        in_steps.extend([self._place.step] * self._place.stepping)
        look(self, *arguments, **options)

    monkeypatch.setattr(rounds.AllreduceGradients, "__init__", noted)

    def train(comm: ac.Communicator) -> float:
        weight = torch.nn.Parameter(torch.zeros(1))
        sgd, options = torch.optim.SGD([weight], lr=1.0), {"virtual_ranks": virtual_ranks}
        optimizer = ac.DistributedOptimizer(sgd, comm=comm, **options)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (weight * comm.rank).sum().backward()
            optimizer.step()
        return float(weight.detach())

    assert run(3, train) == [-STEPS] * 3
    assert in_steps == [1] * 3


def test_gradients_that_cannot_be_reduced_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if other gradients shared their memory.
    monkeypatch.setitem(slots._left_out, 1, 1)

    def train(comm: ac.Communicator) -> None:
        table = ac.synchronize(torch.nn.Embedding(3, 2, sparse=True), comm=comm)
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight, table.weight], lr=1.0)
        ac.DistributedOptimizer(optimizer, comm=comm)
        kind: Any = TypeError if comm.rank else ac.PeerError
        with pytest.raises(kind, match=r"parameter 0 has a history \(backward\(create_graph=True"):
            (weight**2).sum().backward(create_graph=comm.rank == 1)
        optimizer.zero_grad()
        with pytest.raises(kind, match=r"parameter 1 is of layout torch.sparse_coo.*sparse=False"):
            (table(torch.tensor([1])) if comm.rank else table.weight).sum().backward()
        optimizer.zero_grad()
        (weight * comm.rank).sum().backward()
        optimizer.step()
        assert weight.tolist() == [-0.5, -0.5]

    run(2, train)


def test_an_optimizer_that_clips_single_examples_is_refused() -> None:
    class Private(torch.optim.SGD):
        """As DPOptimizer of opacus."""

        def clip_and_accumulate(self) -> None:
            raise NotImplementedError

    optimizer = Private([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    with pytest.raises(TypeError, match="Private clips the gradients of single examples in its"):
        run(1, lambda comm: ac.DistributedOptimizer(optimizer, comm=comm))


@each_rank_of(2)
def test_a_step_inside_backward_is_refused_on_all_ranks(comm: ac.Communicator) -> None:
    weight, optimizer = weight_and_optimizer(comm)
    if comm.rank:
        weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    kind: Any = RuntimeError if comm.rank else ac.PeerError
    with pytest.raises(kind, match=r"step\(\) was called inside backward\(\)"):
        weight.sum().backward()


@pytest.mark.parametrize("how", ["clip", "scale"])
@each_rank_of(2)
def test_local_gradients_of_accumulated_steps_must_not_be_changed(
    comm: ac.Communicator, how: str
) -> None:
    weight, optimizer = weight_and_optimizer(comm, accumulate=2)
    scaler = torch.amp.GradScaler("cpu", enabled=how == "scale")
    scaler.scale(weight.sum()).backward()
    if how == "clip":
        torch.nn.utils.clip_grad_norm_([weight], 0.1)
    said = r"reduced later here, in step\(\) \(with accumulate=2"
    with pytest.raises(RuntimeError, match=said):
        scaler.step(optimizer)


@each_rank_of(2)
def test_optimizers_of_one_parameter_must_reduce_it_alike(comm: ac.Communicator) -> None:
    weight, optimizer = weight_and_optimizer(comm)
    other = ac.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), comm=comm, op="mean")
    weight.sum().backward()
    other.step()
    with pytest.raises(ValueError, match="made later with another op, accumulate or compression"):
        optimizer.step()


def test_no_sync_needs_a_distributed_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="no_sync: this optimizer is not distributed"):
        no_sync(optimizer).__enter__()


@each_rank_of(2)
def test_a_step_after_join_with_gradients_of_the_block_is_refused(comm: ac.Communicator) -> None:
    weight, optimizer = weight_and_optimizer(comm)
    with ac.join(comm):
        if comm.rank:
            weight.sum().backward()
    kind: Any = RuntimeError if comm.rank else ac.PeerError
    with pytest.raises(kind, match="after a join block with gradients of a backward"):
        optimizer.step()


@each_rank_of(2)
def test_a_loss_is_reduced_inside_join_no_more_than_other_arrays(comm: ac.Communicator) -> None:
    weight, optimizer = weight_and_optimizer(comm)

    def closure() -> Any:
        optimizer.zero_grad()
        weight.sum().backward()
        return weight.sum()

    for _ in range(4):
        optimizer.step(closure)
    kind: Any = RuntimeError if comm.rank else ac.PeerError
    with pytest.raises(kind, match="allreduce: inside join only"), ac.join(comm):
        all(optimizer.step(closure) for _ in range(comm.rank))


def test_with_other_frameworks_gradients_are_reduced_in_the_step() -> None:
    class Plain:
        def update(self, params: Any, grads: Any) -> Any:
            return [param - grad for param, grad in zip(params, grads, strict=True)]

    def train(comm: ac.Communicator) -> list[float]:
        if comm.rank:
            plain = ac.DistributedOptimizer(Plain(), comm=comm, op="sum")
            params = [np.zeros(2, np.float32)]
            for step in range(2):
                params = plain.update(params, [np.full(2, step + 1, np.float32)])
            with pytest.raises(ac.PeerError, match="gradients were changed"):
                plain.update(params, params)
            return params[0].tolist()
        weight, optimizer = weight_and_optimizer(comm)
        for step in range(2):
            optimizer.zero_grad()
            (weight * 10 * (step + 1)).sum().backward()
            optimizer.step()
        torch.nn.utils.clip_grad_norm_([weight], 0.1)
        optimizer.zero_grad()
        weight.sum().backward()
        torch.nn.utils.clip_grad_norm_([weight], 0.1)
        with pytest.raises(RuntimeError, match="gradients were changed"):
            optimizer.step()
        return weight.tolist()

    assert run(2, train) == [[-33.0, -33.0]] * 2


def test_a_rank_that_fails_before_its_backward_ends_that_of_the_others() -> None:
    told: list[str] = []

    def train(comm: ac.Communicator) -> None:
        weight, _optimizer = weight_and_optimizer(comm)
        if comm.rank == 1:
            raise ValueError("no data")
        try:
            weight.sum().backward()
        except ac.PeerError as error:
            told.append(str(error))
            raise

    with pytest.raises(ValueError, match="no data"):
        run(3, train)
    assert len(told) == 2
    assert all("no data" in text for text in told)


@pytest.mark.parametrize(
    ("cores", "bound", "nodes", "threads", "wanted"),
    [
        *((8, False, 1, 1, True), (8, False, 1, 2, False), (3, False, 1, 1, False)),
        *((3, False, 2, 1, True), (2, True, 1, 1, True), (2, True, 1, 2, False)),
    ],
)
def test_reductions_start_in_backward_if_a_core_is_free(
    monkeypatch: Any, cores: int, bound: bool, nodes: int, threads: int, wanted: bool
) -> None:
    monkeypatch.setattr(_torch_hooks, "cores", lambda: cores)
    monkeypatch.setattr(_torch_hooks, "_machine_cores", lambda: 64 if bound else cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    transport = SimpleNamespace(local_size=4, size=4 * nodes)
    monkeypatch.setattr(_torch_hooks, "group_of", lambda _: SimpleNamespace(transport=transport))
    for backend, found in (("mpi", wanted), ("threads", True)):
        comm: Any = SimpleNamespace(backend=backend)
        assert _torch_hooks.saves_time(comm, [torch.ones(1)]) == found


class TestProcesses:
    """On as many ranks as there are processes; `test_processes` runs them on more."""

    def test_a_loop(self, world: ac.Communicator) -> None:
        assert_near(world.allgather_object(train(world)), [STEPS] * world.size)

    @pytest.mark.parametrize("free", [1, 1000])
    def test_large_buckets_are_under_way_together(
        self, world: ac.Communicator, free: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_torch_hooks, "cores", lambda: free)
        # Each is larger than the chunks in which ranks of one node share memory.
        weights = [torch.nn.Parameter(torch.eye(500)) for _ in range(4)]
        optimizer = ac.DistributedOptimizer(
            torch.optim.SGD(weights, lr=1.0), comm=world, bucket_bytes=1 << 20
        )
        x = torch.from_numpy(np.random.default_rng(world.rank).normal(size=(3, 500))).float()
        for _ in range(2):
            optimizer.zero_grad()
            y = x
            for weight in weights:
                y = torch.tanh(y @ weight)
            loss = y.square().sum()
            local = torch.autograd.grad(loss, weights, retain_graph=True)
            loss.backward()
            for weight, gradient in zip(weights, local, strict=True):
                assert torch.equal(weight.grad, world.allreduce(gradient, "mean"))
            optimizer.step()
