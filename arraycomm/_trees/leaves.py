"""The leaves of a tree as ranks compare and reduce them: None, tied leaves, leaves on devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._dtypes import BY_NAME, DType, check_movable, check_reducible, name_of
from arraycomm._protocol.details import CallDetail
from arraycomm._protocol.header import LeafSpec, Settings
from arraycomm._protocol.mismatch import STRUCTURE, mismatch
from arraycomm._trees.layout import Spec
from arraycomm._trees.pytrees import Flat

NUMBERS: Final = (bool, int, float, complex, np.generic)
NONE: Final = "None"


class Leaves:
    """The distinct leaves of a tree: which are arrays, and how results get back into the tree.

    `view` returns the view of a leaf that is not None, given the leaf and its path.
    """

    def __init__(self, flat: Flat, view: Callable[[Any, str], BufferView]) -> None:
        self.flat = flat
        self.views: list[BufferView | None] = []
        self.index: list[int] = []
        self.paths: list[str] = []
        seen: dict[int, int] = {}
        for leaf, path in zip(flat.leaves, flat.paths, strict=True):
            tied = seen.get(id(leaf))
            if tied is None or leaf is None or isinstance(leaf, NUMBERS):
                tied = seen[id(leaf)] = len(self.views)
                self.views.append(None if leaf is None else view(leaf, path))
                self.paths.append(path)
            self.index.append(tied)

    def check_reducible(self, op: str) -> None:
        """Raise, with its path, for a leaf that does not have this reduction."""
        for path, leaf in zip(self.paths, self.views, strict=True):
            if leaf is not None:
                check_leaf(leaf.dtype, op, path)

    def described(self) -> tuple[LeafSpec, ...]:
        """Return each distinct leaf as the ranks compare it."""
        return tuple(
            LeafSpec(path, NONE) if leaf is None else array_leaf(path, leaf)
            for path, leaf in zip(self.paths, self.views, strict=True)
        )

    def dtypes(self) -> list[DType]:
        """Return the dtype of each leaf that is an array."""
        return [leaf.dtype for leaf in self.views if leaf is not None]

    def settings(self) -> Settings:
        """Return which leaves are one object, and the containers, as the ranks compare them."""
        return settings_of(self.flat, self.index)

    def rebuild(self, results: list[Any]) -> Any:
        """Return the tree with these results in place of its distinct leaves."""
        return self.flat.rebuild([results[index] for index in self.index])


class Parts:
    """Which leaves are reduced in host memory, and which in device memory.

    Attributes
    ----------
    present, on_device : list of int
        The numbers of the leaves of either kind.
    sources : list of BufferView
        The leaves in host memory.
    specs : tuple of (dtype, shape)
        The form in which these are sent.
    device_bytes : int
        Bytes of the leaves in device memory.
    """

    def __init__(self, views: Sequence[BufferView | None], dtypes: Sequence[DType]) -> None:
        self.views = views
        some = [(index, leaf) for index, leaf in enumerate(views) if leaf is not None]
        self.present = [index for index, leaf in some if leaf.device_buffer is None]
        self.on_device = [index for index, leaf in some if leaf.device_buffer is not None]
        self.sources = [leaf for _, leaf in some if leaf.device_buffer is None]
        self.specs = tuple(
            (dtype, leaf.array.shape)
            for dtype, (_, leaf) in zip(dtypes, some, strict=True)
            if leaf.device_buffer is None
        )
        self.device_bytes = sum(
            leaf.device_buffer.nbytes for _, leaf in some if leaf.device_buffer is not None
        )


def check_leaf(dtype: DType, op: str, path: str) -> None:
    """Raise, with its path, for a leaf whose dtype does not have this reduction."""
    try:
        check_movable(dtype)
        check_reducible(dtype, op)
    except TypeError as error:
        raise TypeError(f"{path}: {error}") from None


def array_leaf(path: str, leaf: BufferView) -> LeafSpec:
    """Return an array as the ranks compare it."""
    return LeafSpec(path, name_of(leaf.dtype), leaf.shape)


def spec_of(leaf: LeafSpec) -> Spec:
    """Return the dtype and shape of a leaf that is an array; see `array_leaf`."""
    assert leaf.shape is not None
    return BY_NAME[leaf.kind].dtype, leaf.shape


def settings_of(flat: Flat, index: Sequence[int]) -> Settings:
    """Return what the ranks compare of a tree beside its leaves, each given by its object's number."""
    tied = len(set(index)) != len(index)
    ties = f"tied leaves {list(index)}" if tied else "no tied leaves"
    return ("ties", ties), (STRUCTURE, flat.structure)


def agreed_leaves(calls: Sequence[CallDetail]) -> list[LeafSpec]:
    """Return each leaf's spec, if ranks differ only in None; raise `MismatchError` otherwise."""
    trees = [call.leaves or () for call in calls]
    if len({call.settings for call in calls}) > 1:
        raise mismatch(_without_none(calls))
    paths = [leaf.path for leaf in trees[0]]
    if any([leaf.path for leaf in tree] != paths for tree in trees):
        raise mismatch(calls)
    agreed = []
    for ranks in zip(*trees, strict=True):
        found = {leaf for leaf in ranks if leaf.kind != NONE}
        if len(found) > 1:
            raise mismatch(_without_none(calls))
        agreed.append(found.pop() if found else ranks[0])
    return agreed


def _without_none(calls: Sequence[CallDetail]) -> list[CallDetail]:
    """Return the calls with None leaves described as another rank has them."""
    known: dict[str, LeafSpec] = {}
    for call in calls:
        for leaf in call.leaves or ():
            if leaf.kind != NONE:
                known.setdefault(leaf.path, leaf)
    return [
        replace(
            call,
            leaves=tuple(
                known.get(leaf.path, leaf) if leaf.kind == NONE else leaf
                for leaf in call.leaves or ()
            ),
        )
        for call in calls
    ]
