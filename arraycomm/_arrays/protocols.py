"""Reads the arrays of unknown types by DLPack, the array interfaces and the buffer protocol."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from arraycomm._arrays import dlpack
from arraycomm._arrays.arithmetic import foreign_has_own, refuse
from arraycomm._arrays.buffer import Array, BufferView, to_native, type_name
from arraycomm._arrays.frameworks.cupy import as_cupy, read_cupy


def read_foreign(x: Any, name: str) -> BufferView:
    """Read `x` by the first protocol that works. If none does, raise the first refusal."""
    if foreign_has_own(x):
        refuse(x, name)
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
    raise TypeError(
        f"{name} must be an array or a number; got {type_name(x)}, which has none of "
        "__dlpack__, __array_interface__, __cuda_array_interface__ and the buffer protocol; "
        "convert it with numpy.asarray, use bcast_object or allreduce_tree, or, inside a tree, "
        "give its class a method __arraycomm_tree__"
    )


def _by_dlpack(x: Any, label: str) -> BufferView | None:
    if _attribute(x, "__dlpack__", label) is None:
        return None
    device = dlpack.CPU_DEVICE
    if _attribute(x, "__dlpack_device__", label) is not None:
        device = dlpack.device_of(x, label)
    if device[0] in dlpack.CUDA:
        return _through_cupy(x, label)
    array, copied = dlpack.read(x, device, label)
    off_host = device[0] not in dlpack.HOST
    return _foreign_view(array, x, copied or off_host, label)


def _foreign_view(array: Array, x: Any, copied: bool, label: str) -> BufferView:
    has_namespace = _attribute(x, "__array_namespace__", label) is not None
    framework = "namespace" if has_namespace else "numpy"
    return BufferView(array, framework, x, not array.flags.writeable, copied)


def _by_cuda_interface(x: Any, label: str) -> BufferView | None:
    interface = _attribute(x, "__cuda_array_interface__", label)
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
    except (BufferError, MemoryError):
        raise
    except Exception as error:
        raise BufferError(f"{label} cannot be read by CuPy: {dlpack.describe(error)}") from error
    found.source = x
    return found


def _by_array_interface(x: Any, label: str) -> BufferView | None:
    interface = _attribute(x, "__array_interface__", label)
    if interface is None:
        return None
    return _described(dlpack.from_array_interface(interface, x, label), x, label)


def _by_array_struct(x: Any, label: str) -> BufferView | None:
    capsule = _attribute(x, "__array_struct__", label)
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
    native = to_native(array)
    found = _foreign_view(native, x, native is not array, label)
    found.readonly = not array.flags.writeable
    return found


def _attribute(x: Any, attribute: str, label: str) -> Any:
    try:
        return getattr(x, attribute, None)
    except MemoryError:
        raise
    except Exception as error:
        raise BufferError(f"{label}.{attribute} raised {dlpack.describe(error)}") from error


_PROTOCOLS: Final = (
    _by_dlpack,
    _by_cuda_interface,
    _by_array_interface,
    _by_array_struct,
    _by_buffer,
)
