"""Readers of the frameworks' arrays: their own means first, since these know most.

No framework is imported: whoever holds an array of it has done that.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from arraycomm._arrays.buffer import CPU, Array, BufferView, Device, Reader, check_dtype, type_name
from arraycomm._dtypes import BY_DTYPE, BY_NAME, DType

# PyTorch ----------------------------------------------------------------------------------------


def find_torch(kind: type) -> Reader | None:
    return read_torch if issubclass(kind, sys.modules["torch"].Tensor) else None


@cache
def torch_carriers() -> dict[Any, tuple[Any, DType]]:
    """Map the torch dtypes that NumPy lacks to an integer of their size and ml_dtypes' dtype."""
    torch = sys.modules["torch"]
    return {
        torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
        torch.float8_e4m3fn: (torch.int8, np.dtype(ml_dtypes.float8_e4m3fn)),
        torch.float8_e5m2: (torch.int8, np.dtype(ml_dtypes.float8_e5m2)),
    }


def read_torch(x: Any, operation: str, name: str) -> BufferView:
    x_plain = without_history(x, operation, name) if x.requires_grad else x
    array: Array | None
    try:
        array = None if _wrapped(x) else _tensor_memory(x_plain)
    except (RuntimeError, TypeError):
        array = None
    if array is None:  # not plain host memory
        return _read_torch_by_copy(x, operation, name)
    check_storage(x, operation, name)
    return BufferView(array, "torch", x, False)


def _tensor_memory(x: Any) -> Array:
    carrier = torch_carriers().get(x.dtype)
    array: Array
    if carrier is None:
        array = x.numpy()
    else:
        array = x.view(carrier[0]).numpy().view(carrier[1])
    return array


def without_history(x: Any, operation: str, name: str) -> Any:
    if sys.modules["torch"].is_grad_enabled():
        raise TypeError(
            f"{operation}: {name} requires gradients, and their history would be lost; use the "
            "differentiable collectives of arraycomm.adapters.torch, or torch.no_grad()"
        )
    return x.detach()


def _wrapped(x: Any) -> bool:
    """Tell whether `x` lives inside a transform of torch.func."""
    return bool(sys.modules["torch"]._C._functorch.is_functorch_wrapped_tensor(x))


def check_storage(x: Any, operation: str, name: str) -> None:
    """Raise where a tensor's elements have no memory, as parameters that are sharded away have none."""
    if not _has_storage(x):
        raise BufferError(
            f"{operation}: {name} has no memory behind its elements (its storage was resized); "
            "gather the parameter before it is used"
        )


def _has_storage(x: Any) -> bool:
    if x.is_contiguous():
        reach = x.numel()
    else:
        reach = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return not x.numel() or (
        (x.storage_offset() + reach) * x.itemsize <= x.untyped_storage().nbytes()
    )


def _read_torch_by_copy(x: Any, operation: str, name: str) -> BufferView:
    reason = torch_refusal(x)
    if reason is not None:
        raise TypeError(f"{operation}: {name} is {reason}")
    try:
        array = _tensor_memory(x.detach().resolve_conj().resolve_neg().cpu())
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"{operation}: {name} is a {type_name(x)} whose memory cannot be read ({error}); "
            "pass a plain, dense tensor"
        ) from error
    return BufferView(array, "torch", x, False, True, torch_device(x))


def torch_refusal(x: Any) -> str | None:
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
        return f"a {type_name(x)}, which has no memory of its own; pass a plain local tensor"
    if x.is_meta:
        return "on the meta device and has no elements; move it to a real device first"
    if str(x.dtype).removeprefix("torch.") not in BY_NAME:
        return f"of dtype {x.dtype}, which is not supported; cast to one of {', '.join(BY_NAME)}"
    return None


def torch_device(x: Any) -> Device:
    """Return a tensor's device."""
    return CPU if x.is_cpu else (x.device.type, x.device.index or 0)


# JAX --------------------------------------------------------------------------------------------


def find_jax(kind: type) -> Reader | None:
    jax = sys.modules.get("jax")
    if jax is None:
        return None
    if issubclass(kind, jax.core.Tracer):
        return _refuse_tracer
    return read_jax if issubclass(kind, jax.Array) else None


def _refuse_tracer(_x: Any, operation: str, name: str) -> BufferView:
    raise TypeError(
        f"{operation}: {name} is traced by JAX (jit, grad, vmap or scan) and has no elements yet; "
        "use the collectives of arraycomm.adapters.jax, or call this outside of the function"
    )


def read_jax(x: Any, operation: str, name: str) -> BufferView:
    check_jax(x, operation, name)
    device = jax_device(x)
    array = np.asarray(x)
    if array.dtype not in BY_DTYPE:
        check_dtype(array.dtype, operation)
    return BufferView(array, "jax", x, True, device[0] != "cpu", device)


def check_jax(x: Any, operation: str, name: str) -> None:
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


def find_cupy(kind: type) -> Reader | None:
    return read_cupy if issubclass(kind, sys.modules["cupy"].ndarray) else None


def read_cupy(x: Any, operation: str, _name: str) -> BufferView:
    """Stage through pinned memory, in the order of CuPy's current stream."""
    check_dtype(x.dtype, operation)
    from arraycomm._arrays.pinned import pinned

    with x.device:
        host = pinned().empty(x.nbytes).view(x.dtype).reshape(x.shape)
        x.get(out=host)
    return BufferView(host, "cupy", x, False, True, cupy_device(x))


def cupy_device(x: Any) -> Device:
    """Return a CuPy array's device."""
    return ("cuda", x.device.id)


# array-api-strict and MLX -----------------------------------------------------------------------


def find_strict(kind: type) -> Reader | None:
    return _read_strict if hasattr(kind, "__dlpack__") else None


def _read_strict(x: Any, operation: str, _name: str) -> BufferView:
    array = np.from_dlpack(x)
    check_dtype(array.dtype, operation)
    return BufferView(array, "array_api_strict", x, not array.flags.writeable)


def find_mlx(kind: type) -> Reader | None:
    return read_mlx if issubclass(kind, sys.modules["mlx.core"].array) else None


def read_mlx(x: Any, operation: str, _name: str) -> BufferView:
    mx = sys.modules["mlx.core"]
    if x.dtype == mx.bfloat16:
        array = np.asarray(memoryview(x.view(mx.uint16))).view(ml_dtypes.bfloat16)
    else:
        array = np.asarray(memoryview(x))
    check_dtype(array.dtype, operation)
    array.flags.writeable = False
    return BufferView(array, "mlx", x, True)
