"""`Framework`: what the core knows about the arrays of one framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from arraycomm._arrays.buffer import CPU, Array, BufferView, Device, Reader
from arraycomm._dtypes import DType, name_of


def _any_dtype(_dtype: DType) -> bool:
    return True


def _copy_back(out: BufferView) -> Any:
    if out.copied:
        np.copyto(out.source, out.array)
    return out.source


def _takes_all(_source: Any) -> frozenset[DType]:
    return frozenset()


def _float64() -> DType:
    return np.dtype(np.float64)


def _never(_array: Array) -> None:
    return None


def _as_asked(_result: Any, _array: Array) -> None:
    return None


def unconverted(source: BufferView, _like: BufferView) -> bool:
    """Tell whether the elements of `source` were read as they are."""
    return not source.copied or source.device != CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """What `exchange` does with a framework's arrays that stay on their device.

    Attributes
    ----------
    own : callable
        Returns an array as the framework's own type. Gets the array and what messages call it.
        Raises if the array cannot be read.
    copy : callable
        Returns a copy of an array.
    namespace : str
        The module whose `from_dlpack` takes over another framework's array.
    """

    own: Callable[[Any, str], Any]
    copy: Callable[[Any], Any]
    namespace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One framework's arrays, as the core sees them. The defaults are right for most frameworks.

    Attributes
    ----------
    name : str
        `BufferView.framework` of its arrays.
    to_framework : callable
        Returns a NumPy array as an array of the framework, like the array of a view.
    read : Reader, optional
        Reads its arrays. None if several readers do.
    device_of : callable, optional
        Returns an array's device without reading the elements. None if only reading tells.
    takes_over : callable
        Tells whether `to_framework` hands over memory of a dtype without a copy.
    commit_out : callable
        Finishes a write into the view of an `out`, and returns the caller's object.
    widest_float : callable
        Returns the float dtype of most bits.
    lacks : callable
        Returns the dtypes of the table that a result like an array cannot have. Gets that array.
    takes_opaque : bool
        A result can have a dtype that is not in the table, such as a structured one.
    number : bool
        Its values are numbers, which have no memory.
    immutable : str
        What messages call it, if its arrays must not be written. Else empty.
    copies_back : bool
        `commit_out` can write a view that is a copy back into its array.
    replaces_out : bool
        `commit_out` replaces all elements, because an array's memory may belong to others as well.
    module : str, optional
        What `exchange` imports to make its arrays. None if `exchange` cannot be asked for it.
    is_already : callable
        Tells whether the array of a view need not be exchanged for one like another view's. Both
        views are of this framework, on one device.
    reason_to_copy : callable
        Says why the framework cannot share a NumPy array's memory; None if it can.
    reason_copied : callable
        Says why a result is not the memory that `to_framework` got; None if it is.
    on_device : OnDevice, optional
        None if its arrays are always on the host.
    """

    name: str
    to_framework: Callable[[Array, BufferView], Any]
    read: Reader | None = None
    device_of: Callable[[Any], Device] | None = None
    takes_over: Callable[[DType], bool] = _any_dtype
    commit_out: Callable[[BufferView], Any] = _copy_back
    widest_float: Callable[[], DType] = _float64
    lacks: Callable[[Any], frozenset[DType]] = _takes_all
    takes_opaque: bool = True
    number: bool = False
    immutable: str = ""
    copies_back: bool = False
    replaces_out: bool = False
    module: str | None = None
    is_already: Callable[[BufferView, BufferView], bool] = unconverted
    reason_to_copy: Callable[[Array], str | None] = _never
    reason_copied: Callable[[Any, Array], str | None] = _as_asked
    on_device: OnDevice | None = None


def no_such_dtype(framework: str, dtype: DType) -> TypeError:
    """Return the error for a result whose dtype the framework lacks."""
    return TypeError(
        f"{framework} has no dtype {name_of(dtype)}; cast first, or take the array as NumPy's"
    )
