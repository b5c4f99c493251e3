"""Pairs of JAX's transformations around a call, against one process that has all ranks as a mapped axis.

There, `jax.lax.psum` and its kin are what calls are here, and `jax.vmap` is right about loops and branches.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import arraycomm as ac
from arraycomm.adapters import jax as collectives
from tests.support.pairwise import EVERY, pairwise

Function = Callable[[Any, Any], Any]
AXIS = "ranks"
# What differs between rows is replicated, so that all ranks take the same turns: x does not decide, k does.
STEPS = np.int32(1)


class Calls(NamedTuple):
    """The calls of ranks, or of the rows of one process."""

    sum: Any
    max: Any
    gather: Any
    ring: Any
    last: Any


def calls_of_ranks(comm: ac.Communicator) -> Calls:
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return Calls(
        lambda x: collectives.allreduce(x, comm=comm),
        lambda x: collectives.allreduce(x, "max", comm=comm),
        lambda x: collectives.allgather(x, comm=comm),
        lambda x: collectives.sendrecv(x, ahead, behind, comm=comm),
        lambda x: collectives.bcast(x, comm.size - 1, comm=comm),
    )


def calls_of_rows(size: int) -> Calls:
    ring = [(row, (row + 1) % size) for row in range(size)]
    return Calls(
        lambda x: lax.psum(x, AXIS),
        lambda x: lax.pmax(x, AXIS),
        lambda x: lax.all_gather(x, AXIS),
        lambda x: lax.ppermute(x, AXIS, ring),
        lambda x: lax.all_gather(x, AXIS)[size - 1],
    )


OPS: dict[str, Callable[[Calls, Any], Any]] = {
    "sum": lambda calls, x: calls.sum(x),
    "gather": lambda calls, x: (calls.gather(x) * 2).sum(0).astype(x.dtype),
    "ring": lambda calls, x: calls.ring(x),
    "last": lambda calls, x: calls.last(x),
}
PLACES: dict[str, Callable[[Callable[[Any], Any]], Function]] = {
    "in a sum": lambda call: lambda x, k: call(x) * 2 + x,
    "alone": lambda call: lambda x, k: call(x),
    "of a constant": lambda call: lambda x, k: call(jnp.ones(x.shape, x.dtype)) + x,
    "of a weak type": lambda call: lambda x, k: call(jnp.asarray(2)) * x,
    "not consumed": lambda call: lambda x, k: (call(x), x * 3)[1],
    "of what decides": lambda call: lambda x, k: x + call(k).astype(x.dtype),
}
DTYPES = ("float32", "complex64", "bfloat16", "int32")
LINEAR = {"jvp", "vjp", "linearize", "linear_transpose", "grad"}


def transformations(calls: Calls) -> dict[str, Callable[[Function], Function]]:
    """Return transformations of a function of an array and of a number that decides."""

    def large(x: Any) -> Any:
        return calls.max(jnp.abs(x).astype(jnp.float32).sum())

    def once_and_twice(f: Function, x: Any, k: Any) -> Any:
        return jax.vmap(f)(jnp.stack([x, 2 * x, x + 1]), k + jnp.arange(3)).sum(0).astype(x.dtype)

    def over_last(f: Function, x: Any, k: Any) -> Any:
        rows = jax.vmap(f, in_axes=(-1, None), out_axes=-1)(jnp.stack([x, 2 * x], -1), k)
        return rows.sum(-1).astype(x.dtype)

    def over_k(f: Function, x: Any, k: Any) -> Any:
        return jax.vmap(lambda k: f(x, k))(k + jnp.arange(2)).sum(0).astype(x.dtype)

    def scan(f: Function, x: Any, k: Any) -> Any:
        return lax.scan(lambda c, y: (f(c, k), f(y, k)), x, jnp.stack([x, x * 2]))[0]

    def turns(f: Function, x: Any, k: Any) -> Any:
        turn = lambda s: (f(s[0], k), s[1] + 1)  # noqa: E731
        return lax.while_loop(lambda s: s[1] < 1 + k % 3, turn, (x, 0))[0]

    def outside(f: Function, x: Any, k: Any) -> Any:
        return lax.while_loop(
            lambda s: s[1] < 1 + k % 2, lambda s: (s[0] + f(x, k), s[1] + 1), (x * 0, 0)
        )[0]

    def until(f: Function, x: Any, k: Any) -> Any:
        return lax.while_loop(
            lambda s: large(f(s[0], k)) + s[1] < 60 + 5 * (k % 3),
            lambda s: (s[0] * 2 + 1, s[1] + 3),
            (x, 0),
        )[0]

    def custom_vjp(f: Function) -> Function:
        made = jax.custom_vjp(f)
        made.defvjp(
            lambda x, k: (f(x, k), (x, k)),
            lambda kept, given: (jax.vjp(lambda x: f(x, kept[1]), kept[0])[1](given)[0], None),
        )
        return made

    def custom_jvp(f: Function) -> Function:
        made = jax.custom_jvp(f)
        made.defjvp(lambda at, along: jax.jvp(lambda x: f(x, at[1]), at[:1], along[:1]))
        return made

    def closed(f: Function, x: Any, k: Any) -> Any:
        converted, consts = jax.closure_convert(lambda x: f(x, k), x)
        return converted(x, *consts)

    def evaluated(f: Function, x: Any, k: Any) -> Any:
        traced = jax.make_jaxpr(f)(x, k)
        return jax.core.eval_jaxpr(traced.jaxpr, traced.consts, x, k)[0]

    def of(apply: Callable[[Function, Any, Any], Any]) -> Callable[[Function], Function]:
        return lambda f: lambda x, k: apply(f, x, k)

    return {
        "jit": jax.jit,
        "vmap": of(once_and_twice),
        "vmap of the last axis": of(over_last),
        "vmap of what decides": of(over_k),
        "scan": of(scan),
        "while_loop": of(turns),
        "while_loop over a constant": of(outside),
        "while_loop's condition": of(until),
        "cond": of(
            lambda f, x, k: lax.cond(k % 2 == 0, lambda x: f(x, k), lambda x: f(x * 2, k) + 1, x)
        ),
        "cond of one": of(lambda f, x, k: lax.cond(k % 2 == 0, lambda x: f(x, k), lambda x: x, x)),
        "switch": of(
            lambda f, x, k: lax.switch(
                k % 3, [lambda x: f(x, k), lambda x: x, lambda x: f(f(x, k), k)], x
            )
        ),
        "checkpoint": jax.checkpoint,
        "custom_vjp": custom_vjp,
        "custom_jvp": custom_jvp,
        "jvp": of(lambda f, x, k: jax.jvp(lambda x: f(x, k), (x,), (x,))[1]),
        "vjp": of(lambda f, x, k: jax.vjp(lambda x: f(x, k), x)[1](x)[0]),
        "linearize": of(lambda f, x, k: jax.linearize(lambda x: f(x, k), x)[1](x)),
        "linear_transpose": of(
            lambda f, x, k: jax.linear_transpose(lambda y: f(y, k) - f(y * 0, k), x)(x)[0]
        ),
        "grad": of(
            lambda f, x, k: jax.grad(lambda x: jnp.real(f(x, k) ** 2).sum().astype(jnp.float32))(x)
        ),
        "closure_convert": of(closed),
        "eval_jaxpr": of(evaluated),
    }


class Row(NamedTuple):
    """A program: a transformation of a transformation of a function with a call at a place."""

    outer: str
    inner: str
    place: str
    op: str
    dtype: str

    def program(self, calls: Calls) -> Function:
        transformed = transformations(calls)
        plain = PLACES[self.place](lambda x: OPS[self.op](calls, x))
        return transformed[self.outer](transformed[self.inner](plain))

    def arrays(self, size: int) -> Any:
        """Return the array of each rank."""
        x = jnp.asarray(np.arange(2.0 * size).reshape(size, 2) % 5 + 1, self.dtype)
        return x * (1 + 0.5j) if self.dtype == "complex64" else x


def rows() -> Iterator[Row]:
    """Return every pair of transformations; each once and those with loops and branches under vmap; or half of these."""
    names = list(transformations(calls_of_rows(1)))
    pairs = [
        (outer, inner)
        for (i, outer), (j, inner) in itertools.product(enumerate(names), repeat=2)
        if EVERY or (j - 5 * i) % len(names) == 0 or (outer == "vmap" and 3 < j < 11)
    ]
    others = itertools.cycle(pairwise(itertools.product(PLACES, OPS, DTYPES)))
    chosen = list(zip(pairs, others, strict=False))[:: 1 if EVERY or "NIGHT" in os.environ else 2]
    for (outer, inner), (place, op, dtype) in chosen:
        is_real = dtype == "int32" and {outer, inner} & LINEAR
        yield Row(outer, inner, place, op, "float32" if is_real else dtype)


def check(row: Row, comm: ac.Communicator, judge: int) -> bool:
    """Compare a program with that of one process, unless JAX refuses it there; return whether it was compared.

    Rank `judge` is that process.
    """
    x, expected = row.arrays(comm.size), None
    if comm.rank == judge:
        in_one = jax.vmap(row.program(calls_of_rows(comm.size)), in_axes=(0, None), axis_name=AXIS)
        expected = _tried(lambda: np.asarray(jax.jit(in_one)(x, STEPS)))
    expected = comm.bcast_object(expected, judge)
    program = jax.jit(row.program(calls_of_ranks(comm)))
    if isinstance(expected, Exception):
        refused = _tried(lambda: program.lower(x[comm.rank], STEPS))
        assert type(refused) is type(expected), f"{row}: {expected}"
        return False
    found, wanted = np.asarray(program(x[comm.rank], STEPS)), expected[comm.rank]
    assert found.dtype == wanted.dtype, row
    np.testing.assert_allclose(
        found.astype(complex), wanted.astype(complex), rtol=2e-2, err_msg=str(row)
    )
    return True


def _tried(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        # Of its class alone, as others can read it.
        return type(error)(str(error))
