"""Laws of optimizers: ranks that train on their own gradients do what one process does on all of them.

Gradients are integers, so that sums are exact, and parameters are compared bit by bit.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import _launch
from arraycomm._training.programs import calls_of
from arraycomm._training.shards import divide
from arraycomm.adapters import numpy as plain
from arraycomm.testing import given as given_on_ranks
from arraycomm.testing import run
from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays.array_case import dtype_of
from arraycomm.testing._arrays.frameworks import elements_of
from arraycomm.testing._arrays.oracle import expected
from arraycomm.testing.conformance._checks import check_elements, check_like
from arraycomm.testing.conformance._inputs import Arrays, arrays
from tests.adapters.arrays import MAKERS, elements

# Before any thread does: others would find a part of the module.
for _framework in ("torch", "jax"):
    with suppress(ImportError):
        import_module(_framework)

pytestmark = pytest.mark.skipif(
    _launch.detect(os.environ) is not None, reason="runs where pytest is alone"
)

SIZES = st.integers(1, 4)
_EXAMPLES = int(os.environ.get("EXAMPLES") or "15")
# Each example of torch takes many small steps.
FEW, MANY = (settings(max_examples=count) for count in (max(1, _EXAMPLES // 3), 2 * _EXAMPLES))
Leaves = list[np.ndarray[Any, Any]]


class Training(NamedTuple):
    """A training: the shapes of the parameters, its steps, and how gradients are reduced."""

    shapes: list[tuple[int, ...]]
    dtypes: list[str]
    steps: int
    optimizer: str
    op: str
    accumulate: int
    bucket_bytes: int
    shard: bool

    @property
    def options(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "accumulate": self.accumulate,
            "bucket_bytes": self.bucket_bytes,
            "shard": self.shard,
        }

    def arrays(self, *seed: int) -> Leaves:
        random = np.random.default_rng(seed)
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [random.integers(-9, 9, shape).astype(dtype) for shape, dtype in pairs]

    def gradients(self, rank: int, step: int) -> Leaves:
        return self.arrays(1, rank, step)

    def reduced(self, size: int, step: int) -> Leaves | None:
        """Return what one process takes this step with; None if it only accumulates."""
        if (step + 1) % self.accumulate:
            return None
        first = step + 1 - self.accumulate
        sums = [
            [
                sum(leaf)
                for leaf in zip(
                    *(self.gradients(r, s) for s in range(first, step + 1)), strict=True
                )
            ]
            for r in range(size)
        ]
        means = [[leaf / leaf.dtype.type(self.accumulate) for leaf in own] for own in sums]
        return [expected(leaves, self.op) for leaves in zip(*means, strict=True)]


TRAININGS = st.integers(1, 5).flatmap(
    lambda count: st.builds(
        Training,
        st.lists(
            st.lists(st.integers(1, 5), max_size=2).map(tuple), min_size=count, max_size=count
        ),
        st.lists(st.sampled_from(("float32", "float64")), min_size=count, max_size=count),
        st.integers(1, 4),
        st.sampled_from(("SGD", "Momentum", "Adam", "Keeping", "Keeping")),
        st.sampled_from(("sum", "mean")),
        st.sampled_from((1, 1, 2)),
        st.sampled_from((1, 100, 1 << 20)),
        st.booleans(),
    )
)


def bits(leaves: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in leaves]


class Keeping:
    """An optimizer whose state has a value of each parameter in every form that can be divided."""

    per_parameter = True

    def __init__(self) -> None:
        self.decays, self.steps, self.sums, self.within = [0.5, 0.25], 0, None, {}

    def update(self, params: Any, grads: Any) -> Any:
        before = self.sums or [np.zeros_like(param) for param in params]
        self.sums = [x + grad for x, grad in zip(before, grads, strict=True)]
        self.pairs = [(x, {"of": x}) for x in self.sums]
        if not self.within:
            self.within = {"empty": [{} for _ in params], "none": [None for _ in params]}
        together = zip(params, self.pairs, self.sums, *self.within.values(), strict=True)
        self.steps += 1
        return [p - (pair[1]["of"] + x) / 8 for p, pair, x, _, _ in together]


def optimizer_of(training: Training) -> Any:
    return Keeping() if training.optimizer == "Keeping" else getattr(plain, training.optimizer)()


def in_one_process(training: Training, size: int) -> Leaves:
    params, optimizer = training.arrays(0), optimizer_of(training)
    for step in range(training.steps):
        reduced = training.reduced(size, step)
        if reduced is not None:
            params = optimizer.update(params, reduced)
    return params


@given(size=SIZES, training=TRAININGS)
def test_ranks_update_as_one_process_does(size, training) -> None:
    def train(comm: ac.Communicator) -> list[bytes]:
        params = training.arrays(0)
        optimizer = optimizer_of(training)
        made = ac.DistributedOptimizer(optimizer, comm=comm, **training.options)
        for step in range(training.steps):
            params = made.update(params, training.gradients(comm.rank, step))
        return bits(params)

    assert run(size, train) == [bits(in_one_process(training, size))] * size


class Keep:
    """An optimizer whose parameters are the last gradients."""

    def update(self, _: Any, grads: Any) -> Any:
        return grads


# Of which few sums are exact, but none is subnormal, which JAX takes for zero.
SEVENTHS = st.integers(-99, 99).map(lambda number: number / 7) | st.sampled_from((-0.0, np.inf))


@st.composite
def gradients_of_steps(draw: st.DrawFn) -> list[Arrays]:
    """Draw gradients of one dtype and shape for some steps; frameworks and layouts differ."""
    dtype = draw(ranked.dtypes("mean") | st.just("complex64"))
    shape = draw(st.sampled_from(((), (3,), (5, 4))))
    drawn: dict[str, Any] = {"elements": SEVENTHS}
    if dtype_of(dtype).kind == "c":
        drawn["elements"] = st.builds(complex, SEVENTHS, SEVENTHS)
    return draw(st.lists(arrays(dtype, shape, **drawn), min_size=1, max_size=4))


# Arrays that lie elsewhere, and those of JAX also of 64 bits, which are not drawn.
ALL_OF = [None, "remote", *(["jax"] if "jax" in ranked.installed_frameworks() else [])]


@given_on_ranks(steps=gradients_of_steps(), all_of=st.sampled_from(ALL_OF))
def test_accumulated_gradients_are_folds_of_means(comm, steps, all_of) -> None:
    """Steps are added up wide, and their mean is rounded once, in the framework of the last one."""
    means = [expected(own, "mean") for own in zip(*(s.elements() for s in steps), strict=True)]
    if means[0].dtype.name.startswith(("bfloat", "float8")) and all_of == "remote":
        all_of = None
    made = ac.DistributedOptimizer(Keep(), comm=comm, accumulate=len(steps))
    for step in steps:
        x = MAKERS[all_of](step.elements()[comm.rank]) if all_of else step.build(comm.rank)
        got = made.update(None, x)
    if all_of is None:
        check_like(got, x)
    else:
        assert type(got) is type(x)
    found = elements(got) if all_of else elements_of(got)
    check_elements(found, expected(means, "mean"), "mean")


@MANY
@given(sizes=st.tuples(SIZES, SIZES), training=TRAININGS)
def test_a_state_is_resumed_by_any_number_of_ranks(sizes, training) -> None:
    """The ranks that resume get the gradients of those before, so that both numbers give the same."""
    training = training._replace(accumulate=1, steps=max(training.steps, 2), op="sum")
    half = training.steps // 2

    def train(comm: ac.Communicator, start: Any, steps: range) -> Any:
        params, state = start
        optimizer = optimizer_of(training)
        made = ac.DistributedOptimizer(optimizer, comm=comm, **training.options)
        if state is not None:
            plain.load_state(made, state, params)
        for step in steps:
            zeros = [np.zeros_like(param) for param in params]
            params = made.update(params, zeros if comm.rank else training.gradients(0, step))
        return params, plain.gather_state(made)

    [saved, *_] = run(sizes[0], train, (training.arrays(0), None), range(half))
    resumed = run(sizes[1], train, saved, range(half, training.steps))
    want = bits(in_one_process(training, 1))
    assert [bits(params) for params, _ in resumed] == [want] * sizes[1]


def linear(name: str, size: int, root: int) -> Any:
    """Return a differentiable collective, and the shapes of its argument and its result."""
    from arraycomm.adapters import torch as collectives

    call = getattr(collectives, name.partition("-")[0])
    if name == "bcast":
        return (lambda x, comm: call(x, root, comm=comm)), (3,), (3,)
    if name == "alltoall":
        return (lambda x, comm: call(x, comm=comm)), (size, 3), (size, 3)
    if name == "allgather":
        return (lambda x, comm: call(x, comm=comm)), (3,), (size, 3)
    op = name.partition("-")[2]
    rows = (size, 3) if name.startswith("reduce_scatter") else (3,)
    return (lambda x, comm: call(x, op, comm=comm)), rows, (3,)


@given(
    size=SIZES,
    name=st.sampled_from(
        [f"{name}-{op}" for name in ("allreduce", "reduce_scatter") for op in ("sum", "mean")]
        + ["allgather", "alltoall", "bcast"]
    ),
    root=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_gradients_of_collectives_are_their_transposes(size, name, root, seed) -> None:
    """Over all ranks together, <A x, y> = <x, Aᵀ y>."""
    torch = pytest.importorskip("torch")

    def products(comm: ac.Communicator) -> tuple[float, float]:
        call, given_shape, made_shape = linear(name, size, root % size)
        random = np.random.default_rng((seed, comm.rank))
        # Multiples of what a mean divides by, so that both sides are exact.
        x = torch.from_numpy(12.0 * random.integers(-9, 9, given_shape)).requires_grad_()
        y = torch.from_numpy(12.0 * random.integers(-9, 9, made_shape))
        made = call(x, comm)
        (made * y).sum().backward()
        return float((made.detach() * y).sum()), float((x.detach() * x.grad).sum())

    there, back = zip(*run(size, products), strict=True)
    assert sum(there) == sum(back)


@FEW
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(lambda c: sum(c) > 1),
    channels=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_batch_norm_of_ranks_is_that_of_the_whole_batch(counts, channels, seed) -> None:
    torch = pytest.importorskip("torch")
    from arraycomm.adapters.torch import SyncBatchNorm

    random = np.random.default_rng(seed)
    parts = [torch.from_numpy(random.normal(size=(n, channels))) for n in counts]
    factors = [torch.from_numpy(random.normal(size=(n, channels))) for n in counts]

    def normalize(layer: Any, x: Any, factor: Any) -> Any:
        x = x.clone().requires_grad_()
        y = layer(x)
        (y * factor).sum().backward()
        return y.detach(), x.grad, layer.running_mean, layer.running_var

    def on_rank(comm: ac.Communicator) -> Any:
        layer = SyncBatchNorm(channels, comm=comm).double()
        return normalize(layer, parts[comm.rank], factors[comm.rank])

    whole = torch.nn.BatchNorm1d(channels).double()
    y, grad, mean, var = normalize(whole, torch.cat(parts), torch.cat(factors))
    results = run(len(counts), on_rank)
    torch.testing.assert_close(torch.cat([result[0] for result in results]), y)
    torch.testing.assert_close(torch.cat([result[1] for result in results]), grad)
    for result in results:
        torch.testing.assert_close(result[2:], (mean, var))


@given(
    places=st.lists(st.lists(st.sampled_from((1, 1, 1, 2)), min_size=4, max_size=4), max_size=4),
    size=st.integers(2, 4),
    name=st.sampled_from(["allreduce", "allgather"]),
)
def test_calls_of_programs_meet_at_one_place(places, size, name) -> None:
    def train(comm: ac.Communicator) -> None:
        calls, x, out = calls_of(comm), np.full(1, comm.rank), np.empty(1, int)
        over = calls.comm
        total, everyones = [size * (size - 1) // 2], [[rank] for rank in range(size)]
        for row in places:
            # The third call is prepared, by its place.
            for _ in range(3):
                assert over.allreduce(x, out=out).tolist() == total
                assert over.allgather(x).tolist() == everyones
                with calls.at(row[comm.rank]):
                    if len(set(row[:size])) > 1:
                        with pytest.raises(ac.MismatchError, match="call 2 of a program"):
                            getattr(over, name)(x)
                        return
                    assert over.allreduce(x, out=out).tolist() == total
                    assert over.allgather(x).tolist() == everyones

    run(size, train)


@given(sizes=st.lists(st.integers(1, 9), max_size=9), ranks=st.integers(1, 4))
def test_shards_are_even(sizes, ranks) -> None:
    loads, owners = [0] * ranks, divide(sizes, ranks)
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    later = divide([*sizes, 100], ranks, dict(enumerate(owners)))
    assert later == [*owners, loads.index(min(loads))]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(
    rate=st.floats(0.01, 1.0),
    beta=st.floats(0.0, 0.99),
    nesterov=st.booleans(),
    gradients=st.lists(st.lists(st.floats(-9, 9), min_size=2, max_size=2), min_size=1, max_size=4),
)
def test_optimizers_step_as_those_of_torch(rate, beta, nesterov, gradients) -> None:
    torch = pytest.importorskip("torch")
    heavy = torch.optim.SGD, {"momentum": beta, "nesterov": nesterov and beta > 0}
    pairs = {
        plain.SGD(rate): (torch.optim.SGD, {}),
        plain.Momentum(rate, beta, nesterov=nesterov and beta > 0): heavy,
        plain.Adam(rate, beta, 0.9): (torch.optim.Adam, {"betas": (beta, 0.9)}),
    }
    for own, (kind, options) in pairs.items():
        mine, theirs = [np.ones(2)], torch.ones(2, dtype=torch.float64, requires_grad=True)
        optimizer = kind([theirs], lr=rate, **options)
        for gradient in gradients:
            mine = own.update(mine, [np.array(gradient)])
            theirs.grad = torch.tensor(gradient, dtype=torch.float64)
            optimizer.step()
        np.testing.assert_allclose(mine[0], theirs.detach(), rtol=1e-9, atol=1e-9)


@given(
    rows=st.lists(st.lists(st.integers(-99, 99), min_size=3, max_size=3), min_size=1, max_size=5),
    compression=st.sampled_from(("float16", "bfloat16")),
    op=st.sampled_from(("sum", "mean")),
    dtype=st.sampled_from((np.float32, np.float64)),
)
def test_compressed_gradients_are_folds_rounded_once_more(rows, compression, op, dtype) -> None:
    """These numbers are exact in 16 bits, and their sums in float32."""
    want = np.sum(rows, 0, np.float32) / np.float32(len(rows) if op == "mean" else 1)
    rounded = want.astype(dtype_of(compression)).astype(dtype)

    def check(comm: ac.Communicator) -> None:
        x = np.array(rows[comm.rank], dtype)
        got = ac.allreduce_gradients([x], op, compression=compression, comm=comm)
        np.testing.assert_array_equal(got[0], rounded, strict=True)

    run(len(rows), check)
