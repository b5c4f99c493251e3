"""Which items of a data set belong to which rank."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, Final, overload

import numpy as np

from arraycomm._communicator import Communicator
from arraycomm._runtime import world

_MODES: Final = ("exact", "pad", "drop")


class DistributedDataContainer(Sequence[Any]):
    """This rank's items of a data set, in a global order that does not depend on the rank count.

    Parameters
    ----------
    data : sequence or array, length n
        Anything with `len` and integer indices: a list, an array (items along axis 0), a torch
        map-style data set. The same on every rank; only this rank's items are ever asked for.
    comm : Communicator, optional
        `world()` by default. No communication takes place.
    shuffle : bool
        Whether the global order is a permutation, drawn anew for each epoch.
    seed : int
        Of the permutation, together with the epoch; the same on every rank.
    uneven : str
        Where n is not a multiple of the number of ranks: "exact" gives some ranks one item more,
        so that every item is there exactly once; "pad" repeats items of the global order from its
        beginning, with weight 0, so that all ranks have the same number; "drop" leaves the last
        items out, likewise.

    Attributes
    ----------
    weights : ndarray, shape (len(self),), float32
        1 for each item, 0 for the repeated ones of "pad".

    Notes
    -----
    Item i of the global order belongs to rank i mod size, as item i // size: a batch of m items on
    each of p ranks is the same global batch as one of m·p items on one rank.
    """

    def __init__(
        self,
        data: Any,
        *,
        comm: Communicator | None = None,
        shuffle: bool = False,
        seed: int = 0,
        uneven: str = "exact",
    ) -> None:
        if uneven not in _MODES:
            raise ValueError(
                f"DistributedDataContainer: uneven must be one of {', '.join(_MODES)}; "
                f"got {uneven!r}"
            )
        try:
            self._count = len(data)
        except TypeError:
            raise TypeError(
                "DistributedDataContainer: data must have a length and take integer indices; "
                f"got {type(data).__name__}"
            ) from None
        comm = comm or world()
        self._data = data
        self._rank, self._size = comm.rank, comm.size
        self._shuffle, self._seed, self._uneven = shuffle, seed, uneven
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of this epoch, where the container shuffles."""
        order = np.arange(self._count)
        if self._shuffle:
            np.random.default_rng((self._seed, epoch)).shuffle(order)
        weights = np.ones(self._count, np.float32)
        over = self._count % self._size
        if over and self._uneven == "drop":
            order, weights = order[: self._count - over], weights[: self._count - over]
        elif over and self._uneven == "pad":
            missing = self._size - over
            order = np.concatenate([order, np.resize(order, missing)])
            weights = np.concatenate([weights, np.zeros(missing, np.float32)])
        self._items = order[self._rank :: self._size]
        self.weights = weights[self._rank :: self._size]

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._data[item] for item in self._items[index].tolist()]
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(
                f"DistributedDataContainer: index {position} is out of range; rank {self._rank} "
                f"has {len(self)} of {self._count} items"
            )
        return self._data[int(self._items[position])]

    def __iter__(self) -> Iterator[Any]:
        return (self._data[item] for item in self._items.tolist())

    def __repr__(self) -> str:
        return (
            f"<DistributedDataContainer: {len(self)} of {self._count} items "
            f"on rank {self._rank} of {self._size}>"
        )
