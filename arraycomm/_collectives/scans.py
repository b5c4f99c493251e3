"""`scan` and `exscan`: the reductions in which each rank gets the fold of the ranks up to it."""

from __future__ import annotations

from typing import Any, ClassVar

from arraycomm._calls.custom_ops import Op
from arraycomm._calls.operation import Context, Share
from arraycomm._collectives import function_reductions
from arraycomm._collectives.reductions import Reduction
from arraycomm._protocol.agreement import Agreement
from arraycomm._reduce import chunks
from arraycomm._reduce.blocks import blocks_of, in_order, nothing, rows_of
from arraycomm._transports.base import Flat, Handle, Link, Steps


class Scan(Reduction):
    """See `Communicator.scan`."""

    name, code = "scan", 26
    # Whether a rank's own elements are part of what it gets.
    inclusive: ClassVar[bool] = True

    def __init__(self, context: Context, x: Any, op: str | Op, out: Any) -> None:
        super().__init__(context, x, op)
        self._count = self.group.rank + int(self.inclusive)
        if self._count:
            self.target = self.make_target(self.source.shape, out)

    def move(self, op: str) -> Steps:
        return prefixes(self.placement.link, self.flat, self.into, op, self.inclusive)

    def by_function(self, op: Op, agreement: Agreement) -> Steps:
        return function_reductions.scan(self, op, agreement, self.into, self.inclusive)

    def share_of(self, op: str) -> Share:
        return Share(range(self._count), 0, op)

    def folded_rows(self, agreement: Agreement) -> Flat:
        return self.rows(agreement)[: self._count]


class Exscan(Scan):
    """See `Communicator.exscan`."""

    name, code = "exscan", 27
    inclusive = False


def prefixes(link: Link, source: Flat, target: Flat | None, op: str, inclusive: bool) -> Steps:
    """Fold the `source` of the ranks up to each into its `target`: with itself if `inclusive`.

    Each rank folds all prefixes of its slice. Exclusive, rank 0 has no target.
    """
    size = link.size
    link.load(op, source.dtype)
    ranges = chunks.ranges(link, source)
    cuts = [[chunk.start + bound for bound in chunks.slices(len(chunk), size)] for chunk in ranges]
    counts = [bounds[link.rank + 1] - bounds[link.rank] for bounds in cuts]
    halves = chunks.halves(link, len(cuts), 2 * size * max(counts, default=0), source.dtype)

    def parts(number: int) -> list[Flat]:
        return rows_of(halves[number & 1][: 2 * size * counts[number]], 2)

    def begin(number: int) -> Handle:
        into = in_order(parts(number)[0], [counts[number]] * size)
        return link.alltoall(blocks_of(source, cuts[number]), into)

    def fold(number: int) -> None:
        rows, outs = parts(number)
        link.prefixes(op, source.dtype, rows_of(rows, size), rows_of(outs, size))

    def after(number: int) -> Handle:
        # Exclusive, prefix r belongs to rank r + 1; the last belongs to nobody, and rank 0 gets
        # none.
        lengths = [counts[number] if rank or inclusive else 0 for rank in range(size)]
        outs = in_order(parts(number)[1][: sum(lengths)], lengths)
        into = nothing(link) if target is None else blocks_of(target, cuts[number])
        return link.alltoall(outs, into)

    yield from chunks.one_by_one(link, len(cuts), begin, fold, after)
