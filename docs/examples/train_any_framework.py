"""Fit a line with one code for every framework: `arraycomm run -n 2 train_any_framework.py torch`.

The argument is numpy (the default), torch, jax, cupy, array_api_strict, or another framework with the
array API. With several arguments, the ranks take them in turn.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from array_api_compat import array_namespace

import arraycomm as ac
from arraycomm.adapters.numpy import Adam


def train(framework: str, comm: ac.Communicator, steps: int = 200) -> dict[str, Any]:
    """Return the parameters of the line 3 x - 1, as arrays of the framework, learnt on all ranks."""
    points = np.linspace(-1, 1, 60, dtype=np.float32)
    mine = points[comm.rank :: comm.size]
    x, y = (ac.exchange(array, framework, copy=True) for array in (mine, 3 * mine - 1))
    params: dict[str, Any] = {
        name: ac.exchange(np.zeros(1, np.float32), framework, copy=True)
        for name in ("slope", "start")
    }
    xp = array_namespace(x)
    # Gradients of sums over points; the optimizer gets the sum over ranks.
    optimizer = ac.DistributedOptimizer(Adam(0.1), comm=comm, op="sum")
    for _ in range(steps):
        errors = (params["slope"] * x + params["start"] - y) / len(points)
        grads = {
            "slope": xp.sum(errors * x, axis=0, keepdims=True),
            "start": xp.sum(errors, axis=0, keepdims=True),
        }
        params = optimizer.update(params, grads)
    return params


if __name__ == "__main__":
    group = ac.init()
    frameworks = sys.argv[1:] or ["numpy"]
    learnt = train(frameworks[group.rank % len(frameworks)], group)
    ac.println({name: float(value[0]) for name, value in learnt.items()})
