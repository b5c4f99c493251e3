"""Collectives that JAX differentiates, batches and compiles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import arraycomm as ac

# How calls inside loops and branches are batched.
import arraycomm.adapters.jax._rows
from arraycomm._training.programs import calls_of
from arraycomm.adapters.jax._linear import (
    Allgather,
    Allreduce,
    Alltoall,
    Bcast,
    Collective,
    ReduceScatter,
    Sendrecv,
    call,
)
from arraycomm.adapters.jax._tracing import is_eager


def make_token() -> jax.Array:
    """Return a token for the first of a chain of calls.

    Calls of one program keep their order without tokens. With one, a call also depends on what made
    the token, as any operation on an array does.

    Returns
    -------
    Array of uint32, shape ()
        Passed as `token` to a collective of this module, which then returns another one.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from arraycomm.adapters.jax import allreduce, make_token
    >>> from arraycomm.testing import run
    >>> def total(comm):
    ...     y, token = allreduce(jnp.ones(2), comm=comm, token=make_token())
    ...     z, token = allreduce(y, "max", comm=comm, token=token)
    ...     return z.tolist()
    >>> run(2, total)
    [[2.0, 2.0], [2.0, 2.0]]
    """
    return jnp.zeros((), jnp.uint32)


def _call(collective: Collective, x: Any, comm: ac.Communicator | None, token: Any) -> Any:
    comm = comm or ac.world()
    try:
        _check_array(collective.name, x)
        if token is not None:
            _check_token(collective.name, token)
    except TypeError as error:
        # Unless a program is being traced, the other ranks make this call now.
        if is_eager():
            jax.effects_barrier()
            collective.refuse(calls_of(comm), error)
        raise
    if token is None:
        return call(collective, x, comm)
    x, token = jax.lax.optimization_barrier((x, token))
    return jax.lax.optimization_barrier((call(collective, x, comm), token))


def _check_array(name: str, x: Any) -> None:
    if not isinstance(x, jax.Array):
        raise TypeError(
            f"{name}: x must be a jax.Array; got {type(x).__name__}. Pass jnp.asarray(x), or use "
            f"the communicator's {name} for other arrays"
        )
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{name}: x is a typed key of JAX; pass jax.random.key_data(x), and "
            "jax.random.wrap_key_data on the result"
        )


def _check_token(name: str, token: Any) -> None:
    if not isinstance(token, jax.Array) or token.dtype != jnp.uint32 or token.shape:
        raise TypeError(
            f"{name}: token must be one of make_token(), or one that a call returned; got {token!r}"
        )


def allreduce(
    x: jax.Array, op: Any = "sum", *, comm: ac.Communicator | None = None, token: Any = None
) -> Any:
    """Reduce all ranks' arrays, eagerly or in transformations of JAX; every rank gets the result.

    Parameters
    ----------
    x : Array, shape S
        This rank's array; shape and dtype are the same on every rank.
    op : str or Op
        As for `Communicator.allreduce`. Only "sum" and "mean" have derivatives. An `Op` can be used
        eagerly only.
    comm : Communicator, optional
        `world()` by default. The calls are made on a duplicate of it.
    token : Array, optional
        See `make_token`.

    Returns
    -------
    Array, shape S
        With the same bits on every rank; and a token if one was passed. The gradient of x is the
        `allreduce` of the result's gradients, with the same op.

    Raises
    ------
    TypeError
        The op has no derivatives, and x is differentiated; or the call is inside `jax.shard_map`.
    BackendUnavailableError
        The call is in a compiled program, and ranks are threads, or the program is for a device.
    MismatchError, PeerError, CommTimeoutError
        As for `Communicator.allreduce`. A compiled program raises them where it is called or where
        its results are awaited; they are instances of `jax.errors.JaxRuntimeError` as well.

    Notes
    -----
    Calls of one program are made in the order in which it was traced, and programs make theirs in
    the order in which they were dispatched. In branches and loops all ranks have to take the same
    turns. The first call with a communicator, or the first compilation of one, duplicates the
    communicator: every rank makes it at the same place among its other calls.

    In a compiled program the result takes the place of x if x is not used further, or is an
    argument that was donated. If x is an argument that was not donated, the result has memory of
    its own; else XLA copies x first.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from arraycomm.adapters.jax import allreduce
    >>> from arraycomm.testing import run
    >>> def slope(comm):
    ...     return float(jax.grad(lambda x: allreduce(x * x, comm=comm))(1.0 + comm.rank))
    >>> run(2, slope)
    [4.0, 8.0]
    """
    return _call(Allreduce(op), x, comm, token)


def allgather(x: jax.Array, *, comm: ac.Communicator | None = None, token: Any = None) -> Any:
    """Stack all ranks' arrays, eagerly or in transformations of JAX; every rank gets the result.

    Parameters
    ----------
    x : Array, shape S
        This rank's array; shape and dtype are the same on every rank.
    comm, token
        As for `allreduce`.

    Returns
    -------
    Array, shape (size, *S)
        Row r is the array of rank r; and a token if one was passed. The gradient of x is the
        `reduce_scatter` of the result's gradients, summed.

    Notes
    -----
    See `allreduce` for errors and for the order of calls.
    """
    return _call(Allgather(), x, comm, token)


def reduce_scatter(
    x: jax.Array, op: Any = "sum", *, comm: ac.Communicator | None = None, token: Any = None
) -> Any:
    """Reduce all ranks' arrays, eagerly or in transformations of JAX; each rank gets its row.

    Parameters
    ----------
    x : Array, shape (size, *S)
        This rank's array; shape and dtype are the same on every rank.
    op, comm, token
        As for `allreduce`.

    Returns
    -------
    Array, shape S
        Row r of what `allreduce` would give, on rank r; and a token if one was passed. The gradient
        of x is the `allgather` of the result's gradients, divided by the number of ranks if the op
        is "mean".

    Notes
    -----
    See `allreduce` for errors and for the order of calls.
    """
    return _call(ReduceScatter(op), x, comm, token)


def alltoall(x: jax.Array, *, comm: ac.Communicator | None = None, token: Any = None) -> Any:
    """Send row r to rank r, and get a row from each, eagerly or in transformations of JAX.

    Parameters
    ----------
    x : Array, shape (size, *S)
        This rank's rows; shape and dtype are the same on every rank.
    comm, token
        As for `allreduce`.

    Returns
    -------
    Array, shape (size, *S)
        Row r is what rank r had in the row of this rank; and a token if one was passed. The
        gradient of x is the `alltoall` of the result's gradients.

    Notes
    -----
    See `allreduce` for errors and for the order of calls.
    """
    return _call(Alltoall(), x, comm, token)


def bcast(
    x: jax.Array, root: int = 0, *, comm: ac.Communicator | None = None, token: Any = None
) -> Any:
    """Give every rank the array of `root`, eagerly or in transformations of JAX.

    Parameters
    ----------
    x : Array, shape S
        On `root` the array to send; on the other ranks any of the same shape and dtype.
    root : int
        The rank that sends.
    comm, token
        As for `allreduce`.

    Returns
    -------
    Array, shape S
        On every rank; and a token if one was passed. The gradient of x is the sum of all ranks'
        gradients on `root`, and zeros on the other ranks.

    Notes
    -----
    See `allreduce` for errors and for the order of calls.
    """
    return _call(Bcast(root), x, comm, token)


def sendrecv(
    x: jax.Array,
    dest: int,
    source: int,
    tag: int = 0,
    *,
    comm: ac.Communicator | None = None,
    token: Any = None,
) -> Any:
    """Send to one rank and receive from another, eagerly or in transformations of JAX.

    Parameters
    ----------
    x : Array, shape S
        The array to send. What this rank receives has the same shape and dtype.
    dest, source : int
        The rank that gets x, and the one whose array is returned; they may be this rank.
    tag : int
        As for `Communicator.send`.
    comm, token
        As for `allreduce`.

    Returns
    -------
    Array, shape S
        The array of `source`; and a token if one was passed. The gradient of x is what `dest` has
        as its result's gradient, sent back.

    Notes
    -----
    See `allreduce` for errors and for the order of calls. An array of more than 64 KiB follows a
    small message with the call's place in the program, its dtype and its shape; a smaller one is in
    that message. An array that a rank sends to itself is copied.
    """
    return _call(Sendrecv(dest, source, tag), x, comm, token)
