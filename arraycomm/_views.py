"""Any array as host memory: the one door through which arrays enter.

A framework is known by the top-level module of the array's type, and is never imported from here:
whoever holds an array of it has done that. What no framework claims is read by the protocols:
DLPack, the array interfaces, the buffer protocol.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np

from arraycomm import _dlpack
from arraycomm._dtypes import BY_DTYPE, BY_NAME, DType, check_movable, name_of

Array: TypeAlias = np.ndarray[Any, Any]
Device: TypeAlias = tuple[str, int]

CPU: Final[Device] = ("cpu", 0)


class BufferView:
    """One array as host memory, with what its result must be like.

    Attributes
    ----------
    array : numpy.ndarray
        The elements, in native byte order, in the caller's own memory where `copied` is false.
    framework : str
        Whose array `source` is; "python" and "numpy_scalar" are numbers, "namespace" is an unknown
        type with an array API namespace, other objects count as "numpy".
    source : object
        The caller's object.
    readonly : bool
        The caller's memory must not be written.
    copied : bool
        `array` is not the caller's memory.
    device : tuple of str and int
        Where the caller's memory is.
    """

    __slots__ = ("array", "copied", "device", "framework", "readonly", "source")

    def __init__(
        self,
        array: Array,
        framework: str,
        source: Any,
        readonly: bool,
        copied: bool = False,
        device: Device = CPU,
    ) -> None:
        self.array = array
        self.framework = framework
        self.source = source
        self.readonly = readonly
        self.copied = copied
        self.device = device

    @property
    def address(self) -> int:
        """Address of the first element."""
        return int(self.array.__array_interface__["data"][0])

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the dimensions."""
        shape: tuple[int, ...] = self.array.shape
        return shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Distances between neighbours in each dimension, in bytes."""
        return self.array.strides

    @property
    def dtype(self) -> DType:
        """NumPy's dtype of the elements, in native byte order."""
        dtype: DType = self.array.dtype
        return dtype


# Reads x as a view. Gets x, the operation, and what the operation calls x.
Reader: TypeAlias = Callable[[Any, str, str], BufferView]


def view(x: Any, operation: str) -> BufferView:
    """Return `x` as host memory, without a copy wherever it is host memory already.

    Raises `TypeError`, `ValueError`, `OverflowError` or `BufferError` that names `operation`.
    """
    return (_READERS.get(type(x)) or _reader_of(type(x)))(x, operation, "x")


def view_out(out: Any, shape: tuple[int, ...], dtype: DType, operation: str) -> BufferView:
    """Return `out` as memory to write a result of this shape and dtype into.

    Raises `ValueError` for another shape, `TypeError` for another dtype or no array at all, and
    `BufferError` where `out` cannot be written.
    """
    found = (_READERS.get(type(out)) or _reader_of(type(out)))(out, operation, "out")
    if found.framework in {"python", "numpy_scalar"}:
        raise TypeError(f"{operation}: out must be an array; got {type(out).__name__}")
    if found.framework == "jax":
        raise BufferError(
            f"{operation}: out is a JAX array, which is immutable; use the result instead of out"
        )
    if found.shape != shape:
        raise ValueError(f"{operation}: out must have the shape {shape}; got {found.shape}")
    if found.dtype != dtype:
        raise TypeError(
            f"{operation}: out must have dtype {name_of(dtype)}; got {name_of(found.dtype)}"
        )
    return _writable(found, operation)


def likeness(x: Any, operation: str, name: str) -> BufferView:
    """Return a view of `x` that tells framework and device, with `NOTHING` for elements.

    It does what `like` needs without a copy from a device, and takes tensors that require
    gradients, since nothing of theirs is read. Where only reading tells, it is the whole view.
    """
    reader = _READERS.get(type(x)) or _reader_of(type(x))
    place = _PLACES.get(reader)
    if place is None:
        return reader(x, operation, name)
    return BufferView(NOTHING, place[0], x, True, True, place[1](x))


def check_readable(x: Any, framework: str, operation: str, name: str) -> None:
    """Raise where a tensor has a history to lose, or a JAX array no elements of its own."""
    if framework == "torch" and x.requires_grad:
        _without_history(x, operation, name)
    elif framework == "jax":
        _check_jax(x, operation, name)


def _writable(found: BufferView, operation: str) -> BufferView:
    if found.framework == "mlx":
        # Its memory may be shared with other arrays; `written` replaces the elements as a whole.
        return BufferView(np.empty(found.shape, found.dtype), "mlx", found.source, False, True)
    if found.readonly:
        raise BufferError(f"{operation}: out is read-only; pass memory that can be written")
    if _overlaps_itself(found.array):
        raise BufferError(
            f"{operation}: elements of out share memory (strides {found.strides} for shape "
            f"{found.shape}); pass an array of its own"
        )
    if found.copied and not _copies_back(found):
        raise BufferError(
            f"{operation}: out shows only a copy of its memory, and what is written there would "
            "be lost; pass an array in host memory"
        )
    return found


def _copies_back(found: BufferView) -> bool:
    return found.framework in {"torch", "cupy"} or isinstance(found.source, np.ndarray)


def _overlaps_itself(array: Array) -> bool:
    """Tell whether two elements may share memory: no slice, transpose or diagonal does this."""
    if array.flags.forc or not array.size:
        return False
    reach = array.itemsize
    lengths = ((abs(step), n) for step, n in zip(array.strides, array.shape, strict=True) if n > 1)
    for step, length in sorted(lengths):
        if step < reach:
            return True
        reach += step * (length - 1)
    return False


def _reader_of(kind: type) -> Reader:
    for base in kind.__mro__:
        module = str(getattr(base, "__module__", "")).partition(".")[0]
        find = _FRAMEWORKS.get(module)
        reader = find(kind) if find is not None else None
        if reader is not None:
            _READERS[kind] = reader
            return reader
    return _read_foreign


# NumPy ------------------------------------------------------------------------------------------


def _find_numpy(kind: type) -> Reader | None:
    if issubclass(kind, np.ma.MaskedArray):
        return _refuse_masked
    if issubclass(kind, np.ndarray):
        return _read_numpy_subclass
    return _read_numpy_scalar if issubclass(kind, np.generic) else None


def _read_numpy(x: Any, operation: str, name: str) -> BufferView:
    if x.dtype in BY_DTYPE:
        return BufferView(x, "numpy", x, not x.flags.writeable)
    return _read_numpy_subclass(x, operation, name)


def _read_numpy_subclass(x: Any, operation: str, _name: str) -> BufferView:
    array = np.asarray(x)
    native = _native(array, operation)
    return BufferView(native, "numpy", x, not x.flags.writeable, native is not array)


def _native(array: Array, operation: str) -> Array:
    """Return the array in native byte order, the same object if it is so already."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    _check_dtype(array.dtype, operation)
    return array


def _check_dtype(dtype: DType, operation: str) -> None:
    """Raise `TypeError` for what the table lacks, also where NumPy takes it for plain bytes."""
    if dtype.kind == "V" and dtype.type is not np.void and dtype not in BY_DTYPE:
        raise TypeError(
            f"{operation}: dtype {dtype} is not supported; cast to one of {', '.join(BY_NAME)}"
        )
    check_movable(dtype, operation)


def _refuse_masked(_x: Any, operation: str, name: str) -> BufferView:
    raise TypeError(
        f"{operation}: {name} is a masked array, whose mask would be lost; "
        f"pass {name}.filled(value), or {name}.data and the mask apart"
    )


def _read_numpy_scalar(x: Any, operation: str, _name: str) -> BufferView:
    return BufferView(_native(np.array(x), operation), "numpy_scalar", x, True, True)


# Python -----------------------------------------------------------------------------------------

_NUMBERS: Final[dict[type, type]] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    complex: np.complex128,
}


def _find_python(kind: type) -> Reader | None:
    if issubclass(kind, tuple(_NUMBERS)):
        return _read_number
    return _refuse_object if issubclass(kind, _OBJECTS) else None


_OBJECTS: Final = (str, list, dict, tuple, set, frozenset, range, type(None), type)


def _read_number(x: Any, operation: str, name: str) -> BufferView:
    dtype: Any = next(_NUMBERS[base] for base in type(x).__mro__ if base in _NUMBERS)
    try:
        array: Array = np.array(x, dtype)
    except OverflowError:
        raise OverflowError(
            f"{operation}: {name} = {x:#x} does not fit int64; pass a float or an array"
        ) from None
    return BufferView(array, "python", x, True, True)


def _refuse_object(x: Any, operation: str, name: str) -> BufferView:
    raise TypeError(
        f"{operation}: {name} must be an array or a number; got {_type_name(x)}; "
        "use bcast_object for any object, allreduce_tree or synchronize for a tree of arrays"
    )


def _type_name(x: Any) -> str:
    if isinstance(x, type):
        return f"the class {x.__qualname__}"
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


# PyTorch ----------------------------------------------------------------------------------------


def _find_torch(kind: type) -> Reader | None:
    return _read_torch if issubclass(kind, sys.modules["torch"].Tensor) else None


@cache
def torch_carriers() -> dict[Any, tuple[Any, DType]]:
    """Map the torch dtypes that NumPy lacks to an integer of their size and ml_dtypes' dtype."""
    torch = sys.modules["torch"]
    return {
        torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
        torch.float8_e4m3fn: (torch.int8, np.dtype(ml_dtypes.float8_e4m3fn)),
        torch.float8_e5m2: (torch.int8, np.dtype(ml_dtypes.float8_e5m2)),
    }


def _read_torch(x: Any, operation: str, name: str) -> BufferView:
    x_plain = _without_history(x, operation, name) if x.requires_grad else x
    array: Array | None
    try:
        array = None if _wrapped(x) else _tensor_memory(x_plain)
    except (RuntimeError, TypeError):
        array = None
    if array is None:  # not plain host memory
        return _read_torch_by_copy(x, operation, name)
    if not _has_storage(x):
        raise BufferError(
            f"{operation}: {name} has no memory behind its elements (its storage was resized); "
            "gather the parameter before it is used"
        )
    return BufferView(array, "torch", x, False)


def _tensor_memory(x: Any) -> Array:
    carrier = torch_carriers().get(x.dtype)
    array: Array
    if carrier is None:
        array = x.numpy()
    else:
        array = x.view(carrier[0]).numpy().view(carrier[1])
    return array


def _without_history(x: Any, operation: str, name: str) -> Any:
    if sys.modules["torch"].is_grad_enabled():
        raise TypeError(
            f"{operation}: {name} requires gradients, and their history would be lost; use the "
            "differentiable collectives of arraycomm.adapters.torch, or torch.no_grad()"
        )
    return x.detach()


def _wrapped(x: Any) -> bool:
    """Tell whether `x` lives inside a transform of torch.func."""
    return bool(sys.modules["torch"]._C._functorch.is_functorch_wrapped_tensor(x))


def _has_storage(x: Any) -> bool:
    if x.is_contiguous():
        reach = x.numel()
    else:
        reach = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return not x.numel() or (
        (x.storage_offset() + reach) * x.itemsize <= x.untyped_storage().nbytes()
    )


def _read_torch_by_copy(x: Any, operation: str, name: str) -> BufferView:
    reason = _torch_refusal(x)
    if reason is not None:
        raise TypeError(f"{operation}: {name} is {reason}")
    try:
        array = _tensor_memory(x.detach().resolve_conj().resolve_neg().cpu())
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"{operation}: {name} is a {_type_name(x)} whose memory cannot be read ({error}); "
            "pass a plain, dense tensor"
        ) from error
    return BufferView(array, "torch", x, False, True, torch_device(x))


def _torch_refusal(x: Any) -> str | None:
    """Say why this tensor has no dense memory of its own, and what to do about it."""
    torch = sys.modules["torch"]
    if _wrapped(x):
        return "traced by torch.func or torch.vmap; call this outside of the transformed function"
    if x.is_nested:
        return "a nested tensor; pass its parts, or to_padded_tensor()"
    if x.is_quantized:
        return "quantized; pass dequantize(), or int_repr() and the scales"
    if x.layout is not torch.strided:
        return f"a tensor of layout {x.layout}; pass to_dense()"
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and (
        type(x).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    ):
        return f"a {_type_name(x)}, which has no memory of its own; pass a plain local tensor"
    if x.is_meta:
        return "on the meta device and has no elements; move it to a real device first"
    if str(x.dtype).removeprefix("torch.") not in BY_NAME:
        return f"of dtype {x.dtype}, which is not supported; cast to one of {', '.join(BY_NAME)}"
    return None


def torch_device(x: Any) -> Device:
    """Return a tensor's device."""
    return CPU if x.is_cpu else (x.device.type, x.device.index or 0)


# JAX --------------------------------------------------------------------------------------------


def _find_jax(kind: type) -> Reader | None:
    jax = sys.modules.get("jax")
    if jax is None:
        return None
    if issubclass(kind, jax.core.Tracer):
        return _refuse_tracer
    return _read_jax if issubclass(kind, jax.Array) else None


def _refuse_tracer(_x: Any, operation: str, name: str) -> BufferView:
    raise TypeError(
        f"{operation}: {name} is traced by JAX (jit, grad, vmap or scan) and has no elements yet; "
        "use the collectives of arraycomm.adapters.jax, or call this outside of the function"
    )


def _read_jax(x: Any, operation: str, name: str) -> BufferView:
    _check_jax(x, operation, name)
    device = jax_device(x)
    array = np.asarray(x)
    if array.dtype not in BY_DTYPE:
        _check_dtype(array.dtype, operation)
    return BufferView(array, "jax", x, True, device[0] != "cpu", device)


def _check_jax(x: Any, operation: str, name: str) -> None:
    if not isinstance(x.dtype, np.dtype):
        raise TypeError(
            f"{operation}: {name} is a typed key of JAX; pass jax.random.key_data({name}), and "
            "jax.random.wrap_key_data on the result"
        )
    if x.is_deleted():
        raise ValueError(
            f"{operation}: {name} is a JAX array that was deleted or donated to a jitted function; "
            "pass the array that replaced it"
        )
    if len(x.sharding.device_set) > 1 and not (x.is_fully_replicated and x.is_fully_addressable):
        raise TypeError(
            f"{operation}: {name} is sharded over {len(x.sharding.device_set)} devices; pass its "
            "addressable shards one by one, or replicate it first"
        )


def jax_device(x: Any) -> Device:
    """Return a JAX array's device, the first of several."""
    device = next(iter(x.sharding.device_set))
    if device.platform == "cpu":
        return CPU
    return ("cuda" if device.platform == "gpu" else device.platform, device.id)


# CuPy -------------------------------------------------------------------------------------------


def _find_cupy(kind: type) -> Reader | None:
    return _read_cupy if issubclass(kind, sys.modules["cupy"].ndarray) else None


def _read_cupy(x: Any, operation: str, _name: str) -> BufferView:
    """Stage through pinned memory, in the order of CuPy's current stream."""
    _check_dtype(x.dtype, operation)
    import cupyx

    with x.device:
        host = cupyx.empty_pinned(x.shape, x.dtype) if x.size else np.empty(x.shape, x.dtype)
        x.get(out=host)
    return BufferView(host, "cupy", x, False, True, cupy_device(x))


def cupy_device(x: Any) -> Device:
    """Return a CuPy array's device."""
    return ("cuda", x.device.id)


# array-api-strict and MLX -----------------------------------------------------------------------


def _find_strict(kind: type) -> Reader | None:
    return _read_strict if hasattr(kind, "__dlpack__") else None


def _read_strict(x: Any, operation: str, _name: str) -> BufferView:
    array = np.from_dlpack(x)
    _check_dtype(array.dtype, operation)
    return BufferView(array, "array_api_strict", x, not array.flags.writeable)


def _find_mlx(kind: type) -> Reader | None:
    return _read_mlx if issubclass(kind, sys.modules["mlx.core"].array) else None


def _read_mlx(x: Any, operation: str, _name: str) -> BufferView:
    mx = sys.modules["mlx.core"]
    if x.dtype == mx.bfloat16:
        array = np.asarray(memoryview(x.view(mx.uint16))).view(ml_dtypes.bfloat16)
    else:
        array = np.asarray(memoryview(x))
    _check_dtype(array.dtype, operation)
    array.flags.writeable = False
    return BufferView(array, "mlx", x, True)


# Everything else --------------------------------------------------------------------------------


def _read_foreign(x: Any, operation: str, name: str) -> BufferView:
    """Try the protocols in turn; the first refusal is told when none of them works."""
    label = f"{operation}: {name}"
    refusal: BufferError | None = None
    for protocol in _PROTOCOLS:
        try:
            found = protocol(x, operation, label)
        except BufferError as error:
            refusal = refusal or error
            continue
        if found is not None:
            return found
    if refusal is not None:
        raise refusal
    raise TypeError(
        f"{label} must be an array or a number; got {_type_name(x)}, which has none of "
        "__dlpack__, __array_interface__, __cuda_array_interface__ and the buffer protocol; "
        "convert it with numpy.asarray, or use bcast_object or allreduce_tree"
    )


def _by_dlpack(x: Any, operation: str, label: str) -> BufferView | None:
    if _attribute(x, "__dlpack__", label) is None:
        return None
    device = _dlpack.CPU_DEVICE
    if _attribute(x, "__dlpack_device__", label) is not None:
        device = _dlpack.device_of(x, label)
    if device[0] in _dlpack.CUDA:
        return _through_cupy(x, operation, label)
    array, copied = _dlpack.read(x, device, label)
    off_host = device[0] not in _dlpack.HOST
    return _foreign_view(array, x, copied or off_host, label)


def _foreign_view(array: Array, x: Any, copied: bool, label: str) -> BufferView:
    has_namespace = _attribute(x, "__array_namespace__", label) is not None
    framework = "namespace" if has_namespace else "numpy"
    return BufferView(array, framework, x, not array.flags.writeable, copied)


def _by_cuda_interface(x: Any, operation: str, label: str) -> BufferView | None:
    interface = _attribute(x, "__cuda_array_interface__", label)
    if interface is None:
        return None
    if not isinstance(interface, dict):
        raise BufferError(f"{label}.__cuda_array_interface__ must be a dict")
    _dlpack.check_unmasked(interface, label)
    found = _through_cupy(x, operation, label)
    found.readonly = bool(interface["data"][1])
    return found


def as_cupy(x: Any) -> Any:
    """Return the device memory of any object as CuPy's array, ordered after its producer."""
    import cupy

    if hasattr(x, "__cuda_array_interface__"):
        return cupy.asarray(x)
    return cupy.from_dlpack(x)


def _through_cupy(x: Any, operation: str, label: str) -> BufferView:
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        raise BufferError(
            f"{label} is in device memory, which is read through CuPy, and CuPy cannot be "
            f"imported ({error}); install it, or pass a copy on the host"
        ) from error
    try:
        found = _read_cupy(as_cupy(x), operation, label)
    except (BufferError, MemoryError):
        raise
    except Exception as error:
        raise BufferError(f"{label} cannot be read by CuPy: {_dlpack.describe(error)}") from error
    found.source = x
    return found


def _by_array_interface(x: Any, operation: str, label: str) -> BufferView | None:
    interface = _attribute(x, "__array_interface__", label)
    if interface is None:
        return None
    return _described(_dlpack.from_array_interface(interface, x, label), x, operation, label)


def _by_array_struct(x: Any, operation: str, label: str) -> BufferView | None:
    capsule = _attribute(x, "__array_struct__", label)
    if capsule is None:
        return None
    return _described(_dlpack.from_array_struct(capsule, x, label), x, operation, label)


def _by_buffer(x: Any, operation: str, label: str) -> BufferView | None:
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
            f"{label} has elements of the format {memory.format!r}, which NumPy cannot read: {error}"
        ) from error
    return _described(array, x, operation, label)


def _described(array: Array, x: Any, operation: str, label: str) -> BufferView:
    native = _native(array, operation)
    found = _foreign_view(native, x, native is not array, label)
    found.readonly = not array.flags.writeable
    return found


def _attribute(x: Any, attribute: str, label: str) -> Any:
    try:
        return getattr(x, attribute, None)
    except MemoryError:
        raise
    except Exception as error:
        raise BufferError(f"{label}.{attribute} raised {_dlpack.describe(error)}") from error


_PROTOCOLS: Final = (
    _by_dlpack,
    _by_cuda_interface,
    _by_array_interface,
    _by_array_struct,
    _by_buffer,
)

# By the top-level module of a class in the type's ancestry: what finds the reader of the type.
_FRAMEWORKS: Final[dict[str, Callable[[type], Reader | None]]] = {
    "numpy": _find_numpy,
    "builtins": _find_python,
    "torch": _find_torch,
    "jax": _find_jax,
    "jaxlib": _find_jax,
    "cupy": _find_cupy,
    "array_api_strict": _find_strict,
    "mlx": _find_mlx,
}

# Readers of the types met so far. Types that no framework claims are not kept: ctypes and others
# make them on the fly, and this table would never let them go.
_READERS: Final[dict[type, Reader]] = {np.ndarray: _read_numpy}

NOTHING: Final = np.empty(0)

# Readers of frameworks whose arrays tell where they are without being read.
_PLACES: Final[dict[Reader, tuple[str, Callable[[Any], Device]]]] = {
    _read_torch: ("torch", torch_device),
    _read_jax: ("jax", jax_device),
    _read_cupy: ("cupy", cupy_device),
    _read_mlx: ("mlx", lambda _: CPU),
}
