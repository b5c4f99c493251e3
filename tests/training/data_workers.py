"""Epochs through a DataLoader with two workers: `data_workers.py METHOD STEPS [STATE]`.

After so many batches in all it stops, and prints as JSON the items that the loop has got, by rank,
and its state; it begins where STATE says.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import arraycomm as ac

COUNT, EPOCHS = 61, 3


class Squares(Dataset[Any]):
    """A map-style data set."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, item: int) -> torch.Tensor:
        return torch.tensor([item, item * item])


def main(method: str, steps: int, state: Any = None) -> None:
    comm = ac.init()
    share = ac.DistributedDataContainer(Squares(), shuffle=True, seed=3)
    if state is not None:
        share.load_state_dict(state)
    loader: DataLoader[Any] = DataLoader(
        share,
        batch_size=3,
        num_workers=2,
        prefetch_factor=4,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    seen: list[tuple[int, int]] = []
    for epoch in range(share.epoch, EPOCHS):
        share.set_epoch(epoch)
        expected = [int(share[i][0]) for i in range(len(share))]
        # Every rank makes as many steps; a step has no batch where a rank has run out of items.
        batches = iter(loader)
        for _ in range(comm.allreduce(-(-len(share) // 3), "max")):
            if steps == 0:
                break
            steps -= 1
            batch = next(batches, torch.empty(0, 2, dtype=torch.int64))
            assert (batch[:, 0] ** 2 == batch[:, 1]).all()
            items = batch[:, 0].tolist()
            assert items == expected[: len(items)], (epoch, items, expected)
            del expected[: len(items)]
            seen += [(epoch, item) for item in items]
            share.advance(len(batch))
        if steps == 0:
            break
    everyone = comm.gather_object(seen)
    if comm.rank == 0:
        print(json.dumps({"seen": everyone, "state": share.state_dict()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(json.loads, sys.argv[3:]))
