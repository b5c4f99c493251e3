"""torch.distributed over gloo, as its manual uses it: tensors, and one process group for each set of ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from arraycomm._errors import CommunicatorClosedError
from docs.studies.peers.wrapper import Call, NotOfferedError

# Seconds that gloo waits for another rank; by default 30 minutes.
PATIENCE = 10.0

_OPS = {name: getattr(dist.ReduceOp, name.upper()) for name in ("sum", "min", "max")}
_OPS |= {name: getattr(dist.ReduceOp, f"B{name.upper()}") for name in ("and", "or", "xor")}
_OPS["prod"] = dist.ReduceOp.PRODUCT


class Gloo:
    """One rank's part."""

    def __init__(self, members: list[int]) -> None:
        self.members = members
        # A call of all processes, also of those that are no members.
        self.group: Any = dist.new_group(members, timedelta(seconds=PATIENCE), "gloo")
        self.rank, self.size = dist.get_rank(self.group), len(members)

    def _call(self, function: Any, result: Any, later: bool, *args: Any, **options: Any) -> Call:
        work = function(*args, **options, group=self.group, async_op=later)
        array = None if result is None else _array(result)
        return Call(array, work.wait, work.is_completed) if later else Call(array)

    # Reductions

    def allreduce(self, x: Any, op: Any = "sum", *, later: bool, out: Any = None) -> Call:
        result = _target(x, out)
        return self._call(dist.all_reduce, result, later, result, _op(op))

    def reduce(
        self, x: Any, op: Any = "sum", root: int = 0, *, later: bool, out: Any = None
    ) -> Call:
        result = _target(x, out)
        call = self._call(dist.reduce, result, later, result, self.members[root], _op(op))
        if self.rank != root:
            call.result = None
        return call

    def reduce_scatter(
        self, x: Any, op: Any = "sum", *, counts: Any = None, later: bool, out: Any = None
    ) -> Call:
        sent = _tensor(x)
        if counts is None:
            result = _room(out, x.shape[1:], sent)
            parts = list(sent.unbind())
        else:
            result = _room(out, (counts[self.rank], *x.shape[1:]), sent)
            parts = list(sent.split(list(counts)))
        return self._call(dist.reduce_scatter, result, later, result, parts, _op(op))

    # Movements

    def bcast(self, x: Any, root: int = 0, *, later: bool, out: Any = None) -> Call:
        result = self._at_root(x, root, out)
        return self._call(dist.broadcast, result, later, result, self.members[root])

    def _at_root(self, x: Any, root: int, out: Any = None) -> Any:
        """Return memory for what the root sends, whose shape and dtype the others do not know."""
        sent = None if x is None else _tensor(x)
        told = self.bcast_object(None if sent is None else (sent.shape, sent.dtype), root)
        if out is not None:
            return _tensor(out) if self.rank != root else _target(x, out)
        return sent.clone() if self.rank == root else torch.empty(told[0], dtype=told[1])

    def allgather(self, x: Any, *, later: bool, out: Any = None) -> Call:
        sent = _tensor(x)
        result = _room(out, (self.size, *x.shape), sent)
        return self._call(dist.all_gather, result, later, list(result.unbind()), sent)

    def gather(self, x: Any, root: int = 0, *, later: bool, out: Any = None) -> Call:
        sent, at_root = _tensor(x), self.rank == root
        result = _room(out, (self.size, *x.shape), sent) if at_root else None
        rows = None if result is None else list(result.unbind())
        return self._call(dist.gather, result, later, sent, rows, self.members[root])

    def scatter(self, x: Any, root: int = 0, *, later: bool, out: Any = None) -> Call:
        sent = None if x is None else _tensor(x)
        shape, dtype = self.bcast_object(None if sent is None else (sent.shape, sent.dtype), root)
        result = torch.empty(shape[1:], dtype=dtype) if out is None else _tensor(out)
        rows = list(sent.unbind()) if sent is not None and self.rank == root else None
        return self._call(dist.scatter, result, later, result, rows, self.members[root])

    def alltoall(self, x: Any, *, later: bool, out: Any = None) -> Call:
        if out is not None and np.shares_memory(x, out):
            raise NotOfferedError("torch.distributed has no all_to_all in place")
        result = _room(out, x.shape, _tensor(x))
        return self._call(dist.all_to_all_single, result, later, result, _tensor(x))

    def alltoallv(self, x: Any, counts: Any, *, later: bool, out: Any = None) -> Call:
        everyones = self.allgather_object(list(counts))
        come = [theirs[self.rank] for theirs in everyones]
        sent = _tensor(x)
        result = _room(out, (sum(come), *x.shape[1:]), sent)
        args = (result, sent, come, list(counts))
        return self._call(dist.all_to_all_single, result, later, *args)

    # Objects and messages

    def bcast_object(self, value: Any = None, root: int = 0) -> Any:
        box = [value]
        dist.broadcast_object_list(box, self.members[root], group=self.group)
        return box[0]

    def allgather_object(self, value: Any) -> Any:
        found = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def gather_object(self, value: Any, root: int = 0) -> Any:
        found = [None] * self.size if self.rank == root else None
        dist.gather_object(value, found, dst=self.members[root], group=self.group)
        return found

    # Groups

    def barrier(self) -> None:
        if self.group is None:
            raise CommunicatorClosedError("the process group has been destroyed")
        dist.barrier(self.group)

    def split(self, color: int | None, key: int) -> Gloo | None:
        if self.size < dist.get_world_size():
            raise NotOfferedError("new_group is a call of all processes")
        told = self.allgather_object((color, key))
        made = {}
        for own in sorted({theirs for theirs, _ in told if theirs is not None}):
            ranks = [rank for rank, (theirs, _) in enumerate(told) if theirs == own]
            made[own] = Gloo(sorted(ranks, key=lambda rank: (told[rank][1], rank)))
        return None if color is None else made[color]

    def dup(self) -> Gloo:
        if self.size < dist.get_world_size():
            raise NotOfferedError("new_group is a call of all processes")
        return Gloo(self.members)

    def free(self) -> None:
        dist.destroy_process_group(self.group)
        self.group = None


def _op(op: Any) -> Any:
    if not isinstance(op, str):
        raise NotOfferedError("gloo has no reductions by functions")
    if op == "mean":
        raise NotOfferedError("gloo has no mean")
    return _OPS[op]


# What NumPy does not name, by the name of ml_dtypes' dtype: as integers, and torch's own.
_NARROW = {
    "bfloat16": ("i2", torch.bfloat16),
    "float8_e4m3fn": ("i1", torch.float8_e4m3fn),
    "float8_e5m2": ("i1", torch.float8_e5m2),
}


def _tensor(x: Any) -> Any:
    """Return a tensor over the memory of an array; it is not to be written if the array is not."""
    if x.dtype.name in _NARROW:
        carrier, dtype = _NARROW[x.dtype.name]
        return _tensor(x.view(carrier)).view(dtype)
    return torch.from_numpy(x if x.flags.writeable else x.copy())


def _array(tensor: Any) -> Any:
    for name, (carrier, dtype) in _NARROW.items():
        if tensor.dtype == dtype:
            import ml_dtypes

            return (
                tensor.view(getattr(torch, f"int{8 * int(carrier[1])}"))
                .numpy()
                .view(np.dtype(getattr(ml_dtypes, name)))
            )
    return tensor.numpy()


def _room(out: Any, shape: Any, like: Any) -> Any:
    return torch.empty(shape, dtype=like.dtype) if out is None else _tensor(out)


def _target(x: Any, out: Any) -> Any:
    """Return a tensor with the elements of `x`, in the memory of `out` or in new memory."""
    if out is None:
        return _tensor(x).clone()
    result = _tensor(out)
    result.copy_(_tensor(x))
    return result
