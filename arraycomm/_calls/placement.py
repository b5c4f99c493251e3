"""Placement: where the arrays of a call are communicated from, and where results go.

Operations see arrays, links and results only through this interface; the host's side of it is here,
the devices' side in `_cuda`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView, allocate
from arraycomm._arrays.results import (
    allocate_like,
    check_result,
    commit_out,
    to_framework,
    view_out,
)
from arraycomm._arrays.views import view
from arraycomm._dtypes import DType
from arraycomm._protocol.agreement import Agreement, UndeliveredError
from arraycomm._protocol.group import Group
from arraycomm._protocol.header import ON_HOST
from arraycomm._reduce.blocks import overlap
from arraycomm._transports.base import Flat, Link, Steps

# The types of what is never on a device; other modules look at the rest.
OF_HOST: Final = frozenset(
    (np.ndarray, type(None), bool, int, float, complex, str, tuple, list, dict)
)


_HERE: Final = nullcontext()


class HostPlacement:
    """Arrays as host memory; what is on a device is copied there and back."""

    host = True
    # Whether the call is of a tree, whose leaves may be in several places.
    tree = False
    # Whether a call may start before its header is checked.
    async_check = False
    # Whether a request is on the device when its call returns: what several communicators put there
    # has one order on all ranks, which is that of the program.
    in_order = False
    # A context in which a thread has what the caller's has, such as current streams.
    here: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    def __init__(self, group: Group, device_flag: int = ON_HOST) -> None:
        # What moves and folds.
        self.link: Link = group.transport
        # What the header says of where the arrays are.
        self.device_flag = device_flag
        # Up to how many bytes travel with the header; -1 if none do, not even of an empty array.
        self.inline_bytes = group.inline_bytes

    @property
    def of_device(self) -> Any:
        """This placement, if what it moves is memory of a device; else None."""
        return None

    def view(self, x: Any, name: str = "x") -> BufferView:
        """Look at an array."""
        return view(x, name)

    def view_out(self, out: Any, shape: tuple[int, ...], dtype: DType) -> BufferView:
        """Look at an array that a result of this shape and dtype is written to."""
        if type(out) in OF_HOST:
            return view_out(out, shape, dtype)
        return self.view_other_out(out, shape, dtype)

    def view_other_out(self, out: Any, shape: tuple[int, ...], dtype: DType) -> BufferView:
        """Look at an `out` that may be on a device."""
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
        array = allocate_like(shape, dtype, like)
        return array, array.reshape(-1)

    def finish(self, made: Any, like: BufferView) -> Any:
        """Return what `empty` made as an array like `like`; the caller forgets `made`."""
        return to_framework(made, like)

    def scratch(self, shape: tuple[int, ...], dtype: DType) -> Flat:
        """Return memory for the elements of a result that is copied to `out` in the end."""
        return allocate(shape, dtype).reshape(-1)

    def commit(self, out: BufferView, flat: Flat, *, direct: bool) -> Any:
        """Finish a write into `out`, direct or copied from `flat`; return the caller's array."""
        with self.here_of(out) if type(out) is not BufferView else _HERE:
            if not direct:
                np.copyto(out.array, flat.reshape(out.array.shape))
            return commit_out(out)

    def here_of(self, out: BufferView) -> AbstractContextManager[Any]:
        """Return a context in which a view by `view_other_out` is written."""
        return _HERE

    def run(self, steps: Steps, digest: int = 0) -> Steps:
        """Run what follows the header, or goes ahead of its check.

        If some ranks may go ahead, `digest` is what all ranks' calls have alike; otherwise it is 0.
        """
        return steps


class StagedTreePlacement(HostPlacement):
    """A tree as host memory, wherever its leaves are."""

    tree = True

    def view(self, x: Any, name: str = "x") -> BufferView:
        found = super().view(x, name)
        check_result(found.shape, found.dtype, found)
        return found


class Placements:
    """Decides where the arrays of a call are communicated from; here, always from host memory."""

    # Whether the ranks have chosen a link between their devices, be it none.
    negotiated = True

    # Lets a thread use the result of the call that has just finished.
    follow: Callable[[], None] | None = None

    def __init__(self, group: Group) -> None:
        # Those of arrays and of trees that are communicated as host memory.
        self.host = HostPlacement(group)
        self.host_tree: HostPlacement = StagedTreePlacement(group)

    def of(self, *arrays: Any, is_request: bool = False) -> HostPlacement:
        """Return the placement of a call of these arrays, some of which may be None."""
        others = [x for x in arrays if type(x) not in OF_HOST]
        return self.of_others(others, is_request) if others else self.host

    def of_tree(self, leaves: Sequence[Any], *, is_request: bool = False) -> HostPlacement:
        """Return the placement of a tree of these leaves."""
        if set(map(type, leaves)) <= OF_HOST:
            return self.host_tree
        return self.of_other_tree(leaves, is_request)

    def on_device(self, x: Any) -> bool:
        """Return whether `x` is an array on a device; copies nothing."""
        return type(x) not in OF_HOST and self.is_other_on_device(x)

    def of_others(self, others: Sequence[Any], is_request: bool) -> HostPlacement:
        """Return the placement of a call of these arguments, of which some may be on a device."""
        return self.host

    def of_other_tree(self, leaves: Sequence[Any], is_request: bool) -> HostPlacement:
        """Return the placement of a tree of these leaves, some of which may be on a device."""
        return self.host_tree

    def is_other_on_device(self, x: Any) -> bool:
        """Return whether an array is on a device."""
        return False

    @property
    def device_name(self) -> str:
        """Where this rank makes arrays when no argument tells it."""
        return "cpu"

    # Calls that are prepared; see `_prepared/fast_paths.py`.

    def prepare(self, make: Callable[[HostPlacement], Any], x: Any, out: Any) -> Any:
        """Return what puts calls with arrays like these on a device, and the call as it was made.

        None if nothing does. Only the call has these very arrays. `make` makes the call with a
        placement, and returns it with its movements.
        """
        return None

    def put(
        self, prepared: Any, found: Any, show: Callable[[None], None], *, beside: bool
    ) -> Callable[[], None] | None:
        """Put a call on a device, and show its header; return what lets its caller use the result.

        If it is `beside` what the caller does meanwhile, that is still to be called.
        """
        return None

    # The life of a communicator.

    def child(self, group: Group, link: Any) -> Placements:
        """Return the placements of a group made from this one, over what `split` returned."""
        return Placements(group)

    def for_survivors(self, group: Group) -> Placements:
        """Return the placements of a group that takes the place of one with dead ranks."""
        return self.child(group, None)

    def after(self) -> Callable[[], None] | None:
        """Return what a thread calls to use the result of the call that has just finished."""
        found, self.follow = self.follow, None
        return found

    def split(self, color: int | None, key: int) -> Steps:
        """Return the link between the devices of a part of the ranks; None if there is none."""
        yield from ()
        return None

    # What the runner asks once headers show that arrays are in several places.

    def negotiate(self) -> Steps:
        """Choose a link together with the other ranks."""
        yield from ()

    def joining_devices(self) -> HostPlacement:
        """Return the placement of an array of the host that meets others on their devices."""
        return self.host

    def of_mixed_tree(self, agreement: Agreement) -> HostPlacement:
        """Return the placement of a tree whose leaves are in other places on other ranks."""
        return self.host_tree


class Destination(NamedTuple):
    """Where a result goes, whatever its shape: a fresh array like `like`, or the caller's `out`.

    `source` is what is read while the result is written. `out` may be the same memory, unless it
    `must_not_alias`.
    """

    like: BufferView
    out: Any = None
    source: Flat | None = None
    must_not_alias: bool = False

    def takes(self, memory: Flat) -> bool:
        """Return whether a result can be written straight into the memory of `out`."""
        source = self.source
        if source is None or not overlap(memory, source):
            return True
        same = memory.nbytes == source.nbytes and _address(memory) == _address(source)
        return same and not self.must_not_alias


class ResultBuffer:
    """A result of this shape and dtype on its way to its destination.

    `flat` is contiguous memory of the result's elements in C order. It is the caller's own memory
    if that is contiguous, and the destination `takes` it.
    """

    def __init__(
        self, placement: HostPlacement, to: Destination, shape: tuple[int, ...], dtype: DType
    ) -> None:
        self._placement, self._like = placement, to.like
        self.shape, self.dtype = shape, dtype
        self._out = None if to.out is None else placement.view_out(to.out, shape, dtype)
        self._made: Any = None
        self._direct = False
        self.copies = int(self._out is not None)
        if self._out is None:
            self._made, self.flat = placement.empty(to.like, shape, dtype)
            return
        direct = placement.direct(self._out)
        if direct is not None and to.takes(direct):
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
        self, placement: HostPlacement, to: Destination, shape: tuple[int, ...], dtype: DType
    ) -> None:
        self._errors: list[Exception] = []
        try:
            super().__init__(placement, to, shape, dtype)
        except Exception as error:
            self._errors.append(error)
            super().__init__(placement, Destination(to.like), shape, dtype)

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


def _address(flat: Flat) -> int:
    if isinstance(flat, np.ndarray):
        return int(flat.__array_interface__["data"][0])
    return int(flat.address)
