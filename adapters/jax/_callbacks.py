"""What compiled programs call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from arraycomm.adapters.jax._errors import as_jax_error, kept
from arraycomm.adapters.jax._tokens import DelaysErrors, ProgramToken

# Makes a call at a place of a program (0: of none): gets arrays, and where results go or None;
# returns results.
Make = Callable[[int, Sequence[Any], Sequence[Any]], Sequence[Any]]
# What XLA calls, with the index of the callback in its program.
PYTHON: Final = "xla_buffer_python_cpu_callback"


class Callback(DelaysErrors):
    """Gets buffers: a token, arguments, results, a token.

    Parameters
    ----------
    token : ProgramToken
        Takes the errors of programs.
    comm : Communicator or None
        Over which other ranks take part, if any do.
    make : Make
        Makes the call.
    place, count : int
        The place of the call in its program, and how many arguments it has.
    """

    def __init__(self, token: ProgramToken, comm: Any, make: Make, place: int, count: int) -> None:
        self._token, self._comm, self._make = token, comm, make
        self._place, self._count = place, count

    def takes_place(self, comm: Any) -> bool:
        """Return whether this is a call over a communicator, which ranks compare."""
        return self._comm is comm

    def __call__(self, _: Any, *buffers: Any) -> tuple[()]:
        if not self._token.has_failed():
            split = 1 + self._count
            arrays = [np.asarray(buffer) for buffer in buffers[1:split]]
            outs = [np.asarray(buffer) for buffer in buffers[split:-1]]
            self._attempt(lambda: self._make(self._place, arrays, outs))
        return ()

    def _attempt(self, make: Callable[[], object]) -> None:
        try:
            make()
        except BaseException as error:
            if not (self.delays_errors and self._token.take(as_jax_error(error))):
                raise kept(error) from error
