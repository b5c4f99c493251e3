"""One large array reduced through the shared segment, as trees are."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraycomm._collectives.operation import Context
from arraycomm._collectives.reductions import Allreduce
from arraycomm._transports.base import Steps
from arraycomm._trees.fusion import Fusion, TreeMemory
from arraycomm._trees.layout import ALIGNMENT


class AllreduceInSegment(Allreduce):
    """`allreduce` of a large host array: each byte is copied once, and folded from there into the result.

    `out` may be `x` itself. Without a shared segment it goes as other arrays do.
    """

    header_independent = False

    def __init__(
        self, context: Context, memory: TreeMemory, fusion: Fusion, x: Any, op: str, out: Any
    ) -> None:
        super().__init__(context, x, op, out)
        self._memory, self._fusion = memory, fusion

    def move(self, op: str) -> Steps:
        segment = None
        # The layout of a tree has gaps that a result does not have.
        if self.placement.host and self.nbytes % ALIGNMENT == 0:
            segment = yield from self._fusion.prepare(self._memory)
        if segment is None:
            yield from super().move(op)
            return
        assert self.into is not None
        into = self.into.view(np.uint8)
        yield from self._fusion.reduce_into(segment, into, [self.source], op)
