"""The CUDA device that a thread works on, for as long as something is done there.

CuPy's own context returns to the device before. In a thread that has used none, that is device 0, and
since CUDA 12 to return there makes a context on it, in every process: hundreds of megabytes for each.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

# CU_STREAM_CAPTURE_MODE_RELAXED
_RELAXED: Final = 2


@contextmanager
def working_on(device: int) -> Iterator[None]:
    """Make a device the thread's current one.

    Afterwards the one before is current again, unless this process does nothing on it. So a thread of
    arraycomm's own stays on its device.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None:
        yield
        return
    runtime = cupy.cuda.runtime
    before = int(runtime.getDevice())
    if before == device:
        yield
        return
    cupy.cuda.Device(device).use()
    try:
        yield
    finally:
        if in_use(before):
            runtime.setDevice(before)


def in_use(device: int) -> bool:
    """Tell whether this process has a context on a device; true if CUDA does not tell."""
    library = driver()
    if library is None:
        return True
    number, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    status = library.cuDeviceGet(ctypes.byref(number), device) or (
        library.cuDevicePrimaryCtxGetState(number, ctypes.byref(flags), ctypes.byref(active))
    )
    return bool(status) or bool(active.value)


def spare_captures() -> None:
    """Let this thread ask CUDA while another one captures a graph, which that would end otherwise."""
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
