"""Messages between programs: an array goes to one rank, and one like it comes from another."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import arraycomm as ac
from arraycomm._training.programs import ProgramCalls


def exchange(calls: ProgramCalls, x: Any, dest: int, source: int, tag: int, out: Any) -> Any:
    """Send an array to a rank and return another's, which must be alike and from the same place."""
    array, status = np.asarray(x), ac.Status()
    if dest == source == calls.comm.rank:
        return _delivered(array, out)
    try:
        received = calls.sendrecv(array, dest, source, tag, out, status)
    except (TypeError, ValueError):
        # Of `out`, which is like the array that was sent.
        _check(array, status)
        raise
    _check(array, status)
    return received if out is not None else jnp.array(received)


def _delivered(array: Any, out: Any) -> Any:
    if out is None:
        return jnp.array(array)
    out[...] = array
    return out


def _check(array: Any, status: ac.Status) -> None:
    """Raise if the other rank has sent another kind of array."""
    if status.dtype is not None and (status.dtype, status.shape) != (array.dtype, array.shape):
        raise ac.MismatchError(
            f"sendrecv: ranks must send arrays of the shape and dtype that they receive; got "
            f"{status.dtype} {status.shape} from rank {status.source}, and sent {array.dtype} "
            f"{array.shape}"
        )
