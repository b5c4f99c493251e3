"""What every distributed optimizer does, as laws: a test class that each adapter subclasses with a driver.

The problem is the same for all: a small network, and for each rank and step a batch like no other. Ranks
that train on their batches must end as one process does on the batches of all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import optree
import pytest
from numpy.typing import NDArray

import arraycomm as ac
from arraycomm._trees.buffers import BufferPool
from tests.adapters.gradients import STEPS, gradients, reduced, zeros
from tests.support.on_ranks import LAUNCH, each_rank_of

Array = NDArray[Any]
Tree = dict[str, Any]
Options = dict[str, Any]

INPUTS, HIDDEN, SAMPLES = 5, 4, 6
KINDS = ["sgd", "momentum", "adamw"]

# Arguments of `DistributedOptimizer` with which every law holds.
OPTIONS: Options = {"verify_every": 1}


# The problem


def initial_parameters(seed: int) -> Tree:
    """Return the network's parameters: one is used by rank 1 alone, and one by no rank."""
    random = np.random.default_rng(seed)
    shapes = {"first": (INPUTS, HIDDEN), "last": HIDDEN, "sometimes": HIDDEN, "never": 3}
    return {name: random.normal(size=shape) for name, shape in shapes.items()}


class Batch(NamedTuple):
    x: Any
    y: Any
    selected: Any  # 1 for samples that use the parameter `sometimes`, otherwise 0


def batch(rank: int, step: int, count: int = SAMPLES) -> Batch:
    random = np.random.default_rng((rank, step))
    x, y = random.normal(size=(count, INPUTS)), random.normal(size=count)
    return Batch(x, y * (1 + rank), np.full(count, float(rank == 1)))


def together(batches: Sequence[Batch]) -> Batch:
    return Batch(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))


def loss_of(params: Any, part: Batch, tanh: Callable[[Any], Any]) -> Any:
    """Return the sum of the losses of the samples."""
    hidden = tanh(part.x @ params["first"])
    if part.selected.any():
        hidden = hidden + part.selected[:, None] * params["sometimes"]
    return ((hidden @ params["last"] - part.y) ** 2).sum()


def gradient_of(params: Tree, part: Batch) -> Tree:
    """Return the gradient of `loss_of`; None for a parameter that no sample uses."""
    tanh = np.tanh(part.x @ params["first"])
    error = 2 * ((tanh + part.selected[:, None] * params["sometimes"]) @ params["last"] - part.y)
    slope = error[:, None] * params["last"]
    return {
        "first": part.x.T @ (slope * (1 - tanh**2)),
        "last": (tanh + part.selected[:, None] * params["sometimes"]).T @ error,
        "sometimes": part.selected @ slope if part.selected.any() else None,
        "never": None,
    }


# A framework


class Driver(ABC):
    """One framework's optimizer, and parameters that it updates, as a training loop has them.

    Its kind is one of `KINDS`, and its rate 0.1. The loop, or the optimizer itself, clips reduced
    gradients to the norm `clip`.
    """

    # Whether a step has the same bits as the plain optimizer's.
    exact: ClassVar[bool] = True
    dtype: ClassVar[Any] = np.float64
    # An optimizer of which `joined.synchronize` reaches all state, or that has none.
    kind_in_join: ClassVar[str] = "adamw"
    # Whether the optimizer treats each parameter by itself, and says so.
    shardable: ClassVar[bool] = True

    def __init__(self, params: Tree, kind: str, clip: float | None = None) -> None:
        self.clip = clip
        self.make({name: np.array(array) for name, array in params.items()}, kind)

    @abstractmethod
    def make(self, params: Tree, kind: str) -> None:
        """Make the parameters and the plain optimizer."""

    @abstractmethod
    def distribute(self, comm: ac.Communicator, options: Options) -> None:
        """Make the optimizer distributed."""

    @abstractmethod
    def apply(self, grads: Tree) -> None:
        """Take a step with these gradients, of which some may be None."""

    @abstractmethod
    def learn(self, part: Batch, factor: float) -> None:
        """Take a step with the gradient of `factor` times the loss."""

    @abstractmethod
    def set_rate(self, rate: float) -> None:
        """Change the learning rate."""

    @abstractmethod
    def parameters(self) -> dict[str, Array]:
        """Return a copy of the parameters."""

    @abstractmethod
    def state(self) -> Any:
        """Return a copy of what a checkpoint has to hold, the parameters first."""

    @abstractmethod
    def resume(self, saved: Any, comm: ac.Communicator) -> None:
        """Go on from a checkpoint that rank 0 has read, and for which the other ranks pass None."""

    @abstractmethod
    def synchronize(self, root: int, comm: ac.Communicator) -> None:
        """Take the parameters and the optimizer's state of a rank."""

    def leave_compiled(self) -> None:
        """Take the next steps outside of compiled programs, which cannot do everything."""

    @abstractmethod
    def finish(self, joined: ac.Join) -> None:
        """Go on after a `join` block: what the adapter cannot reach takes the last rank's values."""


class Program(NamedTuple):
    """A training loop: its optimizer, and what else it does."""

    kind: str
    op: str = "mean"
    clip: float | None = None
    accumulate: int = 1
    new_rate: float | None = None

    @property
    def name(self) -> str:
        marks = "clip" * (self.clip is not None), "rate" * (self.new_rate is not None)
        return " ".join(filter(None, (self.kind, self.op, *marks, f"every {self.accumulate}")))


PROGRAMS = [
    Program("sgd"),
    Program("sgd", op="sum", new_rate=0.01),
    Program("momentum", clip=0.5),
    Program("adamw", op="sum", clip=2.0),
    Program("momentum", op="sum", accumulate=3),
    Program("adamw", clip=0.5, accumulate=2),
    Program("sgd", accumulate=2, new_rate=0.02),
]
# Each with another number of ranks, and the first with one rank alone as well.
CASES = [(PROGRAMS[0], 1), *((each, 2 + n % 3) for n, each in enumerate(PROGRAMS))]
# One rank alone, and several; programs that train run with two and four as well.
NUMBERS = [1, 3]
if LAUNCH is not None:
    # Processes differ from threads in how bytes move, not in what is done with them. Each compiles for itself.
    KINDS, NUMBERS = KINDS[1:2], [LAUNCH.size]
    CASES = [(each, LAUNCH.size) for each in PROGRAMS[1:3]]


class OptimizerContract:
    """The laws. A subclass names its driver."""

    driver: type[Driver]

    @pytest.fixture(params=NUMBERS)
    def size(self, request: pytest.FixtureRequest) -> int:
        number: int = request.param
        return number

    @pytest.fixture
    def several(self) -> int:
        """A number of ranks with which ranks can differ."""
        return NUMBERS[-1]

    # One step

    @pytest.mark.parametrize("op", ["mean", "sum"])
    def test_a_step_is_the_plain_one_with_the_reduced_gradients(
        self, on_ranks, size: int, op: str
    ) -> None:
        def check(comm: ac.Communicator, kind: str) -> list[Array]:
            mine = self.driver(zeros(), kind)
            mine.distribute(comm, {"op": op, **OPTIONS})
            passed = [gradients(comm.rank, step) for step in range(STEPS)]
            for grads in passed:
                mine.apply(grads)
            assert optree.tree_map(np.ndarray.tolist, passed) == optree.tree_map(
                np.ndarray.tolist, [gradients(comm.rank, step) for step in range(STEPS)]
            )
            return arrays(mine.state())

        for kind in KINDS:
            plain = self.driver(zeros(), kind)
            for step in range(STEPS):
                plain.apply(reduced(size, step, op))
            want = arrays(plain.state())
            for got in on_ranks(size, check, kind):
                self._assert_same(got, want)

    def test_a_gradient_that_some_ranks_lack_counts_as_zeros(self, on_ranks, several: int) -> None:
        def check(comm: ac.Communicator, without: set[int]) -> list[Array]:
            mine = self.driver(zeros(), "sgd")
            mine.distribute(comm, {"op": "sum", **OPTIONS})
            mine.leave_compiled()
            grads: Tree = dict(gradients(comm.rank, 0))
            mine.apply(grads | {"a": None} if comm.rank in without else grads)
            return arrays(mine.parameters())

        for without in ({0}, set(range(1, several)), set(range(several))):
            plain = self.driver(zeros(), "sgd")
            having = [rank for rank in range(several) if rank not in without]
            sums = [gradients(rank, 0)["a"] for rank in having]
            total = {"a": sum(sums[1:], sums[0]) if sums else None}
            plain.apply(reduced(several, 0, "sum") | total)
            for got in on_ranks(several, check, without):
                self._assert_same(got, arrays(plain.parameters()))

    def _assert_same(self, got: list[Array], want: list[Array]) -> None:
        slack = 0 if self.driver.exact else 8 * STEPS * np.finfo(np.float32).eps
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=slack, atol=slack, strict=True)

    # Training

    @pytest.mark.parametrize(
        ("program", "size"),
        CASES,
        ids=lambda value: str(value) if isinstance(value, int) else value.name,
    )
    def test_ranks_train_as_one_process_on_all_batches(
        self, on_ranks, program: Program, size: int
    ) -> None:
        count = program.accumulate
        steps = range(count * STEPS)

        def train(comm: ac.Communicator) -> list[dict[str, Array]]:
            mine = self._start(program, comm)
            seen = []
            for step in steps:
                self._change_rate(mine, program, step)
                part = batch(comm.rank, step)
                mine.learn(part, 1 / len(part.y) if program.op == "mean" else 1)
                seen.append(mine.parameters())
            return seen

        one, want = self.driver(initial_parameters(0), program.kind, program.clip), []
        for step in steps[count - 1 :: count]:
            self._change_rate(one, program, step - count + 1)
            part = together(
                [batch(r, s) for s in range(step - count + 1, step + 1) for r in range(size)]
            )
            one.learn(part, 1 / len(part.y) if program.op == "mean" else 1 / count)
            want.append(one.parameters())
        results = on_ranks(size, train)
        self._assert_trained(results, [seen[count - 1 :: count] for seen in results], want)
        for step, (before, after) in enumerate(zip(results[0], results[0][1:], strict=False)):
            # Between two steps that reduce, nothing changes.
            assert (bits(before) == bits(after)) is ((step + 1) % count != count - 1)

    def test_steps_reuse_the_memory_of_those_before(
        self, on_ranks, several: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Memory for reduced gradients is new in the first steps only."""
        new, acquire = list[int](), BufferPool.acquire

        def noted(pool: BufferPool) -> tuple[Array, bool]:
            memory, is_new = acquire(pool)
            new.extend([len(memory)] * (is_new and len(memory) > 0))
            return memory, is_new

        monkeypatch.setattr(BufferPool, "acquire", noted)

        def train(comm: ac.Communicator) -> None:
            mine = self._start(PROGRAMS[0], comm)
            for step in range(10):
                if step == 4:
                    comm.barrier()
                    new.clear()
                    comm.barrier()
                mine.learn(batch(comm.rank, step), 1.0)

        on_ranks(several, train)
        assert not new

    def _start(self, program: Program, comm: ac.Communicator) -> Driver:
        mine = self.driver(initial_parameters(0), program.kind, program.clip)
        mine.distribute(comm, {"op": program.op, "accumulate": program.accumulate, **OPTIONS})
        return mine

    def _change_rate(self, driver: Driver, program: Program, step: int) -> None:
        if program.new_rate is not None and step == program.accumulate:
            driver.set_rate(program.new_rate)

    def _assert_trained(self, results: Any, got: Any, want: list[dict[str, Array]]) -> None:
        """Bits are the same on all ranks after each step, and close to those of one process."""
        first = [bits(params) for params in results[0]]
        assert all([bits(params) for params in seen] == first for seen in results)
        # Sums of a few hundred products, over a few steps, in another order: a few hundred roundings.
        slack = 1000 * np.finfo(self.driver.dtype).eps
        for seen in got:
            for mine, theirs in zip(seen, want, strict=True):
                for name in theirs:
                    np.testing.assert_allclose(mine[name], theirs[name], rtol=slack, atol=slack)

    # Numbers of batches and of samples that differ

    def test_ranks_that_run_out_of_data_train_as_one_process(self, on_ranks, several: int) -> None:
        size, kind, counts = several, self.driver.kind_in_join, (2, 4, 3)[:several]

        def batch_of(rank: int, step: int) -> Batch:
            # The last one of each rank is short.
            return batch(rank, step, SAMPLES - 2 * (step == counts[rank] - 1) - rank)

        def train(comm: ac.Communicator) -> list[dict[str, Array]]:
            mine = self.driver(initial_parameters(0), kind)
            mine.distribute(comm, OPTIONS)
            mine.leave_compiled()
            with ac.join(comm) as joined:
                for step in range(counts[comm.rank]):
                    part = batch_of(comm.rank, step)
                    joined.weight = len(part.y)
                    mine.learn(part, 1 / len(part.y))
            mine.finish(joined)
            mine.learn(batch(comm.rank, 9), 1 / SAMPLES)
            return [mine.parameters()]

        one = self.driver(initial_parameters(0), kind)
        parts = [
            together([batch_of(rank, step) for rank in range(size) if step < counts[rank]])
            for step in range(max(counts))
        ]
        for part in (*parts, together([batch(rank, 9) for rank in range(size)])):
            one.learn(part, 1 / len(part.y))
        results = on_ranks(size, train)
        self._assert_trained(results, results, [one.parameters()])

    # States

    @pytest.mark.parametrize("kind", KINDS)
    def test_all_ranks_go_on_from_the_values_of_one(
        self, on_ranks, several: int, kind: str
    ) -> None:
        def started(rank: int) -> Driver:
            """Return an optimizer that has taken as many steps of its own as its rank says."""
            driver = self.driver(initial_parameters(rank), kind)
            for step in range(rank):
                driver.apply(gradient_of(initial_parameters(step), batch(1, step)) | NEVER)
            return driver

        def check(comm: ac.Communicator, root: int) -> list[dict[str, Array]]:
            mine = started(comm.rank)
            mine.distribute(comm, OPTIONS)
            mine.synchronize(root, comm)
            mine.learn(batch(comm.rank, 5), 1 / SAMPLES)
            return [mine.parameters()]

        for root in {0, several - 1}:
            one = started(root)
            one.learn(together([batch(rank, 5) for rank in range(several)]), 1 / SAMPLES / several)
            results = on_ranks(several, check, root)
            self._assert_trained(results, results, [one.parameters()])

    @pytest.mark.parametrize("kind", KINDS)
    @each_rank_of("several")
    def test_a_run_that_rank_0_alone_has_saved_goes_on_with_the_same_bits(
        self, comm: ac.Communicator, kind: str
    ) -> None:
        def train(driver: Driver, steps: range) -> None:
            for step in steps:
                driver.learn(batch(comm.rank, step), 1 / SAMPLES)

        mine = self._start(Program(kind), comm)
        train(mine, range(2))
        saved = mine.state() if comm.rank == 0 else None
        resumed = self.driver(initial_parameters(comm.rank + 1), kind)
        resumed.distribute(comm, OPTIONS)
        resumed.resume(saved, comm)
        train(resumed, range(2, 4))
        train(mine, range(2, 4))
        assert bits(resumed.parameters()) == bits(mine.parameters())

    # Sharded

    def test_sharded_optimizers_take_the_same_steps(self, on_ranks, several: int) -> None:
        def train(comm: ac.Communicator, kind: str, shard: bool) -> list[dict[str, bytes]]:
            mine = self.driver(initial_parameters(0), kind)
            if shard and not mine.shardable:
                with pytest.raises(TypeError, match="cannot be sharded"):
                    mine.distribute(comm, {"shard": True})
                return train(comm, kind, shard=False)
            mine.distribute(comm, {"shard": shard})
            seen = []
            for step in range(STEPS):
                mine.learn(batch(comm.rank, step), 1 / SAMPLES)
                seen.append(bits(mine.parameters()))
            return seen

        # Of those with a state.
        for kind in KINDS[-2:]:
            sharded = on_ranks(several, train, kind, True)
            assert sharded == on_ranks(several, train, kind, False)

    # What is refused

    @each_rank_of("several")
    def test_wrapping_twice_is_refused(self, comm: ac.Communicator) -> None:
        mine = self.driver(zeros(), "sgd")
        mine.distribute(comm, OPTIONS)
        with pytest.raises(ValueError, match="distributed already"):
            mine.distribute(comm, OPTIONS)


NEVER = {"never": np.zeros(3)}


def bits(params: dict[str, Array]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in params.items()}


def arrays(tree: Any) -> list[Array]:
    """Return the arrays and numbers of a tree as NumPy's arrays."""
    leaves = optree.tree_leaves(tree)
    return [np.asarray(leaf) for leaf in leaves if not isinstance(leaf, str)]
