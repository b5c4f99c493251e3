"""Results: memory for them, and its way into the caller's framework.

This is the only place that knows which framework takes over a NumPy array's memory as its own.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final, TypeAlias

import numpy as np

from arraycomm._arrays.buffer import CPU, Array, BufferView
from arraycomm._arrays.frameworks import torch_carriers
from arraycomm._arrays.protocols import as_cupy
from arraycomm._dtypes import BY_DTYPE, DType, name_of

_ALIGNMENT: Final = 64  # JAX takes over memory of this alignment and copies any other
_BYTE: Final = np.dtype(np.uint8)
_from_buffer: Final[Callable[[Any], ctypes.c_char]] = ctypes.c_char.from_buffer
_WIDE: Final = frozenset(np.dtype(name) for name in ("int64", "uint64", "float64", "complex128"))

ToFramework: TypeAlias = Callable[[Array, BufferView, str], Any]


def allocate(shape: tuple[int, ...], dtype: DType) -> Array:
    """Return new C-contiguous memory, aligned to 64 bytes, of which nothing is set."""
    memory = np.empty(math.prod(shape) * dtype.itemsize + _ALIGNMENT, _BYTE)
    return np.ndarray(shape, dtype, memory, -ctypes.addressof(_from_buffer(memory)) % _ALIGNMENT)


def to_framework(array: Array, like: BufferView, operation: str = "result") -> Any:
    """Hand `array` to the framework and device of `like`, as an array of that framework.

    The caller must forget `array`: wherever the framework can take the memory over, it does.
    """
    return _TO_FRAMEWORK[like.framework](array, like, operation)


def takes_over(framework: str, dtype: DType) -> bool:
    """Tell whether `give` hands host memory of this dtype over without a copy.

    Where this is false, the memory is free for other use as soon as `give` returns.
    """
    if framework in {"numpy", "python", "numpy_scalar", "namespace"}:
        return True
    if framework == "array_api_strict":
        return dtype in _STRICT
    return framework in {"torch", "jax"} and dtype in BY_DTYPE


def widest_float(framework: str) -> DType:
    """Return the float of most bits that arrays of a framework have."""
    narrow = framework == "mlx" or (
        framework == "jax" and not sys.modules["jax"].config.jax_enable_x64
    )
    return np.dtype(np.float32 if narrow else np.float64)


def commit_out(out: BufferView) -> Any:
    """Finish a write into `out.array`, and return the caller's `out`.

    Memory that stood in for the caller's is copied back; torch is told that the tensor changed, so
    that autograd notices where an older value was saved.
    """
    if out.framework == "torch":
        _commit_torch(out)
    elif out.framework == "mlx":
        out.source[...] = _to_mlx(out.array, out, "out")
    elif out.framework == "cupy":
        _commit_cupy(out)
    elif out.copied:
        np.copyto(out.source, out.array)
    return out.source


def _commit_torch(out: BufferView) -> None:
    torch = sys.modules["torch"]
    if out.copied:
        with torch.no_grad():
            out.source.copy_(_to_tensor(out.array, "out"))
    else:
        torch.autograd.graph.increment_version(out.source)


def _commit_cupy(out: BufferView) -> None:
    import cupy

    with cupy.cuda.Device(out.device[1]):
        as_cupy(out.source)[...] = cupy.asarray(out.array)


def _to_numpy(array: Array, _like: BufferView, _operation: str) -> Any:
    return array


def _to_number(array: Array, _like: BufferView, _operation: str) -> Any:
    return array.item() if array.ndim == 0 else array


def _to_scalar(array: Array, _like: BufferView, _operation: str) -> Any:
    return array[()] if array.ndim == 0 else array


def _to_torch(array: Array, like: BufferView, operation: str) -> Any:
    tensor = _to_tensor(array, operation)
    if like.device == CPU:
        return tensor
    # From pageable memory, the copy is in the order of the current stream and done on return.
    return tensor.to(sys.modules["torch"].device(*like.device))


def _to_tensor(array: Array, operation: str) -> Any:
    import torch

    for dtype, (carrier, numpy_dtype) in torch_carriers().items():
        if array.dtype == numpy_dtype:
            integers = array.view(f"i{carrier.itemsize}")
            return torch.from_numpy(integers).view(dtype)
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise no_such_dtype("torch", array.dtype, operation) from None


def _to_jax(array: Array, like: BufferView, operation: str) -> Any:
    import jax

    if array.dtype not in BY_DTYPE:
        raise no_such_dtype("jax", array.dtype, operation)
    with keeping_bits(array.dtype, like.source, operation):
        return jax.device_put(array, jax_place(like.source))


def keeping_bits(dtype: DType, source: Any, operation: str) -> Any:
    """Let JAX keep 64 bits where it does by its configuration, or did for `source`."""
    import jax

    config: Any = jax.config
    if dtype not in _WIDE or config.jax_enable_x64:
        return nullcontext()
    if source is not None and source.dtype in _WIDE:
        return jax.enable_x64(True)
    raise TypeError(
        f"{operation}: JAX would cut {dtype} to 32 bits, because its 64-bit mode is off; set "
        'jax.config.update("jax_enable_x64", True), or cast first'
    )


def jax_place(source: Any) -> Any:
    """Return where the result belongs; None, the default, for a source that is free to move."""
    if source is None or not source.committed:
        return None
    sharding = source.sharding
    if len(sharding.device_set) == 1:
        return sharding
    import jax

    # Replicated, whatever the number of dimensions.
    spec: Any = jax.sharding.PartitionSpec
    return jax.sharding.NamedSharding(sharding.mesh, spec())


def _to_cupy(array: Array, like: BufferView, _operation: str) -> Any:
    import cupy

    if like.device == CPU:
        return cupy.asarray(array)
    with cupy.cuda.Device(like.device[1]):
        return cupy.asarray(array)


def _to_strict(array: Array, like: BufferView, operation: str) -> Any:
    import array_api_strict

    if array.dtype not in _STRICT:
        raise no_such_dtype("array_api_strict", array.dtype, operation)
    device = None if like.source is None else like.source.device
    return array_api_strict.asarray(array, device=device, copy=False)


_STRICT: Final = frozenset(
    row for row in BY_DTYPE if row.kind in "biufc" and row != np.dtype(np.float16)
)


def _to_mlx(array: Array, _like: BufferView, operation: str) -> Any:
    import mlx.core as mx

    name = name_of(array.dtype)
    dtype = getattr(mx, "bool_" if name == "bool" else name, None)
    if dtype is None:
        raise no_such_dtype("mlx", array.dtype, operation)
    return mx.array(np.asarray(array, order="C"), dtype=dtype)


def _to_namespace(array: Array, like: BufferView, _operation: str) -> Any:
    xp = like.source.__array_namespace__()
    try:
        return xp.from_dlpack(array)
    except (BufferError, TypeError, AttributeError, RuntimeError):
        return xp.asarray(array)


def no_such_dtype(framework: str, dtype: DType, operation: str) -> TypeError:
    return TypeError(
        f"{operation}: {framework} has no dtype {name_of(dtype)}; cast first, or take the array as "
        "NumPy's"
    )


_TO_FRAMEWORK: Final[dict[str, ToFramework]] = {
    "numpy": _to_numpy,
    "python": _to_number,
    "numpy_scalar": _to_scalar,
    "torch": _to_torch,
    "jax": _to_jax,
    "cupy": _to_cupy,
    "array_api_strict": _to_strict,
    "mlx": _to_mlx,
    "namespace": _to_namespace,
}
