"""Laws of virtual ranks: a training has the same bits on every number of ranks, from 1 to as many as there are virtual ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from copy import copy, deepcopy
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import _launch
from arraycomm.testing import run

# Before any thread does: others would find a part of the module.
for _framework in ("torch", "jax", "optax"):
    with suppress(ImportError):
        import_module(_framework)

pytestmark = pytest.mark.skipif(
    _launch.detect(os.environ) is not None, reason="runs where pytest is alone"
)

_EXAMPLES = int(os.environ.get("EXAMPLES") or "15")
FEW = settings(max_examples=max(2, _EXAMPLES // 5))
DTYPES = ("float16", "float32", "float64", "complex64", "complex128", "bfloat16")
# Values of which the sign, or the last bit, tells in which order they were added.
VALUES = np.array([-0.0, 0.0, 1.0, -1.0, 1e-3, 3e4, -3e4, 7e-8, 0.1, np.inf])


class Gradients(NamedTuple):
    """The gradients of a training: shapes and dtypes of the parameters, and which are missing."""

    virtual: int
    shapes: list[tuple[int, ...]]
    dtypes: list[str]
    op: str
    bucket_bytes: int
    missing: float
    seed: int

    @property
    def options(self) -> dict[str, Any]:
        return {"op": self.op, "bucket_bytes": self.bucket_bytes}

    def of(self, rank: int, step: int) -> list[Any]:
        random = np.random.default_rng([self.seed, rank, step])
        return [
            None if random.random() < self.missing else self._array(random, shape, dtype)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]

    def _array(self, random: Any, shape: tuple[int, ...], name: str) -> Any:
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        drawn = random.choice(VALUES, shape) * random.choice([1.0, random.random()])
        with np.errstate(all="ignore"):
            return np.asarray(drawn).astype(dtype)

    def zeros(self) -> list[Any]:
        random = np.random.default_rng(0)
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [np.zeros_like(self._array(random, *pair)) for pair in pairs]


GRADIENTS = st.integers(1, 4).flatmap(
    lambda count: st.builds(
        Gradients,
        st.integers(1, 5),
        st.lists(
            st.lists(st.integers(0, 5), max_size=2).map(tuple), min_size=count, max_size=count
        ),
        st.lists(st.sampled_from(DTYPES), min_size=count, max_size=count),
        st.sampled_from(["mean", "sum"]),
        st.sampled_from([1, 64, 25 << 20]),
        st.sampled_from([0.0, 0.0, 0.4, 0.8]),
        st.integers(0, 999),
    )
)


def played(comm: Any, virtual: int | None) -> Iterator[int]:
    """Yield which virtual rank a rank plays in each round of a step; without them, its own rank."""
    count = virtual or comm.size
    for turn in range(-(-count // comm.size)):
        rank = comm.rank + turn * comm.size
        # What a rank without one passes does not count.
        yield rank if rank < count else 99


def bits(arrays: Any) -> list[bytes | None]:
    """Return the bytes of arrays; every NaN has the same."""
    return [None if array is None else _bits(np.asarray(array)) for array in arrays]


def _bits(array: Any) -> bytes:
    parts = array.view(array.real.dtype) if array.dtype.kind == "c" and array.ndim else array
    return np.where(np.isnan(parts), np.nan, parts).astype(parts.dtype).tobytes()


class Recorded:
    """An optimizer that keeps the gradients of each of its steps."""

    def __init__(self) -> None:
        self._steps: list[Any] = []

    def update(self, params: Any, grads: Any) -> Any:
        self._steps.append(bits(grads))
        return params


@given(GRADIENTS, st.integers(0, 4))
def test_virtual_ranks_update_as_ranks_do(training: Gradients, copied: int) -> None:
    """So do those of a copy that is made in a round of the second step, and goes on with other gradients."""

    def train(comm: Any, virtual: int | None, ranks: int) -> Any:
        recorded, params = Recorded(), training.zeros()
        options = {**training.options, "comm": comm, "virtual_ranks": virtual}
        optimizer = ac.DistributedOptimizer(recorded, **options)
        twin, begins = None, copied % -(-training.virtual // ranks)
        for step in range(3):
            for turn, rank in enumerate(played(comm, virtual)):
                after = (turn if virtual else rank // ranks) >= begins
                if step == 1 and twin is None and (after or not virtual):
                    # Both have the same list of steps.
                    twin = copy(optimizer)
                optimizer.update(params, training.of(rank, step))
                if twin is not None:
                    twin.update(params, training.of(rank, step + 3 * after))
        return recorded._steps

    for ranks in range(1, training.virtual + 1):
        expected = run(training.virtual, train, None, ranks)
        assert run(ranks, train, training.virtual, ranks) == expected[:1] * ranks


@given(GRADIENTS, st.booleans())
def test_a_total_goes_on_from_call_to_call(training: Gradients, planned: bool) -> None:
    """Sums onto a total, by trees and by plans, are the left fold of all parts in order."""
    training = training._replace(missing=0.0 if planned else training.missing)

    def add(comm: Any) -> Any:
        total: Any = ()
        plan = comm.plan(training.of(0, 0), "sum") if planned else None
        for rank in played(comm, training.virtual):
            parts = training.of(rank, 0)
            if rank == 99:
                # What no part has stays None.
                every = zip(
                    *(training.of(each, 0) for each in range(training.virtual)), strict=True
                )
                had = [any(part is not None for part in parts) for parts in every]
                zeros = zip(training.zeros(), had, strict=True)
                parts = [-np.zeros_like(zero) if there else None for zero, there in zeros]
            if plan is not None:
                total = plan(parts, onto=total)
            else:
                total = ac.allreduce_gradients(parts, "sum", onto=total, comm=comm)
        return bits(total)

    expected = run(training.virtual, add)
    for ranks in range(1, training.virtual + 1):
        assert run(ranks, add) == expected[:1] * ranks


@given(GRADIENTS, st.lists(st.sampled_from([0, 1, 3, 0.1]), min_size=5, max_size=5))
def test_metrics_go_on_from_call_to_call(training: Gradients, weights: list[float]) -> None:
    training = training._replace(missing=0.0)

    def measure(comm: Any) -> Any:
        total: Any = ()
        for rank in played(comm, training.virtual):
            weight = 0 if rank == 99 else weights[rank]
            mean, total = ac.mean_metrics(training.of(rank, 0), weight, onto=total, comm=comm)
        return bits(mean)

    expected = run(training.virtual, measure)
    assert expected == run(
        training.virtual,
        lambda comm: bits(
            ac.mean_metrics(training.of(comm.rank, 0), weights[comm.rank], comm=comm)
        ),
    )
    for ranks in range(1, training.virtual + 1):
        assert run(ranks, measure) == expected[:1] * ranks


class Program(NamedTuple):
    """A training over a container: a network, its data, and where another number of ranks resumes."""

    virtual: int
    widths: list[int]
    dtype: str
    rows: int
    batch: int
    uneven: str
    pad: bool
    bucket_bytes: int
    skipped: int
    clips: bool
    seed: int
    stops_after: int

    def data(self) -> dict[str, Any]:
        random = np.random.default_rng(self.seed)
        return {"x": random.normal(size=(self.rows, 3)), "y": random.normal(size=self.rows)}

    def container(self, comm: Any) -> ac.DistributedDataContainer[Any]:
        options = {"shuffle": True, "uneven": self.uneven, "virtual_ranks": self.virtual}
        return ac.DistributedDataContainer(self.data(), comm=comm, **options)


PROGRAMS = st.builds(
    Program,
    st.integers(1, 5),
    st.lists(st.integers(1, 5), max_size=2),
    st.sampled_from(["float32", "float64", "bfloat16", "float16"]),
    st.integers(0, 30),
    st.integers(1, 3),
    st.sampled_from(["exact", "pad", "drop"]),
    st.booleans(),
    st.sampled_from([1, 100, 25 << 20]),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 99),
    st.integers(1, 3),
)
EACH = st.data()


def rounds_of(program: Program, comm: Any, state: Any, to_the_end: bool) -> Iterator[Any]:
    """Yield a training's batches: up to a step in its first epoch, or all that are left."""
    share = program.container(comm)
    if state is not None:
        share.load_state_dict(state["share"])
    for epoch in range(share.epoch, 2):
        share.set_epoch(epoch)
        steps = 0
        for batch in share.batches(program.batch, pad=program.pad):
            yield share, batch
            steps += share.completes_step
            if share.completes_step and not to_the_end and steps == program.stops_after:
                return
        if not to_the_end:
            return


def train_torch(comm: Any, program: Program, state: Any, to_the_end: bool) -> Any:
    import torch

    dtype = getattr(torch, program.dtype)
    random = np.random.default_rng(0)
    sizes = [3, *program.widths, 1]
    layers: list[Any] = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
    unused = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(*layers, unused).to(dtype)
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(random.normal(size=parameter.shape)).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if state is not None:
        model.load_state_dict(state["model"])
        # Torch would keep the very arrays, which are those of other ranks as well.
        optimizer.load_state_dict(deepcopy(state["optimizer"]))
    options = {"bucket_bytes": program.bucket_bytes, "virtual_ranks": program.virtual}
    optimizer = ac.DistributedOptimizer(optimizer, comm=comm, verify_every=1, **options)
    losses, total, seen = list(state["losses"]) if state else [], (), None
    for share, (items, weights) in rounds_of(program, comm, state, to_the_end):
        x = torch.from_numpy(items["x"]).to(dtype)
        for layer in layers:
            x = torch.tanh(layer(x))
        if share.virtual_rank % 4 == 1:
            x = x + unused(torch.ones(2, dtype=dtype)).sum()
        errors = (x[:, 0] - torch.from_numpy(items["y"]).to(dtype)) ** 2
        loss = (errors * torch.from_numpy(weights).to(dtype)).sum() / program.batch
        optimizer.zero_grad()
        # The last one needs a backward pass if any other has one.
        may_skip = program.skipped and share.virtual_rank < program.virtual - 1
        if not (may_skip and share.virtual_rank % program.skipped == 1):
            loss.backward()
            # Where some have no backward pass, none may change what they alone have reduced by then.
            if program.clips and not program.skipped:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean, total = ac.mean_metrics(loss.item(), float(weights.sum()), onto=total, comm=comm)
        if share.completes_step:
            losses, total, seen = [*losses, repr(mean)], (), share.state_dict()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "losses": losses,
        "share": seen or program.container(comm).state_dict(),
    }


def train_optax(comm: Any, program: Program, state: Any, to_the_end: bool) -> Any:
    import jax
    import jax.numpy as jnp
    import optax

    random = np.random.default_rng(0)
    sizes, dtype = [3, *program.widths, 1], program.dtype.replace("64", "32")
    params = [jnp.asarray(random.normal(size=pair), dtype) for pair in pairwise(sizes)]
    options = {"bucket_bytes": program.bucket_bytes, "virtual_ranks": program.virtual}
    optimizer = ac.DistributedOptimizer(optax.adam(0.1), comm=comm, **options)
    inner = optimizer.init(params)
    if state is not None:
        params, inner = state["params"], state["inner"]

    def loss_of(params: Any, x: Any, y: Any, weights: Any) -> Any:
        for weight in params:
            x = jnp.tanh(x @ weight)
        return ((x[:, 0] - y) ** 2 * weights).sum() / program.batch

    seen = None
    for share, (items, weights) in rounds_of(program, comm, state, to_the_end):
        batch = (jnp.asarray(array, dtype) for array in (items["x"], items["y"], weights))
        grads = jax.grad(loss_of)(params, *batch)
        if program.skipped and share.virtual_rank % program.skipped == 1:
            grads[0] = None
        updates, inner = optimizer.update(grads, inner, params)
        changes = [
            jnp.zeros_like(param) if update is None else update
            for param, update in zip(params, updates, strict=True)
        ]
        params = optax.apply_updates(params, changes)
        if share.completes_step:
            seen = share.state_dict()
    return {"params": params, "inner": inner, "share": seen or program.container(comm).state_dict()}


def leaves_of(state: Any) -> list[Any]:
    """Return what a state holds, arrays as bytes."""
    if isinstance(state, dict | list | tuple):
        values = state.values() if isinstance(state, dict) else state
        return [leaf for value in values for leaf in leaves_of(value)]
    if hasattr(state, "detach"):
        state = state.detach().double().numpy()
    return bits([state]) if hasattr(state, "shape") else [state]


@pytest.mark.parametrize("framework", ["torch", "optax"])
@FEW
@given(program=PROGRAMS, data=EACH)
def test_programs_give_the_same_on_every_number_of_ranks(
    framework: str, program: Program, data: Any
) -> None:
    pytest.importorskip(framework)
    train = {"torch": train_torch, "optax": train_optax}[framework]

    def of(*ranks: int) -> Any:
        state = None
        for number, count in enumerate(ranks):
            states = run(count, train, program, state, number == len(ranks) - 1)
            seen = [leaves_of(each) for each in states]
            assert seen == seen[:1] * count
            state = states[0]
        return leaves_of(state)

    count = st.integers(1, program.virtual)
    first, second = data.draw(count, "ranks at first"), data.draw(count, "ranks after that")
    expected = of(program.virtual)
    assert of(first) == expected
    assert of(first, second) == expected


class Missing(NamedTuple):
    """A loop with torch in which parameters have no gradient, on some ranks or on all, in a few steps."""

    virtual: int
    optimizer: str
    zeroes: str
    # Which parameters each virtual rank uses in each step: the first one, and some of the others.
    uses: list[tuple[int, int, int, int]]

    def play(self, virtual: int | None, comm: Any) -> Any:
        torch = import_module("torch")
        params = [torch.nn.Parameter(torch.linspace(1, 2, 3)) for _ in range(3)]
        kind = getattr(torch.optim, self.optimizer)
        optimizer = kind(params, **{"momentum": 0.9} if kind is torch.optim.SGD else {"eps": 0.1})
        ac.DistributedOptimizer(optimizer, comm=comm, virtual_ranks=virtual)
        for step, uses in enumerate(self.uses):
            for rank in played(comm, virtual):
                if self.zeroes != "by hand":
                    optimizer.zero_grad(set_to_none=self.zeroes == "set to None")
                for param in params if self.zeroes == "by hand" else ():
                    if param.grad is not None:
                        param.grad.data.zero_()
                if rank < self.virtual:
                    used = [params[0], *(params[n] for n in (1, 2) if uses[rank] & n)]
                    sum((torch.tanh(p) * (1 + rank + step)).sum() for p in used).backward()
                optimizer.step()
        return bits(param.detach() for param in params)


@given(
    st.builds(
        Missing,
        st.integers(1, 4),
        st.sampled_from(["SGD", "AdamW", "RMSprop"]),
        st.sampled_from(["set to None", "in place", "by hand"]),
        # Often none of them, on all ranks.
        st.lists(st.just((0,) * 4) | st.tuples(*[st.integers(0, 3)] * 4), min_size=2, max_size=5),
    )
)
@example(Missing(2, "SGD", "in place", [(3, 3, 0, 0), (0, 0, 0, 0)]))
def test_parameters_without_gradients_move_as_on_ranks(loop: Missing) -> None:
    """Zeros that are left of a gradient are one, with which torch moves a parameter on; None is none."""
    pytest.importorskip("torch")
    expected = run(loop.virtual, partial(loop.play, None))
    for ranks in range(1, loop.virtual + 1):
        assert run(ranks, partial(loop.play, loop.virtual)) == expected[:1] * ranks


# What a turn does with its gradients: backward passes, also within no_sync, and of a part of the parameters.
PASSES = ("one", "one", "one", "none", "local", "local, one", "two", "part")
CHANGES = {
    "none": lambda params: None,
    "norm": lambda params: import_module("torch").nn.utils.clip_grad_norm_(params, 0.5),
    "in place": lambda params: [p.grad.mul_(0.5) for p in params if p.grad is not None],
    "assigned": lambda params: [
        setattr(p, "grad", p.grad * 0.5) for p in params if p.grad is not None
    ],
}


class Loop(NamedTuple):
    """A loop with torch that may be wrong: when it zeroes gradients, how it changes them, and its backward passes."""

    virtual: int
    zeroes: str
    change: str
    in_the_last_round: bool
    passes: list[str]
    seed: int

    def play(self, comm: Any, *, virtually: bool = True) -> Any:
        torch = import_module("torch")
        no_sync = import_module("arraycomm.adapters.torch").no_sync
        used, other = params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer: Any = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        virtual = self.virtual if virtually else None
        ac.DistributedOptimizer(optimizer, comm=comm, virtual_ranks=virtual)
        for step in range(3):
            turns = list(played(comm, virtual))
            for turn, rank in enumerate(turns):
                is_last, who = turn == len(turns) - 1, 0 if rank == 99 else rank
                if self.zeroes in ("set to None", "in place"):
                    optimizer.zero_grad(set_to_none=self.zeroes == "set to None")
                passes = self.passes[(step * self.virtual + who) % len(self.passes)]
                data = np.random.default_rng([self.seed, step, who]).normal(size=(2, 3))
                first, second = torch.from_numpy(data.astype(np.float32))

                def backward(first=first, second=second, whole=passes != "part") -> None:
                    (((used * first).sum() ** 2) + whole * (other * second).sum() ** 2).backward()

                if passes.startswith("local"):
                    with no_sync(optimizer):
                        backward()
                for _ in range({"none": 0, "local": 0, "two": 2}.get(passes, 1)):
                    backward()
                if is_last or not self.in_the_last_round:
                    CHANGES[self.change](params)
                optimizer.step()
                if self.zeroes == "after steps" and is_last:
                    optimizer.zero_grad()
        return bits(param.detach() for param in params)


LOOPS = st.builds(
    Loop,
    st.integers(1, 4),
    st.sampled_from(["never", "set to None", "in place", "after steps"]),
    st.sampled_from(["norm", "in place", "assigned", "none"]),
    st.booleans(),
    st.lists(st.sampled_from(PASSES), min_size=1, max_size=8),
    st.integers(0, 99),
)


def outcome(ranks: int, play: Any) -> Any:
    """Return what all ranks return, or the classes of their own errors."""

    def body(comm: Any) -> Any:
        try:
            return play(comm)
        except Exception as error:
            return type(error), error

    found = run(ranks, body)
    if not any(isinstance(each, tuple) for each in found):
        assert found == found[:1] * ranks
        return found[0]
    # Every rank has one: those that have none of their own are told.
    assert all(isinstance(each, tuple) for each in found)
    return {kind for kind, _ in found} - {ac.PeerError}


@given(LOOPS)
def test_wrong_loops_are_the_same_error_on_every_number_of_ranks(loop: Loop) -> None:
    pytest.importorskip("torch")
    # What a program does to gradients of its own, before they are reduced, it has to do in every round.
    assume(not (loop.in_the_last_round and "local" in loop.passes))
    found = [outcome(ranks, loop.play) for ranks in range(1, loop.virtual + 1)]
    assert found == found[:1] * loop.virtual
    # What is no error is what ranks without virtual ranks give.
    if isinstance(found[0], list):
        assert outcome(loop.virtual, partial(loop.play, virtually=False)) == found[0]


@given(
    st.integers(2, 4),
    st.integers(0, 3),
    st.sampled_from(["shape", "dtype", "name", "more"]),
    st.booleans(),
)
def test_other_trees_are_the_same_error_on_every_number_of_ranks(
    virtual: int, which: int, wrong: str, measures: bool
) -> None:
    def play(comm: Any) -> None:
        total: Any = ()
        optimizer = ac.DistributedOptimizer(Recorded(), comm=comm, virtual_ranks=virtual)
        for rank in played(comm, virtual):
            tree = {"a": np.ones(2), "b": np.ones(3)}
            if rank == which % virtual:
                tree["b"] = {"shape": np.ones(4), "dtype": np.ones(3, np.float32)}.get(
                    wrong, tree["b"]
                )
                tree["c"] = tree["b"]
                del tree["b" if wrong == "name" else "a" if wrong == "more" else "c"]
            if measures:
                _, total = ac.mean_metrics(tree, 1, onto=total, comm=comm)
            else:
                optimizer.update(np.zeros(3), tree)

    for ranks in range(1, virtual + 1):
        assert outcome(ranks, play) == {ac.MismatchError}
