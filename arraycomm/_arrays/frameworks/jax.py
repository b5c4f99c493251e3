"""JAX's arrays, which are immutable."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import CPU, Array, BufferView, Device, Reader
from arraycomm._arrays.frameworks.base import Framework, OnDevice, no_such_dtype, unconverted
from arraycomm._dtypes import BY_DTYPE, DType, check_movable
from arraycomm._errors import with_alternatives

# The dtypes of 64 bits a part, which JAX has only in its 64-bit mode.
WIDE: Final = frozenset(np.dtype(name) for name in ("int64", "uint64", "float64", "complex128"))


def find_reader(kind: type) -> Reader | None:
    """Return the reader of arrays of this type, or what refuses a tracer."""
    jax = sys.modules.get("jax")
    if jax is None:
        return None
    if issubclass(kind, jax.core.Tracer):
        return _refuse_tracer
    return read_jax if issubclass(kind, jax.Array) else None


# Reading ----------------------------------------------------------------------------------------


# What JAX's transformations take in place of a plain call.
_INSTEAD: Final = {
    name: f"arraycomm.adapters.jax.{instead}"
    for name, instead in {
        **{
            name: name for name in ("allreduce", "allgather", "reduce_scatter", "alltoall", "bcast")
        },
        "reduce": "allreduce",
        "gather": "allgather",
        "send": "sendrecv",
        "allreduce_tree": "allreduce for each leaf",
        "allreduce_gradients": "all_reduce().update",
    }.items()
}


def _refuse_tracer(_x: Any, name: str) -> BufferView:
    error = TypeError(
        f"{name} is traced by JAX (jit, grad, vmap or scan) and has no elements yet; "
        "call this outside of the function"
    )
    raise with_alternatives(error, _INSTEAD)


def read_jax(x: Any, name: str) -> BufferView:
    """Read an array, through a copy if it is on a device."""
    check_jax(x, name)
    device = jax_device(x)
    array = np.asarray(x)
    check_movable(array.dtype, name)
    return BufferView(array, "jax", x, True, device[0] != "cpu", device)


def check_jax(x: Any, name: str) -> None:
    """Raise if an array has no elements, or has them on several devices in parts."""
    if not isinstance(x.dtype, np.dtype):
        raise TypeError(
            f"{name} is a typed key of JAX; pass jax.random.key_data({name}), and "
            "jax.random.wrap_key_data on the result"
        )
    if x.is_deleted():
        raise ValueError(
            f"{name} is a JAX array that was deleted or donated to a jitted function; "
            "pass the array that replaced it"
        )
    if len(x.sharding.device_set) > 1 and not (x.is_fully_replicated and x.is_fully_addressable):
        raise TypeError(
            f"{name} is sharded over {len(x.sharding.device_set)} devices; pass its "
            "addressable shards one by one, or replicate it first"
        )


def jax_device(x: Any) -> Device:
    """Return an array's device, the first of several."""
    device = next(iter(x.sharding.device_set))
    if device.platform == "cpu":
        return CPU
    return ("cuda" if device.platform == "gpu" else device.platform, device.id)


# Results ----------------------------------------------------------------------------------------


def _to_jax(array: Array, like: BufferView) -> Any:
    if array.dtype not in BY_DTYPE:
        raise no_such_dtype("jax", array.dtype)
    with keeping_bits(array.dtype, like.source):
        return sys.modules["jax"].device_put(array, jax_placement(like.source))


def promoting_like(made: Any, source: Any) -> Any:
    """Return an array that is weakly typed if `source` is, as what JAX makes of a number is.

    Then dtypes of other arrays win over its own, and a program compiled for such ones takes it.
    """
    if not getattr(source, "weak_type", False) or made.dtype != source.dtype:
        return made
    from jax._src.lax.lax import _convert_element_type

    return _convert_element_type(made, weak_type=True)


def keeping_bits(dtype: DType, source: Any) -> Any:
    """Let JAX keep 64 bits if it does by its configuration, or did for `source`."""
    jax = sys.modules["jax"]
    if dtype not in WIDE or jax.config.jax_enable_x64:
        return nullcontext()
    if dtype not in _lacks(source):
        return jax.enable_x64(True)
    raise TypeError(
        f"JAX would cut {dtype} to 32 bits, because its 64-bit mode is off; set "
        'jax.config.update("jax_enable_x64", True), or cast first'
    )


def _lacks(source: Any) -> frozenset[DType]:
    kept = sys.modules["jax"].config.jax_enable_x64 or (source is not None and source.dtype in WIDE)
    return frozenset() if kept else WIDE


def jax_placement(source: Any) -> Any:
    """Return the sharding of a result; None, the default device, if `source` is uncommitted."""
    if source is None or not source.committed:
        return None
    sharding = source.sharding
    if len(sharding.device_set) == 1:
        return sharding
    # Replicated, whatever the number of dimensions.
    jax = sys.modules["jax"]
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())


def _widest_float() -> DType:
    return np.dtype(np.float64 if sys.modules["jax"].config.jax_enable_x64 else np.float32)


# Exchange ---------------------------------------------------------------------------------------


def _reason_to_copy(array: Array) -> str | None:
    if not array.flags.c_contiguous:
        return "JAX shares only C-contiguous memory"
    if array.size and array.__array_interface__["data"][0] % 64:
        return "JAX shares only memory aligned to 64 bytes"
    return None


def _is_already(source: BufferView, like: BufferView) -> bool:
    """Return whether an array is on the devices of another one, of which the host may have many."""
    return unconverted(source, like) and (
        like.source is None or source.source.sharding.device_set == like.source.sharding.device_set
    )


def _reason_copied(result: Any, array: Array) -> str | None:
    if len(result.sharding.device_set) > 1:
        return "the result is on several devices"
    if result.unsafe_buffer_pointer() != array.__array_interface__["data"][0]:
        return "JAX's default device is not the host"
    return None


def _own(x: Any, name: str) -> Any:
    check_jax(x, name)
    return x


JAX: Final = Framework(
    name="jax",
    module="jax",
    read=read_jax,
    device_of=jax_device,
    to_framework=_to_jax,
    promoting_like=promoting_like,
    takes_over=BY_DTYPE.__contains__,
    widest_float=_widest_float,
    lacks=_lacks,
    takes_opaque=False,
    immutable="JAX",
    reason_to_copy=_reason_to_copy,
    reason_copied=_reason_copied,
    is_already=_is_already,
    on_device=OnDevice(own=_own, copy=lambda x: x.copy(), namespace="jax.numpy"),
)
