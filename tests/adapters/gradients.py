"""Gradients that differ from rank to rank, and their reductions by hand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SHAPE = (4,)
STEPS = 3

Gradients = dict[str, NDArray[np.float32]]


def gradients(rank: int, step: int) -> Gradients:
    """Return the gradients of `a` and `b` on a rank in a step: no two alike."""
    random = np.random.default_rng((rank, step))
    return {name: random.normal(size=SHAPE).astype(np.float32) for name in ("a", "b")}


def reduced(size: int, step: int, op: str) -> Gradients:
    """Return the mean or sum of all ranks' gradients, added in rank order."""
    total = gradients(0, step)
    for rank in range(1, size):
        total = {name: total[name] + new for name, new in gradients(rank, step).items()}
    if op == "sum":
        return total
    return {name: array / np.float32(size) for name, array in total.items()}


def zeros() -> Gradients:
    """Return the parameters `a` and `b` that every test starts from."""
    return {name: np.zeros(SHAPE, np.float32) for name in ("a", "b")}
