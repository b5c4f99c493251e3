"""Virtual ranks: what cannot be combined with them is refused by name on every rank, and says why."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm.adapters.numpy import SGD, gather_state
from tests.support.on_ranks import OnRanks


def made(comm: ac.Communicator, **options: Any) -> Any:
    return ac.DistributedOptimizer(SGD(), comm=comm, **{"virtual_ranks": 4, **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"virtual_ranks": 1}, "2 to 1048576; got 1"),
        ({"accumulate": 2}, "with virtual_ranks accumulate must be 1; got 2"),
        ({"compression": "float16"}, "with virtual_ranks compression must be None"),
        ({"shard": True}, "with virtual_ranks shard must be False; got True"),
    ],
)
def test_arguments_are_refused(on_ranks: OnRanks, options: dict[str, Any], said: str) -> None:
    def body(comm: ac.Communicator) -> None:
        with pytest.raises(ValueError, match=said):
            made(comm, **options)
        if options == {"virtual_ranks": 1}:
            with pytest.raises(ValueError, match="virtual_ranks"):
                ac.DistributedDataContainer(range(9), comm=comm, **options)

    on_ranks(2, body)


def test_ranks_that_differ_are_named(on_ranks: OnRanks) -> None:
    def body(comm: ac.Communicator) -> None:
        with pytest.raises(ac.MismatchError, match="5 virtual ranks"):
            made(comm, virtual_ranks=4 + comm.rank)

    on_ranks(2, body)


def test_inside_join_there_are_none(on_ranks: OnRanks) -> None:
    def body(comm: ac.Communicator) -> None:
        optimizer = made(comm)
        with pytest.raises(ValueError, match="no virtual ranks"), ac.join(comm):
            optimizer.update(np.zeros(1), np.ones(1))
        with pytest.raises(RuntimeError, match="with onto"), ac.join(comm):
            ac.allreduce_gradients([np.ones(1)], "sum", onto=(), comm=comm)
        with pytest.raises(ValueError, match="onto must be None"), ac.join(comm):
            ac.mean_metrics(1.0, 1, onto=(), comm=comm)

    on_ranks(2, body)


def test_a_state_in_the_middle_of_rounds_is_refused(on_ranks: OnRanks) -> None:
    def body(comm: ac.Communicator) -> None:
        optimizer = made(comm)
        share = ac.DistributedDataContainer(range(9), comm=comm, virtual_ranks=4)
        with pytest.raises(ValueError, match="advance: with virtual_ranks"):
            share.advance(1)
        for number, _ in enumerate(share.batches(1)):
            optimizer.update(np.zeros(1), np.ones(1))
            assert share.virtual_rank == comm.rank + 2 * (number % 2)
            if share.completes_step:
                share.state_dict()
                gather_state(optimizer)
                continue
            with pytest.raises(RuntimeError, match="round 1 of 2 of virtual ranks"):
                share.state_dict()
            with pytest.raises(RuntimeError, match="1 of 2 rounds of virtual ranks"):
                gather_state(optimizer)

    on_ranks(2, body)


@pytest.mark.parametrize(
    ("total", "op", "said"),
    [
        ((), "mean", 'with onto op must be "sum"'),
        ([np.ones(3)], "sum", "must have the shape of the total"),
        ({"b": np.ones(2)}, "sum", "onto must have the structure of the tree"),
        ([np.ones(2), np.ones(2)], "sum", "must have the 2 leaves of the total"),
        ([np.ones(2, np.float32)], "sum", "must have the dtype of the total"),
    ],
)
def test_totals_are_like_the_tree(on_ranks: OnRanks, total: Any, op: str, said: str) -> None:
    def body(comm: ac.Communicator) -> None:
        with pytest.raises((ValueError, TypeError), match=said):
            ac.allreduce_gradients([np.ones(2)], op, onto=total, comm=comm)

    on_ranks(2, body)


def test_ranks_go_on_from_a_total_together(on_ranks: OnRanks) -> None:
    def body(comm: ac.Communicator) -> None:
        others, later = [comm.dup() for _ in range(5)], comm.rank > 0
        _, total = ac.mean_metrics(1.0, 1, onto=(), comm=comm)
        for begun in (True, False):
            said = r"onto is \(\) to begin a total on rank 0, a total on rank 1"
            said = said if begun else r"onto\[0\] is float64 .* on rank 0, float64 .* on rank 1"
            first = () if begun else [np.zeros(1), None]
            onto = [np.ones(1), None] if later else first
            with pytest.raises(ac.MismatchError, match=said):
                ac.allreduce_gradients([np.ones(1)] * 2, "sum", onto=onto, comm=others.pop())
            changed = total if later else () if begun else (total[0] + 1, *total[1:])
            with pytest.raises(ac.MismatchError, match=said):
                ac.mean_metrics(1.0, 1, onto=changed, comm=others.pop())
        onto = [np.ones(1), np.ones(1) if later else None]
        with pytest.raises(ac.MismatchError, match=r"onto\[1\] is None on rank 0, float64"):
            ac.allreduce_gradients([np.ones(1)] * 2, "sum", onto=onto, comm=others.pop())

    on_ranks(2, body)


def test_torch_refuses_what_depends_on_the_number_of_ranks(on_ranks: OnRanks) -> None:
    torch: Any = pytest.importorskip("torch")
    from arraycomm.adapters.torch import SyncBatchNorm

    def body(comm: ac.Communicator) -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer: Any = torch.optim.SGD([weight], lr=1.0)
        ac.DistributedOptimizer(optimizer, comm=comm, virtual_ranks=4)
        with pytest.raises(ValueError, match="a closure is evaluated within one"):
            optimizer.step(weight.sum)
        with pytest.raises(TypeError, match="SyncBatchNorm: with virtual_ranks"):
            SyncBatchNorm(2, comm=comm)(torch.ones(3, 2))
        weight.sum().backward()
        assert weight.grad is None
        for what in (optimizer.state_dict, lambda: optimizer.load_state_dict({})):
            with pytest.raises(RuntimeError, match="1 of 2 rounds"):
                what()
        with pytest.raises(RuntimeError, match="is in the total of this round"):
            weight.sum().backward()

    on_ranks(2, body)


def test_optimizers_of_several_frameworks_are_refused(on_ranks: OnRanks) -> None:
    torch: Any = pytest.importorskip("torch")

    def body(comm: ac.Communicator) -> None:
        plain: Any = torch.optim.SGD([torch.ones(1, requires_grad=True)]) if comm.rank else SGD()
        with pytest.raises(TypeError, match="must be of one adapter"):
            ac.DistributedOptimizer(plain, comm=comm, virtual_ranks=4)

    on_ranks(2, body)


@pytest.mark.parametrize("rows", [1, 6, 11, 13])
def test_workers_load_the_batches_of_virtual_ranks(on_ranks: OnRanks, rows: int) -> None:
    torch: Any = pytest.importorskip("torch")
    from arraycomm.adapters.torch import DataLoader

    def load(comm: ac.Communicator, virtual: int | None) -> Any:
        items = [torch.tensor([float(row)]) for row in range(rows)]
        share = ac.DistributedDataContainer(items, comm=comm, virtual_ranks=virtual)
        loader, seen = DataLoader(share, 2), []
        for batch, weights in loader:
            seen.append((share.virtual_rank, batch.tolist(), weights.tolist()))
        assert len(seen) == len(loader)
        return [each for each in seen if each[0] < (virtual or comm.size)]

    def loaded(size: int, virtual: int | None) -> Any:
        return sorted(chain.from_iterable(on_ranks(size, load, virtual)))

    assert loaded(1, 3) == loaded(2, 3) == loaded(3, 3) == loaded(3, None)
