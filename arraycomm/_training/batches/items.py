"""The items of a data set: one by one, and many at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np
from array_api_compat import array_namespace, is_array_api_obj, is_jax_array, is_numpy_array

from arraycomm._arrays.exchange import exchange
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
    if _is_tree(data):
        return _Rows(data)
    return _Sequence(data)


class _Sequence:
    """Anything with a length and integer indices; many items are a list."""

    def __init__(self, data: Any) -> None:
        if hasattr(data, "iloc"):
            raise TypeError(
                f"{_NAME}: data is a {type(data).__name__}, which is indexed by its labels; pass "
                "data.to_numpy(), or a dict of its columns as arrays"
            )
        # Its `__getitem__` only raises.
        kinds = [kind for kind in type(data).__mro__ if kind.__module__.startswith("torch.")]
        if "IterableDataset" in [kind.__name__ for kind in kinds]:
            raise TypeError(
                f"{_NAME}: data is a {type(data).__name__}, an IterableDataset of torch: its items "
                "can only be gone through, not indexed; pass list(data), or a map-style data set"
            )
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise TypeError(
                f"{_NAME}: data must have a length and take integer indices, as lists, arrays and "
                f"map-style data sets do, or be a tree of arrays; got {type(data).__name__}"
            )
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

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
    leaves = flatten(data, "data").leaves
    return dataclasses.is_dataclass(data) or not (len(leaves) == 1 and leaves[0] is data)


def _is_array(x: Any) -> bool:
    # MLX's arrays and plain DLPack objects have no namespace; JAX's random keys have no DLPack.
    return hasattr(x, "__dlpack__") or (is_array_api_obj(x) and not isinstance(x, np.generic))


def _length_of(leaf: Any, path: str) -> int:
    if not _is_array(leaf):
        raise TypeError(
            f"{_NAME}: {path} is a {type(leaf).__name__}; the leaves of a tree must be arrays with "
            "one item for each index of axis 0. Pass a list for a sequence of items"
        )
    if not leaf.shape:
        raise ValueError(
            f"{_NAME}: {path} has no axis 0, along which its items would be; got a 0-d array"
        )
    return int(leaf.shape[0])


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
