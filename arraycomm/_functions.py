"""Functions whose communicator is `world()` by default: on trees, and exact sums."""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from arraycomm._arrays.typing import ArrayT, DTypeT, NewShape, TreeT
from arraycomm._collectives.exact_sums import Fsum
from arraycomm._communicator import Communicator, runner_of, trees_of
from arraycomm._dtypes import OpName
from arraycomm._entries import entry
from arraycomm._prepared.small_trees import call_tree
from arraycomm._session import world
from arraycomm._trees.reduce import (
    DEFAULT_BUCKET_BYTES,
    AllreduceGradients,
    AllreduceTree,
    ReduceOnto,
)
from arraycomm._trees.synchronize import Synchronize


@entry
def allreduce_tree(
    tree: TreeT,
    op: OpName = "mean",
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    comm: Communicator | None = None,
    timeout: float | None = None,
) -> TreeT:
    """Reduce every leaf of a tree over the ranks, in few messages.

    Parameters
    ----------
    tree : pytree of arrays and Python numbers
        The same structure, shapes and dtypes on every rank; frameworks may differ. What containers
        hold besides leaves, such as static fields, is part of the structure. None stays None;
        functions, classes and random generators stay as they are.
    op : str
        As for `Communicator.allreduce`.
    bucket_bytes : int
        Leaves are fused into messages of about this many bytes.
    comm : Communicator, optional
        `world()` by default.
    timeout : float, optional
        Seconds that this call may wait for other ranks, in place of the communicator's timeout.

    Returns
    -------
    pytree
        A new tree of the same structure, each leaf like the one passed. The results of leaves that
        are one object in this rank's tree are one object, if they are the same bits: on another
        rank these leaves may be two. A torch module is changed in place.

    Raises
    ------
    MismatchError
        Trees differ between ranks; the message names the path of the first difference.
    TypeError
        A leaf or a container cannot be reduced; the message names its path.

    Notes
    -----
    Each byte is copied once, into a buffer for its dtype; results are parts of that buffer.
    """
    comm = comm or world()
    rest = (op, bucket_bytes)
    return call_tree(runner_of(comm), timeout, AllreduceTree, trees_of(comm), tree, rest)


@entry
def allreduce_gradients(
    tree: TreeT,
    op: OpName = "mean",
    *,
    missing: str = "zeros",
    onto: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    compression: str | None = None,
    comm: Communicator | None = None,
    timeout: float | None = None,
) -> TreeT:
    """Reduce a tree of gradients, of which some may be missing on some ranks.

    Parameters
    ----------
    tree : pytree of arrays, Python numbers and None
        The same structure on every rank.
    op : str
        As for `Communicator.allreduce`.
    missing : str
        "zeros": None on some ranks counts as zeros of the other ranks' shape and dtype. "error":
        None on some ranks raises `MismatchError`.
    onto : pytree, optional
        A total to go on from, with `op="sum"`: what a call with `onto` has returned, the same on
        every rank, or `()` to begin. The ranks' gradients are added to it in rank order. See Notes.
    bucket_bytes : int
        Leaves are fused into messages of about this many bytes.
    compression : str, optional
        "bfloat16" or "float16": float32 and float64 leaves are sent rounded to these 16 bits,
        accumulated in float32, rounded once more, and returned in their own dtype. In float16,
        values beyond 65504 become infinite. Other leaves are sent as they are.
    comm : Communicator, optional
        `world()` by default.
    timeout : float, optional
        Seconds that this call may wait for other ranks, in place of the communicator's timeout.

    Returns
    -------
    pytree
        As for `allreduce_tree`. A leaf that is None on all ranks stays None; a leaf that is None
        here and not on another rank becomes an array like the tree's first. With `onto`, the new
        total: floats of 16 and 8 bits are then float32, which is not rounded to them.

    Notes
    -----
    With `onto`, the gradients of k parts of a batch have one sum, to the bit, on any number of
    ranks: in turn t, each rank r passes those of part t · size + r. A rank without a part in the
    last turn passes -0.0 in every leaf that some part has, which changes no number that it is added
    to; None would count as zeros, which make 0.0 of -0.0. Gradients on devices go through host
    memory.

    Gradients are reduced in every step, so memory for results of these shapes is kept until a call
    has other shapes: twice the tree's bytes at most. It is used again once its results are gone.
    """
    comm = comm or world()
    if onto is not None:
        arguments = trees_of(comm), tree, op, onto, bucket_bytes, compression, missing
        return runner_of(comm).call_within(timeout, ReduceOnto, *arguments)
    rest = (op, bucket_bytes, compression, missing)
    return call_tree(runner_of(comm), timeout, AllreduceGradients, trees_of(comm), tree, rest)


@entry
def synchronize(
    tree: TreeT | None,
    *,
    root: int = 0,
    comm: Communicator | None = None,
    timeout: float | None = None,
) -> TreeT:
    """Give every rank the values of `root`.

    Parameters
    ----------
    tree : pytree, torch object, or None
        Arrays, numbers, strings, bytes and enums take the values of `root` and keep the type they
        have here, and so does what containers hold besides leaves, such as static fields; None,
        functions and random generators stay as they are. Objects of torch in the
        tree are changed in place: modules (parameters, all buffers, and what `get_extra_state`
        returns), optimizers, learning-rate schedulers and `torch.amp.GradScaler`. Of these, `root`
        alone may have a state, for example from a checkpoint. A rank other than `root` may pass
        None, and then gets the whole tree of `root` (as a pickle: the ranks of a job trust one
        another).
    root : int
        The rank whose values all ranks get.
    comm : Communicator, optional
        `world()` by default.
    timeout : float, optional
        Seconds that this call may wait for other ranks, in place of the communicator's timeout.

    Returns
    -------
    pytree
        A new tree of the same structure, with the same objects of torch in it.

    Raises
    ------
    MismatchError
        Trees differ between ranks, or types of optimizers and schedulers, or the shapes of an
        optimizer's parameters; the message names the path of the first difference.
    TypeError
        A leaf is of a type that cannot be synchronized; the message names its path.
    """
    return runner_of(comm or world()).call_within(timeout, Synchronize, tree, root)


@overload
def fsum(
    x: np.ndarray[Any, DTypeT],
    axis: int | None = None,
    *,
    comm: Communicator | None = None,
    timeout: float | None = None,
) -> NewShape[DTypeT]: ...
@overload
def fsum(
    x: ArrayT,
    axis: int | None = None,
    *,
    comm: Communicator | None = None,
    timeout: float | None = None,
) -> ArrayT: ...
@entry
def fsum(
    x: Any,
    axis: int | None = None,
    *,
    comm: Communicator | None = None,
    timeout: float | None = None,
) -> Any:
    """Sum all rows of all ranks exactly, and round once: the same bits, however rows are spread.

    Parameters
    ----------
    x : array of floats or complex numbers
        This rank's rows. Along `axis` it may have any length, also 0; the other axes and the dtype
        are the same on all ranks.
    axis : int, optional
        The axis that is summed, on each rank and over all ranks. By default every element is, and
        ranks may have arrays of any shape.
    comm : Communicator, optional
        `world()` by default.
    timeout : float, optional
        Seconds that this call may wait for other ranks, in place of the communicator's timeout.

    Returns
    -------
    array
        Like `x`, without the axis; of no dimension by default. Each element is the exact sum,
        rounded to the nearest element of the dtype, ties to even; the parts of complex numbers are
        summed apart. As with `math.fsum`, a sum of zeros, or of nothing, is +0; a NaN
        makes the sum NaN, and so do infinities of both signs. A sum that is too large for the dtype
        is infinite, but one that is so only on the way does not show.

    Raises
    ------
    TypeError
        The dtype is no float and not complex: integers are exact as they are.
    ValueError
        `x` has no such axis.
    MismatchError
        Ranks differ in the axis, in the dtype, or in the length of another axis.

    Notes
    -----
    Each rank adds its rows up in small superaccumulators (Neal: Fast exact summation using small
    and large superaccumulators, 2015), which are integers: so they can be reduced in any order.
    Between ranks go 560 bytes for each element of the result, 1,120 for a complex one. Arrays on
    devices are copied to the host.

    Examples
    --------
    >>> import numpy as np
    >>> import arraycomm as ac
    >>> from arraycomm.testing import run
    >>> x = np.array([1e100, 1.0, -1e100, 1e-9])
    >>> [run(n, lambda comm: float(ac.fsum(x[comm.rank :: comm.size], comm=comm))) for n in (1, 2)]
    [[1.000000001], [1.000000001, 1.000000001]]
    """
    return runner_of(comm or world()).call_within(timeout, Fsum, x, axis)
