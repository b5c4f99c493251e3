"""Python's numbers, and its objects that are no arrays."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView, Reader, type_name
from arraycomm._arrays.frameworks.base import Framework
from arraycomm._errors import with_alternatives

_NUMBERS: Final[dict[type, type]] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    complex: np.complex128,
}
_OBJECTS: Final = (str, list, dict, tuple, set, frozenset, range, type(None), type)


def find_reader(kind: type) -> Reader | None:
    """Return the reader of numbers of this type, or what refuses an object of Python's."""
    if issubclass(kind, tuple(_NUMBERS)):
        return _read_number
    return refuse_object if issubclass(kind, _OBJECTS) else None


def _read_number(x: Any, name: str) -> BufferView:
    dtype: Any = next(_NUMBERS[base] for base in type(x).__mro__ if base in _NUMBERS)
    try:
        array: Array = np.array(x, dtype)
    except OverflowError:
        raise OverflowError(
            f"{name} = {x:#x} does not fit int64; pass a float or an array"
        ) from None
    return BufferView(array, "python", x, True, True)


def refuse_object(x: Any, name: str) -> BufferView:
    """Raise for an object of Python's that is no array."""
    raise no_array(x, name)


# What takes any object, or a tree of arrays, by the operation that refuses it.
_OF_OBJECTS: Final = {
    **dict.fromkeys(
        ("allreduce", "reduce", "reduce_scatter", "scan", "exscan", "scatter", "alltoall"),
        "bcast_object or allgather_object for any object",
    ),
    "bcast": "bcast_object for any object",
    **dict.fromkeys(("allgather", "allgatherv"), "allgather_object for any object"),
    **dict.fromkeys(("gather", "gatherv"), "gather_object for any object"),
    **dict.fromkeys(("send", "sendrecv"), "send_object for any object"),
}
_OF_TREES: Final = {
    **dict.fromkeys(("allreduce", "reduce"), "arraycomm.allreduce_tree for a tree of arrays"),
    "bcast": "arraycomm.synchronize for a tree of arrays, bcast_object for any object",
}
# What lets a tree hold an object.
_IN_TREES: Final = dict.fromkeys(
    ("allreduce_tree", "allreduce_gradients", "plan", "mean_metrics", "synchronize"),
    "a method __arraycomm_tree__ of its class, which shows its arrays",
)


def no_array(x: Any, name: str, lacking: str = "") -> TypeError:
    """Return the error for an object that is neither an array nor a number."""
    is_leaf = isinstance(x, str | set | frozenset | range | type | None)
    instead = _OF_OBJECTS if is_leaf else _OF_OBJECTS | _OF_TREES
    return with_alternatives(
        TypeError(
            f"{name} must be an array or a number; got {type_name(x)}{lacking}; pass "
            f"{_numbers_of(x, name)}"
        ),
        instead | _IN_TREES if lacking else instead,
    )


def _numbers_of(x: Any, name: str) -> str:
    """Return what makes an array of an object that may hold numbers."""
    if hasattr(type(x), "toarray"):
        return f"{name}.toarray()"
    if isinstance(x, set | frozenset):
        return f"numpy.asarray(sorted({name})) if it holds numbers"
    if isinstance(x, list | tuple | range) or hasattr(type(x), "__array__"):
        return f"numpy.asarray({name}) if it holds numbers"
    return "one of these"


def _to_number(array: Array, _like: BufferView) -> Any:
    return array.item() if array.ndim == 0 else array


PYTHON: Final = Framework(name="python", to_framework=_to_number, number=True)
