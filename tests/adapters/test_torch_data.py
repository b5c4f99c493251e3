"""Batches loaded by torch, as many on every rank."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraycomm as ac
from arraycomm.testing import run
from tests.support.launched import ROOT, Report
from tests.support.launcher import needs_mpiexec, run_python
from tests.support.on_ranks import each_rank_of

torch = pytest.importorskip("torch")

from torch.utils.data import TensorDataset, default_collate  # noqa: E402

from arraycomm.adapters.torch import DataLoader  # noqa: E402
from tests.adapters import loader_workers, uneven_recipe  # noqa: E402

UNEVEN = ["exact", "pad", "drop"]


def container(comm: ac.Communicator, data: Any, **options: Any) -> ac.DistributedDataContainer:
    return ac.DistributedDataContainer(data, comm=comm, **options)


# Training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "batch", "uneven"), [(1, 32, "exact"), *((3, 7, uneven) for uneven in UNEVEN)]
)
def test_the_recipe_gives_what_one_process_gives_on_all_data(size, batch, uneven) -> None:
    ranks = run(size, uneven_recipe.train, uneven, batch)
    uneven_recipe.assert_equal_to_one_process(ranks, uneven, batch)


# Batches -----------------------------------------------------------------------------------------

COUNT = 5
X, Y = np.arange(2.0 * COUNT).reshape(COUNT, 2), np.arange(COUNT)
KINDS = {
    "map-style": TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
    "list": list(zip(X, Y, strict=True)),
    "dict": {"x": X, "in": {"y": torch.from_numpy(Y)}},
    "tuple": (X, Y),
    "array": X,
    "tensor": torch.from_numpy(Y),
}


def leaves(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return [leaf for part in batch.values() for leaf in leaves(part)]
    return [leaf for part in batch for leaf in leaves(part)] if type(batch) is list else [batch]


@pytest.mark.parametrize(
    ("kind", "uneven"), [*((kind, "exact") for kind in KINDS), ("list", "pad"), ("tuple", "drop")]
)
def test_batches_are_the_containers_collated_and_as_many_on_every_rank(kind, uneven) -> None:
    data = KINDS[kind]

    def check(comm: ac.Communicator, batch: int) -> None:
        share = container(comm, data, shuffle=True, uneven=uneven)
        loader = DataLoader(share, batch)
        for epoch in range(2):
            share.set_epoch(epoch)
            plain = container(comm, data, shuffle=True, uneven=uneven)
            plain.set_epoch(epoch)
            indices = plain.batches(batch, load=list)
            example = leaves(default_collate([plain.example()]))
            count = 0
            for (items, weights), own in zip(loader, indices, strict=True):
                count += 1
                assert weights.dtype == torch.float32
                assert weights.tolist() == own.weights.tolist()
                wanted = [plain[i] for i in own.items]
                wanted = leaves(default_collate(wanted)) if wanted else [x[:0] for x in example]
                for got, leaf in zip(leaves(items), wanted, strict=True):
                    assert got.dtype == leaf.dtype
                    assert torch.equal(got, leaf)
                assert share.state_dict() == plain.state_dict()
            assert comm.allgather(np.array(count)).tolist() == [len(loader)] * comm.size

    for size, batch in ((1, 2), (3, 1), (3, 2), (7, 1)):
        run(size, check, batch)


@each_rank_of((1, 3))
def test_filled_batches_have_one_shape(comm: ac.Communicator) -> None:
    share = container(comm, [(torch.ones(2) * n, n) for n in range(7)])
    loader, total = DataLoader(share, 2, pad=True), 0.0
    for (x, n), weights in loader:
        assert x.shape == (2, 2)
        assert n.shape == weights.shape == (2,)
        total += float((n * weights).sum())
    assert comm.allreduce(total) == sum(range(7))


@each_rank_of(2)
def test_a_data_set_without_items_has_no_batches(comm: ac.Communicator) -> None:
    loader = DataLoader(container(comm, []), 2)
    assert len(loader) == len(list(loader)) == 0


# Batches without items ---------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    y: Any


SAMPLES = [{"x": torch.ones(4, 2), "name": name} for name in "ab"]


def shapes(batch: Any) -> Any:
    """Return a batch with its arrays' shapes in the place of arrays."""
    if isinstance(batch, collections.abc.Mapping):
        return {key: shapes(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [shapes(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return tuple(batch.shape) if hasattr(batch, "shape") else batch


def taken_out(samples: list[Any]) -> Any:
    return torch.stack([sample.pop("x") for sample in samples])


def offsets(samples: list[Any]) -> Any:
    lengths = [len(sample["x"]) for sample in samples]
    return {
        "all": torch.cat([sample["x"] for sample in samples]),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
    }


COLLATED = {
    "default": (None, {"x": (0, 4, 2), "name": []}),
    "items themselves": (list, []),
    "a tuple of each field": (
        lambda samples: tuple(zip(*(sample.values() for sample in samples), strict=True)),
        ((), ()),
    ),
    "time first": (lambda samples: torch.stack([s["x"] for s in samples], dim=1), (4, 0, 2)),
    "concatenated": (offsets, {"all": (0, 2), "offsets": (1,)}),
    "numpy": (lambda samples: np.stack([s["x"].numpy() for s in samples]), (0, 4, 2)),
    "samples that are changed": (taken_out, (0, 4, 2)),
    "named tuple": (
        lambda samples: Pair(torch.ones(len(samples)), torch.eye(3)),
        Pair((0,), (3, 3)),
    ),
    "user's dict": (
        lambda samples: collections.UserDict(x=torch.ones(len(samples)), scale=2, none=None),
        {"x": (0,), "scale": 2, "none": None},
    ),
}


def last_batch(comm: ac.Communicator, collate_fn: Any) -> Any:
    # Three ranks, two items: the last rank has none. Threads do not share their samples.
    samples = [dict(sample) for sample in SAMPLES]
    [batch] = DataLoader(container(comm, samples), 1, collate_fn=collate_fn)
    return batch.items, len(batch.weights)


@pytest.mark.parametrize(("collate_fn", "wanted"), COLLATED.values(), ids=COLLATED)
def test_batch_of_no_items_is_like_the_others(collate_fn, wanted) -> None:
    full, _, (items, length) = run(3, last_batch, collate_fn)
    assert length == 0
    assert shapes(items) == wanted
    assert type(items) is type(full[0])


REFUSED = {
    "number": (lambda samples: {"x": torch.ones(2), "n": len(samples)}, r"batch\['n'\] is a int"),
    "sum": (lambda samples: [torch.tensor(len(samples))], r"batch\[0\] is a Tensor"),
    "object": (lambda samples: object(), "batch is a object"),
    "keys": (lambda samples: {len(samples): 1}, "batch is a dict"),
    "type": (lambda samples: samples[0] if len(samples) == 1 else samples, "batch is a int"),
    "long": (lambda samples: [0] * len(samples) ** 2, "batch is a list"),
}


@pytest.mark.parametrize(("collate_fn", "said"), REFUSED.values(), ids=REFUSED)
@each_rank_of(2)
def test_collate_fn_that_cannot_be_cut_fails_before_the_first_batch(
    comm: ac.Communicator, collate_fn, said
) -> None:
    loader = iter(DataLoader(container(comm, [0] * 3), 1, collate_fn=collate_fn))
    if comm.rank == 0:
        assert len(list(loader)) == 2
        return
    with pytest.raises(TypeError, match=rf'collate_fn must return .*{said}.*uneven="pad"'):
        next(loader)


# Arguments ---------------------------------------------------------------------------------------

WRONG = {
    "shuffle": ({"shuffle": True}, TypeError, r"shuffle .*pass shuffle=True to Distributed"),
    "sampler": ({"sampler": [0]}, TypeError, "sampler .*Subset"),
    "batch_sampler": ({"batch_sampler": [[0]]}, TypeError, "batch_sampler .*pass batch_size"),
    "drop_last": ({"drop_last": True}, TypeError, 'drop_last .*uneven="drop" or "pad"'),
    "in_order": ({"in_order": False}, TypeError, "in_order .*leave it out"),
    "container": ({"container": [1]}, TypeError, r"container must be .*got list\. Pass Distrib"),
    "none": ({"batch_size": None}, TypeError, "batch_size must be an integer; got None"),
    "zero": ({"batch_size": 0}, ValueError, "batch_size must be at least 1; got 0"),
}


@pytest.mark.parametrize(("options", "error", "said"), WRONG.values(), ids=WRONG)
@each_rank_of(1)
def test_wrong_arguments(comm: ac.Communicator, options, error, said) -> None:
    given = {"container": container(comm, [1]), "batch_size": 1, **options}
    with pytest.raises(error, match=f"^DataLoader: {said}"):
        DataLoader(**given)


# Workers -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers() -> Report:
    job = run_python("-m", "tests.adapters.loader_workers", ranks=2, cwd=ROOT)
    return Report(job, 2)


@needs_mpiexec
@pytest.mark.parametrize("check", [check.__name__ for check in loader_workers.CHECKS])
def test_workers(workers, check) -> None:
    workers.assert_passed(check)
    workers.assert_ended_well()
