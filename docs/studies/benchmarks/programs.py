"""Compiled JAX programs in the benchmark: what arraycomm does inside them, beside mpi4jax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final

from docs.studies.benchmarks.cases import Calls, Case, Field, UnsupportedError, as_numpy

SIZES: Final = (8, 1 << 20, 16 << 20)


def jitted(key: str, field: Field, case: Case, framework: str) -> Calls:
    """Return the calls of one compiled program, or raise `UnsupportedError`."""
    import jax
    import jax.numpy as jnp

    donates = key == "jit-donated"
    program = jax.jit(_reduction(key, field), donate_argnums=(0,) if donates else ())

    def answer() -> Any:
        return [as_numpy(program(jnp.array(case.x[0])))]

    # Zeros, since a result that is donated to the next call would grow from call to call.
    held = [jnp.zeros(case.x[0].shape, case.dtype)]

    def call() -> None:
        result = program(held[0])
        result.block_until_ready()
        if donates:
            held[0] = result

    return call, answer


def _reduction(key: str, field: Field) -> Callable[[Any], Any]:
    if key == "mpi4jax":
        from mpi4py import MPI

        mpi4jax = import_mpi4jax()
        return lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=field.mpi)
    from arraycomm.adapters import jax as adapter

    if key == "optax":
        transformation = adapter.all_reduce("sum", comm=field.comm)
        state = transformation.init(None)
        return lambda x: transformation.update(x, state)[0]
    return lambda x: adapter.allreduce(x, comm=field.comm)


def import_mpi4jax() -> Any:
    """Return the module, or raise `UnsupportedError`."""
    try:
        return import_module("mpi4jax")
    except Exception as error:
        # One that was built for another JAX or another MPI raises other errors than ImportError.
        raise UnsupportedError(f"mpi4jax cannot be imported: {error}") from None


WAYS: Final = {key: partial(jitted, key) for key in ("jit", "jit-donated", "optax", "mpi4jax")}
