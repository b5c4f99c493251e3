"""Reads the arrays of unknown types by DLPack, the array interfaces and the buffer protocol."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from arraycomm._arrays import dlpack
from arraycomm._arrays.arithmetic import foreign_has_own, refuse
from arraycomm._arrays.autodiff import refuse_differentiated
from arraycomm._arrays.buffer import Array, BufferView, to_native
from arraycomm._arrays.frameworks.cupy import as_cupy, read_cupy
from arraycomm._arrays.frameworks.namespace import to_namespace
from arraycomm._arrays.frameworks.python import no_array
from arraycomm._errors import raise_interrupt

_NAMES: Final = "__dlpack__, __array_interface__, __cuda_array_interface__"


def read_foreign(x: Any, name: str) -> BufferView:
    """Read `x` by the first protocol that works. If none does, raise the first refusal."""
    check_foreign(x, name)
    refusals: list[BufferError] = []
    try:
        for protocol in _PROTOCOLS:
            try:
                found = protocol(x, name)
            except BufferError as error:
                refusals.append(error)
                continue
            if found is not None:
                return found
        if refusals:
            raise refusals[0]
    finally:
        # The errors' tracebacks have this frame, and with it the array.
        refusals.clear()
    raise no_array(x, name, f", which has none of {_NAMES} and the buffer protocol")


def check_foreign(x: Any, name: str) -> None:
    """Raise for an object whose elements mean more than its memory, wherever that is."""
    if foreign_has_own(x):
        refuse(x, name)
    refuse_differentiated(x, name)


def _by_dlpack(x: Any, label: str) -> BufferView | None:
    if dlpack.attribute(x, "__dlpack__", label) is None:
        return None
    device = dlpack.CPU_DEVICE
    if dlpack.attribute(x, "__dlpack_device__", label) is not None:
        device = dlpack.device_of(x, label)
    if device[0] in dlpack.CUDA:
        return _through_cupy(x, label)
    array, copied = dlpack.read(x, device, label)
    off_host = device[0] not in dlpack.HOST
    return _foreign_view(array, x, copied or off_host, label)


def _foreign_view(array: Array, x: Any, copied: bool, label: str) -> BufferView:
    if dlpack.attribute(x, "__array_namespace__", label) is None:
        return BufferView(array, "numpy", x, not array.flags.writeable, copied)
    found = BufferView(array, "namespace", x, not array.flags.writeable, copied)
    # So that a class that can be no result is refused before anything is sent.
    to_namespace(np.empty((0,) * array.ndim, array.dtype), found)
    return found


def _by_cuda_interface(x: Any, label: str) -> BufferView | None:
    interface = dlpack.attribute(x, "__cuda_array_interface__", label)
    if interface is None:
        return None
    if not isinstance(interface, dict):
        raise BufferError(f"{label}.__cuda_array_interface__ must be a dict")
    dlpack.check_unmasked(interface, label)
    found = _through_cupy(x, label)
    found.readonly = bool(interface["data"][1])
    return found


def _through_cupy(x: Any, label: str) -> BufferView:
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        raise BufferError(
            f"{label} is in device memory, which is read through CuPy, and CuPy cannot be "
            f"imported ({error}); install it, or pass a copy on the host"
        ) from error
    try:
        found = read_cupy(as_cupy(x), label)
    except Exception as error:
        raise_interrupt(error, BufferError, MemoryError)
        raise BufferError(f"{label} cannot be read by CuPy: {dlpack.describe(error)}") from error
    found.source = x
    return found


def _by_array_interface(x: Any, label: str) -> BufferView | None:
    interface = dlpack.attribute(x, "__array_interface__", label)
    if interface is None:
        return None
    return _described(dlpack.from_array_interface(interface, x, label), x, label)


def _by_array_struct(x: Any, label: str) -> BufferView | None:
    capsule = dlpack.attribute(x, "__array_struct__", label)
    if capsule is None:
        return None
    return _described(dlpack.from_array_struct(capsule, x, label), x, label)


def _by_buffer(x: Any, label: str) -> BufferView | None:
    try:
        memory = memoryview(x)
    except TypeError:
        return None
    except ValueError as error:
        raise BufferError(f"{label} shows no memory: {error}") from error
    try:
        array = np.asarray(memory)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise BufferError(
            f"{label} has elements of the format {memory.format!r}, which NumPy cannot read: "
            f"{error}"
        ) from error
    return _described(array, x, label)


def _described(array: Array, x: Any, label: str) -> BufferView:
    native = to_native(array, label)
    found = _foreign_view(native, x, native is not array, label)
    found.readonly = not array.flags.writeable
    return found


_PROTOCOLS: Final = (
    _by_dlpack,
    _by_cuda_interface,
    _by_array_interface,
    _by_array_struct,
    _by_buffer,
)
