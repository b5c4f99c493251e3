"""The CUDA device that a thread works on, for as long as something is done there.

CuPy's own context returns to the device before. In a thread that has used none, that is device 0,
and since CUDA 12 to return there makes a context on it, in every process: hundreds of megabytes for
each.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any, Final

# CU_STREAM_CAPTURE_MODE_RELAXED
_RELAXED: Final = 2


def imported(name: str) -> Any:
    """Return a module that is imported, or None; also None while another thread imports it."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


class working_on:  # noqa: N801
    """A context in which a device is the thread's current one.

    Afterwards the one before is current again, unless this process does nothing on it. So a thread
    of arraycomm's own stays on its device. A call enters several, so that this is no generator.
    """

    __slots__ = ("_before", "_device")

    def __init__(self, device: int) -> None:
        self._device = device
        # The device that is to be current again, or -1.
        self._before = -1

    def __enter__(self) -> None:
        # Without a further call: each call on a device enters a dozen of these.
        cuda = getattr(sys.modules.get("cupy"), "cuda", None)
        runtime = getattr(cuda, "runtime", None)
        if runtime is not None and (before := runtime.getDevice()) != self._device:
            sys.modules["cupy"].cuda.Device(self._device).use()
            self._before = before

    def __exit__(self, *_: object) -> None:
        if self._before >= 0 and in_use(self._before):
            sys.modules["cupy"].cuda.runtime.setDevice(self._before)


def torch_stream(device: int) -> int:
    """Return PyTorch's current stream, without the object that `current_stream` makes of it."""
    stream: int = sys.modules["torch"]._C._cuda_getCurrentRawStream(device)
    return stream


def in_use(device: int) -> bool:
    """Return whether this process has a context on a device; true if CUDA does not tell."""
    library = driver()
    if library is None:
        return True
    number, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    status = library.cuDeviceGet(ctypes.byref(number), device) or (
        library.cuDevicePrimaryCtxGetState(number, ctypes.byref(flags), ctypes.byref(active))
    )
    return bool(status) or bool(active.value)


def spare_captures() -> None:
    """Let this thread ask CUDA without ending another thread's capture of a graph."""
    library = driver()
    if library is not None:
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


@cache
def driver() -> Any:
    """Return CUDA's driver library, whose calls by ctypes hold no GIL; None if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
