"""`exchange`: any array as an array of another framework, through the door of the collectives."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import CPU, Array, BufferView, Device
from arraycomm._arrays.protocols import as_cupy
from arraycomm._arrays.results import allocate, takes_over, to_framework
from arraycomm._arrays.views import NOTHING, check_readable, result_prototype, view

_MODULES: Final = {
    "numpy": "numpy",
    "torch": "torch",
    "jax": "jax",
    "cupy": "cupy",
    "array_api_strict": "array_api_strict",
    "mlx": "mlx.core",
}
_ON_DEVICES: Final = frozenset(("torch", "jax", "cupy"))


def exchange(x: Any, to: Any, *, copy: bool | None = None) -> Any:
    """Return `x` as an array of another framework.

    The call is local: no other rank takes part. The result has the shape, dtype and elements of
    `x`, whatever its strides.

    Parameters
    ----------
    x : array or number
        Any array that a collective takes.
    to : str or array
        "numpy", "torch", "jax", "cupy", "array_api_strict" or "mlx": an array of that framework, on
        the device of `x` where the framework can use it. Or an array: the result is of its
        framework and on its device; nothing else about it matters.
    copy : bool, optional
        As in the array API standard. None copies only where memory cannot be shared, False never
        does, True always makes memory of its own.

    Returns
    -------
    array
        `x` itself where it is such an array already and `copy` is not True.

    Raises
    ------
    BufferError
        `copy` is False and memory cannot be shared; the message says why. Also where `x` shows
        memory that cannot be read.
    TypeError
        `x` is no array, has a dtype that the framework lacks, is traced, or requires gradients
        while grad mode is on.
    ValueError
        `to` is a name that is not known, or `x` is a deleted JAX array.
    ImportError
        The framework is not installed.

    Notes
    -----
    DeviceMemory is shared with these exceptions. PyTorch has no read-only tensors and no negative
    strides, so such memory is copied. JAX shares memory that is C-contiguous and aligned to 64
    bytes. MLX copies. Host and device never share.

    A NumPy array over a JAX array is read-only. The other way, JAX trusts that shared memory does
    not change: do not write to `x` after it became a JAX array without a copy.

    Shared memory costs some microseconds whatever its size (about 20 towards JAX); a copy moves the
    bytes of `x` once.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(3, dtype=np.float32)
    >>> y = exchange(x[::-1], "array_api_strict")  # shares memory
    >>> exchange(y, np.empty(0))
    array([2., 1., 0.], dtype=float32)
    """
    if copy not in {None, True, False}:
        raise ValueError(f"exchange: copy must be None, True or False; got {copy!r}")
    origin = result_prototype(x, "exchange", "x")
    like = _wanted(to, origin.device)
    if CPU != origin.device == like.device:
        found = _on_device(x, origin.framework, like, copy)
        if found is not None:
            return found
    source = view(x, "exchange") if origin.array is NOTHING else origin
    return _through_host(source, like, copy)


def _wanted(to: Any, device: Device) -> BufferView:
    """Return what the result must be like; a name alone leaves the array on its device."""
    if not isinstance(to, str):
        like = result_prototype(to, "exchange", "to")
        if like.framework in {"python", "numpy_scalar"}:
            raise TypeError(
                f"exchange: to must be the name of a framework or an array; got {type(to).__name__}"
            )
        return like
    module = _MODULES.get(to)
    if module is None:
        raise ValueError(f"exchange: to must be one of {', '.join(_MODULES)}; got {to!r}")
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"exchange: to={to!r} needs {to}, which cannot be imported ({error}); install it first"
        ) from error
    return BufferView(NOTHING, to, None, True, True, device if to in _ON_DEVICES else CPU)


def _through_host(source: BufferView, like: BufferView, copy: bool | None) -> Any:
    if copy is not True and _is_already(source, like):
        return source.source
    unfit = reason_to_copy(source.array, like.framework)
    if copy is False and source.array.size:
        _refuse_copy(_reason_before(source) or _reason_after(like) or unfit)
    array = source.array
    private = source.copied and array.flags.writeable
    if takes_over(like.framework, array.dtype) and (unfit or (copy is True and not private)):
        array = _duplicate(array)
    result = to_framework(array, like, "exchange")
    if copy is False and like.framework == "jax" and array.size:
        _check_shared(result, array)
    return result


def _is_already(source: BufferView, like: BufferView) -> bool:
    if (source.framework, source.device) != (like.framework, like.device):
        return False
    if source.framework == "namespace":
        return type(source.source) is type(like.source)
    converted = source.copied and source.device == CPU
    return not converted and (source.framework != "numpy" or isinstance(source.source, np.ndarray))


def _refuse_copy(reason: str | None) -> None:
    if reason is not None:
        raise BufferError(f"exchange: copy=False, but {reason}; pass copy=None or copy=True")


def _reason_before(source: BufferView) -> str | None:
    if source.framework in {"python", "numpy_scalar"}:
        return "a number has no memory to share"
    if source.device != CPU:
        return f"x is on {source.device[0]}:{source.device[1]}"
    return "the elements of x had to be converted on reading" if source.copied else None


def _reason_after(like: BufferView) -> str | None:
    if like.device != CPU or like.framework == "cupy":
        return f"the result is on {like.device[0] if like.device != CPU else 'cuda'}"
    return None


def reason_to_copy(array: Array, framework: str) -> str | None:
    """Say why this framework cannot share this host memory; None where it can."""
    if framework == "mlx":
        return "MLX copies what it is given"
    rules = _RULES.get(framework)
    if rules is None:
        return None
    return next((reason for broken, reason in rules if broken(array)), None)


def _misaligned(array: Array) -> bool:
    return not array.flags.aligned or any(step % array.itemsize for step in array.strides)


_Rule = tuple[Callable[[Array], bool], str]

_RULES: Final[dict[str, tuple[_Rule, ...]]] = {
    "torch": (
        (
            lambda array: not array.flags.writeable,
            "x is read-only, which a torch tensor cannot be",
        ),
        (
            lambda array: any(step < 0 for step in array.strides),
            "torch has no negative strides",
        ),
        (_misaligned, "the elements of x are not aligned for torch"),
    ),
    "jax": (
        (
            lambda array: not array.flags.c_contiguous,
            "JAX shares only C-contiguous memory",
        ),
        (
            lambda array: array.size > 0 and array.__array_interface__["data"][0] % 64 != 0,
            "JAX shares only memory aligned to 64 bytes",
        ),
    ),
    # A namespace that is not known here may not check what it is given.
    "namespace": (
        (
            lambda array: not (array.flags.c_contiguous and array.flags.writeable),
            "only writable C-contiguous memory is shared with an unknown array type",
        ),
    ),
}


def _duplicate(array: Array) -> Array:
    fresh = allocate(array.shape, array.dtype)
    np.copyto(fresh, array)
    return fresh


def _check_shared(result: Any, array: Array) -> None:
    if result.unsafe_buffer_pointer() != array.__array_interface__["data"][0]:
        _refuse_copy("JAX's default device is not the host")


# Arrays that stay on their device ---------------------------------------------------------------


def _on_device(x: Any, framework: str, like: BufferView, copy: bool | None) -> Any:
    """Return `x` without a way over the host, or None where there is no such way."""
    check_readable(x, framework, "exchange", "x")
    if framework == "cupy":
        x = as_cupy(x)  # what stands for CuPy's may be any object with device memory
    if framework == like.framework:
        return _COPIERS[framework](x) if copy is True else x
    try:
        shared = _import(x, like.framework)
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None  # a dtype or layout that this pair does not share
    if framework == "jax" and copy is False:
        _refuse_copy(f"x is an immutable JAX array, and {like.framework} could write to it")
    return _COPIERS[like.framework](shared) if copy is True or framework == "jax" else shared


def _import(x: Any, framework: str) -> Any:
    """Take over device memory by DLPack, which orders both frameworks' streams."""
    module = importlib.import_module("jax.numpy" if framework == "jax" else framework)
    return module.from_dlpack(x)


_COPIERS: Final[dict[str, Callable[[Any], Any]]] = {
    "torch": lambda x: x.detach().clone(),
    "jax": lambda x: x.copy(),
    "cupy": lambda x: x.copy(),
}
