"""Each collective as a call: what can fail locally first, then the header, then the data.

A function here looks at its arguments, raises what is wrong with them, and returns a `Call`: the
signature to agree on, the payload that travels with it when it is small, and what follows.
"""

from __future__ import annotations

import ast
import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from arraycomm import _algorithms
from arraycomm._buffers import BufferView
from arraycomm._dtypes import DType, check_movable, check_op, check_reducible
from arraycomm._errors import TransportError
from arraycomm._folds import fold
from arraycomm._header import (
    Agreement,
    Signature,
    Steps,
    array_of,
    exchange_details,
    in_header,
)
from arraycomm._results import allocate, give, written
from arraycomm._transports.base import Bytes
from arraycomm._views import likeness, view, view_out

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator

# A length from another rank beyond this is taken for a broken header, not for an order of memory.
_MAX_OBJECT: Final = 1 << 40


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


def allreduce(comm: Communicator, x: Any, op: str, out: Any) -> Call:
    """See `Communicator.allreduce`."""
    source = view(x, "allreduce")
    _check_op(source.dtype, op, "allreduce")
    flat, copies = flatten(source)
    target = Target(source, source.shape, source.dtype, out, "allreduce", flat)

    def finish(agreement: Agreement) -> Steps:
        if inline:
            _fold_inline(comm, agreement, flat, op, target.flat)
        else:
            yield from _algorithms.allreduce(comm._link, flat, target.flat, op, comm._scratch)
        return target.deliver()

    inline = flat.nbytes <= comm._inline
    return Call(
        Signature("allreduce", op, None, source.dtype, source.shape),
        finish,
        _payload(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + target.copies,
        blind=True,
    )


def reduce(comm: Communicator, x: Any, op: str, root: int, out: Any) -> Call:
    """See `Communicator.reduce`."""
    root = check_root(comm, root, "reduce")
    source = view(x, "reduce")
    _check_op(source.dtype, op, "reduce")
    flat, copies = flatten(source)
    target = None
    if comm.rank == root:
        target = Target(source, source.shape, source.dtype, out, "reduce", flat)

    def finish(agreement: Agreement) -> Steps:
        into = None if target is None else target.flat
        if not inline:
            yield from _algorithms.reduce(comm._link, flat, into, op, root, comm._scratch)
        elif into is not None:
            _fold_inline(comm, agreement, flat, op, into)
        return None if target is None else target.deliver()

    inline = flat.nbytes <= comm._inline
    return Call(
        Signature("reduce", op, root, source.dtype, source.shape),
        finish,
        _payload(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + (target.copies if target else 0),
        blind=True,
    )


def bcast(comm: Communicator, x: Any, root: int, like: Any, out: Any) -> Call:
    """See `Communicator.bcast`."""
    root = check_root(comm, root, "bcast")
    if comm.rank != root:
        return _bcast_to(comm, x, root, like, out)
    if x is None:
        raise TypeError("bcast: x is None on the root; the root passes the array to send")
    return _bcast_from(comm, view(x, "bcast"), root, out)


def _bcast_from(comm: Communicator, source: BufferView, root: int, out: Any) -> Call:
    check_movable(source.dtype, "bcast")
    flat, copies = flatten(source)
    target = Target(source, source.shape, source.dtype, out, "bcast", flat)
    # What the header has no room for is told in further steps, after which its payload is gone.
    description = None if in_header(source.dtype, source.shape) else _description(source)

    def finish(agreement: Agreement) -> Steps:
        if description is not None:
            yield from exchange_details(comm._board, {"array": description})
        if target.flat is not flat:
            np.copyto(target.flat, flat)
        if not inline:
            yield from _algorithms.bcast(comm._link, target.flat, root)
        return target.deliver()

    inline = description is None and flat.nbytes <= comm._inline
    return Call(
        Signature("bcast", None, root, source.dtype, source.shape),
        finish,
        _payload(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + 1,
    )


def _description(source: BufferView) -> str:
    """Say dtype and shape in a way that another rank can read; raise where that is not possible."""
    descr = np.lib.format.dtype_to_descr(source.dtype)
    if np.lib.format.descr_to_dtype(descr) != source.dtype:
        raise TypeError(
            f"bcast: dtype {source.dtype} cannot be described to the other ranks; send its fields "
            "one by one"
        )
    return repr((descr, source.shape))


def _bcast_to(comm: Communicator, x: Any, root: int, like: Any, out: Any) -> Call:
    kind = _wanted_kind(x, like, out)
    known = _known_array(x, out)
    target: Target | None = None
    if known is None:
        signature = Signature("bcast", None, root)
    else:
        check_movable(known.dtype, "bcast")
        signature = Signature("bcast", None, root, known.dtype, known.shape)
        target = Target(kind, known.shape, known.dtype, out, "bcast")

    def finish(agreement: Agreement) -> Steps:
        array = array_of(agreement.words, comm._slot_of(root))
        length = agreement.word(root, 13)
        if array is None:
            details = yield from exchange_details(comm._board, {})
            descr, shape = ast.literal_eval(details[root]["array"])
            array = np.lib.format.descr_to_dtype(descr), tuple(shape)
        dtype, shape = array
        into = target or Target(kind, shape, dtype, out, "bcast")
        if length >= 0:
            into.flat.view(np.uint8)[...] = agreement.payload(root, length)
        else:
            yield from _algorithms.bcast(comm._link, into.flat, root)
        return into.deliver()

    return Call(signature, finish)


def _known_array(x: Any, out: Any) -> BufferView | None:
    """Return the array that a rank which is not the root knows the result to be like, if any."""
    if x is not None:
        return view(x, "bcast")
    if out is None:
        return None
    found = view(out, "bcast")
    return view_out(out, found.shape, found.dtype, "bcast")


def _wanted_kind(x: Any, like: Any, out: Any) -> BufferView:
    """Return a view that tells what the result is like; its elements do not matter."""
    for name, example in (("x", x), ("like", like), ("out", out)):
        if example is not None:
            return likeness(example, "bcast", name)
    return view(np.empty(0), "bcast")


def allgather(comm: Communicator, x: Any, out: Any) -> Call:
    """See `Communicator.allgather`."""
    source = view(x, "allgather")
    check_movable(source.dtype, "allgather")
    flat, copies = flatten(source)
    target = Target(source, (comm.size, *source.shape), source.dtype, out, "allgather", flat)
    rows = target.flat.reshape(comm.size, -1) if flat.size else None

    def finish(agreement: Agreement) -> Steps:
        if rows is None:
            return target.deliver()
        if inline:
            for rank in range(comm.size):
                rows[rank] = agreement.payload(rank, flat.nbytes).view(flat.dtype)
        else:
            rows[comm.rank] = flat
            bounds = [flat.size * rank for rank in range(comm.size + 1)]
            yield from _algorithms.allgatherv(comm._link, target.flat, bounds)
        return target.deliver()

    inline = flat.nbytes <= comm._inline
    return Call(
        Signature("allgather", None, None, source.dtype, source.shape),
        finish,
        _payload(flat, inline),
        nbytes=flat.nbytes * comm.size,
        copies=copies + target.copies + 1,
        blind=True,
    )


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


def allgather_object(comm: Communicator, obj: Any, operation: str = "allgather_object") -> Call:
    """See `Communicator.allgather_object`."""
    data = np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)

    def finish(agreement: Agreement) -> Steps:
        lengths = [_length(agreement, rank) for rank in range(comm.size)]
        if max(lengths) <= comm._inline:
            parts = [agreement.payload(rank, n) for rank, n in enumerate(lengths)]
            return deliver(lambda: [pickle.loads(part.data) for part in parts])
        bounds = [0]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        everything = np.empty(bounds[-1], np.uint8)
        everything[bounds[comm.rank] : bounds[comm.rank + 1]] = data
        yield from _algorithms.allgatherv(comm._link, everything, bounds)
        return deliver(
            lambda: [pickle.loads(everything[start:end].data) for start, end in pairwise(bounds)]
        )

    return Call(
        Signature(operation),
        finish,
        _payload(data, len(data) <= comm._inline),
        len(data),
        nbytes=len(data),
    )


def bcast_object(comm: Communicator, obj: Any, root: int) -> Call:
    """See `Communicator.bcast_object`."""
    root = check_root(comm, root, "bcast_object")
    data = np.empty(0, np.uint8)
    if comm.rank == root:
        data = np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)

    def finish(agreement: Agreement) -> Steps:
        length = _length(agreement, root)
        if length <= comm._inline:
            return deliver(pickle.loads, agreement.payload(root, length).data)
        received = data.copy() if comm.rank == root else np.empty(length, np.uint8)
        yield from _algorithms.bcast(comm._link, received, root)
        return deliver(pickle.loads, received.data)

    return Call(
        Signature("bcast_object", None, root),
        finish,
        _payload(data, len(data) <= comm._inline),
        len(data),
        nbytes=len(data),
    )


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


def _check_op(dtype: DType, op: Any, operation: str) -> None:
    check_op(op, operation)
    check_movable(dtype, operation)
    check_reducible(dtype, op, operation)


def _usable(out: np.ndarray[Any, Any], source: np.ndarray[Any, Any] | None) -> bool:
    """Tell whether a result can be written straight into `out` while `source` is being read."""
    if not (out.flags.c_contiguous and out.flags.aligned):
        return False
    if source is None or not np.may_share_memory(out, source):
        return True
    return out.nbytes == source.nbytes and _address(out) == _address(source)


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _payload(flat: np.ndarray[Any, Any], inline: bool) -> Bytes | None:
    return flat.view(np.uint8) if inline else None


def _fold_inline(
    comm: Communicator,
    agreement: Agreement,
    flat: np.ndarray[Any, Any],
    op: str,
    target: np.ndarray[Any, Any],
) -> None:
    rows = [agreement.payload(r, flat.nbytes).view(flat.dtype) for r in range(comm.size)]
    fold(op, flat.dtype, rows, target)


def _length(agreement: Agreement, rank: int) -> int:
    length = agreement.word(rank, 14)
    if not 0 <= length <= _MAX_OBJECT:
        raise TransportError(f"rank {rank} announced an object of {length} bytes")
    return length
