"""PyTorch's tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, Final

import ml_dtypes
import numpy as np

from arraycomm._arrays.buffer import (
    CPU,
    Array,
    BufferView,
    Device,
    Reader,
    allocate,
    type_name,
    use_large_pages,
)
from arraycomm._arrays.dlpack import Memory
from arraycomm._arrays.frameworks.base import ByAddress, Framework, OnDevice, no_such_dtype
from arraycomm._dtypes import BY_DTYPE, BY_NAME, DType
from arraycomm._errors import with_alternatives


def find_reader(kind: type) -> Reader | None:
    """Return the reader of tensors of this type."""
    return read_torch if issubclass(kind, sys.modules["torch"].Tensor) else None


# From this size on, NumPy asks for large pages.
_LARGE: Final = 1 << 22

# Reading ----------------------------------------------------------------------------------------


def read_torch(x: Any, name: str) -> BufferView:
    """Read a tensor: its own memory if that is plain host memory, else a copy."""
    plain = without_history(x, name) if x.requires_grad else x
    _check_tangent(x, name)
    array: Array | None
    try:
        array = None if _wrapped(x) else _memory_of(plain, name)
    except (RuntimeError, TypeError):
        array = None
    if array is None:
        return _read_by_copy(x, name)
    return BufferView(array, "torch", x, False)


class _NewMemory(Memory):
    """That of a tensor which was made for a result, and which the result is in the end."""

    __slots__ = ()


@cache
def torch_carriers() -> dict[Any, tuple[Any, DType]]:
    """Map the torch dtypes that NumPy lacks to an integer of their size and ml_dtypes' dtype."""
    torch = sys.modules["torch"]
    return {
        torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
        torch.float8_e4m3fn: (torch.int8, np.dtype(ml_dtypes.float8_e4m3fn)),
        torch.float8_e5m2: (torch.int8, np.dtype(ml_dtypes.float8_e5m2)),
    }


@cache
def _kind_of(dtype: Any) -> tuple[str, DType | None]:
    """Return what NumPy reads for a torch dtype, and its ml_dtypes dtype; raise if NumPy cannot."""
    torch = sys.modules["torch"]
    integers, carried = torch_carriers().get(dtype, (dtype, None))
    return torch.empty(0, dtype=integers, device="cpu").numpy().dtype.str, carried


def _memory_of(x: Any, name: str) -> Array:
    """Return a tensor's memory, not to be resized while in use; raise if it may be another one."""
    torch = sys.modules["torch"]
    if not _is_plain(x, torch.strided):
        raise TypeError("not plain memory")
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError("no memory of its own")
    check_storage(x, name)
    return _shared(x, Memory)


def _is_plain(x: Any, strided: Any) -> bool:
    """Return whether the elements of a tensor, if it has memory, are there as they are."""
    return x.is_cpu and x.layout is strided and not (x.is_conj() or x.is_neg())


def _shared(x: Any, memory: type[Memory]) -> Array:
    """Return a tensor's memory; `Tensor.numpy()` would forbid to resize it from then on."""
    # Every small call passes here twice.
    read_as, carried = _kind_of(x.dtype)
    address = x.data_ptr()
    if not address and x.numel():
        raise TypeError("no memory of its own")
    described = {
        "data": (address, False),
        "shape": tuple(x.shape),
        "typestr": read_as,
        "version": 3,
    }
    if not x.is_contiguous():
        described["strides"] = tuple(step * x.itemsize for step in x.stride())
    array: Array = np.asarray(memory(described, x))
    return array if carried is None else array.view(carried)


def without_history(x: Any, name: str) -> Any:
    """Return a tensor without its autograd history; raise while that would be lost."""
    if _wrapped(x):
        raise TypeError(f"{name} is {torch_refusal(x)}")
    if sys.modules["torch"].nn.parameter.is_lazy(x):
        raise TypeError(f"{name} has no shape yet; call the lazy module once on every rank before")
    if sys.modules["torch"].is_grad_enabled():
        raise with_alternatives(
            TypeError(
                f"{name} requires gradients, and their history would be lost; pass {name}.detach() "
                "or call this under torch.no_grad()"
            ),
            {
                operation: f"arraycomm.adapters.torch.{operation}"
                for operation in ("allgather", "allreduce", "alltoall", "bcast", "reduce_scatter")
            },
        )
    return x.detach()


def _wrapped(x: Any) -> bool:
    """Return whether `x` lives inside a transform of torch.func."""
    return bool(sys.modules["torch"]._C._functorch.is_functorch_wrapped_tensor(x))


def _check_tangent(x: Any, name: str) -> None:
    if _has_tangent(x):
        raise TypeError(f"{name} is {torch_refusal(x)}")


def _has_tangent(x: Any) -> bool:
    """Return whether `x` is a dual tensor of forward-mode differentiation."""
    forward_ad = sys.modules["torch"].autograd.forward_ad
    # Outside of every `dual_level` there are none; asking so takes a quarter of the time.
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def check_storage(x: Any, name: str) -> None:
    """Raise if a tensor's elements have no memory, as those of a sharded parameter have none."""
    count: int = x.numel()
    if not x.is_contiguous():
        count = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    needed = (x.storage_offset() + count) * x.itemsize if count else 0
    if needed > x.untyped_storage().nbytes():
        raise BufferError(
            f"{name} has no memory behind its elements (its storage was resized); "
            "gather the parameter before it is used"
        )


def _read_by_copy(x: Any, name: str) -> BufferView:
    reason = torch_refusal(x)
    if reason is not None:
        raise TypeError(f"{name} is {reason}")
    try:
        array = _memory_of(x.detach().resolve_conj().resolve_neg().cpu(), name)
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"{name} is a {type_name(x)} whose memory cannot be read ({error}); "
            "pass a plain, dense tensor"
        ) from error
    return BufferView(array, "torch", x, False, True, torch_device(x))


def torch_refusal(x: Any) -> str | None:
    """Say why this tensor has no dense memory of its own, and what to do about it."""
    torch = sys.modules["torch"]
    if _wrapped(x):
        return "traced by torch.func or torch.vmap; call this outside of the transformed function"
    if _has_tangent(x):
        return (
            "a dual tensor of forward-mode differentiation, whose tangent would be lost; pass what "
            "torch.autograd.forward_ad.unpack_dual returns, or detach()"
        )
    if x.is_nested:
        return "a nested tensor; pass its parts, or to_padded_tensor(0.0)"
    if x.is_quantized:
        return "quantized; pass dequantize(), or int_repr() and the scales"
    if x.layout is not torch.strided:
        return f"a tensor of layout {x.layout}; pass to_dense()"
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type_name(x)}, which has no memory of its own; pass a plain local tensor"
    if x.is_meta:
        return "on the meta device and has no elements; move it to a real device first"
    if str(x.dtype).removeprefix("torch.") not in BY_NAME:
        return f"of dtype {x.dtype}, which is not supported; cast to one of {', '.join(BY_NAME)}"
    return None


def torch_device(x: Any) -> Device:
    """Return a tensor's device; raise for one that is on none."""
    if x.is_meta:
        raise TypeError("a tensor on the meta device has no elements; pass one of a real device")
    return CPU if x.is_cpu else (x.device.type, x.device.index or 0)


# Results ----------------------------------------------------------------------------------------


def _to_torch(array: Array, like: BufferView) -> Any:
    tensor = _to_tensor(array)
    if like.device == CPU:
        return tensor
    # From pageable memory, the copy is in the order of the current stream and done on return.
    return tensor.to(sys.modules["torch"].device(*like.device))


def _allocate(shape: tuple[int, ...], dtype: DType) -> Array:
    """Return the memory of a new tensor, which may be resized later."""
    like = _empty_tensors().get(dtype)
    if like is None:
        return allocate(shape, dtype)
    tensor = like.new_empty(shape)
    if tensor.nbytes >= _LARGE:
        # As NumPy does: pages of 4 KiB would take longer than the reduction.
        use_large_pages(tensor.data_ptr(), tensor.nbytes)
    return _shared(tensor, _NewMemory)


@cache
def _empty_tensors() -> dict[DType, Any]:
    """Map the dtypes that torch has to empty tensors."""
    torch = sys.modules["torch"]
    found = {}
    for name, row in BY_NAME.items():
        with suppress(AttributeError, TypeError):
            _kind_of(getattr(torch, name))
            found[row.dtype] = torch.empty(0, dtype=getattr(torch, name), device="cpu")
    return found


def _to_tensor(array: Array) -> Any:
    owner: Any = array.base.base if isinstance(array.base, np.ndarray) else array.base
    if type(owner) is _NewMemory and array.flags.c_contiguous and owner.owner.shape == array.shape:
        return owner.owner
    torch = sys.modules["torch"]
    carried = _carried().get(array.dtype)
    if carried is not None:
        integers, dtype = carried
        return torch.from_numpy(array.view(integers)).view(dtype)
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise no_such_dtype("torch", array.dtype) from None


@cache
def _carried() -> dict[DType, tuple[str, Any]]:
    """Map ml_dtypes' dtypes to an integer of their size and torch's dtype."""
    return {
        numpy_dtype: (f"i{numpy_dtype.itemsize}", dtype)
        for dtype, (_, numpy_dtype) in torch_carriers().items()
    }


def _commit_out(out: BufferView) -> Any:
    """Copy a copy back, or record the write: autograd may have saved an older value."""
    torch = sys.modules["torch"]
    if out.copied:
        with torch.no_grad(), torch.inference_mode(out.source.is_inference()):
            out.source.copy_(_to_tensor(out.array))
    else:
        torch.autograd.graph.increment_version(out.source)
    return out.source


# By address -------------------------------------------------------------------------------------


@cache
def _by_address(kind: type) -> ByAddress | None:
    torch = sys.modules["torch"]
    # Any other class may say something else of itself in each call.
    if kind not in (torch.Tensor, torch.nn.Parameter):
        return None
    strided, has_grad_mode = torch.strided, torch.is_grad_enabled

    def address(x: Any) -> int:
        if (x.requires_grad and has_grad_mode()) or _wrapped(x) or _has_tangent(x):
            return 0
        if not (_is_plain(x, strided) and x.is_contiguous()):
            return 0
        if x.storage_offset() * x.itemsize + x.nbytes > x.untyped_storage().nbytes():
            return 0
        return x.data_ptr()  # type: ignore[no-any-return]

    def maker(shape: tuple[int, ...], dtype: DType) -> Callable[[], tuple[Any, int]]:
        # A shape in one argument takes a third of the time more.
        empty = partial(_empty_tensors()[dtype].new_empty, *(shape or ((),)))

        def make() -> tuple[Any, int]:
            made = empty()
            return made, made.data_ptr()

        return make

    return ByAddress(address, maker, torch.autograd.graph.increment_version)


# Exchange ---------------------------------------------------------------------------------------


def _reason_to_copy(array: Array) -> str | None:
    if not array.flags.writeable:
        return "x is read-only, which a torch tensor cannot be"
    if any(step < 0 for step in array.strides):
        return "torch has no negative strides"
    if not array.flags.aligned or any(step % array.itemsize for step in array.strides):
        return "the elements of x are not aligned for torch"
    return None


def _pin(x: Any) -> None:
    """Forbid a tensor to be resized from now on."""
    integers, _ = torch_carriers().get(x.dtype, (x.dtype, None))
    x.detach().view(integers).numpy()


def _own(x: Any, name: str) -> Any:
    if x.requires_grad:
        without_history(x, name)
    _check_tangent(x, name)
    return x


TORCH: Final = Framework(
    name="torch",
    module="torch",
    read=read_torch,
    allocate=_allocate,
    pin=_pin,
    device_of=torch_device,
    to_framework=_to_torch,
    takes_over=BY_DTYPE.__contains__,
    commit_out=_commit_out,
    takes_opaque=False,
    copies_back=True,
    reason_to_copy=_reason_to_copy,
    by_address=_by_address,
    on_device=OnDevice(own=_own, copy=lambda x: x.detach().clone(), namespace="torch"),
)
