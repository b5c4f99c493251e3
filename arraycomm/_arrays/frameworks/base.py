"""`Framework`: what the core knows about the arrays of one framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from arraycomm._arrays.buffer import CPU, Array, BufferView, Device, Reader
from arraycomm._dtypes import DType, name_of


def _copy_back(out: BufferView) -> Any:
    if out.copied:
        np.copyto(out.source, out.array)
    return out.source


def unconverted(source: BufferView, _like: BufferView) -> bool:
    """Return whether the elements of `source` were read as they are."""
    return not source.copied or source.device != CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """What `exchange` does with a framework's arrays that stay on their device."""

    # Returns an array as the framework's own type. Gets the array and what messages call it. Raises
    # if the array cannot be read.
    own: Callable[[Any, str], Any]
    # Returns a copy of an array.
    copy: Callable[[Any], Any]
    # The module whose `from_dlpack` takes over another framework's array.
    namespace: str


@dataclass(frozen=True, slots=True)
class ByAddress:
    """How prepared calls read and make arrays, where a view of each would take them too long.

    Arrays are of the type, dtype and shape that the first call has looked at through a view.
    """

    # Returns where an array's elements are, in C order on the host. 0 if it has to be looked at
    # through a view, which may refuse it.
    address: Callable[[Any], int]
    # Returns what makes a result of a shape and a dtype, and returns it with its address.
    maker: Callable[[tuple[int, ...], DType], Callable[[], tuple[Any, int]]]
    # Records that an array was written.
    wrote: Callable[[Any], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One framework's arrays, as the core sees them. The defaults are right for most frameworks."""

    # `BufferView.framework` of its arrays.
    name: str
    # Returns a NumPy array as an array of the framework, like the array of a view.
    to_framework: Callable[[Array, BufferView], Any]
    # Reads its arrays. None if several readers do.
    read: Reader | None = None
    # Returns new memory on the host that `to_framework` takes over as the framework's own. None if
    # any is as good.
    allocate: Callable[[tuple[int, ...], DType], Array] | None = None
    # Keeps an array's memory where it is, since another framework's array shares it from now on.
    pin: Callable[[Any], object] = lambda _: None
    # Returns a result that takes part in other dtypes' arithmetic as an array does, the second
    # argument. None if that follows from its dtype.
    promoting_like: Callable[[Any, Any], Any] | None = None
    # Returns an array's device without reading the elements. None if only reading tells.
    device_of: Callable[[Any], Device] | None = None
    # Returns whether `to_framework` hands over memory of a dtype without a copy.
    takes_over: Callable[[DType], bool] = lambda _: True
    # Finishes a write into the view of an `out`, and returns the caller's object.
    commit_out: Callable[[BufferView], Any] = _copy_back
    # Returns the float dtype of most bits.
    widest_float: Callable[[], DType] = lambda: np.dtype(np.float64)
    # Returns the dtypes of the table that a result like an array cannot have. Gets that array.
    lacks: Callable[[Any], frozenset[DType]] = lambda _: frozenset()
    # Whether a result can have a dtype that is not in the table, such as a structured one.
    takes_opaque: bool = True
    # Whether its values are numbers, which have no memory.
    number: bool = False
    # What stands before "array" in messages, if its arrays must not be written. Else empty.
    immutable: str = ""
    # Whether `commit_out` can write a view that is a copy back into its array.
    copies_back: bool = False
    # Whether `commit_out` replaces all elements, because an array's memory may belong to others as
    # well.
    replaces_out: bool = False
    # What `exchange` imports to make its arrays. None if `exchange` cannot be asked for it.
    module: str | None = None
    # Returns whether the array of a view need not be exchanged for one like another view's. Both
    # views are of this framework, on one device.
    is_already: Callable[[BufferView, BufferView], bool] = unconverted
    # Says why the framework cannot share a NumPy array's memory; None if it can.
    reason_to_copy: Callable[[Array], str | None] = lambda _: None
    # Says why a result is not the memory that `to_framework` got; None if it is.
    reason_copied: Callable[[Any, Array], str | None] = lambda _, __: None
    # Returns how prepared calls read and make arrays of a type. None if they do by views.
    by_address: Callable[[type], ByAddress | None] = lambda _: None
    # None if its arrays are always on the host.
    on_device: OnDevice | None = None


def no_such_dtype(framework: str, dtype: DType) -> TypeError:
    """Return the error for a result whose dtype the framework lacks."""
    return TypeError(
        f"{framework} has no dtype {name_of(dtype)}; cast first, or take the array as NumPy's"
    )
