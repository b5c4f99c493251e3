"""Laws of optimizers: ranks that train on their own gradients do what one process does on all of them.

Gradients are integers, so that sums are exact, and parameters are compared bit by bit.
"""

from __future__ import annotations

import copy
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
MANY = settings(max_examples=2 * _EXAMPLES)
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


# How an argument is made of a tensor that is differentiated.
LAYOUTS: dict[str, Any] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(-1, -2),
    "sliced": lambda x: x[..., ::2],
    "scalars": lambda x: x[..., 0, 0],
    "empty": lambda x: x[..., :0],
    # Of two, since few bits are enough for the sum of these gradients.
    "expanded": lambda x: x[..., :1].expand(*x.shape[:-1], 2),
}


@given(
    size=SIZES,
    name=st.sampled_from(
        [f"{name}-{op}" for name in ("allreduce", "reduce_scatter") for op in ("sum", "mean")]
        + ["allgather", "alltoall", "bcast"]
    ),
    dtype=st.sampled_from(("float64", "float32", "float16", "bfloat16", "complex64")),
    layout=st.sampled_from(sorted(LAYOUTS)),
    shape=st.sampled_from(((3, 4), (3, 4), (2, 5_000))),
    required=st.lists(st.sampled_from((True, True, False)), min_size=4, max_size=4),
    root=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_gradients_of_collectives_are_their_transposes(
    size, name, dtype, layout, shape, required, root, seed
) -> None:
    """Over all ranks together, <A x, y> = <x, Aᵀ y>; where no gradient is required, x is zero.

    Results are those of the communicator, of which there are laws.
    """
    torch = pytest.importorskip("torch")
    from arraycomm.adapters import torch as collectives

    operation, _, op = name.partition("-")
    options = {"op": op} if op else {"root": root % size} if name == "bcast" else {}
    rows = operation in ("reduce_scatter", "alltoall")

    def drawn(random: Any, shape: Any) -> Any:
        # Multiples of what a mean divides by, of few bits, so that both sides are exact.
        found = 12 * random.integers(-9, 9, shape) + 12j * random.integers(-9, 9, shape)
        found = torch.from_numpy(np.array(found if dtype == "complex64" else found.real))
        return found.to(getattr(torch, dtype))

    def product(one: Any, other: Any) -> float:
        pair = (each.to(torch.complex128) for each in (one.detach(), other))
        return float((torch.view_as_real(next(pair)) * torch.view_as_real(next(pair))).sum())

    def products(comm: ac.Communicator) -> tuple[float, float]:
        random, requires = np.random.default_rng((seed, comm.rank)), required[comm.rank]
        x = drawn(random, (size, *shape) if rows else shape) * requires
        given = LAYOUTS[layout](x.requires_grad_(requires))
        if name == "bcast" and not requires and comm.rank != options["root"]:
            given = None
        made = getattr(collectives, operation)(given, comm=comm, **options)
        plain = getattr(comm, operation)(None if given is None else given.detach(), **options)
        assert torch.equal(made.detach(), torch.as_tensor(plain))
        assert made.is_contiguous()
        differentiated = any(required[:size])
        assert made.requires_grad == differentiated
        y = drawn(random, made.shape)
        if differentiated:
            made.backward(y)
        places = [each.data_ptr() for each in (x, made, y, x.grad) if each is not None]
        assert made.numel() == 0 or len(places) == len({*places})
        return product(made, y), 0.0 if x.grad is None else product(x, x.grad)

    there, back = zip(*run(size, products), strict=True)
    assert sum(there) == sum(back)


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(lambda c: sum(c) > 1),
    channels=st.integers(1, 3),
    spatial=st.sampled_from(((), (4,), (2, 3), (2, 2, 2))),
    options=st.fixed_dictionaries(
        {"momentum": st.sampled_from((None, 0.1, 0.3)), "eps": st.sampled_from((1e-5, 0.5))},
        optional={"affine": st.just(False), "track_running_stats": st.just(False)},
    ),
    counted=st.booleans(),
    required=st.lists(st.sampled_from((True, True, False)), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
def test_batch_norm_of_ranks_is_that_of_the_whole_batch(
    counts, channels, spatial, options, counted, required, seed
) -> None:
    torch = pytest.importorskip("torch")
    from arraycomm.adapters.torch import convert_sync_batchnorm

    random, nn = np.random.default_rng(seed), torch.nn
    batches = [random.normal(size=(2, 2, n, channels, *spatial)) for n in counts]
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(spatial)]
    plain = kind(channels, **options).double()
    if not counted:
        plain.num_batches_tracked = None
    for parameter in plain.parameters():
        parameter.data = torch.from_numpy(random.normal(size=channels))

    def train(layer: Any, batches: Any, requires: bool = True) -> list[Any]:
        """Return results and gradients of two steps, and at last a result without training."""
        found = []
        for batch, factor in torch.from_numpy(batches):
            x = batch.clone().requires_grad_(requires)
            y = layer(x)
            if y.requires_grad:
                (y * factor).sum().backward()
            found += [y.detach(), x.grad]
        return [*found, layer.eval()(x).detach()]

    def on_rank(comm: ac.Communicator) -> Any:
        layer = convert_sync_batchnorm(copy.deepcopy(plain), comm=comm)
        found = train(layer, batches[comm.rank], required[comm.rank])
        if "track_running_stats" in options:
            # If none are kept, those of this rank's batch alone are taken.
            found.pop()
        grads = [comm.allreduce(each.grad, "sum") for each in layer.parameters()]
        return found, grads, layer.state_dict()

    one = copy.deepcopy(plain)
    whole = train(one, np.concatenate(batches, axis=2))
    grads, bounds = [each.grad for each in one.parameters()], np.cumsum([0, *counts])
    for rank, (found, reduced, state) in enumerate(run(len(counts), on_rank)):
        own = slice(*bounds[rank : rank + 2])
        for got, want in zip(found, whole, strict="track_running_stats" not in options):
            if got is not None:
                torch.testing.assert_close(got, want[own])
        torch.testing.assert_close([reduced, state], [grads, one.state_dict()])


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
