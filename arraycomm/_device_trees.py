"""Leaves of trees that are on a device: packed there, reduced there, and handed back from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from arraycomm import _algorithms
from arraycomm._buffers import BufferView
from arraycomm._cuda import arrays
from arraycomm._cuda.memory import Span
from arraycomm._dtypes import DType
from arraycomm._fusion import Bucket, lay_out
from arraycomm._header import Steps
from arraycomm._results import give
from arraycomm._ways import DeviceWay


def reduce(way: DeviceWay, views: Sequence[BufferView], op: str, bucket_bytes: int) -> Steps:
    """Reduce leaves that are on a device; return what makes each an array again, in their order.

    Leaves of one dtype travel together. Each byte is copied once on the way in, by one launch for
    thousands of leaves; results are parts of one array where a bucket's leaves are of one framework,
    and copied once more where they are not. Leaves of the host come back there.
    """
    made: list[Any] = [None] * len(views)
    for bucket in lay_out(tuple((leaf.dtype, leaf.shape) for leaf in views), bucket_bytes):
        block = _Block(way, bucket, views)
        flat = block.span
        yield from _algorithms.allreduce(way.link, flat, flat, op)
        for leaf, result in block.results():
            made[leaf] = result
    return made


class _Block:
    """The memory of one bucket, and its leaves' places in it."""

    def __init__(self, way: DeviceWay, bucket: Bucket, views: Sequence[BufferView]) -> None:
        self._way, self._bucket, self._views = way, bucket, views
        self._first = views[bucket.pieces[0].leaf]
        count = bucket.nbytes // bucket.dtype.itemsize
        kinds = {(views[piece.leaf].framework, views[piece.leaf].device) for piece in bucket.pieces}
        self._whole: Any = None
        if len(kinds) == 1 and self._first.device[0] == "cuda":
            self._whole, self.span = self._empty(self._first, (count,), bucket.dtype)
        else:
            self.span = way.memory.allocate(bucket.nbytes).view(bucket.dtype)
        pieces = [(views[leaf].span, offset, nbytes) for leaf, offset, nbytes in bucket.pieces]
        way.memory.gather_pieces(pieces, self.span.view("u1"))

    def _empty(self, like: BufferView, shape: tuple[int, ...], dtype: DType) -> tuple[Any, Span]:
        return arrays.empty_like(like, shape, dtype, self._way.memory)

    def results(self) -> Iterator[tuple[int, Any]]:
        """Yield each leaf's number and its result."""
        itemsize = self._bucket.dtype.itemsize
        if self._whole is not None:
            whole = arrays.finish(self._whole, self._first)
        for leaf, offset, nbytes in self._bucket.pieces:
            view, part = self._views[leaf], slice(offset // itemsize, (offset + nbytes) // itemsize)
            if self._whole is not None:
                yield leaf, whole[part].reshape(view.shape)
                continue
            if view.device[0] != "cuda":
                yield leaf, give(self._way.download(self.span[part], view.shape), view)
                continue
            made, span = self._empty(view, view.shape, view.dtype)
            span[...] = self.span[part]
            yield leaf, arrays.finish(made, view)
