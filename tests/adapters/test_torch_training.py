"""Training loops as people write them: on ranks they give what one process on the whole batch gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraycomm as ac
from arraycomm.testing import run

torch = pytest.importorskip("torch")

from arraycomm.adapters.torch import no_sync  # noqa: E402

STEPS, SAMPLES, INPUTS = 4, 6, 5
# Sums of a few hundred products, over a few steps, in another order: a few hundred roundings.
SLACK = 1000 * np.finfo(np.float64).eps


class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
    """With a parameter that no rank uses, one that some use, and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(INPUTS, 4).double()
        self.nowhere = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.tied = torch.nn.Linear(4, 4).double()
        self.sometimes = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.last = torch.nn.Linear(4, 1).double()
        # Not by torch's generator, which the threads share.
        random = np.random.default_rng(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.from_numpy(random.normal(size=tuple(parameter.shape))))

    def forward(self, x: Any, selected: Any) -> Any:
        hidden = torch.tanh(self.tied(torch.tanh(self.tied(self.first(x)))))
        if selected.any():
            hidden = hidden + selected[:, None] * self.sometimes
        return self.last(hidden)[:, 0]


class Batch(NamedTuple):
    x: Any
    y: Any
    selected: Any

    def loss(self, model: Any) -> Any:
        return ((model(self.x, self.selected) - self.y) ** 2).mean()

    def halves(self) -> list[Batch]:
        middle = len(self.x) // 2
        return [Batch(*(part[cut] for part in self)) for cut in (slice(middle), slice(middle, None))]


def batch(rank: int, step: int, *, infinite: bool = False) -> Batch:
    random = np.random.default_rng((rank, step))
    x = torch.from_numpy(random.normal(size=(SAMPLES, INPUTS)))
    y = torch.from_numpy(random.normal(size=SAMPLES) * (1 + rank))
    if infinite and rank == 1 and step == 1:
        y[0] = torch.inf
    return Batch(x, y, torch.full((SAMPLES,), float(rank == 1), dtype=torch.float64))


def joined(batches: list[Batch]) -> Batch:
    """All ranks' batch: first halves first, so that its halves are those of the ranks."""
    halves = zip(*(each.halves() for each in batches), strict=True)
    return Batch(*(torch.cat(parts) for parts in zip(*(h for half in halves for h in half), strict=True)))


# Loops: each trains on batches with an optimizer, as on one process

Loop = Callable[[Any, Any, Iterator[Batch]], None]


def plain(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
    for each in batches:
        optimizer.zero_grad()
        each.loss(model).backward()
        optimizer.step()


def zeroing(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
    for each in batches:
        optimizer.zero_grad(set_to_none=False)
        each.loss(model).backward()
        optimizer.step()


def never_zeroing(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
    for each in batches:
        each.loss(model).backward()
        optimizer.step()


def clipping(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
    for each in batches:
        optimizer.zero_grad()
        each.loss(model).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        assert norm > 0.25
        optimizer.step()


def replacing(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
    for each in batches:
        optimizer.zero_grad()
        each.loss(model).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clamp(-0.1, 0.1)
        optimizer.step()


def scaling(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for each in batches:
        optimizer.zero_grad()
        scaler.scale(each.loss(model)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1024.0


def twice(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
    for each in batches:
        optimizer.zero_grad()
        for half in each.halves():
            (half.loss(model) / 2).backward()
        optimizer.step()


def twice_at_once(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
    for each in batches:
        optimizer.zero_grad()
        loss = each.loss(model)
        (loss / 4).backward(retain_graph=True)
        gradients = torch.autograd.grad(loss, model.first.weight, retain_graph=True)
        assert (gradients[0] != 0).any()
        (loss * 3 / 4).backward()
        optimizer.step()


def in_parts(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
    """One backward pass for each half of the batch, of which only the second reduces."""
    for each in batches:
        optimizer.zero_grad()
        first, second = each.halves()
        with no_sync(optimizer) if hasattr(optimizer, "_is_distributed") else torch.enable_grad():
            (first.loss(model) / 2).backward()
        (second.loss(model) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


def checkpointed(reentrant: bool) -> Loop:
    def loop(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
        for each in batches:
            optimizer.zero_grad()
            x = each.x.clone().requires_grad_()
            for half in Batch(x, each.y, each.selected), each:
                # Each parameter is used inside the checkpoint and outside.
                y = torch.utils.checkpoint.checkpoint(
                    model, x, half.selected, use_reentrant=reentrant
                )
                loss = (((y + model(x, half.selected)) / 2 - each.y) ** 2).mean() / 2
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()

    return loop


def with_closures(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
    for each in batches:

        def closure(each: Batch = each) -> Any:
            optimizer.zero_grad()
            loss = each.loss(model)
            loss.backward()
            return loss

        optimizer.step(closure)


def unfreezing(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
    """Half of the parameters are trained only from the second step on."""
    for number, each in enumerate(batches):
        model.first.requires_grad_(number > 0)
        optimizer.zero_grad()
        each.loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


def growing(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
    """A parameter comes to the optimizer later."""
    extra = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    for number, each in enumerate(batches):
        if number == 2:
            optimizer.add_param_group({"params": [extra]})
        optimizer.zero_grad()
        (extra * each.loss(model)).sum().backward()
        if number >= 2:
            torch.nn.utils.clip_grad_norm_([extra], 0.25)
        else:
            extra.grad = None
        optimizer.step()
    with torch.no_grad():
        model.nowhere.copy_(extra.expand(3))


def by_two(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
    """A second optimizer, over some of the parameters, takes every step too."""
    second = torch.optim.SGD(model.first.parameters(), lr=0.05)
    if hasattr(optimizer, "_is_distributed"):
        ac.DistributedOptimizer(second, comm=optimizer._is_distributed)
    for each in batches:
        optimizer.zero_grad()
        each.loss(model).backward()
        optimizer.step()
        second.step()


LOOPS: list[Loop] = [
    *(plain, zeroing, never_zeroing, clipping, replacing, scaling, twice, twice_at_once, in_parts),
    *(checkpointed(False), checkpointed(True), unfreezing, growing, by_two),
]

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    # With an epsilon so large that the size of the gradients matters, not their sign alone.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, eps=0.1, weight_decay=0.1),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4),
}


def parameters_of(model: Any) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def train(
    comm: ac.Communicator, loop: Loop, make: Callable[[Any], Any], options: dict[str, Any]
) -> tuple[Any, list[Any]]:
    """Train on this rank's batches; return the parameters, and their bytes after each step."""
    model, seen = Model(), []
    optimizer = make(model.parameters())
    optimizer.register_step_post_hook(lambda *_: seen.append(parameters_of(model)))
    ac.DistributedOptimizer(optimizer, comm=comm, **options)
    optimizer._is_distributed = comm
    loop(model, optimizer, (batch(comm.rank, s, infinite=loop is scaling) for s in range(STEPS)))
    return [parameter.detach().numpy() for parameter in model.parameters()], seen


def expected(size: int, loop: Loop, make: Callable[[Any], Any]) -> list[Any]:
    model = Model()
    batches = (
        joined([batch(rank, step, infinite=loop is scaling and size > 1) for rank in range(size)])
        for step in range(STEPS)
    )
    loop(model, make(model.parameters()), batches)
    return [parameter.detach().numpy() for parameter in model.parameters()]


def check(size: int, loop: Loop, name: str, **options: Any) -> None:
    make = OPTIMIZERS[name]
    want = expected(size, loop, make)
    results = run(size, train, loop, make, options)
    for parameters, seen in results:
        assert seen == results[0][1]
        for got, parameter in zip(parameters, want, strict=True):
            np.testing.assert_allclose(got, parameter, rtol=SLACK, atol=SLACK)


@pytest.mark.parametrize("number", range(len(LOOPS)))
def test_ranks_train_as_one_process_on_the_whole_batch(number: int) -> None:
    size, name = (3, 2)[number % 2], ("momentum", "adamw", "sgd")[number % 3]
    # Small buckets are reduced one by one while the backward pass goes on.
    check(size, LOOPS[number], name, bucket_bytes=(1, 200, 1 << 20)[number % 3])
