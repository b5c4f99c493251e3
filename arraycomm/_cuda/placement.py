"""Placements on devices: arrays are communicated from device memory, over a device link."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView, allocate
from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory
from arraycomm._arrays.results import commit_out, to_framework, view_out
from arraycomm._arrays.views import view
from arraycomm._calls.placement import HostPlacement, Placements, StagedTreePlacement
from arraycomm._cuda import arrays
from arraycomm._cuda.callers import Caller, Waiters
from arraycomm._cuda.frameworks import framework_named
from arraycomm._cuda.links.link import DeviceLink
from arraycomm._dtypes import DType
from arraycomm._errors import PeerError
from arraycomm._protocol.agreement import UndeliveredError
from arraycomm._protocol.group import Group
from arraycomm._protocol.header import ALL_ON_DEVICE, ON_HOST
from arraycomm._transports.base import Flat, Steps


class Streams(Protocol):
    """The order of a communicator's work on its device; see `Devices`."""

    # Room for a digest of each rank's header, and for this one's; None if no call goes ahead.
    digests: DeviceBuffer | None

    def begin(self, memory: DeviceMemory) -> None:
        """Put the beginning of a call on the memory's stream, after work in other streams."""

    def guard(self, result: DeviceBuffer, digests: DeviceBuffer | None) -> None:
        """Let nobody take the result of a call for right that is given up, or differs elsewhere."""

    def leave(self, memory: DeviceMemory, waiters: Waiters | None) -> None:
        """Record that a call has put its work on the device."""

    def check(self) -> None:
        """Raise if the work under way has been aborted, so that there is no result."""


def run_within(here: Callable[[], AbstractContextManager[None]], steps: Steps) -> Steps:
    """Run steps that may run in any thread, each within `here`."""
    while True:
        with here():
            try:
                waiting = next(steps)
            except StopIteration as stop:
                return stop.value
        try:
            yield waiting
        except BaseException as error:
            # Nothing more may be put on a stream with an unfinished movement.
            steps.throw(error)
            raise


class _CallersOut(BufferView):
    """`out` on a device for a call of host arrays: written in the streams of the caller."""

    def __init__(self, found: BufferView, device: int | None) -> None:
        super().__init__(
            found.array, found.framework, found.source, found.readonly, found.copied, found.device
        )
        self.caller = Caller(device)


class PlainPlacement(HostPlacement):
    """Arrays on the host, whose results may go to a device."""

    def __init__(self, group: Group, placements: Placements) -> None:
        super().__init__(group)
        self._placements = placements

    def view_other_out(self, out: Any, shape: tuple[int, ...], dtype: DType) -> BufferView:
        found = view_out(out, shape, dtype)
        return _CallersOut(found, arrays.number_of(out)) if arrays.on_cuda(out) else found

    def here_of(self, out: BufferView) -> AbstractContextManager[Any]:
        return self._of(out.caller) if isinstance(out, _CallersOut) else super().here_of(out)

    @contextmanager
    def _of(self, caller: Caller) -> Iterator[None]:
        with caller.here():
            yield
        self._placements.follow = self._placements.follow or caller.follower()


class CopiedPlacement(HostPlacement):
    """Arrays on a device that their framework copies to the host, and results back."""

    def __init__(
        self, group: Group, placements: Placements, device_flag: int, device: int | None
    ) -> None:
        super().__init__(group, device_flag)
        # The ranks may choose NCCL in this call.
        self.in_order = device_flag != ON_HOST
        self._placements, self._caller = placements, Caller(device)
        self.here = self._caller.here

    def run(self, steps: Steps, digest: int = 0) -> Steps:
        result = yield from run_within(self.here, steps)
        self._placements.follow = self._placements.follow or self._caller.follower()
        return result


class CopiedTreePlacement(CopiedPlacement, StagedTreePlacement):
    """A tree with leaves on a device, as host memory."""


class _Download(NamedTuple):
    """Device memory whose elements become an array on the host."""

    flat: DeviceBuffer
    shape: tuple[int, ...]


class DevicePlacement(HostPlacement):
    """Arrays in device memory, over a device link, in the order of one stream.

    In the communicator's own stream, the caller's go on meanwhile; see `Waiters`. A rank whose own
    array is on the host copies it to the device, and its result back.
    """

    host = False
    link: DeviceLink

    def __init__(self, group: Group, link: DeviceLink, streams: Streams, stream: int) -> None:
        super().__init__(group, ALL_ON_DEVICE)
        self.inline_bytes = -1
        # No other call uses these objects, so no other thread changes their stream.
        self.link = link.at(stream)
        self.async_check = self.in_order = link.async_check
        self.memory = self.link.memory
        beside = stream == self.memory.own_stream
        self.here = Caller(self.memory.device, stream if beside else None).here
        self._waiters = Waiters(self.memory) if beside else None
        self._streams = streams
        self._stream = stream
        self._views: list[BufferView] = []

    @property
    def of_device(self) -> DevicePlacement:
        return self

    def view(self, x: Any, name: str = "x") -> BufferView:
        if not arrays.on_cuda(x):
            return self._view_of_host(view(x, name))
        found = arrays.device_view(x, name, self.memory)
        self._views.append(found)
        return self._awaited(found)

    def _awaited(self, found: arrays.DeviceView) -> arrays.DeviceView:
        """Have a view's streams wait only when the result is taken, if they go on meanwhile."""
        if self._waiters is not None and found.streams:
            self._waiters.add(found, found.streams)
            found.streams = (self._stream,)
        return found

    def _view_of_host(self, found: BufferView) -> BufferView:
        return Uploaded(found, self.memory)

    def view_out(self, out: Any, shape: tuple[int, ...], dtype: DType) -> BufferView:
        if arrays.on_cuda(out):
            return self._awaited(arrays.view_out(out, shape, dtype, self.memory))
        return view_out(out, shape, dtype)

    def view_known(self, x: Any, out: Any) -> BufferView | None:
        if x is not None or not arrays.on_cuda(out):
            return super().view_known(x, out)
        found = arrays.device_view(out, "out", self.memory)
        return self.view_out(out, found.shape, found.dtype)

    def direct(self, out: BufferView) -> Flat | None:
        return out.device_buffer

    def empty(self, like: BufferView, shape: tuple[int, ...], dtype: DType) -> tuple[Any, Flat]:
        if like.device[0] == "cuda":
            made, flat = arrays.empty_like(like, shape, dtype, self.memory)
            if self._waiters is not None and framework_named(like.framework).streams(
                like.device[1]
            ):
                self._waiters.add(flat.owner)
            return made, flat
        flat = self.scratch(shape, dtype)
        return _Download(flat, shape), flat

    def finish(self, made: Any, like: BufferView) -> Any:
        if isinstance(made, _Download):
            return to_framework(self.download(made.flat, made.shape), like)
        self.guard(made.device_buffer)
        return arrays.finish(made, like)

    def scratch(self, shape: tuple[int, ...], dtype: DType) -> DeviceBuffer:
        count = int(np.prod(shape, dtype=np.int64))
        return self.memory.allocate(count * dtype.itemsize).view(dtype)

    def commit(self, out: BufferView, flat: Flat, *, direct: bool) -> Any:
        self.guard(cast(DeviceBuffer, flat))
        if out.device[0] == "cuda":
            return arrays.commit_out(cast(arrays.DeviceView, out), flat)
        np.copyto(out.array, self.download(flat, out.shape))
        return commit_out(out)

    def guard(self, result: DeviceBuffer) -> None:
        """Spoil a result on the device if its call is given up, or the ranks' calls differ."""
        self._streams.guard(result, self.link.shown)

    def download(self, flat: DeviceBuffer, shape: tuple[int, ...]) -> Array:
        """Return device memory as an array on the host; raise if the work on it was aborted."""
        array = allocate(shape, flat.dtype)
        self.memory.download(flat, array.reshape(-1))
        self._streams.check()
        return array

    def run(self, steps: Steps, digest: int = 0) -> Steps:
        """Run the steps in the call's stream, after the link's work in other streams."""
        return run_within(self.here, self._leaving(steps, digest))

    def _leaving(self, steps: Steps, digest: int) -> Steps:
        """Run the steps; let the caller's frameworks continue after the work on the device."""
        self._streams.begin(self.memory)
        if digest and self._streams.digests is not None:
            self.link.show(digest, self._streams.digests)
        try:
            result = yield from steps
        except (UndeliveredError, PeerError) as error:
            if not isinstance(error, PeerError) or error.in_step:
                # The ranks go on.
                self._streams.leave(self.memory, self._waiters)
            raise
        for found in self._views:
            arrays.release(found)
        self._streams.leave(self.memory, self._waiters)
        return result


class TreePlacement(DevicePlacement):
    """A tree whose leaves are communicated from where they are, on the host or on the device."""

    host = True
    tree = True

    def __init__(
        self, group: Group, link: DeviceLink, streams: Streams, stream: int, device_flag: int
    ) -> None:
        super().__init__(group, link, streams, stream)
        self.inline_bytes = group.inline_bytes
        self.device_flag = device_flag
        # Leaves on the host are communicated only after the header is checked.
        self.async_check = self.async_check and device_flag == ALL_ON_DEVICE

    def _view_of_host(self, found: BufferView) -> BufferView:
        return found


class UploadedTreePlacement(TreePlacement):
    """A tree whose leaves on the host are reduced with those of other ranks on devices."""

    def _view_of_host(self, found: BufferView) -> BufferView:
        return Uploaded(found, self.memory)


class Uploaded(BufferView):
    """An array on the host, copied to the device because other ranks' arrays are on devices."""

    def __init__(self, found: BufferView, memory: DeviceMemory) -> None:
        super().__init__(found.array, found.framework, found.source, found.readonly, True)
        flat = np.ascontiguousarray(found.array).reshape(-1)
        self.device_buffer = memory.upload(flat)
