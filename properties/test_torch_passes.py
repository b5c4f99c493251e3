"""Laws of backward passes that end in any way, and of parameters that come, go and are swapped.

The oracle is torch alone: the part of each rank is what a plain copy of its pass accumulates.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import _launch
from arraycomm.testing import run
from properties.test_training_laws import MANY

torch = pytest.importorskip("torch")

from arraycomm.adapters.torch import _hooks, no_sync  # noqa: E402

pytestmark = pytest.mark.skipif(
    _launch.detect(os.environ) is not None, reason="runs where pytest is alone"
)

SLACK: Final = 1000 * np.finfo(np.float64).eps
SHAPE: Final = (2, 3)
COUNT: Final = 4

# How a rank's pass may end before it is over: where the exception is raised.
ENDS: Final = ("function", "hook", "early hook", "post", "early post", "node", "interrupt")
JOINS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "apart": lambda ps: sum((p * p * (n + 1)).sum() for n, p in enumerate(ps)),
    "cat": lambda ps: torch.tanh(torch.cat(ps)).sum(),
    "sum": lambda ps: torch.tanh(sum(p.flatten() for p in ps)).sum(),
    "twice": lambda ps: torch.tanh(torch.cat([ps[0], *ps, ps[0]])).sum(),
}


class Keeping(threading.local):
    """The engine of autograd, which keeps what it calls until the next pass, as with devices."""

    _execution_engine = property(lambda self: self)

    def queue_callback(self, callback: Any) -> None:
        self.last = callback
        torch.autograd.Variable._execution_engine.queue_callback(callback)


class Broken(torch.autograd.Function):  # type: ignore[misc, name-defined]
    """Raises in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise KeyError("broken")


class Op(NamedTuple):
    """One thing that a program does: with which parameters, how, and on which rank (-1: all)."""

    kind: str
    some: tuple[int, ...]
    how: str
    join: str
    rank: int


PASSES: Final = ("pass", "pass", "raise", "raise one", "grad", "local")
CHANGES: Final = ("replace", "replace", "drop", "add", "swap")
HOWS: Final = {
    **dict.fromkeys(("raise", "raise one"), ENDS),
    "grad": ("complete", *ENDS),
    "step": ("plain", "clip"),
    "zero": ("none", "in place"),
    **dict.fromkeys(CHANGES, ("item", "list", "groups")),
}


@st.composite
def programs(draw: Any) -> list[Op]:
    found = []
    kinds = (*PASSES, *CHANGES, "step", "step", "zero", "zero")
    for _ in range(draw(st.integers(2, 10))):
        kind = draw(st.sampled_from(kinds))
        some = draw(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=COUNT, unique=True))
        how = draw(st.sampled_from(HOWS.get(kind, ("",))))
        join = draw(st.sampled_from(tuple(JOINS)))
        found.append(Op(kind, tuple(some), how, join, draw(st.integers(0, 2))))
    return [*found, Op("step", (0,), "plain", "apart", 0)]


class Parameters:
    """Parameters, with hooks of the program that come before those of an optimizer."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.armed: dict[str, int] = {}
        # Held as long as it has a hook.
        self.node: Any = None
        values = [torch.from_numpy(random.normal(size=SHAPE)) for _ in range(COUNT)]
        self.all = [self.made(n, value) for n, value in enumerate(values)]

    def made(self, number: int, value: Any) -> Any:
        parameter = torch.nn.Parameter(value.clone())

        def act(kind: str) -> None:
            if self.armed.get(kind) == number:
                raise KeyError("broken")

        parameter.register_hook(lambda _: act("early hook"))
        parameter.register_post_accumulate_grad_hook(lambda _: act("early post"))
        return parameter

    def run(self, op: Op, rank: int, number: int, *, how: str) -> None:
        """Make one pass, which may raise at the last of its parameters."""
        # Passes of several optimizers begin in the same order on every rank.
        order = np.random.default_rng(number).permutation(list(op.some))
        chosen = self.all[op.some[-1]]
        given = [Broken.apply(p) if how == "function" and p is chosen else p for p in self.all]
        factor = 1 + np.random.default_rng((rank, number)).random()
        loss = JOINS[op.join]([given[n] for n in order]) * factor
        self.armed = {how: op.some[-1]}
        handle = self._broken(chosen, how)
        try:
            if op.kind == "grad":
                torch.autograd.grad(loss, [self.all[n] for n in op.some])
            else:
                loss.backward()
        except (KeyError, KeyboardInterrupt):
            assert how in ENDS
        finally:
            self.armed, self.node = {}, None
            if handle is not None:
                handle.remove()

    def _broken(self, chosen: Any, how: str) -> Any:
        def broken(*_: Any) -> None:
            raise KeyboardInterrupt if how == "interrupt" else KeyError("broken")

        if how in ("hook", "interrupt"):
            return chosen.register_hook(broken)
        if how == "post":
            return chosen.register_post_accumulate_grad_hook(broken)
        if how == "node":
            self.node = torch.autograd.graph.get_gradient_edge(chosen).node
            return self.node.register_prehook(broken)
        return None


def optimizers_of(parameters: Sequence[Any], *, several: bool) -> list[Any]:
    lists = [parameters[:3], parameters[2:]] if several else [parameters]
    return [torch.optim.SGD(each, lr=0.1, momentum=0.5) for each in lists]


def numbers_of(owner: Parameters, optimizer: Any) -> list[int]:
    places = {id(parameter): number for number, parameter in enumerate(owner.all)}
    return [places[id(parameter)] for parameter in optimizer.param_groups[0]["params"]]


def change(op: Op, owner: Parameters, optimizers: Sequence[Any]) -> bool:
    """Change the lists of parameters, as programs do; return whether the parameter is concerned."""
    number, old = op.some[-1], owner.all[op.some[-1]]
    lists = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
    is_member = any(p is old for each in lists for p in each)
    if op.kind == "swap":
        torch.utils.swap_tensors(old, torch.nn.Parameter(old.detach() * 1.0))
        return True
    if op.kind == "replace":
        owner.all[number] = owner.made(number, old.detach() / 2)
        lists = [[owner.all[number] if p is old else p for p in each] for each in lists]
    elif op.kind == "drop" and all(len(each) > 1 for each in lists):
        lists = [[p for p in each if p is not old] for each in lists]
    elif op.kind == "add" and not is_member:
        lists[0] = [*lists[0], old]
    else:
        return False
    old.grad = None
    for optimizer, params in zip(optimizers, lists, strict=True):
        state = optimizer.state.pop(old, None) if op.kind != "add" else None
        if op.kind == "replace" and state:
            optimizer.state[owner.all[number]] = state
        group = optimizer.param_groups[0]
        if op.how == "item":
            group["params"][:] = params
        elif op.how == "list":
            group["params"] = params
        else:
            optimizer.param_groups = [{**group, "params": params}]
    return True


class Case(NamedTuple):
    """A drawn program, and how its gradients are reduced."""

    ops: list[Op]
    size: int
    op: str
    nbytes: int
    several: bool
    shard: bool
    # Whether autograd keeps what it calls at the end of a pass that has raised, as with devices.
    kept: bool


Grads = dict[int, Any]


def added(*every: Grads) -> Grads:
    found: Grads = {}
    for grads in every:
        for number, grad in grads.items():
            found[number] = found[number] + grad if number in found else grad
    return found


class Expected:
    """What torch alone gives: the reduced part of each gradient, and the parts of the ranks."""

    def __init__(self, case: Case) -> None:
        self.case, self.owner = case, Parameters()
        self.optimizers = optimizers_of(self.owner.all, several=case.several)
        self.reduced: Grads = {}
        self.own: list[Grads] = [{} for _ in range(case.size)]
        # Those whose hooks are called.
        self.known = self.members
        # Not if autograd keeps a pass that has raised, or reductions had begun in it.
        self.certain = True
        # What the ranks do, and after each operation their gradients, if these are certain.
        self.ops: list[Op] = []
        self.seen: list[list[Grads] | None] = []
        for op in case.ops:
            self.take(op)

    @property
    def members(self) -> set[int]:
        return {n for each in self.optimizers for n in numbers_of(self.owner, each)}

    def take(self, op: Op) -> None:
        """Do an operation; before one that would not see all parameters, zero the gradients."""
        if op.kind in ("raise", "raise one") and "swap" in {each.kind for each in self.ops}:
            # Autograd then comes to the parameters in another order: how far it gets is unknown.
            op = op._replace(kind="pass", how="")
        if op.kind == "raise one" and self.case.nbytes == 1:
            op = op._replace(kind="raise")
        blind = self.known != self.members
        if self.case.several and op.kind in ("pass", "raise one"):
            op = op._replace(some=(*sorted(self.members - {op.some[-1]}), op.some[-1]))
        elif op.kind in ("pass", "step") and not self.case.several:
            # The hook of one parameter tells of all; in a step they have no gradients.
            blind = op.kind == "pass" and not self.known & {*op.some}
        if blind and op.kind not in (*CHANGES, "zero"):
            self.take(op._replace(kind="zero", how="none"))
        if op.kind == "swap" and {"raise", "raise one", "grad"} & {each.kind for each in self.ops}:
            # Torch swaps nothing that the graph of a pass which has raised may still hold.
            op = op._replace(kind="replace")
        if op.kind == "step" and any(self.own):
            op = op._replace(how="plain")
        self.ops.append(op)
        if op.kind in CHANGES:
            self.change(op)
        elif op.kind in ("step", "zero"):
            getattr(self, op.kind)(op)
        elif op.kind != "grad":
            self.passes(op)
        if op.kind == "raise":
            self.certain = self.case.nbytes > 1 and not self.case.kept
        every = [added(self.reduced, own) for own in self.own]
        self.seen.append(every if self.certain else None)

    def change(self, op: Op) -> None:
        if change(op, self.owner, self.optimizers):
            # A known parameter, or its contents, are gone, which is noticed at once if no pass is
            # kept.
            gone = op.kind in ("replace", "swap") and op.some[-1] in self.known
            at_once = gone and not self.case.kept
            self.known = self.members if at_once else self.known & self.members - {op.some[-1]}
            for grads in (self.reduced, *self.own):
                grads.pop(op.some[-1], None)

    def zero(self, op: Op) -> None:
        for rank, own in enumerate(self.own):
            had = added(self.reduced, own)
            zeros = {n: torch.zeros_like(g) for n, g in had.items()}
            self.own[rank] = zeros if op.how == "in place" else {}
        self.reduced, self.known, self.certain = {}, self.members, True

    def passes(self, op: Op) -> None:
        number = len(self.ops)
        seen = self.known & {*op.some}
        for rank in range(self.case.size):
            if op.kind == "raise" or (op.kind == "raise one" and rank == op.rank % self.case.size):
                self.accumulate(op, rank, number, op.how)
            if op.kind != "raise":
                self.accumulate(op, rank, number, "")
        if seen:
            self.known = self.members
        if op.kind in ("pass", "raise one") and seen:
            self.reduce()

    def accumulate(self, op: Op, rank: int, number: int, how: str) -> None:
        alone = Parameters()
        for parameter, like in zip(alone.all, self.owner.all, strict=True):
            parameter.data.copy_(like.detach())
        alone.run(op, rank, number, how=how)
        pairs = [(n, p.grad) for n, p in enumerate(alone.all) if n in self.members]
        self.own[rank] = added(self.own[rank], {n: g for n, g in pairs if g is not None})

    def reduce(self) -> None:
        divisor = self.case.size if self.case.op == "mean" else 1
        whole = added(*self.own)
        self.reduced = added(self.reduced, {n: g / divisor for n, g in whole.items()})
        self.own, self.certain = [{} for _ in self.own], True

    def step(self, op: Op) -> None:
        self.reduce()
        for number, parameter in enumerate(self.owner.all):
            grad = self.reduced.get(number)
            parameter.grad = None if grad is None else grad.clone()
        step(op, self.owner, self.optimizers)
        self.reduced = {n: p.grad for n, p in enumerate(self.owner.all) if p.grad is not None}
        self.known = self.members


def step(op: Op, owner: Parameters, optimizers: Sequence[Any]) -> None:
    if op.how == "clip":
        trained = [p for each in optimizers for p in each.param_groups[0]["params"]]
        torch.nn.utils.clip_grad_norm_(list(dict.fromkeys(trained)), 0.5)
    for optimizer in optimizers:
        optimizer.step()


def train(comm: ac.Communicator, case: Case, expected: Expected) -> list[Any]:
    """Do what is expected on one rank; return the parameters."""
    owner = Parameters()
    optimizers = optimizers_of(owner.all, several=case.several)
    options = {"op": case.op, "bucket_bytes": case.nbytes, "shard": case.shard, "verify_every": 1}
    for optimizer in optimizers:
        ac.DistributedOptimizer(optimizer, comm=comm, **options)
    for number, (op, seen) in enumerate(zip(expected.ops, expected.seen, strict=True), 1):
        if op.kind in CHANGES:
            change(op, owner, optimizers)
        elif op.kind == "step":
            step(op, owner, optimizers)
        elif op.kind == "zero":
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=op.how == "none")
        elif op.kind == "local":
            with ExitStack() as stack:
                for optimizer in optimizers:
                    stack.enter_context(no_sync(optimizer))
                owner.run(op, comm.rank, number, how="")
        else:
            alone = op.kind == "raise one" and comm.rank == op.rank % comm.size
            if alone or op.kind in ("raise", "grad"):
                owner.run(op, comm.rank, number, how=op.how)
            if op.kind in ("pass", "raise one"):
                owner.run(op, comm.rank, number, how="")
        if seen is not None:
            members = {n for each in optimizers for n in numbers_of(owner, each)}
            for n in members:
                check(owner.all[n].grad, seen[comm.rank].get(n), f"{number} {op}: gradient {n}")
    return [parameter.detach() for parameter in owner.all]


def check(got: Any, want: Any, what: str) -> None:
    assert (got is None) == (want is None), f"{what}: {got} in place of {want}"
    if want is not None:
        torch.testing.assert_close(got, want, rtol=SLACK, atol=SLACK, msg=lambda m: f"{what}: {m}")


@MANY
# A pass raises after autograd has added to what another one has left.
@example(
    Case(
        [
            *(Op("raise", (0,), how, "apart", 0) for how in ("post", "early post")),
            Op("step", (0,), "plain", "apart", 0),
        ],
        *(2, "mean", 1, False, False, False),
    )
)
# A parameter is dropped whose gradient a pass has left.
@example(
    Case(
        [
            Op("raise", (3, 0), "function", "apart", 0),
            *(Op(kind, (0,), how, "apart", 0) for kind, how in (("pass", ""), ("drop", "item"))),
            *(Op(kind, (0,), how, "apart", 0) for kind, how in (("pass", ""), ("step", "plain"))),
        ],
        *(1, "mean", 1, False, False, False),
    )
)
# Autograd keeps a pass whose gradients the program has zeroed.
@example(
    Case(
        [
            Op(kind, (0,), how, "apart", 0)
            for kind, how in (
                ("pass", ""),
                ("raise", "early post"),
                ("zero", "none"),
                ("pass", ""),
                ("step", "plain"),
            )
        ],
        *(1, "mean", 1, False, False, True),
    )
)
@given(
    case=st.builds(
        Case,
        programs(),
        st.integers(1, 3),
        st.sampled_from(("mean", "sum")),
        st.sampled_from((1, 1 << 20)),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    )
)
def test_gradients_and_training_are_those_of_torch_alone(case: Case) -> None:
    """However passes end, and whatever becomes of the parameters."""
    expected = Expected(case)
    keeping = Keeping() if case.kept else torch.autograd.Variable
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_hooks, "Variable", keeping)
        results = run(case.size, lambda comm: train(comm, case, expected))
    for values in results:
        for n, (got, want) in enumerate(zip(values, expected.owner.all, strict=True)):
            if n in expected.members:
                check(got, want.detach(), f"parameter {n}")


@given(
    size=st.integers(2, 3),
    present=st.lists(st.integers(1, 7), min_size=3, max_size=6),
    order=st.permutations(range(COUNT)),
    alike=st.booleans(),
    bucket_bytes=st.sampled_from([1, 48, 1 << 20]),
    accumulate=st.integers(1, 2),
)
@example(2, [3, 2, 3, 3], [0, 1, 2, 3], True, 1 << 20, 1)
def test_ranks_may_lack_a_pass_in_any_step(
    size: int, present: list[int], order: list[int], alike: bool, bucket_bytes: int, accumulate: int
) -> None:
    """A step has the mean of the passes that were made, whether it is prepared or not.

    `present` has the ranks that make a pass in each step, a bit each, and at least one of them.
    """
    masks = [mask & ((1 << size) - 1) or 1 for mask in present]

    def factor(number: int, rank: int, step: int) -> int:
        return (1 + number) * (1 + rank) * (1 + step) * size

    def train(comm: ac.Communicator) -> list[list[Any]]:
        shapes = [SHAPE if alike else (1 + number, 3) for number in range(COUNT)]
        parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        made = torch.optim.SGD(parameters, lr=0.0)
        optimizer = ac.DistributedOptimizer(
            made, comm=comm, bucket_bytes=bucket_bytes, accumulate=accumulate
        )
        found = []
        for step, mask in enumerate(masks):
            for _ in range(accumulate):
                optimizer.zero_grad()
                if mask >> comm.rank & 1:
                    parts = [(parameters[n] * factor(n, comm.rank, step)).sum() for n in order]
                    sum(parts).backward()
                optimizer.step()
            found.append([parameter.grad.clone() for parameter in parameters])
        return found

    for steps in run(size, train):
        for step, (mask, gradients) in enumerate(zip(masks, steps, strict=True)):
            for number, gradient in enumerate(gradients):
                ranks = [rank for rank in range(size) if mask >> rank & 1]
                wanted = sum(factor(number, rank, step) for rank in ranks) / size
                assert (gradient == wanted).all(), (step, number)


@given(
    size=st.integers(2, 3),
    passes=st.integers(1, 70),
    lacking=st.integers(0, 2),
    dtype=st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
)
@example(2, 9, 1, "float32")
@example(2, 5, 1, "float16")
def test_ranks_may_lack_a_gradient_in_any_pass_of_a_step(
    size: int, passes: int, lacking: int, dtype: str
) -> None:
    """A gradient that a rank lacks counts as zeros in each of the step's passes."""

    def train(comm: ac.Communicator) -> list[Any]:
        parameters = [torch.nn.Parameter(torch.ones(2, dtype=getattr(torch, dtype))) for _ in "ab"]
        optimizer = ac.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.0), op="sum", comm=comm
        )
        for _ in range(passes):
            used = parameters[: 1 + (comm.rank != lacking % size)]
            sum(parameter.sum() for parameter in used).backward()
        optimizer.step()
        return [parameter.grad.tolist() for parameter in parameters]

    for both, alone in run(size, train):
        assert (both, alone) == ([size * passes] * 2, [(size - 1) * passes] * 2)
