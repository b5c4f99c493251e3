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
# With these steps and factors, differences are exact for polynomials of degree 2, up to rounding.
DIFFERENCES = ((1, 1 / 2), (-1, -1 / 2))
CLOSE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-8}


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


class Derivatives(NamedTuple):
    """The derivatives of a loss of this rank, none like another rank's."""

    loss: Function
    along: Any

    def slope(self, x: Any) -> Any:
        return (self.along * jax.grad(self.loss)(x)).sum()

    def all_of(self, x: Any) -> dict[str, Any]:
        """Return those that a program may ask for, in the order in which each rank asks."""
        tangents = {
            f"tangent of {name}": jax.jvp(function, (x,), (self.along,))[1]
            for name, function in (("loss", self.loss), ("gradient", jax.grad(self.loss)))
        }
        return {"gradient": jax.grad(self.loss)(x), "second": jax.grad(self.slope)(x), **tangents}


def derivatives_of(case: Case, comm: ac.Communicator) -> tuple[Derivatives, Any]:
    """Return the derivatives of a loss of this rank, and where to take them."""
    x, along = (draw(seed + comm.rank, case.shape(comm.size)) for seed in (100, 200))

    def loss(x: Any) -> Any:
        y = case.call(x, comm=comm)
        return (draw(comm.rank, y.shape) * (y + y**2)).sum()

    return Derivatives(loss, along), x


def assert_derivatives(case: Case, comm: ac.Communicator) -> None:
    """Compare derivatives with differences."""
    of, x = derivatives_of(case, comm)
    found = of.all_of(x)
    for name, function in (("gradient", of.loss), ("second", of.slope)):
        np.testing.assert_allclose(
            np.vdot(found[name], of.along), _total_change(comm, function, x, of.along), **CLOSE
        )
    for name, function in (("loss", of.loss), ("gradient", jax.grad(of.loss))):
        change = sum(factor * function(x + step * of.along) for step, factor in DIFFERENCES)
        np.testing.assert_allclose(found[f"tangent of {name}"], change, **CLOSE)


def _total_change(comm: ac.Communicator, loss: Function, x: Any, along: Any) -> float:
    """Return by how much the sum of all ranks' losses changes when this rank alone moves."""
    found = 0.0
    for rank in range(comm.size):
        moved = along * (comm.rank == rank)
        change = sum(factor * loss(x + step * moved) for step, factor in DIFFERENCES)
        total = float(comm.allreduce(np.asarray(change)))
        found = total if comm.rank == rank else found
    return found
