"""The largest or smallest elements of all ranks, and on which ranks they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraycomm._arrays.exchange import exchange
from arraycomm._arrays.results import to_framework
from arraycomm._calls.operation import Context
from arraycomm._collectives.movements import Allgather
from arraycomm._dtypes import Kind, check_reducible, kind_of
from arraycomm._protocol.agreement import Agreement


class Maxloc(Allgather):
    """See `Communicator.maxloc`."""

    name, code = "maxloc", 42
    op = "max"

    def __init__(self, context: Context, x: Any) -> None:
        super().__init__(context, x, None)
        check_reducible(self.source.dtype, self.op)

    def result(self, agreement: Agreement) -> Any:
        rows = exchange(super().result(agreement), "numpy").reshape(self.group.size, -1)
        # The comparisons of floats of 16 and 8 bits are not those of NumPy.
        wide = rows.astype(np.float32) if kind_of(rows.dtype) is Kind.NARROW else rows
        places = wide.argmax(0) if self.op == "max" else wide.argmin(0)
        found, ranks = np.take_along_axis(rows, places[np.newaxis], 0), places.astype(np.int32)
        shape, like = self.source.shape, self.source
        return to_framework(found.reshape(shape), like), to_framework(ranks.reshape(shape), like)


class Minloc(Maxloc):
    """See `Communicator.minloc`."""

    name, code = "minloc", 43
    op = "min"
