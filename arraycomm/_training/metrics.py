"""`mean_metrics`: weighted means of what ranks have measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.results import allocate, to_framework, widest_float
from arraycomm._collectives.operation import Call, deliver
from arraycomm._communicator import Communicator
from arraycomm._dtypes import DType, Kind, kind_of
from arraycomm._protocol.header import Agreement, Signature, Steps, mismatch
from arraycomm._session import world
from arraycomm._training.join import taking_part
from arraycomm._training.weights import check_weight
from arraycomm._trees.fusion import Fusion
from arraycomm._trees.pytrees import flatten
from arraycomm._trees.reduce import DEFAULT_BUCKET_BYTES, NONE, Leaves, parse

_SUMS: Final = np.dtype(np.float64)
_COMPLEX_SUMS: Final = np.dtype(np.complex128)

Array = np.ndarray[Any, Any]


def mean_metrics(tree: Any, weight: Any, *, comm: Communicator | None = None) -> Any:
    """Average what the ranks have measured, each as much as its weight says: Σ w·x / Σ w.

    Parameters
    ----------
    tree : pytree of arrays and Python numbers
        The same structure, shapes and dtypes on every rank: losses, accuracies, histograms.
    weight : number
        This rank's weight, zero or more: for example how many samples it has averaged over. What a
        rank of weight 0 passes does not count, be it NaN.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    pytree
        A new tree of the same structure, with the same bits on every rank. Python numbers come back
        as floats (complex numbers as complex), arrays as arrays of their kind and dtype; integers
        and booleans are averaged as float64 (float32 in JAX without its 64-bit mode). None stays.
        Where the weights of all ranks are 0, the mean of nothing: NaN.

    Raises
    ------
    ValueError
        The weight is negative, infinite or NaN. Other ranks raise `PeerError`.
    TypeError
        The weight is no number, or a leaf has no arithmetic; the message names its path.
    MismatchError
        Trees differ between ranks; the message names the path of the first difference.

    Notes
    -----
    One message, in which the weights travel too. Products and sums are taken in float64, in rank
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
    return comm._call("mean_metrics", _prepare, tree, weight)


def _prepare(comm: Communicator, tree: Any, weight: Any) -> Call:
    mine = check_weight(weight, "mean_metrics")
    leaves = Leaves(flatten(tree), "mean_metrics", comm._host_tree_placement)
    present = [leaf for leaf in leaves.views if leaf is not None]
    for path, leaf in zip(leaves.paths, leaves.views, strict=True):
        if leaf is not None and kind_of(leaf.dtype) is Kind.OPAQUE:
            raise TypeError(
                f"mean_metrics: {path} must be an array of numbers; got dtype {leaf.dtype}"
            )
    likes = [_like(leaf) for leaf in present]
    summands = [_weighted(leaf.array, mine) for leaf in present]
    summands.append(np.array(mine, _SUMS))
    fusion = Fusion(
        tuple((_SUMS, (summand.nbytes // 8,)) for summand in summands), DEFAULT_BUCKET_BYTES
    )
    packed = fusion.take()
    sources = [
        BufferView(summand.reshape(-1).view(_SUMS), "numpy", summand, False) for summand in summands
    ]
    inline = fusion.nbytes <= comm._inline
    if inline:
        packed.pack(sources)

    def means() -> Any:
        sums = [
            place.view(s.dtype) for (_, place), s in zip(packed.leaves(), summands, strict=True)
        ]
        total = sums[-1][0]
        given = iter(
            to_framework(_divided(part, total, leaf.shape, dtype), like)
            for part, leaf, (like, dtype) in zip(sums[:-1], present, likes, strict=True)
        )
        return leaves.rebuild([None if leaf is None else next(given) for leaf in leaves.views])

    def finish(agreement: Agreement) -> Steps:
        if agreement.details is not None:
            check_same_leaves(agreement.details)
        if inline and agreement.details is None:
            fusion.fold_payloads(comm, packed, agreement, "sum")
        else:
            yield from fusion.reduce(comm, packed, sources, "sum")
        return deliver(means)

    return Call(
        Signature("mean_metrics", leaves=leaves.described(), settings=leaves.ties()),
        finish,
        packed.block if inline else None,
        nbytes=fusion.nbytes,
        copies=len(present),
        # A rank that has no data may be among the others: see `join`.
        negotiable=comm._join is not None,
    )


def check_same_leaves(details: Sequence[dict[str, Any]]) -> None:
    """Raise where ranks that have data differ in their trees."""
    live = taking_part(details)
    if any(detail["leaves"] != live[0]["leaves"] for detail in live):
        raise mismatch(live)


def shadow_metrics(comm: Communicator, live: Sequence[dict[str, Any]]) -> Steps:
    """Take part in other ranks' means with nothing to add."""
    check_same_leaves(live)
    specs = []
    for _, text in live[0]["leaves"]:
        if text != NONE:
            dtype, shape = parse(text)
            parts = 2 if kind_of(dtype) is Kind.COMPLEX else 1
            specs.append((_SUMS, (math.prod(shape) * parts,)))
    fusion = Fusion((*specs, (_SUMS, (1,))), DEFAULT_BUCKET_BYTES)
    packed = fusion.take()
    yield from fusion.reduce(comm, packed, [None] * (len(specs) + 1), "sum")
    return None, 0.0, None


def _like(leaf: BufferView) -> tuple[BufferView, DType]:
    """Return whose array a mean is like, and its dtype: integers and booleans have none of theirs."""
    if kind_of(leaf.dtype) in {Kind.BOOL, Kind.INTEGER}:
        return leaf, widest_float(leaf.framework)
    return leaf, leaf.dtype


def _weighted(array: Array, weight: float) -> Array:
    """Return w·x in double precision; nothing at all where the weight is 0."""
    dtype = _COMPLEX_SUMS if kind_of(array.dtype) is Kind.COMPLEX else _SUMS
    made = np.zeros(array.shape, dtype)
    if weight:
        with np.errstate(all="ignore"):
            # Part by part: a complex product of an infinity would have a NaN part.
            wide = np.ascontiguousarray(array.astype(dtype)).reshape(-1).view(_SUMS)
            np.multiply(wide, weight, out=made.reshape(-1).view(_SUMS))
    return made


def _divided(sums: Array, total: float, shape: tuple[int, ...], dtype: DType) -> Array:
    with np.errstate(all="ignore"):
        parts = sums.view(_SUMS)
        np.divide(parts, total, out=parts)
        mean = allocate(shape, dtype)
        mean[...] = sums.reshape(shape)
    return mean
