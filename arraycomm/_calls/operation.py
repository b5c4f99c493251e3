"""An operation: one rank's part in one collective, whole in one class.

Its constructor checks the arguments and raises what is wrong with them. The runner then shows its
signature, with its payload if that is small enough; `steps` moves the rest over a link; `result`
hands the result to the caller. Operations decide nothing about when and over what they run: the
runner does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from arraycomm._arrays.results import check_result
from arraycomm._calls.placement import (
    DeferredResultBuffer,
    Destination,
    HostPlacement,
    Placements,
    ResultBuffer,
    flatten,
)
from arraycomm._dtypes import DType
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.group import Group
from arraycomm._protocol.header import Signature, register
from arraycomm._transports.base import Bytes, Flat, Steps


class Share(NamedTuple):
    """What a rank gets of arrays that have come with the headers.

    It is made of the arrays of some ranks: of that part of each which has this number, if all parts
    are equally long. They are folded by `op`, or come one after the other if that is None.
    """

    ranks: range
    part: int = 0
    op: str | None = None


# What a rank gets that gets nothing.
NO_SHARE: Final = Share(range(0))


@dataclass(slots=True)
class Context:
    """What the runner gives every operation: the group, and where the call's arrays are.

    A call that is prepared again, because arrays of other ranks are elsewhere, is given its
    placement.
    """

    group: Group
    placements: Placements
    given: HostPlacement | None = None
    # Whether the caller goes on meanwhile.
    is_request: bool = False

    @property
    def host(self) -> HostPlacement:
        """The placement of arrays that are host memory."""
        return self.given or self.placements.host

    @property
    def host_tree(self) -> HostPlacement:
        """The placement of trees that are communicated as host memory."""
        return self.placements.host_tree

    def place(self, *arrays: Any) -> HostPlacement:
        """Return where a call of these arrays is communicated from."""
        return self.given or self.placements.of(*arrays, is_request=self.is_request)

    def place_tree(self, leaves: Sequence[Any]) -> HostPlacement:
        """Return where a tree of these leaves is communicated from."""
        return self.given or self.placements.of_tree(leaves, is_request=self.is_request)


class Operation:
    """One rank's part in one collective."""

    # What errors and headers call it.
    name: ClassVar[str]
    code: ClassVar[int]
    # Whether `steps` needs nothing from the header if the payload is too large for it, or if all
    # arrays are on devices.
    header_independent: bool = False
    independent_on_devices: bool = False
    # Whether ranks whose trees differ get one another's details instead of an error.
    negotiable: bool = False
    # What the ranks compare.
    signature: Signature
    # What travels with the header; set by the runner from `pack`.
    payload: Bytes | None = None
    # Where the result goes, on a rank that gets an array.
    target: ResultBuffer | None = None
    # What the header announces beside the signature, in which ranks may differ; of a tree,
    # `MAX_DIMS` words more. See `_protocol/header.py` for what that is.
    word: int = 0
    further_words: Sequence[int] = ()
    # Bytes of the arrays passed, and copies made of them outside the transport.
    nbytes: int = 0
    copies: int = 0

    def __init_subclass__(cls) -> None:
        if "code" in cls.__dict__:
            register(cls.name, cls.code)

    def __init__(self, context: Context, placement: HostPlacement | None = None) -> None:
        self.group = context.group
        self.placement = context.host if placement is None else placement

    @property
    def is_independent(self) -> bool:
        """Whether the call needs nothing from the header."""
        return self.header_independent and self.payload is None

    @property
    def may_go_ahead(self) -> bool:
        """Whether the call need not wait for the check of its header on a rank's device."""
        return self.is_independent or self.independent_on_devices

    def pack(self, room: int) -> Bytes | None:
        """Return what travels with the header, if it fits in `room` bytes; -1 is no room at all."""
        return None

    def share(self) -> Share | None:
        """Return what this rank gets of what comes with the headers; None if a table cannot say."""
        return None

    def steps(self, agreement: Agreement) -> Steps:
        """Move what has not come with the headers."""
        yield from ()

    def result(self, agreement: Agreement) -> Any:
        """Hand the result to the caller, the last thing a call does."""
        return None if self.target is None else self.target.deliver()

    @property
    def into(self) -> Flat:
        """Where the elements of the result go; None on a rank that gets none."""
        return None if self.target is None else self.target.flat

    def buffer_for(
        self, to: Destination, shape: tuple[int, ...], dtype: DType, *, deferred: bool
    ) -> ResultBuffer:
        """Return memory for a result; it is `deferred` if the header tells the shape."""
        if to.out is None and not deferred:
            check_result(shape, dtype, to.like)
        make = DeferredResultBuffer if deferred else ResultBuffer
        target = make(self.placement, to, shape, dtype)
        self.copies += target.copies
        return target


class ArrayOperation(Operation):
    """An operation on one array a rank: `source`, the caller's, is `flat` in C order."""

    def __init__(self, context: Context, x: Any, op: Any = None) -> None:
        super().__init__(context, context.place(x, op))
        self.source = self.placement.view(x)
        self.flat, self.copies = flatten(self.source)
        self.nbytes = self.flat.nbytes

    def make_target(
        self,
        shape: tuple[int, ...],
        out: Any,
        *,
        must_not_alias: bool = False,
        deferred: bool = False,
    ) -> ResultBuffer:
        """Return memory for a result of this shape, like the caller's array; see `buffer_for`."""
        to = Destination(self.source, out, self.flat, must_not_alias)
        return self.buffer_for(to, shape, self.source.dtype, deferred=deferred)

    def sign(
        self, op: str | None, root: int | None, shape: tuple[int, ...] | None = None
    ) -> Signature:
        """Return the signature of a call with this array."""
        shape = self.source.shape if shape is None else shape
        return Signature(self.name, op, root, self.source.dtype, shape)

    def pack(self, room: int) -> Bytes | None:
        return self.flat.view(np.uint8) if self.flat.nbytes <= room else None

    def rows(self, agreement: Agreement) -> Flat:
        """Return every rank's elements, which came with the headers: one row a rank."""
        return agreement.payloads(self.flat.nbytes).view(self.flat.dtype)
