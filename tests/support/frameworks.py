"""Arrays of each framework, made and read without any code of the library."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from arraycomm._dtypes import BY_NAME

FRAMEWORKS = ("numpy", "torch", "jax", "array_api_strict", "mlx")
_NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_MISSING = {
    "array_api_strict": {*_NARROW, "float16"},
    "mlx": {"float8_e4m3fn", "float8_e5m2", "complex128"},
}
INSTALLED = [framework for framework in FRAMEWORKS if importlib.util.find_spec(framework)]
# Each framework that is there with each of its dtypes.
PAIRS = [
    (framework, name)
    for framework in INSTALLED
    for name in BY_NAME
    if name not in _MISSING.get(framework, ())
]


def need(framework: str) -> Any:
    """Import a framework, or skip the test where it is not installed."""
    return pytest.importorskip("mlx.core" if framework == "mlx" else framework)


def sample(name: str, shape: tuple[int, ...] = (3, 4, 5), seed: int = 0) -> Any:
    """Return an array of random bits (of bool: random truth)."""
    dtype = BY_NAME[name].dtype
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if name == "bool":
        bits &= 1
    return bits.view(dtype).reshape(shape)


def make(framework: str, array: Any) -> Any:
    """Return an array of the framework, without any code of the library."""
    module = need(framework)
    return _MAKERS[framework](module, np.asarray(array))


def _make_torch(torch: Any, array: Any) -> Any:
    if any(step < 0 for step in array.strides):
        pytest.skip("torch has no negative strides")
    integers = array.view(f"i{array.itemsize}") if array.dtype.name in _NARROW else array
    tensor = torch.from_numpy(integers if integers.flags.writeable else integers.copy())
    return tensor.view(getattr(torch, array.dtype.name)) if integers is not array else tensor


def _make_jax(jax: Any, array: Any) -> Any:
    with jax.enable_x64(True):
        return jax.numpy.array(array)


def _make_mlx(mx: Any, array: Any) -> Any:
    name = array.dtype.name
    return mx.array(
        np.asarray(array, order="C"), dtype=getattr(mx, "bool_" if name == "bool" else name)
    )


_MAKERS = {
    "numpy": lambda _, array: array,
    "torch": _make_torch,
    "jax": _make_jax,
    "array_api_strict": lambda xs, array: xs.asarray(array, copy=False),
    "mlx": _make_mlx,
}


def content(x: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and bytes of any framework's array, without any code of the library."""
    kind = type(x).__module__.partition(".")[0]
    shape = tuple(x.shape)
    if kind == "torch":
        torch = need("torch")
        data = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(x.dtype).removeprefix("torch."), shape, data
    if kind == "mlx":
        mx = need("mlx")
        name = str(x.dtype).removeprefix("mlx.core.").rstrip("_")
        flat = np.asarray(memoryview(mx.contiguous(x).reshape(-1).view(mx.uint8)))
        return name, shape, flat.tobytes()
    array = np.from_dlpack(x) if kind == "array_api_strict" else np.asarray(x)
    return array.dtype.name, shape, array.tobytes()


def pointer(x: Any) -> int:
    """Return the address of an array's first element as its framework tells it."""
    kind = type(x).__module__.partition(".")[0]
    if kind == "torch":
        return x.data_ptr()
    if kind in {"jax", "jaxlib"}:
        return x.unsafe_buffer_pointer()
    if kind == "array_api_strict":
        x = np.from_dlpack(x)
    if kind == "mlx":
        x = np.asarray(memoryview(x if x.dtype.size != 2 else x.view(need("mlx").uint16)))
    return np.asarray(x).__array_interface__["data"][0]
