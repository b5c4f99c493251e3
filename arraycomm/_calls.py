"""A collective as a call: what it shows the other ranks, what follows, and where its result goes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from arraycomm._buffers import BufferView
from arraycomm._dtypes import DType
from arraycomm._header import Agreement, Signature, Steps
from arraycomm._results import allocate, give, written
from arraycomm._transports.base import Bytes
from arraycomm._views import view_out

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator


@dataclass(slots=True)
class Call:
    """One rank's part in one collective.

    `blind` says that `finish` needs nothing from the header when the payload is too large for it.
    """

    signature: Signature
    finish: Callable[[Any], Steps]
    payload: Bytes | None = None
    length: int = 0
    nbytes: int = 0
    copies: int = 0
    negotiable: bool = False
    blind: bool = False


class UndeliveredError(Exception):
    """The ranks are done with one another, but this one's framework does not take its result."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def deliver(make: Callable[..., Any], *args: Any) -> Any:
    """Return `make(*args)`, the last thing a call does; what it raises concerns this rank alone."""
    try:
        return make(*args)
    except Exception as error:
        raise UndeliveredError(error) from error


class Target:
    """Where a result goes: a fresh array like the caller's, or the caller's `out`.

    `flat` is contiguous memory of the result's elements in C order. It is the caller's own memory
    where that is contiguous, and does not overlap `source` other than by being the same.
    """

    def __init__(
        self,
        like: BufferView,
        shape: tuple[int, ...],
        dtype: DType,
        out: Any,
        operation: str,
        source: np.ndarray[Any, Any] | None = None,
    ) -> None:
        self._like = like
        self._out = None if out is None else view_out(out, shape, dtype, operation)
        self.copies = 0
        direct = self._out is not None and _usable(self._out.array, source)
        self._array = self._out.array if direct and self._out else allocate(shape, dtype)
        self._staged = self._out is not None and not direct
        self.copies = int(self._staged)
        self.flat = self._array.reshape(-1)

    def deliver(self) -> Any:
        """Hand the finished result to the caller."""
        if self._out is None:
            return deliver(give, self._array, self._like)
        if self._staged:
            np.copyto(self._out.array, self._array)
        return deliver(written, self._out)


def barrier(comm: Communicator) -> Call:
    """See `Communicator.barrier`."""

    def finish(agreement: Agreement) -> Steps:
        yield from ()

    return Call(Signature("barrier"), finish)


def agreement_only(operation: str, op: str | None = None, data: bytes = b"") -> Call:
    """A call that is finished with its header; it returns every rank's `data`, of one length."""

    def finish(agreement: Agreement) -> Steps:
        yield from ()
        return [agreement.payload(rank, len(data)).tobytes() for rank in range(len(agreement.rows))]

    return Call(Signature(operation, op), finish, np.frombuffer(data, np.uint8))


def check_root(comm: Communicator, root: Any, operation: str) -> int:
    """Return `root` as a rank of the communicator, or raise."""
    try:
        rank = operator.index(root)
    except TypeError:
        raise TypeError(f"{operation}: root must be an integer; got {root!r}") from None
    if not 0 <= rank < comm.size:
        raise ValueError(
            f"{operation}: root must be a rank of the communicator, 0 to {comm.size - 1}; got {root}"
        )
    return rank


def flatten(source: BufferView) -> tuple[np.ndarray[Any, Any], int]:
    """Return the elements in C order as one-dimensional memory, and the copies that took."""
    flat = source.array.reshape(-1)
    if not flat.flags.c_contiguous:
        flat = np.ascontiguousarray(flat)
    copied = flat.size > 0 and not np.may_share_memory(flat, source.array)
    return flat, int(copied) + int(source.copied)


def payload_of(flat: np.ndarray[Any, Any], inline: bool) -> Bytes | None:
    """Return what travels with the header, where it fits."""
    return flat.view(np.uint8) if inline else None


def _usable(out: np.ndarray[Any, Any], source: np.ndarray[Any, Any] | None) -> bool:
    """Tell whether a result can be written straight into `out` while `source` is being read."""
    if not (out.flags.c_contiguous and out.flags.aligned):
        return False
    if source is None or not np.may_share_memory(out, source):
        return True
    return out.nbytes == source.nbytes and _address(out) == _address(source)


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])
