"""MLX over its ring of sockets, as its manual uses it; it reduces, gathers and sends, and has no groups.

Its arrays are lazy: what is not evaluated at once has the place of a nonblocking call.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from arraycomm.testing._arrays.frameworks import elements_of
from docs.studies.peers.wrapper import Call, NotOfferedError

_FUNCTIONS = {
    "sum": mx.distributed.all_sum,
    "min": mx.distributed.all_min,
    "max": mx.distributed.all_max,
}


class Mlx:
    """One rank's part."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()

    def allreduce(self, x: Any, op: Any = "sum", *, later: bool, out: Any = None) -> Call:
        _refuse(out)
        if op not in _FUNCTIONS:
            raise NotOfferedError(f"mlx.core.distributed reduces by sum, min and max, not by {op}")
        return _ended(_FUNCTIONS[op](mx.array(x), group=self.group), later)

    def reduce_scatter(
        self, x: Any, op: Any = "sum", *, counts: Any = None, later: bool, out: Any = None
    ) -> Call:
        _refuse(out)
        if op != "sum" or counts is not None:
            raise NotOfferedError("mlx.core.distributed has sum_scatter of equal parts")
        return _ended(mx.distributed.sum_scatter(mx.array(x), group=self.group)[0], later)

    def allgather(self, x: Any, *, later: bool, out: Any = None) -> Call:
        _refuse(out)
        # It joins rows.
        return _ended(mx.distributed.all_gather(mx.array(x)[None], group=self.group), later)


def _refuse(out: Any) -> None:
    if out is not None:
        raise NotOfferedError("mlx.core.distributed has no out")


def _ended(result: Any, later: bool) -> Call:
    call = Call()

    def wait() -> None:
        mx.eval(result)
        call.result = np.array(elements_of(result), order="C")

    call.wait = wait
    if not later:
        wait()
    return call
