"""The items of a data set: one by one, and many at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np
from array_api_compat import array_namespace, is_array_api_obj, is_jax_array, is_numpy_array

from arraycomm._arrays.buffer import type_name
from arraycomm._arrays.dlpack import describe, offered
from arraycomm._arrays.exchange import exchange
from arraycomm._errors import raise_interrupt
from arraycomm._training.batches.order import Integers
from arraycomm._trees.pytrees import flatten

_NAME: Final = "DistributedDataContainer"


class Items(Protocol):
    """The items of a data set."""

    def __len__(self) -> int: ...

    def one(self, item: int) -> Any:
        """Return one item."""

    def many(self, index: Integers) -> Any:
        """Return the items that `index` names, in its order."""


def items_of(data: Any) -> Items:
    """Return the items of any data set, or raise `TypeError` or `ValueError`."""
    instead = _instead(data)
    if instead is not None:
        raise TypeError(f"{_NAME}: data is a {type_name(data)}, {instead}")
    return _Rows(data) if _is_tree(data) else _Sequence(data)


def _instead(data: Any) -> str | None:
    """Say why items cannot be had by their numbers, and what to pass; None if they may be."""
    kind = type(data)
    if hasattr(kind, "__dask_graph__") and data.__dask_graph__() is not None:
        return "which is computed later; pass data.compute()"
    if any(hasattr(kind, name) for name in _OF_TABLES):
        names = "column_names" if hasattr(data, "column_names") else "columns"
        way = "data.to_numpy()"
        if hasattr(data, names):
            way = f"a dict of its columns, {{name: data[name].to_numpy() for name in data.{names}}}"
        return f"which is indexed by its columns or labels; pass {way}"
    if hasattr(kind, "toarray"):
        return "whose rows cannot be indexed in every format; pass data.toarray()"
    if _is_other_mapping(data):
        return (
            "a mapping that is no tree; pass one of its values, or a dict of its arrays, "
            "{name: numpy.asarray(data[name]) for name in data.keys()}"
        )
    return None


# Pandas and what is like it, and what shows its columns to Arrow's consumers.
_OF_TABLES: Final = ("iloc", "__dataframe__", "__arrow_c_stream__", "__arrow_c_array__")


def _is_other_mapping(data: Any) -> bool:
    """Return whether a mapping is no node of trees; zarr's groups do not say that they are one."""
    if isinstance(data, Mapping):
        return _is_leaf(data)
    if not (callable(getattr(type(data), "keys", None)) and hasattr(type(data), "__iter__")):
        return False
    first = next(iter(data), None)
    return isinstance(first, str) and first in list(data.keys())


def _collected(data: Any) -> str:
    """Say what makes a sequence of the items, if anything does."""
    if hasattr(type(data), "collect"):
        return "; pass data.collect()"
    return "; pass list(data)" if hasattr(type(data), "__iter__") else ""


class _Sequence:
    """Anything with a length and integer indices; many items are a list."""

    def __init__(self, data: Any) -> None:
        # Its `__getitem__` only raises.
        kinds = [kind for kind in type(data).__mro__ if kind.__module__.startswith("torch.")]
        if "IterableDataset" in [kind.__name__ for kind in kinds]:
            raise TypeError(
                f"{_NAME}: data is a {type(data).__name__}, an IterableDataset of torch: its items "
                "can only be gone through, not indexed; pass list(data), or a map-style data set"
            )
        # Zarr's arrays have a shape alone.
        has_length = hasattr(data, "__len__") or bool(getattr(data, "shape", ()))
        if not (has_length and hasattr(data, "__getitem__")):
            raise TypeError(
                f"{_NAME}: data must have a length and take integer indices, as lists, arrays and "
                f"map-style data sets do, or be a tree of arrays; got {type_name(data)}"
                f"{_collected(data)}"
            )
        self._data = data

    def __len__(self) -> int:
        data = self._data
        return len(data) if hasattr(data, "__len__") else int(data.shape[0])

    def one(self, item: int) -> Any:
        return self._data[item]

    def many(self, index: Integers) -> list[Any]:
        return [self._data[item] for item in index.tolist()]


class _Rows:
    """Arrays that share their axis 0; many items are a tree of arrays of the same kinds."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._flat = flatten(data, "data")
        lengths = {
            path: _length_of(leaf, path)
            for leaf, path in zip(self._flat.leaves, self._flat.paths, strict=True)
            if leaf is not None
        }
        if not lengths:
            raise TypeError(f"{_NAME}: data is a {type(data).__name__} without any array in it")
        for path, leaf in zip(self._flat.paths, self._flat.leaves, strict=True):
            _check_rows(leaf, path)
        self._length = next(iter(lengths.values()))
        if set(lengths.values()) != {self._length}:
            found = ", ".join(f"{path} has {length}" for path, length in lengths.items())
            raise ValueError(
                f"{_NAME}: the arrays of data must be of one length along axis 0; {found}. Pass a "
                "list for a sequence of items"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # How to rebuild the tree cannot be pickled; the tree can.
        return _Rows, (self._data,)

    def __len__(self) -> int:
        return self._length

    def one(self, item: int) -> Any:
        leaves = [None if leaf is None else _row(leaf, item) for leaf in self._flat.leaves]
        return self._flat.rebuild(leaves)

    def many(self, index: Integers) -> Any:
        leaves = [None if leaf is None else _take(leaf, index) for leaf in self._flat.leaves]
        return self._flat.rebuild(leaves)


def _is_tree(data: Any) -> bool:
    """Tell a tree of arrays from a sequence of items.

    A tuple is a tree if it holds arrays, and otherwise a sequence; a list is always a sequence.
    """
    if _is_array(data) or isinstance(data, Mapping):
        return True
    if isinstance(data, tuple):
        if any(map(_is_array, flatten(data, "data").leaves)):
            return True
        for number, item in enumerate(data):
            if hasattr(item, "__len__") and not isinstance(item, str | bytes | tuple | Mapping):
                raise TypeError(
                    f"{_NAME}: data is a tuple, and data[{number}] is a {type(item).__name__}; "
                    "pass a tuple of arrays if their rows are the items, and otherwise a list"
                )
        return False
    if hasattr(data, "__getitem__") or hasattr(data, "__iter__"):
        return False
    return dataclasses.is_dataclass(data) or not _is_leaf(data)


def _is_leaf(data: Any) -> bool:
    leaves = flatten(data, "data").leaves
    return len(leaves) == 1 and leaves[0] is data


def _is_array(x: Any) -> bool:
    # MLX's arrays and plain DLPack objects have no namespace; JAX's random keys have no DLPack.
    return offered(x) or (is_array_api_obj(x) and not isinstance(x, np.generic))


def _length_of(leaf: Any, path: str) -> int:
    if not (_is_array(leaf) and hasattr(leaf, "shape")):
        ways = {"__array__": "numpy.asarray", "__dlpack__": "numpy.from_dlpack"}
        found = [f"{way}({path}), or " for name, way in ways.items() if hasattr(type(leaf), name)]
        way = "".join(found[:1])
        raise TypeError(
            f"{_NAME}: {path} is a {type_name(leaf)}; the leaves of a tree must be arrays with one "
            f"item for each index of axis 0. Pass {way}a list for a sequence of items"
        )
    if not leaf.shape:
        raise ValueError(
            f"{_NAME}: {path} has no axis 0, along which its items would be; got a 0-d array"
        )
    return int(leaf.shape[0])


def _check_rows(array: Any, path: str) -> None:
    """Raise for an array that cannot give several of its rows; none are read."""
    try:
        if array is not None:
            _take(array, np.empty(0, np.int64))
    except Exception as error:
        raise_interrupt(error)
        raise TypeError(
            f"{_NAME}: {path} is a {type_name(array)}, whose rows cannot be taken by an array of "
            f"their numbers ({describe(error)}); pass numpy.asarray({path})"
        ) from error


def _row(array: Any, item: int) -> Any:
    # A row of a NumPy vector is a number. The array API standard demands the ellipsis.
    return array[item] if isinstance(array, np.ndarray) else array[item, ...]


def _take(array: Any, index: Integers) -> Any:
    """Return rows of an array as one of the same kind; only these rows are read."""
    if is_numpy_array(array):
        # NumPy's `take` would first copy the whole of an array whose rows are not contiguous.
        return array[index]
    if not is_array_api_obj(array):
        return array[exchange(index, array)]
    # JAX takes NumPy's indices; its own have 64 bits only in its 64-bit mode.
    rows = index if is_jax_array(array) else exchange(index, array)
    return array_namespace(array).take(array, rows, axis=0)
