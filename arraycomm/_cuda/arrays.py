"""Arrays on a CUDA device as spans, and spans as arrays again: the door, and no way over the host.

Every array is used in the streams of its framework. What is read is there once the memory's own
stream comes to it, and what the framework does next comes after what was put on that stream: events
see to that where the streams differ, and the host never waits.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import BufferView, check_dtype
from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory
from arraycomm._arrays.views import NOTHING, check_out
from arraycomm._cuda.frameworks import ANY, Framework, framework_named, framework_of
from arraycomm._cuda.layouts import DeviceExport, Layout
from arraycomm._cuda.streams import LOANS, order
from arraycomm._dtypes import DType

_OF_HOST: Final = frozenset(
    (np.ndarray, type(None), bool, int, float, complex, str, tuple, list, dict)
)


class DeviceView(BufferView):
    """One array on a device, with what its result must be like; `array` has nothing of it.

    Attributes
    ----------
    layout : Layout
        Where the caller's elements are.
    span : Span
        The elements in C order: the caller's own memory where `copied` is false.
    streams : tuple of int
        Those in which the caller's framework uses the array.
    """

    device_buffer: DeviceBuffer

    def __init__(
        self, framework: Framework, source: Any, shown: DeviceExport, memory: DeviceMemory
    ) -> None:
        super().__init__(
            NOTHING, framework.name, source, shown.readonly, shown.copied, ("cuda", memory.device)
        )
        self.layout: Layout = shown.layout
        self.streams = framework.streams(memory.device)
        if shown.stream is not None:
            self.streams += (shown.stream,)
        address, _, _, dtype = shown.layout
        self.device_buffer = DeviceBuffer(address, shown.layout.size, dtype, shown.owner, memory)

    @property
    def address(self) -> int:
        """Address of the first element, on the device."""
        return self.layout.address

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the dimensions."""
        return self.layout.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Distances between neighbours in each dimension, in bytes."""
        return self.layout.strides

    @property
    def dtype(self) -> DType:
        """NumPy's dtype of the elements, or ml_dtypes'."""
        return self.layout.dtype


class Result(NamedTuple):
    """Memory that becomes an array of this shape."""

    device_buffer: DeviceBuffer
    shape: tuple[int, ...]


def device_of(x: Any) -> int | None:
    """Return the number of the CUDA device that an array is on, -1 where any can reach it.

    None for what is no array, and for arrays on the host, which those in pinned memory are.
    """
    framework = framework_of(x)
    return None if framework is None else framework.device(x)


def on_cuda(x: Any) -> bool:
    """Tell whether `x` is an array on a CUDA device; nothing is imported or copied."""
    return device_of(x) is not None


def may_be_on_cuda(kind: type) -> bool:
    """Tell whether there are arrays of this type on devices; quicker than to look at each."""
    return kind not in _OF_HOST


def stream_of(x: Any) -> int | None:
    """Return the stream in which the framework of a device array works now.

    None for JAX, which shows none: any stream will do.
    """
    framework, device = framework_of(x), device_of(x)
    streams = framework.streams(device) if framework is not None and device is not None else ()
    return streams[0] if streams else None


def device_view(x: Any, operation: str, name: str, memory: DeviceMemory) -> DeviceView:
    """Return an array on the memory's device as a span, to be read in the memory's stream.

    Elements that do not lie side by side, or not aligned, are copied, on the device. Raises what `_views.view` does,
    and `ValueError` for an array on another device.
    """
    LOANS.sweep()
    framework, shown, found = _look(x, operation, name, memory)
    if not shown.layout.fit:
        found.device_buffer, found.copied = framework.gather(shown, x, memory), True
    return found


def release(view: BufferView) -> None:
    """Let the framework of a view use its array again, after what is on the memory's stream by now.

    JAX has no stream that could wait: there, the array's memory is held until the device has come
    to this point.
    """
    if isinstance(view, DeviceView):
        _let_go(view, view.device_buffer.memory)


def empty_like(
    like: BufferView, shape: tuple[int, ...], dtype: DType, memory: DeviceMemory
) -> tuple[Result, DeviceBuffer]:
    """Return memory for a result on the memory's device, free for use in the memory's stream.

    `finish` makes an array of the framework of `like` of it. Wherever the framework can have its own
    memory filled by others, it is that.
    """
    framework = framework_named(like.framework)
    device_buffer = framework.empty(shape, dtype, like.source, memory)
    order(memory, framework.streams(memory.device), (memory.stream,))
    return Result(device_buffer, shape), device_buffer


def finish(result: Result, like: BufferView) -> Any:
    """Return an array of what `empty_like` made, whose framework uses it after the memory's stream.

    Releases `like` as well. The span must not be written any more.
    """
    _let_go(like, result.device_buffer.memory)
    return framework_named(like.framework).finish(result.device_buffer, result.shape, like)


def view_out(
    out: Any, shape: tuple[int, ...], dtype: DType, operation: str, memory: DeviceMemory
) -> DeviceView:
    """Return a device array `out` as a span to write a result of this shape and dtype into.

    The span is the caller's memory where its elements lie side by side and aligned, and else memory
    that `written` copies from. Raises what `_views.view_out` does.
    """
    framework, shown, found = _look(out, operation, "out", memory)
    if framework.name == "jax":
        raise BufferError(
            f"{operation}: out is a JAX array, which is immutable; use the result instead of out"
        )
    check_out(found, shape, dtype, operation)
    _check_writable(found, operation)
    if not shown.layout.contiguous:
        found.device_buffer, found.copied = empty_like(found, shape, dtype, memory)[1], True
    return found


def commit_out(out: DeviceView, flat: DeviceBuffer) -> Any:
    """Finish a write into `out`, whose elements are now those of `flat`; return the caller's `out`.

    Its framework goes on after the write, and torch is told that the tensor has changed.
    """
    framework = framework_named(out.framework)
    out.device_buffer[...] = flat
    if out.copied:
        framework.put_back(out.device_buffer, out.layout, out.source)
    release(out)
    framework.changed(out.source)
    return out.source


def _look(
    x: Any, operation: str, name: str, memory: DeviceMemory
) -> tuple[Framework, DeviceExport, DeviceView]:
    """Look at an array wherever its elements lie; they are there for the memory's stream."""
    framework = framework_of(x)
    assert framework is not None, "on_cuda is asked before"
    device = framework.device(x)
    if device not in {ANY, memory.device}:
        raise ValueError(
            f"{operation}: {name} is on cuda:{device}, but this communicator works on "
            f"cuda:{memory.device}; move it there, or make a communicator with that device"
        )
    shown = framework.show(x, operation, name, memory)
    check_dtype(shown.layout.dtype, operation)
    found = DeviceView(framework, x, shown, memory)
    order(memory, found.streams, (memory.stream,))
    return framework, shown, found


def _let_go(view: BufferView, memory: DeviceMemory) -> None:
    """Have the view's framework go on after the memory's stream, in whatever stream it is by now."""
    before = view.streams if isinstance(view, DeviceView) else ()
    now = framework_named(view.framework).streams(memory.device)
    order(memory, (memory.stream,), dict.fromkeys((*before, *now)))
    if isinstance(view, DeviceView) and not view.streams:
        LOANS.add(memory.record(), view)


def _check_writable(found: DeviceView, operation: str) -> None:
    if found.readonly:
        raise BufferError(f"{operation}: out is read-only; pass memory that can be written")
    if found.layout.overlaps_itself:
        raise BufferError(
            f"{operation}: elements of out share memory (strides {found.strides} for shape "
            f"{found.shape}); pass an array of its own"
        )
