"""Laws of torch's optimizers: what ranks train is what one process trains on all of their data.

And whose memory a gradient is: reductions write only to memory that nobody else has. Autograd hands
out parts of one tensor where a model joins, stacks or adds its parameters, and the program's own
tensor where that is passed to `backward`.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

import numpy as np
import optree
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import _launch
from arraycomm.testing import run
from properties.test_training_laws import MANY

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from arraycomm.adapters.torch import _hooks, gather_state, no_sync  # noqa: E402

pytestmark = [
    pytest.mark.skipif(_launch.detect(os.environ) is not None, reason="runs where pytest is alone"),
    # Of schedules that begin before any step, or with a copy of the optimizer.
    pytest.mark.filterwarnings(r"ignore:.*optimizer.step\(\)"),
]


class Keeping(threading.local):
    """The engine of autograd, which keeps what it calls until the next pass, as with devices."""

    _execution_engine = property(lambda self: self)

    def queue_callback(self, callback: Any) -> None:
        self.last = callback
        torch.autograd.Variable._execution_engine.queue_callback(callback)


@pytest.fixture(autouse=True, scope="module")
def _kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_hooks, "Variable", Keeping())
        yield


# Sums of a few hundred products, over a few steps, in another order: a few hundred roundings.
SLACK: Final = 1000 * np.finfo(np.float64).eps
SHAPE: Final = (2, 3)


def made(count: int, *, alike: int = 0) -> list[Any]:
    """Return parameters; the first ones may have no values by which they are known."""
    random = np.random.default_rng(0)
    values = [random.normal(size=SHAPE) ** (number >= alike) for number in range(count)]
    return [torch.nn.Parameter(torch.from_numpy(value)) for value in values]


def direction(like: Any, *seed: int) -> Any:
    """What parameters are multiplied with: another tensor for each rank and step."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=tuple(like.shape)))


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


def output_of(parameters: Sequence[Any], rank: int, step: int, join: str = "cat") -> Any:
    """Return one tensor of parameters, used in an order of the rank's own, and its direction."""
    order = np.random.default_rng((rank, step)).permutation(len(parameters))
    whole = JOINS[join]([parameters[n] for n in order])
    return whole, direction(whole, rank, step)


def loss_of(*arguments: Any) -> Any:
    """Return a rank's loss; see `output_of`."""
    whole, given = output_of(*arguments)
    return (torch.tanh(whole) * given).sum()


def values_of(parameters: Sequence[Any]) -> list[Any]:
    return [parameter.detach().clone() for parameter in parameters]


# Loops, with what may happen to an optimizer in between -----------------------------------------


class Halved(ac.Compression):
    """Sends halves of gradients, in fewer bits."""

    def compress(self, gradient: Any) -> Any:
        return gradient.bfloat16() / 2

    def decompress(self, reduced: Any, gradient: Any) -> Any:
        return reduced.to(gradient.dtype) * 2


class Twice(torch.optim.SGD):  # type: ignore[misc, name-defined]
    """Evaluates a closure twice, and keeps more than tensors."""

    per_parameter = True

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["evaluations"] = {"all": (2, [1.5])}
        return super().step(closure)


class Broken(torch.autograd.Function):  # type: ignore[misc, name-defined]
    """Raises in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise KeyError("broken")


class Deriving(torch.autograd.Function):  # type: ignore[misc, name-defined]
    """Derives another loss in its backward pass, by `torch.autograd.grad`."""

    @staticmethod
    def forward(ctx: Any, x: Any, loss: Callable[[], Any], parameters: list[Any]) -> Any:
        ctx.loss, ctx.parameters = loss, parameters
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        with torch.enable_grad():
            torch.autograd.grad(ctx.loss(), ctx.parameters, allow_unused=True)
        return gradient, None, None


KINDS: Final[dict[str, Callable[[Any], Any]]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    # With an epsilon so large that the size of the gradients matters, not their sign alone.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, eps=0.1, weight_decay=0.1),
    "twice": lambda parameters: Twice(parameters, lr=0.1, momentum=0.9),
}
EVENTS = ("deepcopy", "copy", *("nothing", "saved") * 3, "raised", "grown", "decayed", "frozen")
PARTS: Final = (
    *("all", "first", "some", "local", "derived", "argument"),
    *("checkpoint", "inner last", "inner derived"),
)
CHANGES: Final = ("nothing", "clip", "replace", "scale")
ZEROS: Final = ("none", "in place", "flat", "not at all")


class Doubled(ac.Compression):
    """Sends gradients times two, which loses nothing."""

    def compress(self, gradient: Any) -> Any:
        return gradient * 2

    def decompress(self, reduced: Any, gradient: Any) -> Any:
        return reduced / 2


EXACT, LOSSY = (None, Doubled()), ("bfloat16", "float16", Halved())


class Step(NamedTuple):
    """What happens before a step; its backward passes, and how it ends; who has no data in it (-1)."""

    event: str
    parts: list[str]
    change: str
    end: str
    zeros: str
    idle: int


class Case(NamedTuple):
    """A drawn loop, and how its gradients are reduced."""

    steps: list[Step]
    kind: str
    # The second rank lists its parameters in another order, which names prove, or values.
    mixed: str
    join: str
    options: dict[str, Any]


@st.composite
def cases(draw: Any) -> Case:
    options = {
        "op": draw(st.sampled_from(("sum", "mean"))),
        "bucket_bytes": draw(st.sampled_from((1, 33, 1 << 20))),
        "accumulate": draw(st.sampled_from((1, 1, 1, 2))),
        "shard": draw(st.booleans()),
        "compression": draw(st.sampled_from((None, *EXACT, *LOSSY))),
    }
    accumulates, steps = options["accumulate"] > 1, list[Step]()
    for _ in range(draw(st.integers(1, 5))):
        events = [e for e in EVENTS if e != "grown" or "grown" not in [s.event for s in steps]]
        if accumulates:
            # Sums are in no state, and must be of the same parameters.
            events = [e for e in events if e not in ("saved", "grown")]
        event = draw(st.sampled_from(events))
        parts = draw(st.lists(st.sampled_from(PARTS), max_size=3) | st.just(["by hand"]))
        end = draw(st.sampled_from(("step", "step", "skip", "closure")))
        change, zeros = draw(st.sampled_from(CHANGES)), draw(st.sampled_from(ZEROS))
        if accumulates or parts == ["by hand"]:
            # Gradients are this rank's own until the step.
            change, end, zeros = "nothing", "step", "none"
        # Who has no data takes the step, since it cannot know that the others skip it.
        idle = -1 if end == "skip" else draw(st.integers(-1, 2))
        unknown = ("flat", "not at all") if steps and steps[-1].end == "skip" else ("not at all",)
        if steps and steps[-1].zeros in unknown and event == "nothing" and end == "step":
            # It still has gradients, or a step of zeros. Others in their place would be this rank's own, set by hand.
            parts = ["all" if part == "by hand" else part for part in parts]
            idle, change = -1, "clip" if change == "replace" else change
        steps.append(Step(event, parts, change, end, zeros, idle))
    choices = list(KINDS), ("", "names", "values"), list(JOINS)
    return Case(steps, *(draw(st.sampled_from(each)) for each in choices), options)


def after_a_skipped_step(event: str, end: str, zeros: str = "none") -> Case:
    """Return a loop in which rank 0 has no data in the step that follows one without an update."""
    skipped = Step("nothing", ["all"], "nothing", "skip", zeros, -1)
    options = {"op": "sum", "bucket_bytes": 1, "accumulate": 1, "shard": False, "compression": None}
    steps = [skipped, Step(event, ["all"], "nothing", end, "none", 0)]
    return Case(steps, "momentum", "", "cat", options)


def repeated_in_a_checkpoint() -> Case:
    """Return a loop in whose third step gradients come again after their reduction has begun."""
    case = after_a_skipped_step("nothing", "step")
    first = case.steps[0]._replace(end="step")
    return case._replace(steps=[first, first, first._replace(parts=["inner last"])])


def passes_after_a_pass(part: str) -> Case:
    """Return a loop in which gradients that are reduced are added to in a pass in another one."""
    case = after_a_skipped_step("nothing", "step")
    return case._replace(steps=[case.steps[1]._replace(parts=["all", part])], join="apart")


def by_hand_after_an_exception() -> Case:
    """Return a loop in which gradients are set by hand after a pass that raised, and was zeroed."""
    case = after_a_skipped_step("nothing", "step")
    raised = case.steps[1]._replace(event="raised", parts=["by hand"])
    return case._replace(steps=[case.steps[0]._replace(parts=[]), raised], join="apart")


class Loop:
    """A loop with the losses of some ranks: one rank's part of it, or one process with all of them."""

    def __init__(
        self, case: Case, ranks: Sequence[int], comm: ac.Communicator | None, *, happens: bool
    ) -> None:
        self.case, self.ranks, self.comm = case, ranks, comm
        # Whether an optimizer is replaced by a copy where the program says so.
        self.happens = happens
        self.parameters = made(4, alike=3 * (case.mixed == "names"))
        self.grown = False
        self.make()
        self.sums: dict[int, Any] = {}
        self.kept = 0
        self.seen: list[list[Any]] = []
        # The program's own memory for gradients, and tensors of its own that must stay as they are.
        self.flat: Any = None
        self.own: list[tuple[Any, Any]] = []

    def make(self) -> None:
        """Make an optimizer of the parameters, as a program does at its start."""
        first, comm = self.parameters[:3], self.comm
        named = [(str(number), parameter) for number, parameter in enumerate(first)]
        given = named if self.case.mixed == "names" else first
        turned = self.case.mixed and comm is not None and comm.rank == 1
        self.optimizer = KINDS[self.case.kind](given[::-1] if turned else given)
        if comm is not None:
            ac.DistributedOptimizer(self.optimizer, comm=comm, **self.case.options)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        if self.grown:
            self.grow()

    def grow(self) -> None:
        name = {"param_names": ["3"]} if self.case.mixed == "names" else {}
        last = [("3", self.parameters[3])] if name else self.parameters[3:]
        self.optimizer.add_param_group({"params": last, "lr": 0.05})

    def happen(self, event: str, number: int) -> None:
        """Do what happens between two steps."""
        if event == "decayed":
            self.schedule.step()
        elif event == "grown":
            self.grown = True
            self.grow()
        elif event == "frozen":
            self.parameters[0].requires_grad_(not self.parameters[0].requires_grad)
        elif event == "raised" and self.comm is not None:
            used = enumerate(self.used)
            order = [Broken.apply(p) if n == 1 + number % 2 else p for n, p in used]
            with pytest.raises(KeyError, match="broken"):
                sum((p * (2 + self.comm.rank)).sum() for p in order).backward()
            self.zero("none")
        elif event == "deepcopy" and self.happens:
            together = self.parameters, self.optimizer, self.schedule
            self.parameters, self.optimizer, self.schedule = copy.deepcopy(together)
        elif event == "copy" and self.happens:
            self.optimizer = copy.copy(self.optimizer)
            self.schedule.optimizer = self.optimizer
        elif event == "saved" and self.happens:
            self.save_and_load()

    def save_and_load(self) -> None:
        """Go on with an optimizer that has loaded what another one has saved."""
        assert self.comm is not None
        if self.case.options["shard"]:
            root = self.comm.size - 1
            state = self.comm.bcast_object(gather_state(self.optimizer, root=root), root)
        else:
            state = pickle.loads(pickle.dumps(self.optimizer.state_dict()))
        schedule = self.schedule.state_dict()
        kept = [
            (value, p.requires_grad)
            for value, p in zip(values_of(self.parameters), self.parameters, strict=True)
        ]
        self.parameters = [torch.nn.Parameter(*each) for each in kept]
        self.make()
        self.optimizer.load_state_dict(state)
        self.schedule.load_state_dict(schedule)

    @property
    def used(self) -> list[Any]:
        return self.parameters[: self.grown + 3]

    def has_none(self, step: Step) -> bool:
        """Return whether there is no data in a step."""
        return {*self.ranks} == {step.idle}

    def keep(self, tensor: Any) -> Any:
        self.own.append((tensor, tensor.clone()))
        return tensor

    def outputs(self, part: str, number: int, idle: int) -> list[tuple[Any, Any]]:
        """Return what the parameters are joined to on each rank, and its direction."""
        found, size = [], len(self.ranks) if self.case.options["op"] == "mean" else 1
        for rank in self.ranks:
            some = {"first": self.used[:1], "some": self.used[(rank + number) % 2 :: 2]}
            if rank != idle:
                whole, given = output_of(some.get(part, self.used), rank, number, self.case.join)
                found.append((whole, given / size))
        return found

    def loss(self, *arguments: Any) -> Any:
        return sum((torch.tanh(whole) * given).sum() for whole, given in self.outputs(*arguments))

    def pass_back(self, value: Any, given: Any = None) -> None:
        """Make a backward pass; in one process without what autograd adds up in shared memory."""
        if self.comm is not None:
            value.backward(given)
            return
        found = torch.autograd.grad(value, self.trained(), given, allow_unused=True)
        for parameter, grad in zip(self.trained(), found, strict=True):
            if grad is not None:
                before = torch.zeros_like(grad) if parameter.grad is None else parameter.grad
                parameter.grad = before + grad

    def trained(self) -> list[Any]:
        return [parameter for parameter in self.used if parameter.requires_grad]

    def backward(self, step: Step, number: int) -> Any:
        """Make the backward passes of a step; return the last loss."""
        value = torch.zeros((), dtype=torch.float64)
        for part in () if self.has_none(step) else step.parts:
            with no_sync(self.optimizer) if part == "local" and self.comm else nullcontext():
                # A rank may make as many as it likes.
                times = 1 + self.ranks[-1] if part == "local" and self.comm else 1
                for _ in range(times):
                    value = self.backward_of(part, number, step.idle, times)
        if "local" in step.parts and not self.has_none(step):
            # What follows sees all of it.
            self.pass_back(self.loss("all", number, step.idle))
        return value.detach()

    def backward_of(self, part: str, number: int, idle: int, times: int) -> Any:
        """Make one of this many backward passes of a kind; return its loss."""
        value = self.loss(part, number, idle) / times
        if part in ("checkpoint", "inner last"):
            one = torch.ones((), dtype=torch.float64, requires_grad=True)
            again = value
            if self.comm is not None:
                again = checkpoint(
                    lambda x: x * self.loss("all", number, idle), one, use_reentrant=number % 2 == 0
                )
            # Autograd begins with what was made last.
            value = again + (value if part == "checkpoint" else self.loss(part, number, idle))
        if part == "inner derived" and self.comm is not None and value.requires_grad:
            one = torch.ones((), dtype=torch.float64, requires_grad=True)
            value = value * Deriving.apply(
                one, lambda: self.loss("all", number, idle), self.trained()
            )
        if part in ("derived", "by hand"):
            found = torch.autograd.grad(value, self.trained(), allow_unused=True)
            pairs = zip(self.trained(), found, strict=True)
            for parameter, grad in pairs if part == "by hand" else ():
                parameter.grad = None if grad is None else self.keep(grad)
            self.flat = None
        elif part == "argument":
            for whole, given in self.outputs(part, number, idle):
                if whole.requires_grad:
                    self.pass_back(whole, self.keep(given))
        elif value.requires_grad:
            self.pass_back(value)
        return value * times

    def zero(self, how: str) -> None:
        if how == "flat" and self.flat is not None and self.comm is not None:
            self.flat.zero_()
        elif how == "flat":
            self.flat = torch.zeros(len(self.used), *SHAPE, dtype=torch.float64)
            for parameter, grad in zip(self.used, self.flat, strict=True):
                parameter.grad = grad
        elif how != "not at all":
            self.optimizer.zero_grad(set_to_none=how == "none")
            self.flat = None if how == "none" else self.flat

    def take(self, number: int, step: Step) -> None:
        if step.event != "nothing":
            self.zero("none")
            self.happen(step.event, number)
        if step.end == "closure":

            def closure() -> Any:
                self.zero("none")
                return self.backward(step, number)

            self.seen.append([self.optimizer.step(closure)])
        else:
            self.backward(step, number)
            if step.change == "replace":
                self.flat = None
            mine = not self.has_none(step)
            if mine:
                change(step.change, [p for p in self.parameters if p.grad is not None])
            is_local = self.case.options["accumulate"] > 1 or "by hand" in step.parts
            grads = [p.grad for p in self.parameters if mine and not is_local]
            self.seen.append([grad.clone() for grad in grads if grad is not None])
            if step.end == "step":
                before = [p.grad for p in self.parameters]
                self.step()
                # Else a step reduces more, and rounds.
                ready = mine and not is_local and self.case.options["compression"] in EXACT
                if self.comm and (ready or self.kept % self.case.options["accumulate"]):
                    assert_same([[p.grad for p in self.parameters]], [before])
        self.seen.append(values_of(self.parameters))
        if step.idle >= 0:
            # Then gradients are no longer parts of one tensor.
            self.flat = None
        self.zero(step.zeros)
        for tensor, before in self.own:
            assert torch.equal(tensor, before), "the program's own tensor was written to"

    def step(self) -> None:
        """Take a step; in one process with the mean of the gradients of several."""
        every = self.case.options["accumulate"]
        self.kept += 1
        if self.comm is not None or every == 1:
            self.optimizer.step()
            return
        for n, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.sums[n] = self.sums.get(n, 0) + parameter.grad / every
        if self.kept % every == 0:
            for n, parameter in enumerate(self.parameters):
                parameter.grad = self.sums.get(n)
            self.optimizer.step()
            self.sums = {}

    def run(self) -> tuple[list[list[Any]], int]:
        """Return what each step has left: the gradients or the loss, and the parameters.

        Then the whole state, and how much of it is here.
        """
        for number, step in enumerate(self.case.steps):
            self.take(number, step)
        state = self.optimizer.state_dict() if self.comm is None else gather_state(self.optimizer)
        self.seen.append([] if state is None else optree.tree_leaves(state["state"]))
        return self.seen, sum(map(bool, self.optimizer.state.values()))


def change(how: str, parameters: list[Any]) -> None:
    if how == "clip":
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    for parameter in parameters:
        if how == "replace":
            parameter.grad = parameter.grad / 2
        elif how == "scale":
            parameter.grad.mul_(0.5)


def assert_same(mine: list[list[Any]], others: list[list[Any]], slack: float = 0) -> None:
    """Compare two ranks' steps; who had no data in one has seen no gradients of it."""
    assert len(mine) == len(others)
    for got, want in zip(mine, others, strict=True):
        if got and want:
            torch.testing.assert_close(got, want, rtol=slack, atol=slack)


def trained(comm: ac.Communicator, case: Case, *, happens: bool = True) -> Any:
    return Loop(case, [comm.rank], comm, happens=happens).run()


def alone(case: Case, size: int) -> list[list[Any]]:
    """Return what one process gives."""
    seen, _ = Loop(case, range(size), None, happens=False).run()
    return seen


@MANY
@example(repeated_in_a_checkpoint(), 2)
@example(by_hand_after_an_exception(), 2)
@example(passes_after_a_pass("inner last"), 2)
@example(passes_after_a_pass("inner derived"), 2)
@example(after_a_skipped_step("nothing", "closure"), 2)
@example(after_a_skipped_step("deepcopy", "step"), 2)
@example(after_a_skipped_step("grown", "step", "in place"), 2)
@given(case=cases(), size=st.integers(1, 4))
def test_drawn_loops_give_what_one_process_gives(case: Case, size: int) -> None:
    """With copies or states that are loaded on the way or without, and sharded or not."""
    together = case._replace(options={**case.options, "shard": False})
    (results, kept), (others, whole) = (
        zip(*run(size, lambda comm, how=how: trained(comm, how[0], happens=how[1])), strict=True)
        for how in ((case, True), (together, False))
    )
    exact = case.options["compression"] in EXACT
    twice = any("inner last" in step.parts for step in case.steps)  # In one sum or in two.
    for seen in results:
        assert_same(seen, results[0])
    for seen in others if exact or not twice else ():
        assert_same(seen, results[0], SLACK * twice)
    assert not case.options["shard"] or sum(kept) == whole[0]
    for seen in results if exact else ():
        assert_same(seen, alone(case, size), SLACK)


# Ranks that run out of data, and errors ---------------------------------------------------------

HOWS: Final = ("backward", "parts", "in step", "idle", "fails in backward", "fails in step")
# With gradients that are reduced before the step, so that the program can clip them.
CLIPPING: Final = ("backward", "parts", "fails in backward", "fails in step")


class Share(NamedTuple):
    """How a rank takes a step inside `join`."""

    weight: float
    how: str


def fail(optimizer: Any, parameters: list[Any], rank: int, how: str) -> None:
    """Fail on this rank alone, before the others hear of it."""
    if how == "fails in backward":
        hook = parameters[0].register_post_accumulate_grad_hook
        handle = hook(lambda parameter: change("scale", [parameter]))
        with pytest.raises(RuntimeError, match="was changed inside"):
            loss_of(parameters, rank, 9).backward()
        handle.remove()
    if how == "fails in step":
        parameters[0].grad, parameters[1].grad = torch.ones(SHAPE).double(), parameters[1] * 2
        with pytest.raises(TypeError, match="parameter 1 has a history"):
            optimizer.step()
    optimizer.zero_grad()


def take_joined(optimizer: Any, parameters: list[Any], rank: int, step: int, share: Share) -> None:
    fail(optimizer, parameters, rank, share.how)
    if share.how == "idle":
        return
    # What these steps consist of is not told to the others.
    whole = share.how not in ("parts", "in step")
    with nullcontext() if whole else no_sync(optimizer):
        (loss_of(parameters, rank, step) / (2 if share.how == "parts" else 1)).backward()
    if share.how == "parts":
        (loss_of(parameters, rank, step) / 2).backward()


@MANY
@given(
    shares=st.lists(
        st.lists(
            st.builds(Share, st.sampled_from((0, 1, 2, 0.3)), st.sampled_from(HOWS)), max_size=4
        ),
        min_size=1,
        max_size=3,
    ),
    kind=st.sampled_from(("momentum", "adamw")),
    op=st.sampled_from(("sum", "mean")),
    shard=st.booleans(),
    how=st.sampled_from(CHANGES),
    after=st.sampled_from(("backward", "by hand")),
    first=st.sampled_from((2, 3)),
)
def test_inside_join_ranks_take_the_steps_of_the_others(
    shares, kind, op, shard, how, after, first
) -> None:
    """Each counts by its weight, and who has no data, or has failed before it told the others, none."""

    def train(comm: ac.Communicator) -> list[Any]:
        parameters = made(3)
        plain = KINDS[kind](parameters[:first])
        schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
        optimizer = ac.DistributedOptimizer(plain, comm=comm, op=op, shard=shard)
        if parameters[first:]:
            optimizer.add_param_group({"params": parameters[first:]})
        with ac.join(comm) as joined:
            for step, share in enumerate(shares[comm.rank]):
                joined.weight = share.weight
                take_joined(optimizer, parameters, comm.rank, step, share)
                if share.how in CLIPPING:
                    change(how, parameters)
                optimizer.step()
                schedule.step()
        optimizer.zero_grad()
        if after == "backward":
            loss_of(parameters, comm.rank, 8).backward()
        else:
            others = [value.requires_grad_() for value in values_of(parameters)]
            grads = torch.autograd.grad(loss_of(others, comm.rank, 8), others)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
        optimizer.step()
        return values_of(parameters)

    size, parameters = len(shares), made(3)
    optimizer = KINDS[kind](parameters)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rows = [[s.weight for s in row] for row in shares]
    for step, weights in enumerate([*itertools.zip_longest(*rows, fillvalue=0), [1] * size]):
        last = step == max(map(len, rows))
        factors = weights if op == "mean" else [weight > 0 for weight in weights]
        optimizer.zero_grad()
        hows = ["" if last or step >= len(row) else row[step].how for row in shares]
        losses = [loss_of(parameters, rank, 8 if last else step) for rank in range(size)]
        total = sum(
            loss * factor * (each != "idle")
            for loss, factor, each in zip(losses, factors, hows, strict=True)
        )
        if sum(weights):
            if {*hows} - {"idle", ""} or last:
                (total / (sum(weights) if op == "mean" else 1)).backward()
            if {*hows} & {*CLIPPING}:
                change(how, parameters)
            optimizer.step()
        schedule.step()
    results = run(size, train)
    for seen in results:
        assert_same([seen], results[:1])
        assert_same([seen], [values_of(parameters)], SLACK)


# What one rank does otherwise than the others, and what is said of it.
APART: Final = {
    "inside": "was changed inside backward",
    **dict.fromkeys(
        ("in place", "replaced", "added to", "each"), "on rank {} is not that on rank 0"
    ),
    "skipped": "different steps of one optimizer",
    "again": "different steps of one optimizer",
}


@MANY
@given(
    size=st.integers(2, 3),
    rank=st.integers(0, 2),
    # The rarest is the gradient that is changed while it is reduced.
    how=st.sampled_from((*["inside"] * len(APART), *APART)),
    places=st.permutations(range(3)),
    before=st.integers(0, 2),
    nbytes=st.sampled_from((1, 1, 1 << 20)),
)
def test_what_one_rank_does_alone_is_an_error_on_all(
    size, rank, how, places, before, nbytes
) -> None:
    """A gradient changed inside backward is by a hook of another one, if it is there already."""
    acted = []

    def train(comm: ac.Communicator) -> str:
        parameters = made(3)
        chosen = parameters[places[1]]
        plain = torch.optim.SGD(parameters, lr=0.1)
        optimizer = ac.DistributedOptimizer(plain, comm=comm, bucket_bytes=nbytes)

        def act(_: Any) -> None:
            if chosen.grad is not None:
                acted.append(
                    change("scale" if how in ("inside", "in place") else "replace", [chosen])
                )

        for step in range(before + 2):
            optimizer.zero_grad()
            apart = how if step == before and comm.rank == rank % size else ""
            if apart == "inside":
                parameters[places[0]].register_post_accumulate_grad_hook(act)
            try:
                for _ in range(2 if apart == "again" else 1):
                    loss_of(parameters, 0, step).backward()
                if apart in ("in place", "replaced", "added to"):
                    act(None)
                if how == "each" and step == before:
                    chosen.grad = chosen.grad / (2 + comm.rank)
                    acted.append(step)
                if how == "added to" and step == before:
                    loss_of(parameters, 0, step).backward()
                if apart != "skipped":
                    optimizer.step()
            except (RuntimeError, ac.PeerError, ac.MismatchError) as error:
                return str(error) if step >= before else f"too early: {error}"
        return ""

    told = run(size, train)
    if acted or how in ("skipped", "again"):
        odd = 1 if how == "each" else max(rank % size, 1)
        assert all(APART[how].format(odd) in text for text in told)
    else:
        assert not any(told)
