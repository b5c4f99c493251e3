"""Leaves on a device: packed, reduced and returned without a copy to the host.

What such a reduction puts on the device after its header may be recorded, and put there in C again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.results import to_framework
from arraycomm._calls.operation import Context, Operation
from arraycomm._calls.placement import HostPlacement
from arraycomm._cuda import arrays
from arraycomm._cuda.placement import CopiedTreePlacement, DevicePlacement
from arraycomm._errors import forgiving
from arraycomm._prepared.steps import moving
from arraycomm._protocol.header import ALL_ON_DEVICE, Signature
from arraycomm._reduce import algorithms
from arraycomm._transports.base import Steps
from arraycomm._trees.buffers import Packed
from arraycomm._trees.fusion import Fusion
from arraycomm._trees.layout import Bucket, lay_out
from arraycomm._trees.leaves import Parts


def reduce(
    placement: DevicePlacement, views: Sequence[BufferView], op: str, bucket_bytes: int
) -> Steps:
    """Reduce leaves on a device; return their results, in their order.

    Leaves of one dtype are sent together. One launch copies many leaves into their bucket. If a
    bucket's leaves are all of one framework and device, results are parts of one array; otherwise
    each result is copied once more. The result of a leaf on the host is on the host.
    """
    reduced: list[Any] = [None] * len(views)
    for bucket in lay_out(tuple((leaf.dtype, leaf.shape) for leaf in views), bucket_bytes):
        packed = _DeviceBucket(placement, bucket, views)
        flat = packed.device_buffer
        yield from algorithms.allreduce(placement.link, flat, flat, op)
        for leaf, result in packed.results():
            reduced[leaf] = result
    return reduced


class _DeviceBucket:
    """One bucket on the device: its leaves packed, then their results."""

    def __init__(
        self, placement: DevicePlacement, bucket: Bucket, views: Sequence[BufferView]
    ) -> None:
        self._placement, self._bucket, self._views = placement, bucket, views
        self._first = views[bucket.pieces[0].leaf]
        count = bucket.nbytes // bucket.dtype.itemsize
        kinds = {(views[piece.leaf].framework, views[piece.leaf].device) for piece in bucket.pieces}
        self._whole: Any = None
        if len(kinds) == 1 and self._first.device[0] == "cuda":
            self._whole, self.device_buffer = placement.empty(self._first, (count,), bucket.dtype)
        else:
            self.device_buffer = placement.memory.allocate(bucket.nbytes).view(bucket.dtype)
        pieces = [
            (views[leaf].device_buffer, offset, nbytes) for leaf, offset, nbytes in bucket.pieces
        ]
        placement.memory.gather_pieces(pieces, self.device_buffer.view("u1"))

    def results(self) -> Iterator[tuple[int, Any]]:
        """Yield each leaf's number and its result."""
        itemsize = self._bucket.dtype.itemsize
        if self._whole is not None:
            whole = self._placement.finish(self._whole, self._first)
        else:
            self._placement.guard(self.device_buffer)
        for leaf, offset, nbytes in self._bucket.pieces:
            view, part = self._views[leaf], slice(offset // itemsize, (offset + nbytes) // itemsize)
            if self._whole is not None:
                yield leaf, whole[part].reshape(view.shape)
                continue
            if view.device[0] != "cuda":
                yield (
                    leaf,
                    to_framework(
                        self._placement.download(self.device_buffer[part], view.shape), view
                    ),
                )
                continue
            made, device_buffer = self._placement.empty(view, view.shape, view.dtype)
            device_buffer[...] = self.device_buffer[part]
            yield leaf, arrays.finish(made, view)


class Recorded(NamedTuple):
    """A reduction of a tree on a device, recorded: what puts it there, and what ranks compare."""

    prepared: Any
    signature: Signature
    nbytes: int
    copies: int
    fusion: Fusion
    packed: Packed
    parts: Parts

    def placement(self, context: Context) -> HostPlacement:
        """Return the placement of a call: of what is made in full after all, if ranks differ."""
        group, placements = context.group, context.placements
        return CopiedTreePlacement(group, placements, ALL_ON_DEVICE, self.prepared.device)

    def put(self, context: Context, found: Any) -> list[Any]:
        """Put on the device what `prepared` has found there, and return the results."""
        placements, beside = context.placements, context.is_request
        placements.follow = placements.put(self.prepared, found, lambda _: None, beside=beside)
        results: list[Any] = self.prepared.deliver(found, None)
        return results


def record(
    context: Context,
    leaves: Sequence[Any],
    make: Callable[[Context], Operation],
    take_apart: Callable[[Any], list[Any]],
) -> Any:
    """Record the reduction of leaves, made in a context; return what looks at others like them.

    `take_apart` returns the leaves of a result. None if it cannot be recorded.
    """

    def recorded(placement: HostPlacement) -> tuple[Operation, Steps]:
        made = make(Context(context.group, context.placements, placement))
        made.payload = made.pack(0)
        return made, moving(made, take_apart)

    # What is wrong with that is no matter of the call which is made now.
    with forgiving:
        prepared, _ = context.placements.prepare(recorded, leaves, None)
        return prepared
    return None
