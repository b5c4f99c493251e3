from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._data import DistributedDataContainer


def _containers(count: int, size: int, **options) -> list[DistributedDataContainer]:
    data = list(range(count))
    return [
        DistributedDataContainer(data, comm=SimpleNamespace(rank=r, size=size), **options)
        for r in range(size)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_item_is_on_exactly_one_rank(size, shuffle) -> None:
    for count in (0, 1, 2, 5, 7, 10, 28, 29):
        parts = [list(c) for c in _containers(count, size, shuffle=shuffle)]
        assert sorted(item for part in parts for item in part) == list(range(count))


def test_global_order_does_not_depend_on_the_number_of_ranks() -> None:
    [alone] = _containers(23, 1, shuffle=True, seed=4)
    for size in (2, 3, 5):
        parts = _containers(23, size, shuffle=True, seed=4)
        assert [parts[i % size][i // size] for i in range(23)] == list(alone)


def test_epoch_and_seed_choose_the_order() -> None:
    [container] = _containers(40, 1, shuffle=True, seed=1)
    first = list(container)
    container.set_epoch(1)
    second = list(container)
    container.set_epoch(0)
    assert first != second != list(range(40))
    assert list(container) == first
    assert list(_containers(40, 1, shuffle=True, seed=2)[0]) != first


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_pad_repeats_with_weight_zero(size) -> None:
    for count in (1, 2, 5, 10):
        parts = _containers(count, size, uneven="pad")
        assert len({len(part) for part in parts}) == 1
        kept = [i for part in parts for i, w in zip(part, part.weights, strict=True) if w]
        assert sorted(kept) == list(range(count))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_drop_leaves_the_last_items_out(size) -> None:
    for count in (0, 2, 5, 10):
        parts = _containers(count, size, uneven="drop")
        assert sorted(i for part in parts for i in part) == list(range(count - count % size))


def test_is_a_sequence_of_arrays_rows_too() -> None:
    rows = np.arange(12).reshape(6, 2)
    container = DistributedDataContainer(rows, comm=SimpleNamespace(rank=1, size=2))
    assert len(container) == 3
    assert container[-1].tolist() == [10, 11]
    assert [row.tolist() for row in container[:2]] == [[2, 3], [6, 7]]
    with pytest.raises(IndexError, match="rank 1 has 3 of 6 items"):
        container[3]


def test_wrong_arguments() -> None:
    comm = SimpleNamespace(rank=0, size=1)
    with pytest.raises(TypeError, match="must have a length"):
        DistributedDataContainer(iter([1]), comm=comm)
    with pytest.raises(ValueError, match="uneven must be one of exact, pad, drop"):
        DistributedDataContainer([1], comm=comm, uneven="truncate")
    if not ac.is_initialized():
        with pytest.raises(ac.NotInitializedError, match="init"):
            DistributedDataContainer([1])
