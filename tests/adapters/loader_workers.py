"""Worker processes of torch on each of two ranks: `python -m tests.adapters.loader_workers`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader as PlainLoader
from torch.utils.data import Dataset

import arraycomm as ac
from arraycomm.adapters.torch import DataLoader
from tests.adapters import uneven_recipe
from tests.support.launched import checks_in, perform

BATCH = 32


def trains_like_one_process(method: str | None, **options: Any) -> None:
    comm = ac.world()
    mine = uneven_recipe.train(comm, "exact", BATCH, multiprocessing_context=method, **options)
    ranks = comm.allgather_object(mine)
    uneven_recipe.assert_equal_to_one_process(ranks, "exact", BATCH)


def forked_workers_train_like_one_process() -> None:
    trains_like_one_process("fork", num_workers=2, prefetch_factor=4)


def spawned_workers_train_like_one_process() -> None:
    """Rank 0 loads without workers: a spawned one takes seconds to import torch."""
    if ac.world().rank:
        trains_like_one_process("spawn", num_workers=1, persistent_workers=True)
    else:
        trains_like_one_process(None)


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


class Squares(Dataset[Any]):
    """A map-style data set."""

    def __len__(self) -> int:
        return 61

    def __getitem__(self, item: int) -> torch.Tensor:
        return torch.tensor([item, item * item])


def plain_batches(comm: ac.Communicator, state: Any, epochs: int) -> Iterator[tuple[int, Any, Any]]:
    """Yield the epoch, each batch that two workers of torch's own loader have loaded, and the state."""
    share = ac.DistributedDataContainer(Squares(), comm=comm, shuffle=True, seed=3)
    share.load_state_dict({**share.state_dict(), **state})
    loader: PlainLoader[Any] = PlainLoader(
        share,
        batch_size=3,
        num_workers=2,
        prefetch_factor=4,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    for epoch in range(share.epoch, epochs):
        share.set_epoch(epoch)
        expected = [int(share[i][0]) for i in range(len(share))]
        # Every rank makes as many steps; a step has no batch where a rank has run out of items.
        batches = iter(loader)
        for _ in range(comm.allreduce(-(-len(share) // 3), "max")):
            batch = next(batches, torch.empty(0, 2, dtype=torch.int64))
            items, squares = batch.T.tolist()
            assert squares == [item**2 for item in items]
            assert items == expected[: len(items)], (epoch, items, expected)
            del expected[: len(items)]
            share.advance(len(batch))
            yield epoch, items, share.state_dict()


def other_numbers_of_ranks_go_on_from_what_a_plain_loop_has_got() -> None:
    """One rank leaves an epoch, and both go on with it. The workers have loaded more than its loop has got."""
    world, epochs, left = ac.world(), 3, None
    alone = world.split(0 if world.rank == 0 else None)
    if alone is not None:
        left = list(islice(plain_batches(alone, {}, epochs), 4))
    before = world.bcast_object(left)
    state = before[-1][-1]
    assert state["consumed"] == 4 * 3
    after = world.allgather_object(list(plain_batches(world, state, epochs)))
    seen = [(epoch, item) for epoch, items, _ in chain(before, *after) for item in items]
    assert sorted(seen) == [(epoch, item) for epoch in range(epochs) for item in range(61)]


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


CHECKS = checks_in(globals())

if __name__ == "__main__":
    ac.init(timeout=120)
    perform(CHECKS)
