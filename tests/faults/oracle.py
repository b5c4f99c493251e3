"""What ranks get from the calls of a program, computed with NumPy from what all pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from arraycomm.testing._arrays.oracle import expected, same_result
from tests.faults import above, optimizers
from tests.faults.programs import CUSTOM, Call
from tests.faults.values import Array, argument, counts_of, custom_op, passes_nothing


def signature(call: Call, rank: int) -> tuple[Any, Any]:
    """Return what a call shows the others: its head, and its array or None where it cannot know."""
    head = (call.operation, call.op, call.root, call.setting)
    unknown = passes_nothing(call, rank) or not call.dtype
    return head, None if unknown else (call.dtype, call.shape)


def agreed(calls: list[Call]) -> bool:
    """Return whether the calls of all ranks are parts of one; those that raise are left aside."""
    shown = [signature(call, rank) for rank, call in enumerate(calls) if not call.wrong]
    arrays = {array for _, array in shown if array is not None}
    return len({head for head, _ in shown}) <= 1 and len(arrays) <= 1


def right_result(calls: list[Call], rank: int) -> Any:
    """Return what a rank gets from a call to which the ranks pass these."""
    call, size = calls[rank], len(calls)
    if call.operation == "update":
        return optimizers.updated(calls, rank)
    if call.operation in above.OPERATIONS:
        return above.OPERATIONS[call.operation].right(calls, rank)
    if call.operation == "barrier":
        return None
    if call.root >= 0:
        if call.operation.startswith(("reduce", "gather")) and rank != call.root:
            return None
        if call.operation in ("bcast", "scatter", "bcast_object"):
            sent = argument(calls[call.root], call.root, size)
            return sent[rank] if call.operation == "scatter" else sent
    passed = [argument(other, number, size) for number, other in enumerate(calls)]
    return _RESULTS[call.operation](passed, rank, call, calls)


def _folded(xs: list[Array], op: str) -> Array:
    if op != CUSTOM:
        return expected(xs, op)
    fold, total = custom_op(raises=False), xs[0]
    for x in xs[1:]:
        total = fold(total, x)
    return total


def _block(x: Array, counts: list[int], rank: int) -> Array:
    start = sum(counts[:rank])
    return x[start : start + counts[rank]]


_RESULTS: Final[dict[str, Callable[[list[Any], int, Call, list[Call]], Any]]] = {
    "allreduce": lambda xs, rank, call, calls: _folded(xs, call.op),
    "reduce": lambda xs, rank, call, calls: _folded(xs, call.op),
    "scan": lambda xs, rank, call, calls: _folded(xs[: rank + 1], call.op),
    "exscan": lambda xs, rank, call, calls: _folded(xs[:rank], call.op) if rank else None,
    "reduce_scatter": lambda xs, rank, call, calls: _folded([x[rank] for x in xs], call.op),
    "allgather": lambda xs, rank, call, calls: np.stack(xs),
    "allgatherv": lambda xs, rank, call, calls: np.concatenate(xs),
    "gather": lambda xs, rank, call, calls: np.stack(xs),
    "gatherv": lambda xs, rank, call, calls: np.concatenate(xs),
    "alltoall": lambda xs, rank, call, calls: np.stack([x[rank] for x in xs]),
    "alltoallv": lambda xs, rank, call, calls: np.concatenate(
        [
            _block(x, counts_of(other, source, len(xs)), rank)
            for source, (x, other) in enumerate(zip(xs, calls, strict=True))
        ]
    ),
    "allgather_object": lambda xs, rank, call, calls: xs,
    "gather_object": lambda xs, rank, call, calls: xs,
}


def differs(got: Any, right: Any, op: str = "") -> str:
    """Say in what a result differs from the right one, or return an empty string."""
    if isinstance(right, list) and isinstance(got, list) and len(got) == len(right):
        return next(
            (said for pair in zip(got, right, strict=True) if (said := differs(*pair, op))), ""
        )
    if not isinstance(right, np.ndarray | np.generic):
        return "" if got == right else f"{got!r:.200}, not {right!r:.200}"
    found = np.asarray(got)
    if same_result(found, np.asarray(right), op):
        return ""
    return f"{found.dtype} {found.shape} {found!r:.200}, not {right.dtype} {right.shape} {right!r:.200}"
