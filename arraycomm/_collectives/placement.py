"""Placement: where the arrays of a call are communicated from, and where results go.

Operations see arrays, links and results only through this interface; the host's side of it is here,
the devices' side in `_cuda`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView
from arraycomm._arrays.results import allocate, commit_out, to_framework
from arraycomm._arrays.views import view, view_out
from arraycomm._collectives.algorithms import overlap
from arraycomm._dtypes import DType
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.group import Group
from arraycomm._protocol.header import ON_HOST
from arraycomm._protocol.undelivered import UndeliveredError
from arraycomm._transports.base import Flat, Link, Steps


class HostPlacement:
    """Arrays as host memory; what is on a device is copied there and back.

    Attributes
    ----------
    link : Link
        What moves and folds.
    device_flag : int
        What the header says of where the arrays are.
    inline_bytes : int
        Up to how many bytes travel with the header; -1 if none do, not even of an empty array.
    async_check : bool
        Whether a call may start before its header is checked.
    tree : bool
        Whether the call is of a tree, whose leaves may be in several places.
    """

    host = True
    tree = False
    async_check = False

    def __init__(self, group: Group, device_flag: int = ON_HOST) -> None:
        self.link: Link = group.transport
        self.device_flag = device_flag
        self.inline_bytes = group.inline_bytes

    def view(self, x: Any, name: str = "x") -> BufferView:
        """Look at an array."""
        return view(x, name)

    def view_out(self, out: Any, shape: tuple[int, ...], dtype: DType) -> BufferView:
        """Look at an array that a result of this shape and dtype is written to."""
        return view_out(out, shape, dtype)

    def view_known(self, x: Any, out: Any) -> BufferView | None:
        """Return an array that the result is known to be like on a rank that is not the root."""
        if x is not None:
            return self.view(x)
        if out is None:
            return None
        found = view(out, "out")
        return view_out(out, found.shape, found.dtype)

    def direct(self, out: BufferView) -> Flat | None:
        """Return the memory of `out` if its elements lie side by side, in C order."""
        array = out.array
        return array.reshape(-1) if array.flags.c_contiguous and array.flags.aligned else None

    def empty(self, like: BufferView, shape: tuple[int, ...], dtype: DType) -> tuple[Any, Flat]:
        """Return memory that can become an array like `like`, and its elements."""
        array = allocate(shape, dtype)
        return array, array.reshape(-1)

    def finish(self, made: Any, like: BufferView) -> Any:
        """Return what `empty` made as an array like `like`; the caller forgets `made`."""
        return to_framework(made, like)

    def scratch(self, shape: tuple[int, ...], dtype: DType) -> Flat:
        """Return memory for the elements of a result that is copied to `out` in the end."""
        return allocate(shape, dtype).reshape(-1)

    def commit(self, out: BufferView, flat: Flat, *, direct: bool) -> Any:
        """Finish a write into `out`, directly or to be copied from `flat`; return the caller's array."""
        if not direct:
            np.copyto(out.array, flat.reshape(out.array.shape))
        return commit_out(out)

    def result(
        self,
        like: BufferView,
        shape: tuple[int, ...],
        dtype: DType,
        out: Any,
        source: Flat | None = None,
        *,
        must_not_alias: bool = False,
    ) -> ResultBuffer:
        """Return where a result of this shape and dtype goes; see `ResultBuffer`."""
        return ResultBuffer(self, like, shape, dtype, out, source, must_not_alias=must_not_alias)

    def run(self, steps: Steps) -> Steps:
        """Run what follows the header."""
        return steps


class StagedTreePlacement(HostPlacement):
    """A tree as host memory, wherever its leaves are."""

    tree = True


class Placements(abc.ABC):
    """Decides where the arrays of a call are communicated from."""

    @abc.abstractmethod
    def of(self, *arrays: Any) -> HostPlacement:
        """Return the placement of a call of these arrays, some of which may be None."""

    @abc.abstractmethod
    def of_tree(self, leaves: Sequence[Any]) -> HostPlacement:
        """Return the placement of a tree of these leaves."""

    @abc.abstractmethod
    def on_device(self, x: Any) -> bool:
        """Tell whether `x` is an array on a device; copies nothing."""

    @property
    @abc.abstractmethod
    def host(self) -> HostPlacement:
        """The placement of arrays that are host memory."""

    @property
    @abc.abstractmethod
    def host_tree(self) -> HostPlacement:
        """The placement of trees that are communicated as host memory."""

    @property
    def device_name(self) -> str:
        """Where this rank makes arrays when no argument tells it."""
        return "cpu"

    # The life of a communicator.

    @abc.abstractmethod
    def child(self, group: Group, link: Any) -> Placements:
        """Return the placements of a group made from this one, over what `split` returned."""

    def for_survivors(self, group: Group) -> Placements:
        """Return the placements of a group that takes the place of one with dead ranks."""
        return self.child(group, None)

    def split(self, color: int | None, key: int) -> Steps:
        """Return the link between the devices of a part of the ranks; None if there is none."""
        yield from ()
        return None

    # What the runner asks once headers show that arrays are in several places.

    @property
    def negotiated(self) -> bool:
        """Whether the ranks have chosen a link between their devices, be it none."""
        return True

    def negotiate(self) -> Steps:
        """Choose a link together with the other ranks."""
        yield from ()

    def joining_devices(self) -> HostPlacement:
        """Return the placement of an array of the host that meets others on their devices."""
        return self.host

    def of_mixed_tree(self, agreement: Agreement) -> HostPlacement:
        """Return the placement of a tree whose leaves are in other places on other ranks."""
        return self.host_tree


class HostPlacements(Placements):
    """Every array is host memory."""

    def __init__(self, group: Group) -> None:
        self._host = HostPlacement(group)
        self._host_tree = StagedTreePlacement(group)

    def child(self, group: Group, link: Any) -> Placements:
        return HostPlacements(group)

    @property
    def host(self) -> HostPlacement:
        return self._host

    @property
    def host_tree(self) -> HostPlacement:
        return self._host_tree

    def on_device(self, x: Any) -> bool:
        return False

    def of(self, *arrays: Any) -> HostPlacement:
        return self._host

    def of_tree(self, leaves: Sequence[Any]) -> HostPlacement:
        return self._host_tree


class ResultBuffer:
    """Where a result goes: a fresh array like the caller's, or the caller's `out`.

    `flat` is contiguous memory of the result's elements in C order. It is the caller's own memory if
    that is contiguous and does not overlap `source` other than by being the same; if it
    `must_not_alias`, not even so.
    """

    def __init__(
        self,
        placement: HostPlacement,
        like: BufferView,
        shape: tuple[int, ...],
        dtype: DType,
        out: Any,
        source: Flat | None = None,
        *,
        must_not_alias: bool = False,
    ) -> None:
        self._placement, self._like = placement, like
        self._out = None if out is None else placement.view_out(out, shape, dtype)
        self._made: Any = None
        self._direct = False
        self.copies = int(self._out is not None)
        if self._out is None:
            self._made, self.flat = placement.empty(like, shape, dtype)
            return
        direct = placement.direct(self._out)
        if direct is not None and _may_write(direct, source, must_not_alias):
            self.flat, self._direct, self.copies = direct, True, 0
        else:
            self.flat = placement.scratch(shape, dtype)

    def deliver(self) -> Any:
        """Hand the finished result to the caller."""
        if self._out is None:
            return self._placement.finish(self._made, self._like)
        return self._placement.commit(self._out, self.flat, direct=self._direct)


class DeferredResultBuffer(ResultBuffer):
    """A result whose shape is known only once the headers of the other ranks have been read.

    What is wrong with `out` is raised at the end, since by then the other ranks count on this one.
    """

    def __init__(
        self,
        placement: HostPlacement,
        like: BufferView,
        shape: tuple[int, ...],
        dtype: DType,
        out: Any,
        source: Flat | None = None,
        *,
        must_not_alias: bool = False,
    ) -> None:
        self._errors: list[Exception] = []
        try:
            super().__init__(
                placement, like, shape, dtype, out, source, must_not_alias=must_not_alias
            )
        except Exception as error:
            self._errors.append(error)
            super().__init__(placement, like, shape, dtype, None)

    def deliver(self) -> Any:
        if self._errors:
            raise UndeliveredError(self._errors.pop())
        return super().deliver()


def flatten(source: BufferView) -> tuple[Flat, int]:
    """Return the elements in C order as one-dimensional memory, and the copies that took."""
    if source.device_buffer is not None:
        return source.device_buffer, int(source.copied)
    flat: Array = source.array.reshape(-1)
    if source.array.flags.c_contiguous:
        return flat, int(source.copied)
    if not flat.flags.c_contiguous:
        flat = np.ascontiguousarray(flat)
    copied = flat.size > 0 and not np.may_share_memory(flat, source.array)
    return flat, int(copied) + int(source.copied)


def _may_write(out: Flat, source: Flat | None, must_not_alias: bool) -> bool:
    """Tell whether a result can be written straight into `out` while `source` is being read."""
    if source is None or not overlap(out, source):
        return True
    return not must_not_alias and out.nbytes == source.nbytes and _address(out) == _address(source)


def _address(flat: Flat) -> int:
    if isinstance(flat, np.ndarray):
        return int(flat.__array_interface__["data"][0])
    return int(flat.address)
