"""What programs call above the collectives: how a rank calls it, and what it must get.

Gradients are multiples of a number that all weights and counts divide, and small, so that their means
are exact in whatever order they are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

import arraycomm as ac
from arraycomm import Communicator
from arraycomm.testing._arrays.oracle import expected
from tests.faults.programs import DTYPES, Call
from tests.faults.values import ON_PURPOSE, Array, OnPurposeError, passes_nothing, values

# A dtype for another leaf of a tree, with the same reductions.
PARTNERS: Final = {
    "bool": "bool",
    "int32": "int64",
    "int64": "int32",
    "float16": "float64",
    "bfloat16": "float32",
    "float32": "bfloat16",
    "float64": "float16",
    "complex64": "float32",
}
# The numbers 1 to 9, which may be the sum of weights, divide it.
_DIVISIBLE: Final = 2520
_BLOCK: Final = (11,)


@dataclass(frozen=True)
class Above:
    """An operation: how a rank calls it, and what it gets if the ranks pass these calls."""

    play: Callable[[Communicator, Call], Any]
    right: Callable[[Sequence[Call], int], Any]


def whole(call: Call, rank: int, step: int) -> Array:
    """Return a gradient of one step."""
    random = np.random.default_rng((call.number, rank, step))
    return np.asarray(random.integers(0, 120, call.shape) * _DIVISIBLE).astype(DTYPES[call.dtype])


# Trees


def _partner(call: Call, rank: int) -> Array:
    other = replace(call, dtype=PARTNERS[call.dtype])
    return values(other, (*call.shape, 1), rank)


def _tree(call: Call, rank: int) -> dict[str, Any]:
    x = values(call, call.shape, rank)
    return {"a": x, "b": [_partner(call, rank), None], "tied": x}


def _leaves(tree: dict[str, Any]) -> list[Any]:
    return [tree["a"], *tree["b"], tree["tied"] is tree["a"]]


def _allreduce_tree(comm: Communicator, call: Call) -> Any:
    return _leaves(ac.allreduce_tree(_tree(call, comm.rank), _op(call), comm=comm))


def _op(call: Call) -> str:
    return "average" if call.wrong == "op" else call.op


def _reduced_tree(calls: Sequence[Call], rank: int) -> list[Any]:
    op = calls[rank].op
    a = [values(call, call.shape, r) for r, call in enumerate(calls)]
    b = [_partner(call, r) for r, call in enumerate(calls)]
    return [expected(a, op), expected(b, op), None, True]


def _gradients(call: Call, rank: int) -> dict[str, Any]:
    tree = _tree(call, rank)
    if (call.number + rank) % 3 == 0:
        tree["b"][0] = None
    return tree


def _allreduce_gradients(comm: Communicator, call: Call) -> Any:
    return _leaves(ac.allreduce_gradients(_gradients(call, comm.rank), _op(call), comm=comm))


def _reduced_gradients(calls: Sequence[Call], rank: int) -> list[Any]:
    found = [_gradients(call, r)["b"][0] for r, call in enumerate(calls)]
    leaves = _reduced_tree(calls, rank)
    if all(leaf is None for leaf in found):
        return [leaves[0], None, *leaves[2:]]
    zeros = np.zeros_like(leaves[1])
    summands = [zeros if leaf is None else leaf for leaf in found]
    return [leaves[0], expected(summands, calls[rank].op), *leaves[2:]]


def _repeated(call: Call) -> list[Call]:
    return [replace(call, number=call.number + 5_000 * at) for at in range(1 + len(call.shape))]


def _plan(comm: Communicator, call: Call) -> Any:
    plan = comm.plan(_tree(call, comm.rank), _op(call))
    return [_leaves(plan(_tree(each, comm.rank))) for each in _repeated(call)]


def _planned(calls: Sequence[Call], rank: int) -> list[Any]:
    steps = zip(*map(_repeated, calls), strict=True)
    return [_reduced_tree(step, rank) for step in steps]


def _state(call: Call, rank: int) -> dict[str, Any]:
    kept = (lambda: rank) if call.wrong == "unpicklable" else len
    return {"x": values(call, call.shape, rank), "n": call.number + rank, "s": f"{rank}", "f": kept}


def _synchronize(comm: Communicator, call: Call) -> Any:
    passed = None if passes_nothing(call, comm.rank) else _state(call, comm.rank)
    got = ac.synchronize(passed, root=_root(comm, call), comm=comm)
    return [got["x"], got["n"], got["s"]]


def _root(comm: Communicator, call: Call) -> int:
    return comm.size if call.wrong == "root" else call.root


def _synchronized(calls: Sequence[Call], rank: int) -> list[Any]:
    root = calls[rank].root
    sent = _state(calls[root], root)
    return [sent["x"], sent["n"], sent["s"]]


def _weight(call: Call, rank: int) -> int:
    return (call.number + rank) % 3


def _mean_metrics(comm: Communicator, call: Call) -> Any:
    weight = -1 if call.wrong == "weight" else _weight(call, comm.rank)
    measured = {"x": values(call, call.shape, comm.rank), "n": call.number + comm.rank}
    got = ac.mean_metrics(measured, weight, comm=comm)
    return [got["x"], got["n"]]


def _mean_of_metrics(calls: Sequence[Call], rank: int) -> list[Any]:
    weights = [_weight(call, r) for r, call in enumerate(calls)]
    x = [values(call, call.shape, r) for r, call in enumerate(calls)]
    n = [np.array(call.number + r) for r, call in enumerate(calls)]
    return [_weighted_mean(x, weights), _weighted_mean(n, weights)]


def _weighted_mean(arrays: Sequence[Array], weights: Sequence[int]) -> Array:
    dtype, wide = arrays[0].dtype, np.dtype(np.float64)
    if dtype.kind == "c":
        wide = np.dtype(np.complex128)
    elif dtype.kind in "biu":
        dtype = wide
    products = [
        x.astype(wide) * float(w) if w else np.zeros(x.shape, wide)
        for x, w in zip(arrays, weights, strict=True)
    ]
    total = products[0]
    for product in products[1:]:
        total = total + product
    with np.errstate(all="ignore"):
        parts = np.ascontiguousarray(total).reshape(-1).view(np.float64) / float(sum(weights))
    return parts.view(wide).reshape(total.shape).astype(dtype)


# Blocks


def _raise_together(comm: Communicator, call: Call) -> Any:
    with ac.raise_together(comm):
        if call.wrong == "block" and call.number % 2:
            raise OnPurposeError(ON_PURPOSE)
        got = comm.allreduce(np.full(_BLOCK, call.number + comm.rank), "max")
        if call.wrong == "block":
            raise OnPurposeError(ON_PURPOSE)
    return got


def _raised_together(calls: Sequence[Call], rank: int) -> Array:
    return np.full(_BLOCK, max(call.number + r for r, call in enumerate(calls)))


def _steps(call: Call, rank: int) -> int:
    return (call.number + rank) % 4


def _join(comm: Communicator, call: Call) -> Any:
    total = np.zeros(call.shape, DTYPES[call.dtype])
    with ac.join(comm) as joined:
        if call.wrong == "block":
            raise OnPurposeError(ON_PURPOSE)
        joined.weight = 1 + comm.rank % 2
        for step in range(_steps(call, comm.rank)):
            gradients = {"w": whole(call, comm.rank, step)}
            total += ac.allreduce_gradients(gradients, comm=comm)["w"]
    return joined.synchronize(total)


def _joined(calls: Sequence[Call], rank: int) -> Array:
    total = np.zeros(calls[rank].shape, DTYPES[calls[rank].dtype])
    for step in range(max(_steps(call, r) for r, call in enumerate(calls))):
        ranks = [r for r, call in enumerate(calls) if _steps(call, r) > step]
        weighted = [whole(calls[r], r, step) * (1 + r % 2) for r in ranks]
        total += np.asarray(sum(weighted) / sum(1 + r % 2 for r in ranks)).astype(total.dtype)
    return total


# Data, and lines


def _container(comm: Communicator, call: Call) -> Any:
    """Consume one batch, save a state, and consume the rest from another container."""
    length, uneven, seed = call.setting.split()
    data = object() if call.wrong == "data" else np.arange(int(length)) * 10
    shuffle = int(seed) >= 0
    settings: Any = {"comm": comm, "shuffle": shuffle, "seed": max(int(seed), 0), "uneven": uneven}
    container = ac.DistributedDataContainer(data, **settings)
    container.set_epoch(2)
    first = next(container.batches(3))
    again = ac.DistributedDataContainer(np.arange(int(length)) * 10, **settings)
    again.load_state_dict(container.state_dict())
    found = [first, *again.batches(2)]
    items = [int(i) for batch in found for i in batch.items]
    counted = [int(i) for b in found for i, w in zip(b.items, b.weights, strict=True) if w]
    everyone = sorted(i for part in comm.allgather_object(counted) for i in part)
    return [len(items) if shuffle else items, len(everyone) if uneven == "drop" else everyone]


def _contained(calls: Sequence[Call], rank: int) -> list[Any]:
    length, uneven, seed = calls[rank].setting.split()
    count, size = int(length), len(calls)
    all_items = [i * 10 for i in range(count)]
    if uneven == "drop":
        order = all_items[: count - count % size]
    elif uneven == "pad":
        order = all_items + all_items[: -count % size]
    else:
        order = all_items
    items = order[rank::size]
    everyone: Any = len(order) if uneven == "drop" else all_items
    return [len(items) if int(seed) >= 0 else items, everyone]


class _Unprintable:
    def __str__(self) -> str:
        raise OnPurposeError(ON_PURPOSE)


def _println(comm: Communicator, call: Call) -> None:
    ac.println(_Unprintable() if call.wrong == "line" else f"line {call.number}", comm=comm)


OPERATIONS: Final = {
    "allreduce_tree": Above(_allreduce_tree, _reduced_tree),
    "allreduce_gradients": Above(_allreduce_gradients, _reduced_gradients),
    "plan": Above(_plan, _planned),
    "synchronize": Above(_synchronize, _synchronized),
    "mean_metrics": Above(_mean_metrics, _mean_of_metrics),
    "join": Above(_join, _joined),
    "raise_together": Above(_raise_together, _raised_together),
    "container": Above(_container, _contained),
    "println": Above(_println, lambda calls, rank: None),
    "free": Above(lambda comm, call: comm.free(), lambda calls, rank: None),
}
