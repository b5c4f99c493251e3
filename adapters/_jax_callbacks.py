"""What compiled programs call: Python, or the native part, which has Python make what it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import jax
import numpy as np
from jax.core import ShapedArray

from arraycomm._native import compiled
from arraycomm._training.programs import NativeReduction, forget_native_calls
from arraycomm.adapters._jax_errors import as_jax_error, kept
from arraycomm.adapters._jax_tokens import DelaysErrors, ProgramToken

# Makes a call at a place of a program (0: of none): gets arrays, and where results go or None; returns results.
Make = Callable[[int, Sequence[Any], Sequence[Any]], Sequence[Any]]
_PYTHON: Final = "xla_buffer_python_cpu_callback"
_NATIVE: Final = "arraycomm_reduce"


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
        """Tell whether this is a call over a communicator, which ranks compare."""
        return self._comm is comm

    def target(self, index: int) -> tuple[str, dict[str, Any]]:
        """Return what XLA is to call, and with which attributes; `index` is that of the callback in its program."""
        return _PYTHON, {"index": np.uint64(index)}

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
            # The rest of the program is to come here as well, where it is seen that it has failed.
            forget_native_calls()
            if not (self.delays_errors and self._token.take(as_jax_error(error))):
                raise kept(error) from error


class NativeCallback(Callback):
    """A reduction that the native part makes without the GIL from the second time on."""

    def __init__(
        self,
        token: ProgramToken,
        comm: Any,
        make: Make,
        place: int,
        like: ShapedArray,
        reduction: NativeReduction,
    ) -> None:
        super().__init__(token, comm, make, place, 1)
        self._like, self._reduction = like, reduction
        self._call = compiled.ProgramCall(self._in_python, like.size * like.dtype.itemsize)

    def target(self, index: int) -> tuple[str, dict[str, Any]]:
        return _NATIVE, {"call": np.uint64(self._call.address())}

    def _in_python(self, begun: Any, x_memory: memoryview, out_memory: memoryview) -> None:
        """Make the call, or take it to its end if the native part has begun it."""
        if begun is None and self._token.has_failed():
            return
        x, out = (
            np.ndarray(self._like.shape, self._like.dtype, memory)
            for memory in (x_memory, out_memory)
        )
        self._attempt(lambda: self._finish(begun, x, out))

    def _finish(self, begun: Any, x: Any, out: Any) -> None:
        if begun is not None:
            self._reduction.go_on(begun, x, out)
            return
        self._make(self._place, [x], [out])
        exchange = self._reduction.exchange(x)
        if exchange is not None:
            self._call.use(exchange)


@cache
def is_native() -> bool:
    """Tell whether programs can call the native part."""
    if compiled is None:
        return False
    try:
        jax.ffi.register_ffi_target(_NATIVE, compiled.xla_handler, platform="cpu")
    except (RuntimeError, ValueError):
        # An XLA of another interface.
        return False
    return True
