"""A tree's leaves as ranks compare and reduce them: None, those on devices, one object twice.

Whether two leaves are one object is a rank's own matter: the ranks share values. Results of leaves
that are one object are one object, too, if they are the same bits. They need not be: on another
rank these leaves may be two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Self

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView, allocate
from arraycomm._arrays.views import view
from arraycomm._dtypes import BY_NAME, DType, Kind, check_movable, check_reducible, kind_of, name_of
from arraycomm._errors import MismatchError
from arraycomm._folds import fold_on, total_dtype
from arraycomm._protocol.details import CallDetail
from arraycomm._protocol.header import LeafSpec
from arraycomm._protocol.mismatch import ONTO, VALUE, mismatch
from arraycomm._trees.layout import Spec
from arraycomm._trees.pytrees import Flat, flatten
from arraycomm._trees.static import Static, lines_of

NUMBERS: Final = (bool, int, float, complex, np.generic)
NONE: Final = "None"


class Leaves:
    """The leaves of a tree: which are arrays, and how results get back into the tree.

    `view` returns the view of a leaf that is not None, given the leaf and its path.
    """

    def __init__(self, flat: Flat, view: Callable[[Any, str], BufferView]) -> None:
        self.flat, self.paths = flat, flat.paths
        self.views = [
            None if leaf is None else view(leaf, path)
            for leaf, path in zip(flat.leaves, flat.paths, strict=True)
        ]

    def check_values(self) -> None:
        """Raise, with its path, for a container whose leaves are not values alone."""
        for path, kind in self.flat.sparse:
            raise TypeError(
                f"{path} is a sparse {kind}: a reduction would add up its indices as well; pass "
                f"{path}.todense(), or a tree of what may be added up"
            )

    def check_reducible(self, op: str) -> None:
        """Raise, with its path, for a leaf that does not have this reduction."""
        self.check_values()
        for path, leaf in zip(self.paths, self.views, strict=True):
            if leaf is not None:
                check_leaf(leaf.dtype, op, path)

    def described(self) -> tuple[LeafSpec, ...]:
        """Return each leaf as the ranks compare it."""
        return tuple(
            LeafSpec(path, NONE) if leaf is None else array_leaf(path, leaf)
            for path, leaf in zip(self.paths, self.views, strict=True)
        )

    def dtypes(self) -> list[DType]:
        """Return the dtype of each leaf that is an array."""
        return [leaf.dtype for leaf in self.views if leaf is not None]

    def rebuild(self, results: list[Any]) -> Any:
        """Return the tree with these results in place of its leaves."""
        return self.flat.rebuild(tied(self.flat.leaves, results))


class Parts:
    """Which leaves are reduced in host memory, and which in device memory."""

    def __init__(self, views: Sequence[BufferView | None], dtypes: Sequence[DType]) -> None:
        self.views = views
        some = [(index, leaf) for index, leaf in enumerate(views) if leaf is not None]
        self.present = [index for index, leaf in some if leaf.device_buffer is None]
        self.on_device = [index for index, leaf in some if leaf.device_buffer is not None]
        self.sources = [leaf for _, leaf in some if leaf.device_buffer is None]
        # The dtypes and shapes in which the sources are sent.
        self.specs = tuple(
            (dtype, leaf.array.shape)
            for dtype, (_, leaf) in zip(dtypes, some, strict=True)
            if leaf.device_buffer is None
        )
        self.device_bytes = sum(
            leaf.device_buffer.nbytes for _, leaf in some if leaf.device_buffer is not None
        )


class Total(NamedTuple):
    """The sum of one leaf over several calls, in the dtype of sums.

    `dtype` is the leaf's own; None if the caller has passed the sum alone.
    """

    array: Array
    dtype: DType | None


# What ranks compare of `onto`.
BEGINS: Final = (ONTO, f"{ONTO}: {VALUE}() to begin a total")
GOES_ON: Final = (ONTO, f"{ONTO}: {VALUE}a total")


def goes_on_from(totals: Iterable[tuple[str, Array | None]]) -> tuple[str, str]:
    """Return what ranks compare of a total that the program has passed: the bits of its leaves."""
    name, text = GOES_ON
    return name, "\n".join([text, *lines_of([Static(None, list(totals))], alone=True)])


class Onto:
    """The totals that a sum over the ranks goes on from, which all ranks have.

    `totals` are those of the leaves, None for one that no call has had; None in place of all begins
    a total. The ranks' leaves are folded in rank order, so the first rank's total is added to its
    own leaf, and the fold goes on from there. A rank that does not count adds -0.0, to which every
    number is the identity: zeros would make 0.0 of -0.0.
    """

    def __init__(
        self,
        totals: Sequence[Total | None] | None,
        *,
        counts: bool = True,
        setting: tuple[str, str] = GOES_ON,
    ) -> None:
        self._totals, self._counts = totals, counts
        # An optimizer's ranks compare their rounds instead, and always say that they go on.
        self.setting = setting

    @classmethod
    def of(cls, tree: Any, leaves: Sequence[str], *, alone: bool) -> Self:
        """Return a tree that a caller has passed for one with leaves of these paths."""
        if isinstance(tree, tuple) and not tree:
            return cls(None, setting=BEGINS)
        found = Leaves(flatten(tree, "onto"), view)
        for path, leaf in zip(found.paths, leaves, strict=False):
            if path.removeprefix("onto") != leaf.removeprefix("tree"):
                raise ValueError(f"onto must have the structure of the tree; got {path} for {leaf}")
        arrays = [None if leaf is None else leaf.array for leaf in found.views]
        setting = goes_on_from(() if alone else zip(found.paths, arrays, strict=True))
        totals = [None if array is None else Total(array, None) for array in arrays]
        return cls(totals, setting=setting)

    def join(self, leaves: Leaves, rank: int) -> list[BufferView | None]:
        """Return what this rank adds for each of its leaves; forget those that count nowhere."""
        if self._totals is not None and len(self._totals) != len(leaves.views):
            raise ValueError(
                f"the tree must have the {len(self._totals)} leaves of the total that it is added "
                f"to; got {len(leaves.views)}"
            )
        joined: list[BufferView | None] = []
        for number, leaf in enumerate(leaves.views):
            total = self._total(number)
            if leaf is not None and total is not None:
                _check_total(total, leaf, leaves.paths[number])
            if leaf is None or (total is None and not self._counts):
                leaves.views[number] = None
                joined.append(None)
            else:
                joined.append(self._joined(leaf, total, rank))
        return joined

    def _total(self, number: int) -> Total | None:
        return None if self._totals is None else self._totals[number]

    def _joined(self, leaf: BufferView, total: Total | None, rank: int) -> BufferView:
        if not self._counts and total is not None:
            return view(identity(total.array.shape, total.array.dtype))
        wide = total_dtype(leaf.dtype)
        if rank or self._totals is None:
            return leaf if wide == leaf.dtype else view(_added(None, leaf.array))
        before = np.zeros(leaf.shape, wide) if total is None else total.array
        return view(_added(before, leaf.array))

    def missing(self, number: int, rank: int) -> BufferView | None:
        """Return what this rank adds for a leaf that only others have; None stands for zeros."""
        total = self._total(number)
        if total is None or (self._counts and rank):
            return None
        return view(
            _with_zeros(total.array)
            if self._counts
            else identity(total.array.shape, total.array.dtype)
        )

    def completed(self, made: Sequence[Total | None]) -> list[Total | None]:
        """Return all totals, after a call that has made those of some leaves.

        A leaf that is missing on all ranks counts as zeros on them.
        """
        return [
            total._replace(array=_with_zeros(total.array))
            if new is None and (total := self._total(number)) is not None
            else new
            for number, new in enumerate(made)
        ]


def _added(total: Array | None, row: Array) -> Array:
    """Return a row added to a total, as the ranks' rows are folded; without one the row alone."""
    made = allocate(row.shape, total_dtype(row.dtype))
    before = None if total is None else np.ascontiguousarray(total).reshape(-1)
    rows = [np.ascontiguousarray(row).reshape(-1)]
    fold_on("sum", row.dtype, before, 0, rows, made.reshape(-1), more=True)
    return made


def _with_zeros(total: Array) -> Array:
    return _added(total, np.zeros(total.shape, total.dtype))


def identity(shape: tuple[int, ...], dtype: DType) -> Array:
    """Return an array that changes nothing that it is added to."""
    made = np.zeros(shape, dtype)
    return made if kind_of(dtype) is Kind.INTEGER else np.negative(made)


def _check_total(total: Total, leaf: BufferView, path: str) -> None:
    dtype, wide = total.dtype or total.array.dtype, total_dtype(leaf.dtype)
    if total.dtype is not None and (leaf.shape, leaf.dtype) != (total.array.shape, dtype):
        # On more ranks these would be the gradients of two ranks.
        raise MismatchError(
            f"DistributedOptimizer: {path} is not the same on all virtual ranks: "
            f"{name_of(dtype)} {total.array.shape} in earlier rounds of this step, and "
            f"{name_of(leaf.dtype)} {leaf.shape} in this one"
        )
    if leaf.shape != total.array.shape:
        raise ValueError(
            f"{path} must have the shape of the total that it is added to, {total.array.shape}; "
            f"got {leaf.shape}"
        )
    if wide != total.array.dtype or (total.dtype or leaf.dtype) != leaf.dtype:
        raise TypeError(
            f"{path} must have the dtype of the total that it is added to, {name_of(dtype)}; got "
            f"{name_of(leaf.dtype)}, whose sums are of {name_of(wide)}"
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


def tied(leaves: Sequence[Any], results: list[Any]) -> list[Any]:
    """Return the results, one object for leaves that are one, if they are the same bits."""
    if len(set(map(id, leaves))) == len(leaves):
        return results
    first: dict[int, int] = {}
    for number, leaf in enumerate(leaves):
        if leaf is None or isinstance(leaf, NUMBERS):
            continue
        other = first.setdefault(id(leaf), number)
        if other != number and _are_same(results[number], results[other]):
            results[number] = results[other]
    return results


def _are_same(result: Any, other: Any) -> bool:
    """Return whether two results are arrays of the same bits; other objects equal only themselves.

    Those of a device are copied to the host for that, but only where a tree has one array twice.
    """
    if result is other or type(result) is not type(other):
        return result is other
    mine, others = result, other
    if type(result) is not np.ndarray:
        try:
            mine, others = view(result).array, view(other).array
        except (TypeError, BufferError):
            return False
    same_kind = (mine.dtype, mine.shape) == (others.dtype, others.shape)
    return same_kind and mine.tobytes() == others.tobytes()


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
