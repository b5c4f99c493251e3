"""A library of contiguous arrays with the methods that laws call.

The wrapper does what users of such a library write: it makes the argument a contiguous NumPy array, makes
a result of the right shape, and hands that over as an array of the argument's kind. It looks neither at
dtypes nor at what other ranks pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class Library(Protocol):
    """One rank's part in a library that communicates contiguous NumPy arrays.

    Its methods that are named as collectives take `(array, *arguments, later)`, and return a `Call`.
    `later` asks for the nonblocking form.
    """

    rank: int
    size: int


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


# Calls with an array that have a nonblocking form, those that send one, and all others.
_ARRAYS = (
    *("allreduce", "reduce", "reduce_scatter", "scan", "exscan"),
    *("bcast", "allgather", "gather", "scatter", "alltoall"),
    *("allgatherv", "gatherv", "scatterv", "alltoallv"),
)
_SENT = ("isend", "sendrecv")
_REST = (
    *("recv", "irecv"),
    *("bcast_object", "allgather_object", "gather_object", "barrier", "free"),
)


class Wrapper:
    """What laws call, over a library."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.rank, self.size = library.rank, library.size

    def __getattr__(self, name: str) -> Any:
        if name in _REST:
            return self._of_library(name)
        if name in _SENT:
            method = self._of_library(name)
            return lambda x, *args: method(contiguous(x), *args)
        if name in _ARRAYS:
            return functools.partial(self._now, self._of_library(name))
        if name[1:] in _ARRAYS and name[0] == "i":
            return functools.partial(self._later, self._of_library(name[1:]))
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

    def _now(self, method: Any, x: Any, *args: Any, **options: Any) -> Any:
        counts = options.pop("return_counts", False)
        request = self._begin(method, x, args, options, later=False)
        result = request.wait()
        return (result, self.library.counts) if counts else result

    def _later(self, method: Any, x: Any, *args: Any, **options: Any) -> Request:
        return self._begin(method, x, args, options, later=True)

    def _begin(
        self, method: Any, x: Any, args: Sequence[Any], options: dict[str, Any], *, later: bool
    ) -> Request:
        like, out = options.pop("like", None), options.pop("out", None)
        array = None if x is None else contiguous(x)
        if out is not None:
            # It gets the memory of `out` itself, whatever its layout.
            call = method(array, *args, **options, later=later, out=elements_of(out))
            return Request(call, lambda _: out)
        call = method(array, *args, **options, later=later)
        return Request(call, functools.partial(_alike, like=x if like is None else like))


def contiguous(x: Any) -> Any:
    """Return the elements as a NumPy array in C order, aligned, in the byte order of this machine."""
    elements = elements_of(x)
    return np.require(elements, elements.dtype.newbyteorder("="), ["C", "ALIGNED"])


def _alike(array: Any, like: Any) -> Any:
    """Return an array as one of the kind of `like`."""
    if array is None or like is None:
        return array
    if isinstance(like, (bool, int, float, complex, np.generic)):
        return type(like)(array[()])
    return to_framework(array, view(like, "peers"))
