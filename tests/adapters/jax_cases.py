"""The collectives of JAX, and their derivatives against differences of the sum of all ranks' losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import arraycomm as ac
from arraycomm.adapters import jax as collectives

Function = Callable[..., Any]
# With these steps and factors, differences are exact for polynomials of degree 4, up to rounding.
DIFFERENCES = ((1, 8 / 12), (-1, -8 / 12), (2, -1 / 12), (-2, 1 / 12))


class Case(NamedTuple):
    call: Function
    rows: bool = False

    def shape(self, size: int) -> tuple[int, ...]:
        return (size, 2) if self.rows else (2,)


def _ring(x: Any, *, comm: ac.Communicator | None = None) -> Any:
    there = comm or ac.world()
    rank, size = there.rank, there.size
    return collectives.sendrecv(x, (rank + 1) % size, (rank - 1) % size, comm=comm)


CASES = {
    "allreduce": Case(collectives.allreduce),
    "allreduce-mean": Case(partial(collectives.allreduce, op="mean")),
    "allgather": Case(collectives.allgather),
    "reduce_scatter": Case(collectives.reduce_scatter, rows=True),
    "reduce_scatter-mean": Case(partial(collectives.reduce_scatter, op="mean"), rows=True),
    "alltoall": Case(collectives.alltoall, rows=True),
    "bcast": Case(lambda x, *, comm=None: collectives.bcast(x, 0, comm=comm)),
    "sendrecv": Case(_ring),
}


def draw(seed: int, shape: tuple[int, ...]) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def derivatives(case: Case, comm: ac.Communicator, compiled: Function) -> None:
    """Compare the derivatives of a loss of this rank, none like another rank's, with differences."""
    x, along = (draw(seed + comm.rank, case.shape(comm.size)) for seed in (100, 200))

    def loss(x: Any) -> Any:
        y = case.call(x, comm=comm)
        return (draw(comm.rank, y.shape) * (y + y**2 + y**3 / 3)).sum()

    def slope(x: Any) -> Any:
        return (along * jax.grad(loss)(x)).sum()

    for function in (loss, slope):
        found = compiled(jax.grad(function))(x)
        np.testing.assert_allclose(
            found, _differences(comm, compiled(function), x), rtol=1e-8, atol=1e-8
        )
    for function in (loss, jax.grad(loss)):
        change = sum(factor * function(x + step * along) for step, factor in DIFFERENCES)
        _, tangent = compiled(lambda x, f=function: jax.jvp(f, (x,), (along,)))(x)
        np.testing.assert_allclose(tangent, change, rtol=1e-8, atol=1e-8)


def _differences(comm: ac.Communicator, loss: Function, x: Any) -> Any:
    """Return the derivatives of the sum of all ranks' losses by the elements of this rank."""
    found = np.zeros(x.shape)
    for rank in range(comm.size):
        for index in np.ndindex(*x.shape):
            moved = np.zeros(x.shape)
            moved[index] = comm.rank == rank
            total = sum(factor * loss(x + step * moved) for step, factor in DIFFERENCES)
            whole = float(comm.allreduce(np.asarray(total)))
            if comm.rank == rank:
                found[index] = whole
    return found
