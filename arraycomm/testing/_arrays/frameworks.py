"""The frameworks of drawn arrays: what each supports, and how its arrays are built and read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._arrays.frameworks.torch import torch_carriers
from arraycomm._dtypes import BY_DTYPE, DType, name_of
from arraycomm.testing._arrays.dtypes import field_dtypes
from arraycomm.testing._arrays.layouts import LAYOUTS, address_of


class _Framework(NamedTuple):
    """The dtypes and layouts that a framework's arrays can have, and how one is built.

    `build` gets a NumPy array in new memory, laid out as requested, and takes it over or copies it.
    """

    modules: tuple[str, ...]
    build: Callable[[Array], Any]
    has: Callable[[DType], bool]
    layouts: tuple[str, ...]
    readonly: bool = False


class DLPackOnly:
    """An array that shows nothing but DLPack."""

    __slots__ = ("_array",)

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> object:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def _build_torch(array: Array) -> Any:
    import torch

    for dtype, (carrier, narrow) in torch_carriers().items():
        if array.dtype == narrow:
            return torch.from_numpy(array.view(f"i{carrier.itemsize}")).view(dtype)
    return torch.from_numpy(array)


def _build_jax(array: Array) -> Any:
    import jax

    if not _has_64_bits(array.dtype):
        return jax.numpy.array(array)
    # JAX's configuration is per thread, and another thread may have drawn the array.
    with jax.enable_x64(True):
        return jax.numpy.array(array)


def _build_strict(array: Array) -> Any:
    import array_api_strict

    return array_api_strict.asarray(array, copy=False)


def _build_cupy(array: Array) -> Any:
    import cupy

    memory: Any = array.base
    start = address_of(array) - address_of(memory)
    on_device = cupy.asarray(memory)
    return cupy.ndarray(array.shape, array.dtype, on_device.data + start, array.strides)


def _build_mlx(array: Array) -> Any:
    import mlx.core as mx

    name = name_of(array.dtype)
    dtype = getattr(mx, "bool_" if name == "bool" else name)
    if not array.size:
        return mx.zeros(array.shape, dtype)  # MLX would lose the shape of an empty NumPy array
    if name == "bfloat16":
        return mx.array(array.view(np.uint16)).view(dtype)
    return mx.array(array)


_NARROW: Final = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # those of ml_dtypes


def _in_buffers(dtype: DType) -> bool:
    """Return whether the buffer protocol has a format for this dtype that NumPy can read."""
    if dtype.names is not None:
        return all(map(_in_buffers, field_dtypes(dtype)))
    return dtype.kind in "biufcSU" and name_of(dtype) not in _NARROW


def _named(*missing: str) -> Callable[[DType], bool]:
    return lambda dtype: dtype in BY_DTYPE and name_of(dtype) not in missing


def _has_64_bits(dtype: DType) -> bool:
    return dtype.itemsize == (16 if dtype.kind == "c" else 8)


_STRIDED: Final = ("contiguous", "fortran", "transposed", "sliced", "offset", "broadcast")
_SIGNED: Final = (*_STRIDED, "negative")

# Frameworks with the most dtypes come first: their index among those that have a dtype then seldom
# changes while Hypothesis simplifies an example.
FRAMEWORKS: Final = {
    "numpy": _Framework(
        (), lambda array: array, lambda _: True, (*_SIGNED, "unaligned", "swapped"), True
    ),
    "torch": _Framework(("torch",), _build_torch, _named(), _STRIDED),
    "jax": _Framework(("jax", "jaxlib"), _build_jax, _named(), ("contiguous",)),
    "mlx": _Framework(
        ("mlx",),
        _build_mlx,
        _named("float8_e4m3fn", "float8_e5m2", "float64", "complex128"),
        ("contiguous",),
    ),
    "buffer": _Framework(
        (), lambda array: memoryview(array.data), _in_buffers, (*_SIGNED, "unaligned"), True
    ),
    # Older versions of NumPy do not export read-only arrays.
    "dlpack": _Framework(
        (), DLPackOnly, _named(*_NARROW), _SIGNED, np.lib.NumpyVersion(np.__version__) >= "2.1.0"
    ),
    "array_api_strict": _Framework(
        ("array_api_strict",), _build_strict, _named(*_NARROW, "float16"), _SIGNED
    ),
    "cupy": _Framework(("cupy",), _build_cupy, _named(), _SIGNED),
}


@cache
def installed_frameworks() -> tuple[str, ...]:
    """Return the frameworks whose arrays can be built here, without importing any of them."""
    return tuple(name for name, framework in FRAMEWORKS.items() if _is_here(name, framework))


def _is_here(name: str, framework: _Framework) -> bool:
    return all(map(find_spec, framework.modules)) and (name != "cupy" or _device_is_here())


def _device_is_here() -> bool:
    """Look for the drivers' files: after a call to a driver this process could not fork."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}
    return not hidden and any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))


def layouts_of(framework: str, dtype: DType) -> tuple[str, ...]:
    """Return the layouts that a framework's arrays of a dtype can have; none if it lacks the dtype.

    JAX has dtypes of 64 bits only if its configuration enables them.
    """
    if framework == "jax" and _has_64_bits(dtype) and not _jax_has_64_bits():
        return ()
    return layouts_in_principle(framework, dtype)


@lru_cache(maxsize=1024)
def layouts_in_principle(framework: str, dtype: DType) -> tuple[str, ...]:
    """Return what `layouts_of` does, whatever the configuration of JAX is."""
    described = FRAMEWORKS[framework]
    if not described.has(dtype):
        return ()
    return tuple(
        name for name, layout in LAYOUTS.items() if name in described.layouts and layout.fits(dtype)
    )


def _jax_has_64_bits() -> bool:
    config: Any = getattr(sys.modules.get("jax"), "config", None)
    if config is not None:
        return bool(config.jax_enable_x64)
    return os.environ.get("JAX_ENABLE_X64", "").lower() in {"1", "true", "t", "yes", "y", "on"}


def elements_of(array: Any) -> Array:
    """Return an array's elements as a NumPy array, by means of its own framework.

    Host memory is shared: what is written to one array is seen in the other.
    """
    found: Array = _READERS.get(_package_of(array), np.asarray)(array)
    return found


@contextmanager
def elements_to_write(array: Any) -> Iterator[Array]:
    """Lend an array's elements; what is written to them is in the array afterwards, if writable."""
    elements = elements_of(array)
    yield elements
    write = _WRITERS.get(_package_of(array))
    if write is not None:
        write(array, elements)


def _package_of(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def _read_torch(tensor: Any) -> Array:
    carrier, narrow = torch_carriers().get(tensor.dtype, (None, None))
    found: Array = (tensor if carrier is None else tensor.view(carrier)).cpu().numpy()
    if narrow is not None:
        found = found.view(narrow)
    return found


def _write_torch(tensor: Any, elements: Array) -> None:
    if not tensor.is_cuda:
        return
    for axis, step in enumerate(tensor.stride()):
        if not step and tensor.shape[axis] > 1:  # one element, seen several times
            tensor, elements = tensor.narrow(axis, 0, 1), elements.take([0], axis)
    tensor.copy_(_build_torch(elements.copy()))


def _write_cupy(array: Any, elements: Array) -> None:
    import cupy

    there = _carried(array)
    there[...] = cupy.asarray(np.ascontiguousarray(elements).view(there.dtype))


def _carried(array: Any) -> Any:
    """Return a CuPy array of numbers for which CuPy has kernels, over the same memory."""
    import cupy

    if name_of(array.dtype) not in _NARROW:
        return array
    return cupy.ndarray(array.shape, f"u{array.dtype.itemsize}", array.data, array.strides)


def _read_mlx(array: Any) -> Array:
    import mlx.core as mx

    if array.dtype == mx.bfloat16:
        return np.asarray(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.asarray(array)


_READERS: Final[dict[str, Callable[[Any], Array]]] = {
    "torch": _read_torch,
    "mlx": _read_mlx,
    "cupy": lambda array: np.asarray(_carried(array).get().view(array.dtype)),
    "array_api_strict": np.from_dlpack,
    "arraycomm": np.from_dlpack,
}
# For arrays on a device, whose elements are read by a copy.
_WRITERS: Final[dict[str, Callable[[Any, Array], None]]] = {
    "torch": _write_torch,
    "cupy": _write_cupy,
}
