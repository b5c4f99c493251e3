"""Functions of CUDA's driver, called by ctypes: quicker than by CuPy, and without the GIL."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from arraycomm._arrays.current_device import driver
from arraycomm._errors import TransportError

# CUresult
SUCCESS: Final = 0
NOT_READY: Final = 600
_INVALID_CONTEXT: Final = 201

_pointer, _count = ctypes.c_void_p, ctypes.c_uint
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuEventQuery": (_pointer,),
    # stream, address, value, flags
    "cuStreamWriteValue32_v2": (_pointer, _pointer, ctypes.c_uint32, _count),
    # function, blocks, threads, shared memory, stream, arguments, options
    "cuLaunchKernel": (_pointer, *[_count] * 6, _count, _pointer, _pointer, _pointer),
}
_functions: dict[str, Any] = {}


def status_of(device: int, name: str, *arguments: Any) -> int:
    """Call a function on a device, which is this thread's current one; return its status."""
    function = _functions.get(name)
    if function is None:
        function = _functions[name] = driver()[name]
        function.argtypes, function.restype = _SIGNATURES[name], ctypes.c_int
    status: int = function(*arguments)
    if status == _INVALID_CONTEXT:
        # CUDA's runtime names a current device also to a thread that has no context so far.
        import cupy

        cupy.cuda.runtime.setDevice(device)
        status = function(*arguments)
    return status


def address_of(name: str) -> int:
    """Return where a function is."""
    return pointer(driver()[name])


def pointer(function: Any) -> int:
    """Return the address of a function of ctypes."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def call(device: int, name: str, *arguments: Any) -> None:
    """Call a function on a device, as `status_of` does; raise `TransportError` if it fails."""
    check(status_of(device, name, *arguments))


def check(status: int) -> None:
    """Raise `TransportError` unless a function has succeeded."""
    if status != SUCCESS:
        import cupy

        error = cupy.cuda.runtime.CUDARuntimeError(status)
        raise TransportError(f"CUDA reported: {error}") from error
