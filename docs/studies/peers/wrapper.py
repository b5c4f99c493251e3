"""A library of contiguous arrays with the methods that laws call.

The wrapper does what users of such a library write: it makes the argument a contiguous NumPy array, makes
a result of the right shape, and hands that over as an array of the argument's kind. It looks neither at
dtypes nor at what other ranks pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import view
from arraycomm.testing._arrays.frameworks import elements_of


class NotOfferedError(AttributeError):
    """The library has no such call, or none for such arguments."""


@dataclass
class Call:
    """A call of the library that is under way, or done."""

    result: Any = None
    wait: Callable[[], Any] = lambda: None
    test: Callable[[], bool] = lambda: True
    counts: Any = None  # the rows that came from each rank


class Request:
    """What a nonblocking call returns."""

    def __init__(self, call: Call, finish: Callable[[Any], Any]) -> None:
        self._call, self._finish = call, finish

    def wait(self, timeout: float | None = None) -> Any:
        """Wait, and return the result in the caller's kind of array."""
        self._call.wait()
        return self._finish(self._call.result)

    def test(self) -> bool:
        """Return whether the call is done."""
        return self._call.test()


# Calls with an array that have a nonblocking form, messages, and all others.
ARRAYS = (
    *("allreduce", "reduce", "reduce_scatter", "scan", "exscan"),
    *("bcast", "allgather", "gather", "scatter", "alltoall"),
    *("allgatherv", "gatherv", "scatterv", "alltoallv"),
)
_SENT = ("send", "isend", "sendrecv")
_MESSAGES = (
    *(*_SENT, "recv", "irecv"),
    *("send_object", "isend_object", "recv_object", "irecv_object", "probe", "iprobe"),
)
_REST = ("bcast_object", "allgather_object", "gather_object", "barrier", "free")


class Wrapper:
    """What laws call, over one rank's part in a library that communicates contiguous NumPy arrays.

    Methods of the library that are named as collectives take `(array, *arguments, later)`, and return
    a `Call`. `later` asks for the nonblocking form.
    """

    def __init__(self, library: Any) -> None:
        self.library = library
        self.rank, self.size = library.rank, library.size

    def __getattr__(self, name: str) -> Any:
        if name in _REST:
            return self._of_library(name)
        if name in _MESSAGES:
            return functools.partial(self._message, name, self._of_library(name))
        if name in ("maxloc", "minloc"):
            method = self._of_library(name)
            return lambda x: tuple(_alike(part, x) for part in method(contiguous(x)))
        if name in ARRAYS:
            begin = functools.partial(self._begin, self._of_library(name), False)
            return lambda x, *args, **options: begin(x, *args, **options).wait()
        if name[1:] in ARRAYS and name[0] == "i":
            return functools.partial(self._begin, self._of_library(name[1:]), True)
        raise NotOfferedError(name)

    def _of_library(self, name: str) -> Any:
        found = getattr(self.library, name, None)
        if found is None:
            raise NotOfferedError(f"{type(self.library).__name__} has no {name}")
        return found

    def split(self, color: int | None, key: int = 0) -> Wrapper | None:
        """Split the group."""
        made = self._of_library("split")(color, key)
        return None if made is None else Wrapper(made)

    def dup(self, **options: Any) -> Wrapper:
        """Return the same ranks, whose calls are independent of this one's."""
        if options:
            raise NotOfferedError(f"dup({options}): options are arraycomm's")
        return Wrapper(self._of_library("dup")())

    def _message(
        self, name: str, method: Any, *args: Any, like: Any = None, out: Any = None, **options: Any
    ) -> Any:
        # No limit of a law is reached, and no other library has one.
        options.pop("timeout", None)
        made = method(*((contiguous(args[0]), *args[1:]) if name in _SENT else args), **options)
        finish = functools.partial(_received, like=like, out=out)
        if name == "irecv":
            call = Call(test=made.test)
            call.wait = lambda: setattr(call, "result", made.wait())
            return Request(call, finish)
        return finish(made) if name in ("recv", "sendrecv") else made

    def _begin(self, method: Any, later: bool, x: Any, *args: Any, **options: Any) -> Request:
        like, out = options.pop("like", None), options.pop("out", None)
        counted = options.pop("return_counts", False)
        if out is not None:
            # It gets the memory of `out` itself, whatever its layout.
            options["out"] = elements_of(out)
        call = method(None if x is None else contiguous(x), *args, **options, later=later)

        def finish(result: Any) -> Any:
            made = _alike(result, x if like is None else like) if out is None else out
            return (made, call.counts) if counted and made is not None else made

        return Request(call, finish)


def contiguous(x: Any) -> Any:
    """Return the elements as a NumPy array in C order, aligned, in the byte order of this machine."""
    elements = elements_of(x)
    return np.require(elements, elements.dtype.newbyteorder("="), ["C", "ALIGNED"])


def _received(array: Any, like: Any, out: Any) -> Any:
    if out is None:
        return _alike(array, like)
    elements_of(out)[...] = array
    return out


def _alike(array: Any, like: Any) -> Any:
    """Return an array as one of the kind of `like`."""
    if array is None or like is None:
        return array
    if isinstance(like, (bool, int, float, complex, np.generic)):
        return type(like)(array[()])
    return to_framework(array, view(like, "peers"))
