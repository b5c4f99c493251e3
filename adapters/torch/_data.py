"""Batches of a data container, loaded by the worker processes of torch's DataLoader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import default_collate

import arraycomm as ac
from arraycomm._checks import check_at_least, check_bool

_Rows = TypeVar("_Rows", torch.Tensor, np.ndarray[Any, Any])

# Options of torch's loader that the container decides, with what to write instead.
_NOT_HERE: Final = {
    "shuffle": "the container chooses the order; pass shuffle=True to DistributedDataContainer",
    "sampler": "the container chooses the order; make it over torch.utils.data.Subset(data, "
    "indices) to choose items",
    "batch_sampler": "the container chooses the batches; pass batch_size",
    "drop_last": 'all ranks have the same number of batches; pass uneven="drop" or "pad" to '
    "DistributedDataContainer, and the last one is of the same length on all ranks too",
    "in_order": "progress is counted in the order of the container; leave it out",
}


class DataLoader:
    """Batches of a `DistributedDataContainer`, loaded ahead by worker processes of torch.

    Every rank gets the same number of batches, so a loop's body may be collective. Weights and
    progress are those of `DistributedDataContainer.batches`.

    Parameters
    ----------
    container : DistributedDataContainer
        Of any data whose items `collate_fn` can put together.
    batch_size : int
        Items of one rank in a batch, the same on every rank: all ranks together have
        batch_size · size.
    num_workers : int
        Worker processes of this rank; with 0 it loads the items itself.
    collate_fn : callable, optional
        Makes a batch of a list of items; `torch.utils.data.default_collate` by default.
    pad : bool
        As for `DistributedDataContainer.batches`; each rank must have an item.
    **options
        Of `torch.utils.data.DataLoader`: `multiprocessing_context`, `persistent_workers`,
        `prefetch_factor`, `pin_memory`, `worker_init_fn`, `timeout`, `generator` and so on. Not
        `shuffle`, `sampler`, `batch_sampler`, `drop_last` and `in_order`, which the container
        decides.

    Attributes
    ----------
    container : DistributedDataContainer
        As passed; its `set_epoch`, `state_dict` and `load_state_dict` are those of the loader.
    batch_size : int
        As passed.

    Raises
    ------
    TypeError, ValueError
        An argument is of a wrong type or value, or an option is one that the container decides.
        From the iterator: a batch without items cannot be made by `collate_fn` (see Notes).

    Notes
    -----
    `iter(loader)` is collective, and begins or continues the epoch as `batches` does: it yields
    named tuples `(items, weights)`. `items` is what `collate_fn` returns. `weights` is a tensor of
    float32 in host memory, with 1 for each item, or 0 for the repeated items of "pad".
    `len(loader)` is the number of batches, the same on every rank; it is local.

    A batch counts as consumed when the loop gets it, however many the workers have loaded by then.
    One loop at a time: another `iter(loader)` ends the one before.

    With `uneven="exact"` the last batch has no items on some ranks, if these ran out of them. Its
    shapes are worked out from batches of one item and of two, both of the same example
    (`DistributedDataContainer.example`): what grows by one row, or one element of a list, has none.
    What does not depend on the items stays. If `collate_fn` returns anything else, such as a sum,
    the loop raises before its first batch; "pad" and "drop" need no such batch.
    """

    def __init__(
        self,
        container: ac.DistributedDataContainer,
        batch_size: int,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pad: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(container, ac.DistributedDataContainer):
            raise TypeError(
                "DataLoader: container must be a DistributedDataContainer; got "
                f"{type(container).__name__}. Pass DistributedDataContainer(data)"
            )
        for name, remedy in _NOT_HERE.items():
            if name in options:
                raise TypeError(f"DataLoader: {name} is not an option here: {remedy}")
        self.container, self._pad = container, check_bool(pad, "DataLoader: pad")
        self.batch_size = check_at_least(batch_size, 1, "DataLoader: batch_size")
        self._batches = _Batches()
        self._loader: TorchLoader[Any] = TorchLoader(
            # Torch asks for no more than an item by its index.
            container,  # type: ignore[arg-type]
            batch_sampler=self._batches,
            num_workers=num_workers,
            collate_fn=_Collate(container, collate_fn or default_collate),
            **options,
        )

    def __len__(self) -> int:
        return self.container.num_batches(self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        batches = self.container.batches(self.batch_size, pad=self._pad, load=self._load)
        return map(_with_tensor, batches)

    def _load(self, indices: Iterator[Sequence[int]]) -> Iterable[Any]:
        """Load batches, of which the last ones may have no items.

        Such a one comes first out of the workers, so that a `collate_fn` that cannot make it fails
        before the epoch instead of at its end.
        """
        if self._pad:
            return self._run(indices)
        batches = list(indices)
        if all(batches):
            return self._run(iter(batches))
        loaded = self._run(chain([range(0)], filter(None, batches)))
        empty = next(loaded)
        return (next(loaded) if own else empty for own in batches)

    def _run(self, indices: Iterator[Sequence[int]]) -> Iterator[Any]:
        self._batches.indices = indices
        return iter(self._loader)


class _Batches:
    """A batch sampler of torch that is given its batches anew for each epoch."""

    def __init__(self) -> None:
        self.indices: Iterator[Sequence[int]] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.indices


class _Collate:
    """Makes a batch of items; of no items too. Goes to the workers."""

    def __init__(
        self, container: ac.DistributedDataContainer, collate_fn: Callable[[list[Any]], Any]
    ) -> None:
        self._container = container
        self._collate_fn = collate_fn

    def __call__(self, items: list[Any]) -> Any:
        return self._collate_fn(items) if items else self._empty()

    def _empty(self) -> Any:
        item = self._container.example()
        # Copies, since a collate_fn may change the items that it gets.
        one, two = (
            self._collate_fn([copy.deepcopy(item) for _ in range(count)]) for count in (1, 2)
        )
        return _without_items(one, two, "batch")


def _with_tensor(batch: Any) -> Any:
    items, weights = batch
    return type(batch)(items, torch.from_numpy(weights))


def _without_items(one: Any, two: Any, path: str) -> Any:
    """Return what a batch of no items is like, given one of an item and one of it twice."""
    if type(one) is not type(two):
        raise _not_cut(path, one)
    if isinstance(one, torch.Tensor | np.ndarray):
        return _without_rows(one, two, path)
    if isinstance(one, Mapping) and one.keys() == two.keys():
        values = {key: _without_items(one[key], two[key], f"{path}[{key!r}]") for key in one}
        return _like_mapping(one, values)
    if isinstance(one, list | tuple):
        return _without_elements(one, two, path)
    if one is None or (isinstance(one, str | bytes | bool | int | float) and one == two):
        return one
    raise _not_cut(path, one)


def _without_rows(one: _Rows, two: _Rows, path: str) -> _Rows:
    """Cut the axis along which items are; an array that is the same for any number stays."""
    if one.ndim == two.ndim and one.dtype == two.dtype:
        for axis, (length, longer) in enumerate(zip(one.shape, two.shape, strict=True)):
            if length < longer <= 2 * length:
                return one[(slice(None),) * axis + (slice(2 * length - longer),)]
        if one.shape == two.shape and bool((one == two).all()):
            return one
    raise _not_cut(path, one)


def _without_elements(one: Any, two: Any, path: str) -> Any:
    length, longer = len(one), len(two)
    if length < longer <= 2 * length:
        return one[: 2 * length - longer]
    if length != longer:
        raise _not_cut(path, one)
    parts = [
        _without_items(*pair, f"{path}[{number}]")
        for number, pair in enumerate(zip(one, two, strict=True))
    ]
    return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)


def _like_mapping(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same class with other values."""
    if not isinstance(mapping, MutableMapping):
        return values
    made = copy.copy(mapping)
    made.update(values)
    return made


def _not_cut(path: str, value: Any) -> TypeError:
    return TypeError(
        "DataLoader: this rank has no items in the last batch, and collate_fn must return what can "
        f"be cut to none: tensors, arrays and lists that grow with each item; {path} is a "
        f"{type(value).__name__} that does not. Return such, or pass "
        'uneven="pad" or "drop" to DistributedDataContainer'
    )
