"""A collective as a call: what it shows the other ranks, what follows, and where its result goes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.results import allocate, commit_out, to_framework
from arraycomm._arrays.views import view_out
from arraycomm._dtypes import DType
from arraycomm._errors import TransportError
from arraycomm._protocol.header import Agreement, Signature, Steps
from arraycomm._transports.base import Bytes, Flat

if TYPE_CHECKING:
    from arraycomm._collectives.placement import HostPlacement
    from arraycomm._communicator import Communicator


# A length from another rank beyond this is taken for a broken header, not for an order of memory.
MAX_LENGTH: Final = 1 << 40


@dataclass(slots=True)
class Call:
    """One rank's part in one collective.

    `blind` says that `finish` needs nothing from the header when the payload is too large for it, and
    `ahead` that it does not where all is on a device.
    `prefix` is the signature as a header carries it, where that was encoded beforehand. `way` is that
    of its array, and `again` makes the call for another way.
    """

    signature: Signature
    finish: Callable[[Any], Steps]
    payload: Bytes | None = None
    length: int = 0
    nbytes: int = 0
    copies: int = 0
    negotiable: bool = False
    blind: bool = False
    ahead: bool = False
    prefix: bytes | None = None
    placement: HostPlacement | None = None
    again: Callable[[HostPlacement], Call] | None = None


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


class ResultBuffer:
    """Where a result goes: a fresh array like the caller's, or the caller's `out`.

    `flat` is contiguous memory of the result's elements in C order. It is the caller's own memory
    where that is contiguous, and does not overlap `source` other than by being the same; where
    `apart`, not even so.
    """

    def __init__(
        self,
        like: BufferView,
        shape: tuple[int, ...],
        dtype: DType,
        out: Any,
        operation: str,
        source: np.ndarray[Any, Any] | None = None,
        *,
        must_not_alias: bool = False,
    ) -> None:
        self._like = like
        self._out = None if out is None else view_out(out, shape, dtype, operation)
        direct = self._out is not None and _usable(self._out.array, source, must_not_alias)
        self._array = self._out.array if direct and self._out else allocate(shape, dtype)
        self._staged = self._out is not None and not direct
        self.copies = int(self._staged)
        self.flat = self._array.reshape(-1)

    def deliver(self) -> Any:
        """Hand the finished result to the caller."""
        if self._out is None:
            return deliver(to_framework, self._array, self._like)
        if self._staged:
            np.copyto(self._out.array, self._array)
        return deliver(commit_out, self._out)


def bounds_of(lengths: Iterable[int], elements: int = 1) -> list[int]:
    """Where parts of so many rows of `elements` begin, and where the last one ends."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length * elements)
    return bounds


def lengths_of(agreement: Agreement, size: int) -> list[int]:
    """Return the lengths that the ranks have announced."""
    lengths = [agreement.word(rank, 14) for rank in range(size)]
    for rank, length in enumerate(lengths):
        if not 0 <= length <= MAX_LENGTH:
            raise TransportError(f"rank {rank} announced a length of {length}")
    return lengths


def check_counts(counts: Any, size: int, rows: int, operation: str) -> list[int]:
    """Return `counts` as one length for each rank, which make up the rows of an array."""
    try:
        found = [operator.index(count) for count in counts]
    except TypeError:
        raise TypeError(
            f"{operation}: counts must be a sequence of integers, one for each rank; got {counts!r}"
        ) from None
    if len(found) != size or min(found) < 0 or sum(found) != rows:
        raise ValueError(
            f"{operation}: counts must be one length for each of the {size} ranks, {rows} in all, "
            f"as x has rows; got {found}"
        )
    return found


def check_rows(source: BufferView, size: int, operation: str) -> tuple[int, ...]:
    """Return the shape of the rows of an array that has one for each rank."""
    shape = source.shape
    if not shape or shape[0] != size:
        raise ValueError(
            f"{operation}: x must have one row for each of the {size} ranks, shape ({size}, …); got "
            f"shape {shape}"
        )
    return shape[1:]


def check_axis(source: BufferView, operation: str, otherwise: str) -> tuple[int, ...]:
    """Return the shape of the rows of an array that may have any number of them."""
    if not source.shape:
        raise ValueError(
            f"{operation}: x must have an axis 0, whose length may differ between ranks; got a "
            f"0-d array, for which there is {otherwise}"
        )
    return source.shape[1:]


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
    return check_rank(comm, root, operation, "root", "an integer")


def check_rank(
    comm: Communicator, rank: Any, operation: str, name: str, wanted: str = "a rank"
) -> int:
    """Return an argument that names a rank of the communicator, or raise."""
    try:
        found = operator.index(rank)
    except TypeError:
        raise TypeError(f"{operation}: {name} must be {wanted}; got {rank!r}") from None
    if not 0 <= found < comm.size:
        raise ValueError(
            f"{operation}: {name} must be a rank of the communicator, 0 to {comm.size - 1}; got {rank}"
        )
    return found


def flatten(source: BufferView) -> tuple[Flat, int]:
    """Return the elements in C order as one-dimensional memory, and the copies that took."""
    if source.device_buffer is not None:
        return source.device_buffer, int(source.copied)
    flat = source.array.reshape(-1)
    if not flat.flags.c_contiguous:
        flat = np.ascontiguousarray(flat)
    copied = flat.size > 0 and not np.may_share_memory(flat, source.array)
    return flat, int(copied) + int(source.copied)


def payload_of(flat: Flat, inline: bool) -> Bytes | None:
    """Return what travels with the header, where it fits."""
    return flat.view(np.uint8) if inline else None


def _usable(
    out: np.ndarray[Any, Any], source: np.ndarray[Any, Any] | None, must_not_alias: bool
) -> bool:
    """Tell whether a result can be written straight into `out` while `source` is being read."""
    if not (out.flags.c_contiguous and out.flags.aligned):
        return False
    if source is None or not np.may_share_memory(out, source):
        return True
    return not must_not_alias and out.nbytes == source.nbytes and _address(out) == _address(source)


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])
