"""A small framework that learns on one process or on several ranks; arraycomm is an optional dependency of it.

    python library_author.py                 # also if arraycomm is not installed
    arraycomm run -n 3 library_author.py     # or: mpiexec -n 3 python library_author.py

Both print the same loss, here with three ranks: `ranks: 3, loss: 0.000863`. The tests are in `test_library_author.py`.
The framework has a tree of parameters of its own, and an optimizer of its own. Neither imports arraycomm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

try:  # pip install 'tinynet[ranks]' would bring it
    import arraycomm as ac
except ImportError:
    ac = None  # type: ignore[assignment]

Array = np.ndarray[Any, Any]


class Params:
    """The parameters of a model: arrays by name."""

    def __init__(self, **arrays: Array) -> None:
        self.arrays = arrays

    def map(self, fn: Callable[..., Array], *others: Params) -> Params:
        """Return what `fn` makes of each array, and of those of the same name in `others`."""
        names = self.arrays
        return Params(**{n: fn(self.arrays[n], *(o.arrays[n] for o in others)) for n in names})

    def __arraycomm_tree__(self) -> tuple[Any, Callable[[Any], Params]]:
        # What the ranks share, and how to make such an object of it.
        return self.arrays, lambda arrays: Params(**arrays)


class Momentum:
    """An optimizer that is called as `update(params, grads, state)`: DistributedOptimizer takes it."""

    def __init__(self, rate: float = 0.1, decay: float = 0.9) -> None:
        self.rate, self.decay = rate, decay

    def init(self, params: Params) -> Params:
        return params.map(np.zeros_like)

    def update(self, params: Params, grads: Params, state: Params) -> tuple[Params, Params]:
        state = state.map(lambda velocity, grad: self.decay * velocity + grad, grads)
        return params.map(lambda param, velocity: param - self.rate * velocity, state), state


def predict(params: Params, x: Array) -> Array:
    return x @ params.arrays["w"] + params.arrays["b"]


def fit(params: Params, x: Array, y: Array, *, steps: int = 100, comm: Any = None) -> Params:
    """Return parameters that fit the rows of all ranks; collective over `comm`.

    A rank passes its own rows, of which there may be none. `comm` is what `arraycomm.borrow` takes.
    """
    with borrowed(comm) as ranks:
        optimizer: Any = Momentum()
        if ranks is None:
            check(x, y)
            count = len(x)
        else:
            with ac.raise_together(ranks):  # if one rank's rows are wrong, every rank raises
                check(x, y)
            count = ranks.allreduce(len(x))
            params = ac.synchronize(params, comm=ranks)
            optimizer = ac.DistributedOptimizer(optimizer, comm=ranks, op="sum")
        state = optimizer.init(params)
        for _ in range(steps):
            # A part of the gradient of the mean over all rows: the sum over the ranks is the whole of it.
            error = (predict(params, x) - y) / count
            grads = Params(w=2 * x.T @ error, b=2 * error.sum())
            params, state = optimizer.update(params, grads, state)
    return params


def check(x: Array, y: Array) -> None:
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise ValueError(f"x must have two dimensions, and y its rows; got {x.shape}, {y.shape}")


@contextmanager
def borrowed(comm: Any) -> Iterator[Any]:  # the ranks to compute on; None without arraycomm
    if ac is None:
        if comm is not None:
            raise ImportError("comm needs arraycomm: pip install 'tinynet[ranks]'")
        yield None
        return
    with ac.borrow(comm) as ranks:
        yield ranks


if __name__ == "__main__":
    # The program calls init, not the library.
    rank, size = (0, 1) if ac is None else ((world := ac.init()).rank, world.size)
    rows = np.random.default_rng(0).normal(size=(50, 3))
    targets = rows @ [1.0, 2.0, 3.0] + 4
    learnt = fit(Params(w=np.zeros(3), b=np.zeros(())), rows[rank::size], targets[rank::size])
    loss = np.mean((predict(learnt, rows) - targets) ** 2)
    assert loss < 1e-3
    if rank == 0:
        print(f"ranks: {size}, loss: {loss:.6f}")
