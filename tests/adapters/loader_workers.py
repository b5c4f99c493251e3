"""Worker processes of torch on each of two ranks: `python -m tests.adapters.loader_workers`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

import torch

import arraycomm as ac
from arraycomm.adapters.torch import DataLoader
from tests.adapters import uneven_recipe
from tests.support.launched import perform

BATCH = 32


def trains_like_one_process(method: str, **options: Any) -> None:
    comm = ac.world()
    mine = uneven_recipe.train(comm, "exact", BATCH, multiprocessing_context=method, **options)
    ranks = comm.allgather_object(mine)
    uneven_recipe.assert_equal_to_one_process(ranks, "exact", BATCH)


def forked_workers_train_like_one_process() -> None:
    trains_like_one_process("fork", num_workers=2, prefetch_factor=4)


def spawned_workers_train_like_one_process() -> None:
    trains_like_one_process("spawn", num_workers=1, persistent_workers=True)


def kept_workers_follow_a_loop_that_is_left() -> None:
    """The workers have loaded all of the epoch by the time the loop is left, and saved."""
    comm = ac.world()
    share = ac.DistributedDataContainer(range(61), shuffle=True)
    loader = DataLoader(
        share,
        3,
        num_workers=2,
        prefetch_factor=9,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    for epoch in (3, 4):
        share.set_epoch(epoch)
        seen = items_of(islice(loader, 4))
        state = share.state_dict()
        assert state["consumed"] == 4 * 3 * comm.size
        share.load_state_dict(state)
        seen += items_of(loader)
        assert sorted(chain(*comm.allgather_object(seen))) == list(range(61))
        assert share.state_dict()["consumed"] == 61


def items_of(batches: Iterable[Any]) -> list[int]:
    return [item for batch in batches for item in batch.items.tolist()]


def uncut(samples: list[Any]) -> Any:
    return torch.tensor(len(samples))


def what_a_collate_fn_cannot_make_is_named_by_the_worker() -> None:
    comm = ac.world()
    share = ac.DistributedDataContainer(range(3))
    loader = DataLoader(
        share, 1, num_workers=1, collate_fn=uncut, multiprocessing_context="fork", timeout=60
    )
    said = ""
    try:
        assert len(list(loader)) == 2
    except TypeError as error:
        said = str(error)
    assert ("collate_fn must return" in said) == (comm.rank == 1), said


if __name__ == "__main__":
    ac.init(timeout=120)
    perform(
        [
            forked_workers_train_like_one_process,
            spawned_workers_train_like_one_process,
            kept_workers_follow_a_loop_that_is_left,
            what_a_collate_fn_cannot_make_is_named_by_the_worker,
        ]
    )
