"""Device arrays through the door: staged, in stream order, and back on their device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arraycomm._exchange import exchange
from arraycomm._results import give, written
from arraycomm._views import view, view_out

cupy = pytest.importorskip("cupy")
try:
    _DEVICES = cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError:
    _DEVICES = 0
pytestmark = pytest.mark.skipif(not _DEVICES, reason="no CUDA device")

DTYPES = ("bool", "int8", "int64", "uint16", "float16", "float32", "float64", "complex64")
LAYOUTS = {
    "contiguous": lambda a: a,
    "sliced": lambda a: a[:, ::2],
    "transposed": lambda a: a.T,
    "negative": lambda a: a[::-1],
    "0-d": lambda a: a[1, 2],
    "empty": lambda a: a[:0],
}


def torch_on_device() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return torch


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_is_staged_by_bits(dtype: str, layout: str) -> None:
    x = LAYOUTS[layout](cupy.arange(12).reshape(3, 4).astype(dtype))
    found = view(x, "op")
    assert (found.framework, found.device, found.copied) == ("cupy", ("cuda", x.device.id), True)
    assert found.array.tobytes() == cupy.asnumpy(x).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_results_are_on_the_device(dtype: str) -> None:
    x = cupy.arange(12).astype(dtype)
    result = give(np.arange(5).astype(dtype), view(x, "op"))
    assert isinstance(result, cupy.ndarray)
    assert (result.device.id, result.dtype) == (x.device.id, x.dtype)
    assert result.tolist() == np.arange(5).astype(dtype).tolist()


@pytest.mark.parametrize("layout", ["contiguous", "sliced", "transposed", "negative"])
def test_cupy_out_receives_what_is_written(layout: str) -> None:
    whole = cupy.zeros((3, 4), "float32")
    out = LAYOUTS[layout](whole)
    found = view_out(out, out.shape, np.dtype("float32"), "op")
    found.array[...] = 5
    assert written(found) is out
    assert (out == 5).all()
    assert int(whole.sum()) == 5 * out.size


def test_reading_waits_for_the_current_stream() -> None:
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.ones((2000, 2000), "float64")
        for _ in range(20):
            x = x @ x / 2000
        assert view(x, "op").array[0, 0] == 1


class Interface:
    """Has a CUDA array interface and nothing else."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.__cuda_array_interface__ = x.__cuda_array_interface__


def test_cuda_array_interface_gives_cupy() -> None:
    x = Interface(cupy.arange(3))
    found = view(x, "op")
    assert found.array.tolist() == [0, 1, 2]
    assert isinstance(give(np.ones(3), found), cupy.ndarray)
    out = view_out(x, (3,), np.dtype("int64"), "op")
    out.array[...] = 7
    assert written(out) is x
    assert x.x.tolist() == [7, 7, 7]


def test_exchange_makes_a_cuda_array_interface_cupys() -> None:
    x = cupy.arange(3)
    there = exchange(Interface(x), "cupy", copy=False)
    assert isinstance(there, cupy.ndarray)
    assert there.data.ptr == x.data.ptr


def test_dlpack_on_a_device_gives_cupy() -> None:
    class Producer:
        def __init__(self, x: Any) -> None:
            self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__

    found = view(Producer(cupy.arange(3)), "op")
    assert found.array.tolist() == [0, 1, 2]
    assert found.framework == "cupy"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "complex64", "bool"])
def test_torch_on_a_device(dtype: str) -> None:
    torch = torch_on_device()
    x = torch.arange(6, device="cuda").to(getattr(torch, dtype)).reshape(2, 3).T
    found = view(x, "op")
    assert (found.framework, found.device, found.copied) == ("torch", ("cuda", 0), True)
    result = give(found.array.copy(), found)
    assert result.device == x.device
    assert torch.equal(result.contiguous().view(torch.uint8), x.contiguous().view(torch.uint8))
    out = torch.zeros_like(x)
    target = view_out(out, tuple(out.shape), found.dtype, "op")
    target.array[...] = found.array
    assert torch.equal(written(target).view(torch.uint8), x.view(torch.uint8))


def test_exchange_stays_on_the_device() -> None:
    torch = torch_on_device()
    x = cupy.arange(6, dtype="float32")
    t = exchange(x, "torch", copy=False)
    assert t.data_ptr() == x.data.ptr
    assert exchange(t, x, copy=False).data.ptr == x.data.ptr
    assert exchange(t, "cupy", copy=True).data.ptr != x.data.ptr
    assert torch.equal(exchange(np.arange(6, dtype="float32"), t), t)


@pytest.mark.parametrize("to", ["numpy", np.empty(0)])
def test_exchange_to_the_host_copies(to: Any) -> None:
    x = cupy.arange(3)
    assert exchange(x, to).tolist() == [0, 1, 2]
    with pytest.raises(BufferError, match="x is on cuda:0"):
        exchange(x, to, copy=False)


def test_exchange_to_the_device_copies() -> None:
    x = np.arange(3)
    assert exchange(x, "cupy").tolist() == [0, 1, 2]
    with pytest.raises(BufferError, match="the result is on cuda"):
        exchange(x, "cupy", copy=False)


@pytest.mark.skipif(_DEVICES < 2, reason="needs two devices")
def test_results_go_to_the_sources_device() -> None:
    with cupy.cuda.Device(1):
        x = cupy.arange(3)
    assert give(view(x, "op").array.copy(), view(x, "op")).device.id == 1
