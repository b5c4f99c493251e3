"""The ways of an array through a collective: as host memory, or on the device where it is.

A way says what a call looks at, which link it goes over, and where its result goes; the calls
themselves are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory
from arraycomm._arrays.results import allocate, commit_out, to_framework
from arraycomm._arrays.views import view, view_out
from arraycomm._collectives.operation import ResultBuffer, UndeliveredError, deliver
from arraycomm._dtypes import DType
from arraycomm._protocol.header import Steps
from arraycomm._transports.base import Flat, Link

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator
    from arraycomm._cuda.devices import Devices


# What a header says of an array on a device, and of a tree with every leaf on one.
ALL_ON_DEVICE: Final = 1


class Place(Protocol):
    """Where a result goes; `flat` is memory of its elements in C order."""

    flat: Flat
    copies: int

    def deliver(self) -> Any:
        """Hand the finished result to the caller."""


class HostPlacement:
    """Arrays as host memory; what is on a device is copied there and back.

    Attributes
    ----------
    link : Link
        What moves and folds.
    place : int
        What the header says: 1 where an array of the call is on a device.
    example : object
        An array of the call that is on a device, where there is one.
    host : bool
        Whether elements are in host memory, so that few of them travel with the header.
    ahead : bool
        Whether a call goes ahead of its header, which is seen to later.
    """

    host = True
    ahead = False
    # Whether the call is of a tree, whose leaves may be in several places.
    tree = False

    def __init__(self, comm: Communicator, place: int = 0, example: Any = None) -> None:
        self.link: Link = comm._link
        self.place = place
        self.example = example
        self._inline = comm._inline

    def view(self, x: Any, operation: str, name: str = "x") -> BufferView:
        """Look at an array."""
        return view(x, operation, name)

    def known(self, x: Any, out: Any, operation: str) -> BufferView | None:
        """Return the array that a rank which is not the root knows the result to be like, if any."""
        if x is not None:
            return self.view(x, operation)
        if out is None:
            return None
        found = view(out, operation)
        return view_out(out, found.shape, found.dtype, operation)

    def target(
        self,
        like: BufferView,
        shape: tuple[int, ...],
        dtype: DType,
        out: Any,
        operation: str,
        source: Flat | None = None,
        *,
        must_not_alias: bool = False,
    ) -> Place:
        """Return where a result goes; see `Target`."""
        return ResultBuffer(
            like, shape, dtype, out, operation, source, must_not_alias=must_not_alias
        )

    def inline(self, flat: Flat) -> bool:
        """Tell whether elements travel with the header."""
        return self.host and bool(flat.nbytes <= self._inline)

    def run(self, steps: Steps) -> Steps:
        """Run what follows the header."""
        return steps


class DevicePlacement(HostPlacement):
    """Arrays where they are, over a device's link, in the order of the caller's stream.

    A rank whose own array is on the host copies it to the device, and its result back.
    """

    host = False

    def __init__(self, comm: Communicator, devices: Devices, stream: int) -> None:
        super().__init__(comm, ALL_ON_DEVICE)
        assert devices.link is not None
        self.link = devices.link
        self.ahead = devices.link.ahead
        self._devices = devices
        self.memory = devices.link.memory.at(stream)
        self._stream = stream
        self._views: list[BufferView] = []

    def view(self, x: Any, operation: str, name: str = "x") -> BufferView:
        from arraycomm._cuda import arrays

        if not arrays.on_cuda(x):
            return self._view_of_host(view(x, operation, name))
        found = arrays.device_view(x, operation, name, self.memory)
        self._views.append(found)
        return found

    def _view_of_host(self, found: BufferView) -> BufferView:
        return Uploaded(found, self.memory)

    def known(self, x: Any, out: Any, operation: str) -> BufferView | None:
        from arraycomm._cuda import arrays

        if x is not None or not arrays.on_cuda(out):
            return super().known(x, out, operation)
        found = arrays.device_view(out, operation, "out", self.memory)
        return arrays.view_out(out, found.shape, found.dtype, operation, self.memory)

    def target(
        self,
        like: BufferView,
        shape: tuple[int, ...],
        dtype: DType,
        out: Any,
        operation: str,
        source: Flat | None = None,
        *,
        must_not_alias: bool = False,
    ) -> Place:
        return DeviceResultBuffer(
            self, like, shape, dtype, out, operation, source, must_not_alias=must_not_alias
        )

    def download(self, device_buffer: DeviceBuffer, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return what is on the device as an array of the host, unless the wait for it was ended."""
        array = allocate(shape, device_buffer.dtype)
        self.memory.download(device_buffer, array.reshape(-1))
        self._devices.check()
        return array

    def run(self, steps: Steps) -> Steps:
        """Go on in the caller's stream each time, behind what the link did in others."""
        while True:
            self._devices.enter(self._stream)
            try:
                waiting = next(steps)
            except StopIteration as stop:
                self._leave()
                return stop.value
            try:
                yield waiting
            except BaseException as error:
                # Nothing more may be put on a stream in which a movement is not through.
                steps.throw(error)
                raise

    def _leave(self) -> None:
        """Let the caller's frameworks go on after what was put on the device."""
        from arraycomm._cuda import arrays

        for found in self._views:
            arrays.release(found)
        self._devices.leave()


class StagedTreePlacement(HostPlacement):
    """A tree as host memory, wherever its leaves are."""

    tree = True


class TreePlacement(DevicePlacement):
    """A tree each of whose leaves is communicated from where it is."""

    host = True
    tree = True

    def __init__(self, comm: Communicator, devices: Devices, stream: int, place: int) -> None:
        super().__init__(comm, devices, stream)
        self.place = place
        # What is on the host goes in step with the header.
        self.ahead = self.ahead and place == ALL_ON_DEVICE

    def _view_of_host(self, found: BufferView) -> BufferView:
        return found


class UploadedTreePlacement(TreePlacement):
    """A tree whose leaves on the host meet those of other ranks on their devices."""

    def _view_of_host(self, found: BufferView) -> BufferView:
        return Uploaded(found, self.memory)


class Uploaded(BufferView):
    """An array of the host that meets others on their devices."""

    def __init__(self, found: BufferView, memory: DeviceMemory) -> None:
        super().__init__(found.array, found.framework, found.source, found.readonly, True)
        flat = np.ascontiguousarray(found.array).reshape(-1)
        self.device_buffer = memory.upload(flat)


class DeviceResultBuffer:
    """Where a result on a device goes: see `Target`."""

    def __init__(
        self,
        placement: DevicePlacement,
        like: BufferView,
        shape: tuple[int, ...],
        dtype: DType,
        out: Any,
        operation: str,
        source: DeviceBuffer | None,
        *,
        must_not_alias: bool,
    ) -> None:
        from arraycomm._cuda import arrays

        memory = placement.memory
        self._placement, self._like, self._shape = placement, like, shape
        self._out: BufferView | None = None
        self._made: Any = None
        self.copies = 0
        if out is not None and arrays.on_cuda(out):
            self._out = arrays.view_out(out, shape, dtype, operation, memory)
        elif out is not None:
            self._out = view_out(out, shape, dtype, operation)
        elif like.device[0] == "cuda":
            self._made, self.flat = arrays.empty_like(like, shape, dtype, memory)
            return
        device_buffer = None if self._out is None else self._out.device_buffer
        if device_buffer is not None and self._usable(device_buffer, source, must_not_alias):
            self.flat = device_buffer
        else:
            count = int(np.prod(shape, dtype=np.int64))
            self.flat = memory.allocate(count * dtype.itemsize).view(dtype)
            self.copies = 1

    @staticmethod
    def _usable(out: DeviceBuffer, source: DeviceBuffer | None, must_not_alias: bool) -> bool:
        """Tell whether a result can be written straight into `out` while `source` is being read."""
        if source is None or not out.shares(source):
            return True
        return not must_not_alias and (out.address, out.nbytes) == (source.address, source.nbytes)

    def deliver(self) -> Any:
        """Hand the finished result to the caller."""
        from arraycomm._cuda import arrays

        if self._made is not None:
            return deliver(arrays.finish, self._made, self._like)
        if self._out is None:
            return deliver(lambda: to_framework(self._downloaded(), self._like))
        if self._out.device[0] == "cuda":
            return deliver(arrays.commit_out, self._out, self.flat)
        np.copyto(self._out.array, self._downloaded())
        return deliver(commit_out, self._out)

    def _downloaded(self) -> np.ndarray[Any, Any]:
        return self._placement.download(self.flat, self._shape)


class DeferredResultBuffer:
    """A place whose shape is known only once the other ranks have been heard.

    What is wrong with `out` is raised at the end, since by then the other ranks count on this one.
    """

    def __init__(
        self,
        placement: HostPlacement,
        like: BufferView,
        shape: tuple[int, ...],
        dtype: DType,
        out: Any,
        operation: str,
        source: Flat | None = None,
        *,
        must_not_alias: bool = False,
    ) -> None:
        self._error: Exception | None = None
        try:
            self._place = placement.target(
                like, shape, dtype, out, operation, source, must_not_alias=must_not_alias
            )
        except Exception as error:
            self._error = error
            self._place = placement.target(like, shape, dtype, None, operation)
        self.flat = self._place.flat

    def deliver(self) -> Any:
        """Hand the finished result to the caller, or raise what is wrong with `out`."""
        if self._error is not None:
            raise UndeliveredError(self._error)
        return self._place.deliver()
