"""Arrays on a CUDA device as device buffers, and back, without a copy to the host.

Each framework uses its arrays in its own streams. Before the memory's stream reads an array, it
waits for these streams; afterwards they wait for it. These waits are events on the device; the host
never waits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.current_device import imported
from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory
from arraycomm._arrays.results import check_out
from arraycomm._arrays.views import NOTHING
from arraycomm._cuda.frameworks import ANY, PER_THREAD, Framework, framework_named, framework_of
from arraycomm._cuda.layouts import DeviceExport, Layout
from arraycomm._cuda.streams import LEASES, order
from arraycomm._dtypes import DType, check_movable


class DeviceView(BufferView):
    """An array on a device, and what its result must be like; `array` is empty."""

    # The elements in C order; the caller's own memory if `copied` is false.
    device_buffer: DeviceBuffer

    def __init__(
        self, framework: Framework, source: Any, export: DeviceExport, memory: DeviceMemory
    ) -> None:
        super().__init__(
            NOTHING, framework.name, source, export.readonly, export.copied, ("cuda", memory.device)
        )
        # Where the elements of the caller's array are.
        self.layout: Layout = export.layout
        # Those in which the caller's framework uses the array.
        self.streams = framework.streams(memory.device)
        if export.stream is not None:
            self.streams += (export.stream,)
        address, _, _, dtype = export.layout
        self.device_buffer = DeviceBuffer(address, export.layout.size, dtype, export.owner, memory)

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
    """Device memory that becomes an array of this shape."""

    device_buffer: DeviceBuffer
    shape: tuple[int, ...]


def device_of(x: Any) -> int | None:
    """Return the number of the CUDA device that an array is on, or -1 if any device can reach it.

    None if `x` is no array, or is on the host. Arrays in pinned memory are on the host.
    """
    framework = framework_of(x)
    return None if framework is None else framework.device(x)


def on_cuda(x: Any) -> bool:
    """Return whether `x` is an array on a CUDA device; nothing is imported or copied."""
    return device_of(x) is not None


def number_of(x: Any) -> int | None:
    """Return the number of the device that an array is on; None if any device can reach it."""
    device = device_of(x)
    return None if device == ANY else device


def check_stream(x: Any, home: int | None = None) -> tuple[int, ...]:
    """Return the streams that the framework of a device array uses now, if calls can be there.

    If any device can reach it, they are those of `home`, or of the current device. None are those
    of JAX, which does not show them: for its arrays any stream will do. Raises if
    calls cannot be ordered in the framework's current stream.
    """
    framework = framework_of(x)
    device = None if framework is None else framework.device(x)
    if framework is None or device is None:
        return ()
    if device == ANY and (cupy := imported("cupy")) is not None:
        device = cupy.cuda.runtime.getDevice() if home is None else home
    streams = framework.streams(device)
    if streams and framework.captures(device, streams):
        raise ValueError(
            f"the current stream of {framework.name} is captured into a CUDA graph, which cannot "
            "hold the other ranks' part of a call; make the call outside of the capture"
        )
    if PER_THREAD in streams:
        raise ValueError(
            f"the current stream of {framework.name} is CUDA's default stream of each thread, in "
            "which no other thread can put work; make the call in a stream of its own"
        )
    return streams


def device_view(x: Any, name: str, memory: DeviceMemory) -> DeviceView:
    """Return a view of an array on the memory's device, to be read in the memory's stream.

    Elements that are not contiguous or not aligned are copied on the device. Raises what
    `_arrays.views.view` does, and `ValueError` for an array on another device.
    """
    LEASES.sweep()
    framework, export, found = _inspect(x, name, memory)
    if not export.layout.fit:
        found.device_buffer, found.copied = framework.gather(export, x, memory), True
    return found


def release(view: BufferView) -> None:
    """Let the framework of a view use its array again, after the work now on the memory's stream.

    JAX has no stream that could wait. The memory of its arrays is held until the device has done
    that work.
    """
    if isinstance(view, DeviceView):
        _release(view, view.device_buffer.memory)


def empty_like(
    like: BufferView, shape: tuple[int, ...], dtype: DType, memory: DeviceMemory
) -> tuple[Result, DeviceBuffer]:
    """Return memory for a result on the memory's device, free for use in the memory's stream.

    `finish` turns it into an array of the framework of `like`. It is the framework's own memory if
    the framework lets others write into that.
    """
    framework = framework_named(like.framework)
    device_buffer = framework.empty(shape, dtype, like.source, memory)
    order(memory, framework.streams(memory.device), (memory.stream,))
    return Result(device_buffer, shape), device_buffer


def finish(result: Result, like: BufferView) -> Any:
    """Return the array of a result of `empty_like`; its framework waits for the memory's stream.

    Releases `like` as well. The device buffer must not be written afterwards.
    """
    _release(like, result.device_buffer.memory)
    return framework_named(like.framework).finish(result.device_buffer, result.shape, like)


def view_out(out: Any, shape: tuple[int, ...], dtype: DType, memory: DeviceMemory) -> DeviceView:
    """Return a view of a device array `out`, to write a result of this shape and dtype into.

    It has the caller's memory if kernels can work there, and otherwise memory that `commit_out`
    copies from. Raises what `_arrays.views.view_out` does.
    """
    framework, export, found = _inspect(out, "out", memory)
    if framework.name == "jax":
        raise BufferError("out is a JAX array, which is immutable; use the result instead of out")
    check_out(found, shape, dtype)
    _check_writable(found)
    if not export.layout.fit:
        found.device_buffer, found.copied = empty_like(found, shape, dtype, memory)[1], True
    return found


def commit_out(out: DeviceView, flat: DeviceBuffer) -> Any:
    """Finish a write into `out`, whose elements are now those of `flat`; return the caller's `out`.

    Its framework waits for the write on the device. A torch tensor's version is incremented.
    """
    framework = framework_named(out.framework)
    out.device_buffer[...] = flat
    if out.copied:
        framework.put_back(out.device_buffer, out.layout, out.source)
    release(out)
    framework.changed(out.source)
    return out.source


def _inspect(x: Any, name: str, memory: DeviceMemory) -> tuple[Framework, DeviceExport, DeviceView]:
    """Return an array's framework, export and view; the memory's stream waits for its elements."""
    framework = framework_of(x)
    assert framework is not None, "callers check on_cuda first"
    device = framework.device(x)
    if device not in {ANY, memory.device}:
        of_torch = framework.name == "torch"
        use = "torch.cuda.set_device({})" if of_torch else "cupy.cuda.Device({}).use()"
        raise ValueError(
            f"{name} is on cuda:{device}, but this communicator works on "
            f"cuda:{memory.device}; call {use.format('comm.local_rank')}, with "
            "the communicator of init, before arrays are made, or init(device=...) with the device "
            "that they are on"
        )
    export = framework.export(x, name, memory)
    check_movable(export.layout.dtype, name)
    found = DeviceView(framework, x, export, memory)
    order(memory, found.streams, (memory.stream,))
    return framework, export, found


def _release(view: BufferView, memory: DeviceMemory) -> None:
    """Have the streams that the view's framework uses wait for the memory's stream."""
    before = view.streams if isinstance(view, DeviceView) else ()
    now = framework_named(view.framework).streams(memory.device)
    order(memory, (memory.stream,), dict.fromkeys((*before, *now)))
    if isinstance(view, DeviceView) and not view.streams:
        LEASES.add(memory.record(), view)


def _check_writable(found: DeviceView) -> None:
    if found.readonly:
        raise BufferError("out is read-only; pass memory that can be written")
    if found.layout.overlaps_itself:
        raise BufferError(
            f"elements of out share memory (strides {found.strides} for shape "
            f"{found.shape}); pass an array of its own"
        )
