"""What virtual ranks cost: `mpiexec -n 2 python virtual.py`, and with `-n 4`.

A step of four virtual ranks, one that accumulates as many gradients, and as many plain steps take
turns, so that they meet the same machine. Each computes the gradients of four batches. Figures are
medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import arraycomm as ac

VIRTUAL, WIDTH, LAYERS, ROWS, TIMES = 4, 724, 4, 16, 60

comm = ac.init()
turns = VIRTUAL // comm.size


def stepper(steps: int, **options: Any) -> Callable[[], None]:
    """Return what computes this rank's gradients, with `steps` steps of a new optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    plain = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer: Any = ac.DistributedOptimizer(plain, comm=comm, **options)
    x = torch.randn(ROWS, WIDTH)

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    return run


def main() -> None:
    torch.set_num_threads(1)
    ways = {
        f"{turns} plain steps": stepper(turns),
        f"accumulate={turns}": stepper(turns, accumulate=turns),
        f"virtual_ranks={VIRTUAL}": stepper(turns, virtual_ranks=VIRTUAL),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(TIMES + 5):
        for way, run in ways.items():
            comm.barrier()
            start = time.perf_counter()
            run()
            if turn >= 5:
                taken[way].append(time.perf_counter() - start)
    plain = np.median(next(iter(taken.values())))
    for way, times in taken.items():
        median = np.median(times)
        ac.println(f"{way}: {median * 1e3:.1f} ms, ratio {median / plain:.2f}", ranks=0)


main()
