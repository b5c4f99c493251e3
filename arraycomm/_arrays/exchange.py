"""`exchange`: any array as an array of another framework, read as the collectives read it."""

from __future__ import annotations

import importlib
from typing import Any, Final, overload

import numpy as np

from arraycomm._arrays.buffer import CPU, BufferView, Device, allocate
from arraycomm._arrays.frameworks import BY_NAME
from arraycomm._arrays.typing import ArrayT
from arraycomm._arrays.views import NOTHING, result_prototype, view
from arraycomm._entries import entry
from arraycomm._errors import naming

_MODULES: Final = {row.name: row.module for row in BY_NAME.values() if row.module is not None}


@overload
def exchange(x: Any, to: str, *, copy: bool | None = None) -> Any: ...
@overload
def exchange(x: Any, to: ArrayT, *, copy: bool | None = None) -> ArrayT: ...
@entry
def exchange(x: Any, to: Any, *, copy: bool | None = None) -> Any:
    """Return `x` as an array of another framework.

    The call is local: no other rank takes part. The result has the shape, dtype and elements of
    `x`, whatever its strides.

    Parameters
    ----------
    x : array or number
        Any array that a collective takes.
    to : str or array
        A framework: "numpy", "torch", "jax", "cupy", "array_api_strict" or "mlx". The result is on
        the device of `x` if the framework can use that. Or an array: the result is of its framework
        and on its device; nothing else about it matters.
    copy : bool, optional
        As in the array API standard. None copies only if memory cannot be shared, False never
        copies, True always does.

    Returns
    -------
    array
        `x` itself if it is such an array already and `copy` is not True.

    Raises
    ------
    BufferError
        `copy` is False and memory cannot be shared; the message says why. Or the memory of `x`
        cannot be read.
    TypeError
        `x` is not an array, has a dtype that the framework lacks, is traced, or requires gradients
        while grad mode is on.
    ValueError
        `to` is an unknown name, or `x` is a deleted JAX array.
    ImportError
        The framework is not installed.

    Notes
    -----
    Memory is shared, with these exceptions. PyTorch has no read-only tensors and no negative
    strides, so such memory is copied. JAX shares only memory that is C-contiguous and aligned to 64
    bytes. MLX always copies. Host and device never share.

    A PyTorch tensor whose memory is shared cannot be resized any more.

    A NumPy array over a JAX array is read-only. In the other direction, JAX relies on shared memory
    not to change: do not write to `x` after it became a JAX array without a copy.

    Sharing takes some microseconds whatever the size (about 20 towards JAX); a copy moves the bytes
    of `x` once.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(3, dtype=np.float32)
    >>> y = exchange(x[::-1], "array_api_strict")  # shares memory
    >>> exchange(y, np.empty(0))
    array([2., 1., 0.], dtype=float32)
    """
    with naming("exchange"):
        return _taken_over(x, to, copy)


def _taken_over(x: Any, to: Any, copy: bool | None) -> Any:
    if not isinstance(copy, bool | np.bool | None):
        raise ValueError(f"copy must be None, True or False; got {copy!r}")
    copy = None if copy is None else bool(copy)
    origin = result_prototype(x, "x")
    like = _wanted(to, origin.device)
    if CPU != origin.device == like.device:
        found = _on_device(x, origin.framework, like.framework, copy)
        if found is not None:
            return found
    source = view(x) if origin.array is NOTHING else origin
    return _through_host(source, like, copy)


def _wanted(to: Any, device: Device) -> BufferView:
    """Return what the result must be like; a name alone leaves the array on its device."""
    if not isinstance(to, str):
        like = result_prototype(to, "to")
        if BY_NAME[like.framework].number:
            raise TypeError(
                f"to must be the name of a framework or an array; got {type(to).__name__}"
            )
        return like
    module = _MODULES.get(to)
    if module is None:
        raise ValueError(f"to must be one of {', '.join(_MODULES)}; got {to!r}")
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"exchange: to={to!r} needs {to}, which cannot be imported ({error}); install it first"
        ) from error
    on_host = BY_NAME[to].on_device is None
    return BufferView(NOTHING, to, None, True, True, CPU if on_host else device)


def _through_host(source: BufferView, like: BufferView, copy: bool | None) -> Any:
    framework = BY_NAME[like.framework]
    if copy is not True and _is_already(source, like):
        return source.source
    unfit = framework.reason_to_copy(source.array)
    if copy is False and source.array.size:
        _refuse_copy(_reason_before(source) or _reason_after(like) or unfit)
    array = source.array
    private = source.copied and array.flags.writeable
    if framework.takes_over(array.dtype) and (unfit or (copy is True and not private)):
        array = allocate(array.shape, array.dtype)
        np.copyto(array, source.array)
    result = framework.to_framework(array, like)
    why_copied = framework.reason_copied(result, array)
    if copy is False and array.size:
        _refuse_copy(why_copied)
    if why_copied is None and array is source.array and not source.copied:
        BY_NAME[source.framework].pin(source.source)
    return result


def _is_already(source: BufferView, like: BufferView) -> bool:
    if (source.framework, source.device) != (like.framework, like.device):
        return False
    return BY_NAME[like.framework].is_already(source, like)


def _refuse_copy(reason: str | None) -> None:
    if reason is not None:
        raise BufferError(f"copy=False, but {reason}; pass copy=None or copy=True")


def _reason_before(source: BufferView) -> str | None:
    if BY_NAME[source.framework].number:
        return "a number has no memory to share"
    if source.device != CPU:
        return f"x is on {source.device[0]}:{source.device[1]}"
    return "the elements of x had to be converted on reading" if source.copied else None


def _reason_after(like: BufferView) -> str | None:
    return None if like.device == CPU else f"the result is on {like.device[0]}"


def _on_device(x: Any, framework: str, wanted: str, copy: bool | None) -> Any:
    """Return `x` without a copy through the host, or None if the two frameworks cannot do that."""
    here, there = BY_NAME[framework].on_device, BY_NAME[wanted].on_device
    if here is None or there is None:
        return None
    x = here.own(x, "x")
    if framework == wanted:
        return here.copy(x) if copy is True else x
    try:
        # DLPack orders the streams of both frameworks.
        shared = importlib.import_module(there.namespace).from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None  # a dtype or layout that this pair does not share
    immutable = BY_NAME[framework].immutable
    if immutable and copy is False:
        _refuse_copy(f"x is an immutable {immutable} array, and {wanted} could write to it")
    return there.copy(shared) if copy is True or immutable else shared
