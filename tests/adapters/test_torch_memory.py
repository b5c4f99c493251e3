"""Whose memory a gradient of torch's is: reductions write only to memory that nobody else has.

Autograd hands out parts of one tensor where a model joins, stacks or adds its parameters, and the program's
own tensor where that is passed to `backward`. Loops are drawn from all of these, and compared with
`torch.autograd.grad`, since torch's own accumulation adds twice to two gradients in the same memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm.testing import run
from tests.support.on_ranks import each_rank_of

torch = pytest.importorskip("torch")

from arraycomm.adapters.torch import no_sync  # noqa: E402

SHAPE, STEPS = (2, 3), 3
SLACK: Final = 1000 * np.finfo(np.float64).eps

# One tensor of several parameters of one shape.
JOINS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "apart": lambda ps: torch.stack([(p * p).sum() for p in ps]),
    "cat": torch.cat,
    "stack": torch.stack,
    "vector": torch.nn.utils.parameters_to_vector,
    "sum": lambda ps: sum(p.flatten() for p in ps),
    "sum of views": lambda ps: sum(p.view(-1) for p in ps).view(SHAPE),
    "one twice": lambda ps: torch.cat([ps[0], *ps, ps[0]]),
    "expanded": lambda ps: torch.cat([p.expand(2, *SHAPE) for p in ps]),
    "transposed": lambda ps: torch.cat([p.T for p in ps], 1),
    "views": lambda ps: torch.cat([p.view(-1)[1:] for p in ps]),
    "selected": lambda ps: torch.nn.functional.embedding(torch.tensor([0, 1, 1]), torch.cat(ps)),
}
# How gradients come to `.grad`, and how they are zeroed.
COMES: Final = ("backward", "argument", "twice", "by hand", "by hand, kept", "hook", "not synced")
ZEROES: Final = ("none", "zeros", "flat", "flat, same")


class Identity(ac.Compression):
    """Sends gradients as they are."""


OPTIONS: Final[list[dict[str, Any]]] = [
    {},
    {"bucket_bytes": 1},
    {"op": "sum"},
    {"shard": True},
    {"accumulate": 2},
    {"compression": Identity()},
]


class Program(NamedTuple):
    """A drawn training loop."""

    joins: tuple[str, str]
    count: int
    comes: str
    zeroes: str
    options: int


programs: Final = st.builds(
    Program,
    st.tuples(st.sampled_from(list(JOINS)), st.sampled_from(list(JOINS))),
    st.integers(1, 3),
    st.sampled_from(COMES),
    st.sampled_from(ZEROES),
    st.integers(0, len(OPTIONS) - 1),
)


def made(count: int) -> list[Any]:
    random = np.random.default_rng(0)
    return [torch.nn.Parameter(torch.from_numpy(random.normal(size=SHAPE))) for _ in range(count)]


def direction(like: Any, rank: int, step: int, part: int) -> Any:
    """What a rank multiplies the joined parameters with, another one in each step."""
    random = np.random.default_rng((rank, step, part))
    return torch.from_numpy(random.normal(size=tuple(like.shape)))


def gradients(program: Program, parameters: list[Any], rank: int, step: int) -> list[Any]:
    """Return a rank's gradients of a step, in memory of their own."""
    total = [torch.zeros(SHAPE, dtype=torch.float64) for _ in parameters]
    for part in range(passes(program)):
        whole = JOINS[program.joins[part]](parameters)
        given = direction(whole, rank, step, part)
        if program.comes != "argument":
            whole, given = (whole * given).square().sum(), None
        found = torch.autograd.grad(whole, parameters, given, allow_unused=True)
        total = [t if f is None else t + f for t, f in zip(total, found, strict=True)]
    return total


def passes(program: Program) -> int:
    return 2 if program.comes in ("twice", "not synced") else 1


class Rank:
    """One rank's part in a program, with memory of the program's own that must stay as it is."""

    def __init__(self, program: Program, comm: ac.Communicator) -> None:
        self.program, self.rank = program, comm.rank
        self.parameters = made(program.count)
        plain = torch.optim.SGD(self.parameters, lr=0.01)
        self.optimizer = ac.DistributedOptimizer(plain, comm=comm, **OPTIONS[program.options])
        self.own: list[tuple[Any, Any]] = []
        self.flat: Any = None

    def keep(self, tensor: Any) -> Any:
        self.own.append((tensor, tensor.clone()))
        return tensor

    def zero(self) -> None:
        program, parameters = self.program, self.parameters
        if program.zeroes in ("none", "zeros"):
            self.optimizer.zero_grad(set_to_none=program.zeroes == "none")
            return
        if self.flat is None:
            self.flat = torch.zeros(len(parameters), *SHAPE, dtype=torch.float64)
            for parameter, grad in zip(parameters, self.flat, strict=True):
                parameter.grad = grad
        self.flat.zero_()

    def compute(self, step: int) -> None:
        program, parameters = self.program, self.parameters
        if program.comes.startswith("by hand"):
            found = gradients(program, parameters, self.rank, step)
            for parameter, grad in zip(parameters, found, strict=True):
                parameter.grad = self.keep(grad) if "kept" in program.comes else grad
            return
        for part in range(passes(program)):
            whole = JOINS[program.joins[part]](parameters)
            given = self.keep(direction(whole, self.rank, step, part))
            if program.comes == "argument":
                whole.backward(given)
            elif program.comes == "not synced" and part == 0:
                with no_sync(self.optimizer):
                    (whole * given).square().sum().backward()
            else:
                (whole * given).square().sum().backward()

    def run(self) -> list[Any]:
        hooked = self.parameters if self.program.comes == "hook" else []
        handles = [p.register_post_accumulate_grad_hook(lambda p: None) for p in hooked]
        for step in range(STEPS * OPTIONS[self.program.options].get("accumulate", 1)):
            self.zero()
            self.compute(step)
            self.optimizer.step()
            for tensor, before in self.own:
                assert torch.equal(tensor, before), "the program's own tensor was written to"
        for handle in handles:
            handle.remove()
        return [p.detach().clone() for p in self.parameters]


def expected(program: Program, size: int) -> list[Any]:
    """Train in one process, with every rank's gradients."""
    parameters, options = made(program.count), OPTIONS[program.options]
    every = options.get("accumulate", 1)
    for turn in range(STEPS):
        total = [torch.zeros(SHAPE, dtype=torch.float64) for _ in parameters]
        for step in range(turn * every, (turn + 1) * every):
            for rank in range(size):
                found = gradients(program, parameters, rank, step)
                total = [t + f for t, f in zip(total, found, strict=True)]
        divisor = (1 if options.get("op") == "sum" else size) * every
        with torch.no_grad():
            for parameter, gradient in zip(parameters, total, strict=True):
                parameter.sub_(0.01 * gradient / divisor)
    return [p.detach() for p in parameters]


def check(program: Program, comm: ac.Communicator) -> None:
    got = Rank(program, comm).run()
    for mine, want in zip(got, expected(program, comm.size), strict=True):
        np.testing.assert_allclose(mine.numpy(), want.numpy(), rtol=SLACK, atol=SLACK)
        assert comm.allgather(mine).reshape(comm.size, -1).unique(dim=0).shape[0] == 1


@settings(max_examples=int(os.environ.get("EXAMPLES") or 15) * 2, deadline=None, database=None)
@given(program=programs, size=st.integers(1, 3))
def test_drawn_loops_give_what_autograd_gives(program: Program, size: int) -> None:
    run(size, lambda comm: check(program, comm))


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

    def test_loops(self, world: ac.Communicator) -> None:
        names = list(JOINS)
        for turn, comes in enumerate(COMES):
            joins, zeroes = (names[turn], names[turn + 4]), ZEROES[turn % len(ZEROES)]
            check(Program(joins, 3, comes, zeroes, turn % len(OPTIONS)), world)
