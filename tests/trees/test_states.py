"""Torch's modules, optimizers, schedulers and scalers: after `synchronize` all ranks go on as the root would."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm.testing import run
from tests.support.on_ranks import each_rank_of

torch = pytest.importorskip("torch")
optim = torch.optim
schedulers = optim.lr_scheduler


class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    """With buffers that are in its state dict and that are not, and with extra state inside and outside."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        # Not by torch's generator, which the threads share.
        random = np.random.default_rng(rank)
        self.inner = Counting(rank)
        self.linear = torch.nn.Linear(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("hidden", torch.from_numpy(random.normal(size=3)), persistent=False)
        self.register_buffer("absent", None)
        self.extra = {"names": [f"rank {rank}"], "array": torch.full((2,), rank)}
        with torch.no_grad():
            for tensor in (*self.parameters(), self.norm.running_mean):
                tensor.copy_(torch.from_numpy(random.normal(size=tuple(tensor.shape))))

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, x: Any) -> Any:
        return self.norm(self.inner(self.linear(x))) + self.hidden + self.extra["array"][0]


class Counting(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Its output depends on how often it was called."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.calls = rank

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x / self.calls


class MasterWeights(optim.SGD):  # type: ignore[misc, name-defined]
    """Keeps a copy of each parameter in more digits than the parameter has."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    fresh = parameter.double()
                    master = self.state[parameter].setdefault("master", fresh)
                    master -= group["lr"] * parameter.grad
                    parameter.copy_(master)
        return loss


def groups(model: Any) -> list[dict[str, Any]]:
    return [
        {"params": model.linear.parameters()},
        {"params": model.norm.parameters(), "weight_decay": 0.1},
    ]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda model: optim.SGD(groups(model), lr=0.1, momentum=0.9),
    "adam": lambda model: optim.Adam(groups(model), lr=0.1, amsgrad=True),
    "tensor rate": lambda model: optim.AdamW(groups(model), lr=torch.tensor(0.1)),
    "adafactor": lambda model: optim.Adafactor(groups(model)),
    "asgd": lambda model: optim.ASGD(groups(model)),
    "rprop": lambda model: optim.Rprop(groups(model)),
    "lbfgs": lambda model: optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
    "master": lambda model: MasterWeights(groups(model), lr=0.1),
}


class Ramp:
    """A schedule that is an object, whose attributes are state."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, step: int) -> float:
        self.factor *= 0.75
        return self.factor


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, Ramp()),
    "one cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.2, total_steps=40),
    "cyclic": lambda optimizer: schedulers.CyclicLR(
        optimizer, 0.01, 0.1, 2, cycle_momentum=False, scale_fn=lambda x: 0.5**x
    ),
    "restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
    "sequential": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, total_iters=3), schedulers.ExponentialLR(optimizer, 0.5)],
        [3],
    ),
    "chained": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.5, 3), schedulers.StepLR(optimizer, 2)]
    ),
    "plateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=0),
    "averaged": lambda optimizer: optim.swa_utils.SWALR(optimizer, 0.3, anneal_epochs=3),
}


class Training:
    """A whole training program of one rank; those of two ranks have nothing in common."""

    def __init__(self, rank: int, optimizer: str, schedule: str) -> None:
        self.model = Net(rank)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.schedule = SCHEDULES[schedule](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + rank), growth_interval=2)
        self.scales = optimizer not in ("lbfgs", "master")  # which need the loss itself

    @property
    def tree(self) -> dict[str, Any]:
        return {"all": [self.model, (self.optimizer, self.schedule)], "scaler": self.scaler}

    def go_on(self, steps: int) -> list[bytes]:
        """Take some steps on data that all ranks have; return the parameters and what goes with them."""
        for step in range(steps):
            x = torch.from_numpy(np.random.default_rng(step).normal(size=(5, 4))).float()
            loss = self._step(x)
            plateau = isinstance(self.schedule, schedulers.ReduceLROnPlateau)
            self.schedule.step(*[float(loss) + step] * plateau)
        tensors = [*self.model.parameters(), *self.model.buffers()]
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        seen = [tensor.detach().numpy().tobytes() for tensor in tensors]
        return [*seen, repr((rates, self.scaler.state_dict(), self.model.extra)).encode()]

    def _step(self, x: Any) -> Any:
        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.model(x).square().sum()
            (self.scaler.scale(loss) if self.scales else loss).backward()
            return loss.detach()

        if not self.scales:
            return self.optimizer.step(closure)
        loss = closure()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


# Steps that each rank has taken before: the root alone, all another number, all but the root.
ROOT_ALONE, ALL, NOT_THE_ROOT = (0, (4, 0, 0)), (2, (2, 0, 5)), (1, (2, 0, 5))


@pytest.mark.parametrize(
    ("optimizer", "schedule", "steps"),
    [
        ("momentum", "lambda", ROOT_ALONE),
        ("adam", "one cycle", NOT_THE_ROOT),
        ("tensor rate", "chained", ALL),
        ("adafactor", "plateau", ALL),
        ("asgd", "averaged", NOT_THE_ROOT),
        ("rprop", "restarts", ALL),
        ("lbfgs", "sequential", ROOT_ALONE),
        ("master", "cyclic", ALL),
    ],
)
def test_all_ranks_go_on_as_the_root_would_have_alone(
    optimizer: str, schedule: str, steps: tuple[int, tuple[int, ...]]
) -> None:
    root, before = steps

    def check(comm: ac.Communicator) -> list[bytes]:
        mine = Training(comm.rank, optimizer, schedule)
        mine.go_on(before[comm.rank])
        got = ac.synchronize(mine.tree, root=root, comm=comm)
        assert got["all"] == [mine.model, (mine.optimizer, mine.schedule)]
        assert got["scaler"] is mine.scaler
        return mine.go_on(3)

    alone = Training(root, optimizer, schedule)
    alone.go_on(before[root])
    want = alone.go_on(3)
    assert run(3, check) == [want] * 3


def test_a_distributed_optimizer_goes_on_with_the_state_of_the_root() -> None:
    def check(comm: ac.Communicator) -> list[bytes]:
        mine = Training(comm.rank, "adam", "sequential")
        mine.go_on(4 * (comm.rank == 1))
        ac.DistributedOptimizer(mine.optimizer, comm=comm)
        ac.synchronize([mine.optimizer, mine.tree], root=1, comm=comm)
        return mine.go_on(4)

    alone = Training(1, "adam", "sequential")
    alone.go_on(4)
    # All ranks have the same data, so that the mean of two gradients is either.
    assert run(2, check) == [alone.go_on(4)] * 2


# Torch's, of any unpickled schedule.
@pytest.mark.filterwarnings("ignore:Seems like .optimizer.step")
def test_ranks_without_any_objects_get_those_of_the_root_and_the_others_keep_theirs() -> None:
    def check(comm: ac.Communicator) -> list[bytes]:
        mine = Training(comm.rank, "adam", "sequential")
        mine.go_on(2 * (comm.rank == 0))
        tree = ac.synchronize(None if comm.rank == 1 else mine.tree, comm=comm)
        if comm.rank == 1:
            mine.model, (mine.optimizer, mine.schedule) = tree["all"]
            mine.scaler = tree["scaler"]
        else:
            assert tree["scaler"] is mine.scaler
        return mine.go_on(2)

    first, second, third = run(3, check)
    assert first == second == third


def other_schedule(rank: int) -> Any:
    optimizer = OPTIMIZERS["adam"](Net(0))
    last = (schedulers.ExponentialLR, schedulers.StepLR)[rank](optimizer, 1)
    return schedulers.SequentialLR(optimizer, [schedulers.ConstantLR(optimizer), last], [1])


def other_buffer(rank: int) -> Any:
    model = torch.nn.Linear(3, 1)
    model.register_buffer("scale", torch.ones(1) if rank else None)
    return model


# What ranks 0 and 1 pass, and how the difference is told.
DIFFERENT: dict[str, tuple[Callable[[int], Any], str]] = {
    "parameters": (
        lambda rank: optim.Adam(torch.nn.Linear(3 + rank, 1).parameters()),
        r".param_groups\[0\]\['params'\]\[0\] is parameter \(1, 3\) on rank 0",
    ),
    "groups": (
        lambda rank: optim.Adam(groups(Net(0))[: 1 + rank]),
        r".param_groups\[1\]\['params'\]\[0\] is on rank 1 only",
    ),
    "optimizer": (
        lambda rank: (optim.Adam, optim.AdamW)[rank](Net(0).parameters()),
        " is Adam on rank 0, AdamW on rank 1",
    ),
    "schedule": (
        other_schedule,
        r" is SequentialLR\(ConstantLR, ExponentialLR\) on rank 0, SequentialLR\(Cons",
    ),
    "scaler": (
        lambda rank: torch.amp.GradScaler("cpu", enabled=rank == 0),
        " is GradScaler on rank 0, disabled GradScaler on rank 1",
    ),
    "extra state": (
        lambda rank: torch.nn.Sequential(Counting(0) if rank else torch.nn.Identity()),
        ".0._extra_state is on rank 1 only",
    ),
    "buffer": (other_buffer, ".scale is on rank 1 only"),
}


@pytest.mark.parametrize("case", DIFFERENT)
@each_rank_of(2)
def test_objects_that_are_not_alike_raise_on_all_ranks(comm: ac.Communicator, case: str) -> None:
    make, difference = DIFFERENT[case]
    with pytest.raises(ac.MismatchError, match=rf"First difference: tree\[1\]{difference}"):
        ac.synchronize([1.5, make(comm.rank)], comm=comm)


def test_extra_state_is_no_part_of_a_reduction() -> None:
    def check(comm: ac.Communicator) -> tuple[int, float]:
        model = torch.nn.Sequential(Counting(comm.rank), torch.nn.Linear(1, 1))
        with torch.no_grad():
            model[1].bias.fill_(comm.rank)
        ac.allreduce_tree(model, "sum", comm=comm)
        return model[0].calls, model[1].bias.item()

    assert run(2, check) == [(0, 1.0), (1, 1.0)]


@pytest.mark.parametrize("call", [ac.synchronize, partial(ac.allreduce_tree, op="max")])
def test_module_with_elements_that_share_memory_is_refused_before_anything_is_written(
    call: Callable[..., Any],
) -> None:
    def body(comm: ac.Communicator) -> Any:
        module = Net(comm.rank)
        before = module.state_dict()["linear.weight"].clone()
        if comm.rank:
            module.register_buffer("wide", torch.zeros(1).expand(3))
        else:
            module.register_buffer("wide", torch.zeros(3))
        kind = TypeError if comm.rank else ac.PeerError
        with pytest.raises(kind, match="wide has elements that share memory"):
            call(module, comm=comm)
        assert torch.equal(module.state_dict()["linear.weight"], before)
        assert comm.allreduce(1) == 2

    run(2, body)
