"""What compiled programs call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

import arraycomm as ac
from arraycomm._protocol.header import digest
from arraycomm._training.comparison.digests import digest_of
from arraycomm.adapters.jax._errors import as_jax_error, kept
from arraycomm.adapters.jax._tokens import DelaysErrors, ProgramToken

# What XLA calls, with the index of the callback in its program.
PYTHON: Final = "xla_buffer_python_cpu_callback"


class Callback(DelaysErrors):
    """Gets buffers: a token, arguments, results, a token.

    `make` makes the call, of `count` arguments, over `comm` if other ranks take part.
    """

    def __init__(
        self,
        token: ProgramToken,
        comm: ac.Communicator | None,
        make: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
        count: int,
    ) -> None:
        self._token, self._comm, self._make, self._count = token, comm, make, count

    def takes_place(self, comm: Any) -> bool:
        """Return whether this is a call over a communicator, which ranks compare."""
        return self._comm is comm

    def __call__(self, _: Any, *buffers: Any) -> tuple[()]:
        if self._token.has_failed():
            return ()
        split = 1 + self._count
        arrays = [np.asarray(buffer) for buffer in buffers[1:split]]
        outs = [np.asarray(buffer) for buffer in buffers[split:-1]]
        try:
            for out, result in zip(outs, self._make(arrays, outs), strict=True):
                if result is not out:
                    out[...] = result
        except BaseException as error:
            if not (self.delays_errors and self._token.take(as_jax_error(error))):
                raise kept(error) from error
        return ()


def are_alike(arrays: Sequence[Any], comm: ac.Communicator) -> bool:
    """Return whether all ranks have the same arrays; collective."""
    shown = [(str(x.dtype), x.shape, digest_of(x)) for x in map(np.asarray, arrays)]
    found = comm.allgather(np.array(digest(*shown), np.int64))
    return bool((found == found[0]).all())
