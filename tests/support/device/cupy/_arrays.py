"""CuPy's arrays: NumPy does the work, on the current stream."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from cupy import cuda
from cupy._machine import machine

from arraycomm._arrays import dlpack


def _check_kernels(dtype: Any) -> None:
    """Refuse, as CuPy 13 does, dtypes that it has no kernels for: those of ml_dtypes."""
    if dtype.kind == "V":
        raise ValueError(f"Unsupported dtype {dtype}")


def _put(what: str, work: Callable[[], Any], *operands: Any) -> None:
    """Put work on the current stream; operands of other streams' memory are kept until it is done.

    CuPy keeps none: there it is up to chance, for a while, whether the memory is used again.
    """
    stream = cuda.current_stream()
    arrays = [x for x in operands if isinstance(x, ndarray)]
    kept = [x.data for x in arrays if getattr(x.data.mem, "stream", None) is not stream]

    def quietly() -> None:
        with np.errstate(all="ignore"):
            work()
        kept.clear()

    stream.put(what, quietly)


class ndarray:  # noqa: N801 - the name that CuPy has
    __array_ufunc__ = None

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: Any = None,
        strides: Any = None,
        order: str = "C",
    ) -> None:
        shape = (int(shape),) if isinstance(shape, int | np.integer) else tuple(shape)
        dtype = np.dtype(dtype)
        self.data = cuda.alloc(math.prod(shape) * dtype.itemsize) if memptr is None else memptr
        self._show(dlpack.array_at(self.data.ptr, shape, strides, dtype, False, None, "memptr"))
        if strides is not None:
            self.strides = tuple(strides)

    def _show(self, elements: Any) -> ndarray:
        """Have the elements, an array over the memory."""
        # As a NumPy array that keeps no memory.
        self.elements = elements
        self.dtype, self.shape, self.strides = elements.dtype, elements.shape, elements.strides
        self.size, self.nbytes, self.ndim = elements.size, elements.nbytes, elements.ndim
        self.itemsize, self.flags = elements.itemsize, elements.flags
        return self

    def _part(self, elements: Any) -> ndarray:
        found = ndarray.__new__(ndarray)
        address = _address(elements) if elements.size else self.data.ptr
        found.data = self.data + (address - self.data.ptr)
        return found._show(elements)

    device = property(lambda self: cuda.Device(self.data.device_id))
    T = property(lambda self: self._part(self.elements.T))

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Use `.get()`")

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, part: Any) -> ndarray:
        return self._part(self.elements[_with_ellipsis(part)])

    def __setitem__(self, part: Any, value: Any) -> None:
        _check_kernels(self.dtype)
        target = self.elements[_with_ellipsis(part)]
        source = value.elements if isinstance(value, ndarray) else np.array(value)
        _put("assign", lambda: np.copyto(target, source, casting="unsafe"), self, value)

    def fill(self, value: Any) -> None:
        self[...] = value

    def reshape(self, *shape: Any) -> ndarray:
        elements = self.elements.reshape(*shape)
        if not elements.size or np.shares_memory(elements, self.elements):
            return self._part(elements)
        return self.copy().reshape(*shape)

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    def view(self, dtype: Any) -> ndarray:
        return self._part(self.elements.view(dtype))

    def compute(self, function: Callable[..., Any], *others: Any) -> ndarray:
        """Return what a function of NumPy makes of this array and others."""
        _check_kernels(self.dtype)
        operands = [x.elements if isinstance(x, ndarray) else x for x in (self, *others)]
        arrays = [x for x in operands if isinstance(x, np.ndarray)]
        ones = [
            np.ones((1,) * x.ndim, x.dtype) if isinstance(x, np.ndarray) else x for x in operands
        ]
        one = np.asarray(function(*ones))
        shape = np.broadcast_shapes(*(x.shape for x in arrays)) if one.ndim or not self.ndim else ()
        made = ndarray(shape, one.dtype)
        target = made.elements
        _put("compute", lambda: np.copyto(target, function(*operands)), self, *others)
        return made

    def change(self, function: Callable[..., Any], other: Any) -> ndarray:
        target = self.elements
        operand = other.elements if isinstance(other, ndarray) else other

        def work() -> None:
            np.copyto(target, function(target, operand), casting="unsafe")

        _put("change", work, self, other)
        return self

    def __matmul__(self, other: ndarray) -> ndarray:
        made = ndarray((self.shape[0], other.shape[1]), self.dtype)
        a, b, target = self.elements, other.elements, made.elements
        _put("matmul", lambda: np.matmul(a, b, out=target), self, other)
        return made

    def astype(self, dtype: Any) -> ndarray:
        return self.compute(lambda x: x.astype(dtype))

    def copy(self, order: str = "C") -> ndarray:
        return self.compute(np.copy)

    def get(self, *, out: Any = None) -> Any:
        """Copy to the host; by a kernel first if the elements are not contiguous."""
        if not self.flags.c_contiguous:
            _check_kernels(self.dtype)
        target = np.empty(self.shape, self.dtype) if out is None else out
        assert (target.shape, target.dtype) == (self.shape, self.dtype)
        assert target.flags.c_contiguous
        elements = self.elements
        _put("get", lambda: np.copyto(target, elements))
        machine.wait(cuda.get_current_stream().ptr)
        return target

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr if self.size else 0, False),
            "stream": cuda.get_current_stream().ptr or 1,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.data.device_id

    def __dlpack__(
        self, *, stream: int | None = None, max_version: Any = None, dl_device: Any = None
    ) -> Any:
        if dl_device == (1, 0):
            return self.get().__dlpack__()
        current = cuda.get_current_stream()
        if stream != -1 and (stream or 1) != (current.ptr or 1):
            machine.wait_event(stream or 1, current.record().ptr)
        arguments = self.data.ptr, self.shape, self.strides, self.dtype, False, self.data, "x"
        version = {} if max_version is None else {"max_version": (1, 0)}
        capsule = dlpack.array_at(*arguments).__dlpack__(**version)
        tensor, _ = dlpack.open_capsule(capsule, "x")
        tensor.device_type, tensor.device_id = self.__dlpack_device__()
        return capsule


def _with_ellipsis(part: Any) -> Any:
    parts = part if isinstance(part, tuple) else (part,)
    # So that NumPy returns arrays in every case.
    return parts if Ellipsis in parts else (*parts, Ellipsis)


def _address(elements: Any) -> int:
    return int(elements.__array_interface__["data"][0])


def _add_operators() -> None:
    names = "add sub mul truediv floordiv mod pow eq ne lt le gt ge and_ or_ xor"
    for name in names.split():
        function, plain = getattr(operator, name), name.rstrip("_")
        ways: dict[str, Callable[..., Any]] = {
            "": lambda self, other, f=function: self.compute(f, other),
            "r": lambda self, other, f=function: self.compute(lambda a, b: f(b, a), other),
            "i": lambda self, other, f=function: self.change(f, other),
        }
        for way, method in ways.items():
            setattr(ndarray, f"__{way}{plain}__", method)
    for name in ("sum", "min", "max", "all", "any"):
        function = getattr(np, name)
        setattr(ndarray, name, lambda self, f=function: self.compute(f))


_add_operators()
# By which arraycomm knows them.
ndarray.__module__ = "cupy"


# Functions ------------------------------------------------------------------------------------------


def asarray(x: Any, dtype: Any = None) -> ndarray:
    if isinstance(x, ndarray):
        return x
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is not None:
        return _of_interface(x, interface)
    host = np.array(x, dtype)
    _check_kernels(host.dtype)
    made = ndarray(host.shape, host.dtype)
    target = made.elements
    _put("upload", lambda: np.copyto(target, host))
    return made


def _of_interface(x: Any, interface: Any) -> ndarray:
    stream = interface.get("stream")
    if stream:
        event = cuda.Event()
        machine.record(event.ptr, stream)
        machine.wait_event(cuda.get_current_stream().ptr, event.ptr)
    memory = cuda.UnownedMemory(interface["data"][0], 0, x)
    start = cuda.MemoryPointer(memory, 0)
    kind = np.dtype(interface["typestr"])
    return ndarray(interface["shape"], kind, start, interface.get("strides"))


def from_dlpack(x: Any) -> ndarray:
    capsule = x.__dlpack__(stream=cuda.get_current_stream().ptr or 1)
    tensor, _ = dlpack.open_capsule(capsule, "x")
    dtype = dlpack.dtype_of(tensor, "x")
    count = tensor.ndim
    strides = [n * dtype.itemsize for n in tensor.strides[:count]] if tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset
    memory = cuda.UnownedMemory(address, 0, (capsule, x), tensor.device_id)
    return ndarray(tensor.shape[:count], dtype, cuda.MemoryPointer(memory, 0), strides)


def asnumpy(x: ndarray) -> Any:
    return x.get()


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)


def full(shape: Any, value: Any, dtype: Any = None) -> ndarray:
    made = ndarray(shape, np.asarray(value).dtype if dtype is None else dtype)
    made.fill(value)
    return made


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 1, dtype)


def arange(*arguments: Any, dtype: Any = None) -> ndarray:
    return asarray(np.arange(*arguments, dtype=dtype))


class RawKernel:
    """The one that keeps a stream busy for some nanoseconds."""

    def __init__(self, code: str, name: str) -> None:
        assert name == "spin"

    def __call__(self, _grid: Any, _block: Any, arguments: Any, stream: Any = None) -> None:
        (nanoseconds,) = arguments
        found = machine.stream((stream or cuda.get_current_stream()).ptr)
        found.put("spin", lambda: time.sleep(int(nanoseconds) * 1e-9))


class _Pool:
    """CuPy's pool of device memory."""

    @staticmethod
    def total_bytes() -> int:
        return machine.pool.total

    @staticmethod
    def free_all_blocks(stream: Any = None) -> None:
        machine.pool.drop(None if stream is None else stream.ptr)


_POOL: Final = _Pool()


def get_default_memory_pool() -> _Pool:
    return _POOL
