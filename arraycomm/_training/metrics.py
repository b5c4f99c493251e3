"""`mean_metrics`: weighted means of the ranks' measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, overload
from zlib import crc32

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView
from arraycomm._arrays.frameworks import BY_NAME as FRAMEWORKS
from arraycomm._arrays.results import to_framework
from arraycomm._arrays.typing import T, TreeT
from arraycomm._calls.operation import Context, Operation
from arraycomm._communicator import Communicator, runner_of, trees_of
from arraycomm._dtypes import DType, Kind, kind_of
from arraycomm._entries import entry
from arraycomm._errors import MismatchError
from arraycomm._folds import fold_on
from arraycomm._protocol.agreement import Agreement, active
from arraycomm._protocol.details import CallDetail
from arraycomm._protocol.header import Signature
from arraycomm._protocol.mismatch import mismatch
from arraycomm._session import world
from arraycomm._training.weighted import ShadowStep, check_weight, divided
from arraycomm._transports.base import Bytes, Steps
from arraycomm._trees.fusion import Fusion, TreeMemory
from arraycomm._trees.leaves import BEGINS, NONE, Leaves, goes_on_from, spec_of
from arraycomm._trees.pytrees import flatten
from arraycomm._trees.reduce import DEFAULT_BUCKET_BYTES

_SUMS: Final = np.dtype(np.float64)
_COMPLEX_SUMS: Final = np.dtype(np.complex128)


@overload
def mean_metrics(
    tree: TreeT, weight: Any, *, onto: Sequence[Array], comm: Communicator | None = None
) -> tuple[TreeT, tuple[Array, ...]]: ...
@overload
def mean_metrics(tree: float, weight: Any, *, comm: Communicator | None = None) -> float: ...
@overload
def mean_metrics(
    tree: Mapping[T, float], weight: Any, *, comm: Communicator | None = None
) -> dict[T, float]: ...
@overload
def mean_metrics(tree: TreeT, weight: Any, *, comm: Communicator | None = None) -> TreeT: ...
@entry
def mean_metrics(
    tree: Any, weight: Any, *, onto: Sequence[Array] | None = None, comm: Communicator | None = None
) -> Any:
    """Average what the ranks have measured, each as much as its weight says: Σ w·x / Σ w.

    Parameters
    ----------
    tree : pytree of arrays and Python numbers
        The same structure, shapes and dtypes on every rank: losses, accuracies, histograms.
    weight : number
        This rank's weight, zero or more: for example how many samples it has averaged over. What a
        rank of weight 0 passes does not count, even if it is NaN.
    onto : sequence of ndarray, optional
        A total to go on from: what a call with `onto` has returned beside its means, the same on
        every rank, or `()` to begin. The mean is then that of all calls since, and its bits do not
        depend on the number of ranks if these take turns.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    pytree
        A new tree of the same structure, with the same bits on every rank. Python numbers come back
        as floats (complex numbers as complex), arrays as arrays of their kind and dtype; integers
        and booleans are averaged as float64 (float32 in JAX without its 64-bit mode). None stays.
        If the weights of all ranks are 0, the result is NaN. With `onto`, a pair of it and of the
        new total.

    Raises
    ------
    ValueError
        The weight is negative, NaN, or beyond 1e60 or 1e-60. Other ranks raise `PeerError`.
    TypeError
        The weight is no number, or a leaf has no arithmetic; the message names its path.
    MismatchError
        Trees differ between ranks; the message names the path of the first difference. Or `onto` is
        the total of another tree.

    Notes
    -----
    One message, which carries the weights too. Products and sums are taken in float64, in rank
    order, and then rounded to the leaf's dtype.

    Examples
    --------
    >>> import arraycomm as ac
    >>> from arraycomm.testing import run
    >>> samples, losses = [3, 1], [1.0, 2.0]
    >>> run(2, lambda comm: ac.mean_metrics(losses[comm.rank], samples[comm.rank], comm=comm))
    [1.25, 1.25]
    """
    comm = comm or world()
    return runner_of(comm).call(MeanMetrics, trees_of(comm), tree, weight, onto)


class MeanMetrics(Operation):
    """See `mean_metrics`."""

    name, code = "mean_metrics", 31

    def __init__(
        self,
        context: Context,
        memory: TreeMemory,
        tree: Any,
        weight: Any,
        onto: Sequence[Array] | None = None,
    ) -> None:
        super().__init__(context)
        local = check_weight(weight)
        self._memory = memory
        self._leaves = leaves = Leaves(flatten(tree), context.host_tree.view)
        self._present = [leaf for leaf in leaves.views if leaf is not None]
        for path, leaf in zip(leaves.paths, leaves.views, strict=True):
            if leaf is not None and kind_of(leaf.dtype) is Kind.OPAQUE:
                raise TypeError(f"{path} must be an array of numbers; got dtype {leaf.dtype}")
        self._likes = [_like(leaf) for leaf in self._present]
        self._summands = [_weighted(leaf.array, local) for leaf in self._present]
        self._summands.append(np.array(local, _SUMS))
        self._goes_on = onto is not None
        before = [] if onto is None else _arrays_of(onto)
        # What a total is of: on one rank nobody else's tree is compared.
        self._tree = np.array([crc32(repr(leaves.described()).encode())], _SUMS)
        if before:
            self._go_on_from(before)
        self._fusion = Fusion(
            tuple((_SUMS, (summand.nbytes // 8,)) for summand in self._summands),
            DEFAULT_BUCKET_BYTES,
        )
        self._packed = self._fusion.acquire()
        self._sources = [
            BufferView(summand.reshape(-1).view(_SUMS), "numpy", summand, False)
            for summand in self._summands
        ]
        leaves.check_values()
        settings = leaves.flat.settings(alone=self.group.size == 1)
        if self._goes_on:
            total = goes_on_from((f"onto[{n}]", each) for n, each in enumerate(before))
            settings = (*settings, total if before else BEGINS)
        self.signature = Signature(self.name, leaves=leaves.described(), settings=settings)
        self.nbytes, self.copies = self._fusion.nbytes, len(self._present)

    def _go_on_from(self, before: list[Array]) -> None:
        """Add what this rank has measured to a total, if it is the one to do so."""
        *found, tree = before
        parts = [summand.reshape(-1).view(_SUMS) for summand in self._summands]
        shapes = [total.shape for total in found] == [part.shape for part in parts]
        if not shapes or not np.array_equal(tree, self._tree):
            # On more ranks these would be the trees of two ranks.
            raise MismatchError(
                "mean_metrics: onto must be () or the total of a tree with the same paths, shapes "
                f"and dtypes; got another one for {', '.join(self._leaves.paths)}"
            )
        if not self.group.rank:
            for total, part in zip(found, parts, strict=True):
                fold_on("sum", _SUMS, total, 0, [part.copy()], part, more=True)

    def pack(self, room: int) -> Bytes | None:
        if self._fusion.nbytes > room:
            return None
        self._packed.pack(self._sources)
        return self._packed.buffer

    def steps(self, agreement: Agreement) -> Steps:
        if agreement.calls is not None:
            check_same_leaves(agreement.calls)
        if self.payload is not None and agreement.calls is None:
            self._fusion.fold_payloads(self.group, self._packed, agreement, "sum")
        else:
            yield from self._fusion.reduce(self._memory, self._packed, self._sources, "sum")

    def result(self, agreement: Agreement) -> Any:
        sums = [
            slot.view(summand.dtype)
            for slot, summand in zip(self._packed.leaves(), self._summands, strict=True)
        ]
        kept = (
            (*(slot.copy() for slot in self._packed.leaves()), self._tree) if self._goes_on else ()
        )
        total = sums[-1][0]
        means = iter(
            to_framework(divided(part.reshape(leaf.shape), total, dtype), like)
            for part, leaf, (like, dtype) in zip(sums[:-1], self._present, self._likes, strict=True)
        )
        views = self._leaves.views
        tree = self._leaves.rebuild([None if leaf is None else next(means) for leaf in views])
        return (tree, kept) if self._goes_on else tree


class JoinedMeanMetrics(MeanMetrics):
    """`mean_metrics` inside `join`: ranks that have no data may be among the others."""

    negotiable = True

    def __init__(self, context: Context, memory: TreeMemory, tree: Any, *rest: Any) -> None:
        super().__init__(context, memory, tree, *rest)
        if self._goes_on:
            raise ValueError("inside join onto must be None, since ranks without data have no turn")


def _arrays_of(onto: Any) -> list[Array]:
    """Return the arrays of a total, none to begin one."""
    try:
        if isinstance(onto, tuple | list):
            return [np.asarray(total, _SUMS).reshape(-1) for total in onto]
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f"onto must be () or the total that a call has returned beside its means; got {onto!r}"
    )


def check_same_leaves(calls: Sequence[CallDetail]) -> None:
    """Raise if ranks that have data differ in their trees."""
    live = active(calls)
    trees = [(call.leaves, call.settings) for call in live]
    if any(tree != trees[0] for tree in trees):
        raise mismatch(live)


def shadow_metrics(memory: TreeMemory, live: Sequence[CallDetail]) -> Steps:
    """Take part in other ranks' means, with zeros and weight 0."""
    check_same_leaves(live)
    specs = []
    for leaf in live[0].leaves or ():
        if leaf.kind != NONE:
            dtype, shape = spec_of(leaf)
            parts = 2 if kind_of(dtype) is Kind.COMPLEX else 1
            specs.append((_SUMS, (math.prod(shape) * parts,)))
    fusion = Fusion((*specs, (_SUMS, (1,))), DEFAULT_BUCKET_BYTES)
    packed = fusion.acquire()
    yield from fusion.reduce(memory, packed, [None] * (len(specs) + 1), "sum")
    return ShadowStep(None, 0.0, None)


def _like(leaf: BufferView) -> tuple[BufferView, DType]:
    """Return the array that a mean is like, and its dtype: a float for integers and booleans."""
    if kind_of(leaf.dtype) in {Kind.BOOL, Kind.INTEGER}:
        return leaf, FRAMEWORKS[leaf.framework].widest_float()
    return leaf, leaf.dtype


def _weighted(array: Array, weight: float) -> Array:
    """Return w·x in double precision; what changes no sum if the weight is 0, whatever x is."""
    dtype = _COMPLEX_SUMS if kind_of(array.dtype) is Kind.COMPLEX else _SUMS
    made = np.zeros(array.shape, dtype)
    if weight:
        with np.errstate(all="ignore"):
            # Part by part: a complex product of an infinity would have a NaN part.
            wide = np.ascontiguousarray(array.astype(dtype)).reshape(-1).view(_SUMS)
            np.multiply(wide, weight, out=made.reshape(-1).view(_SUMS))
    else:
        np.negative(made, out=made)
    return made
