"""The scratch memory of large reductions, taken before the header: there may be too little of it."""

from __future__ import annotations

import numpy as np

from arraycomm._collectives.selection import CHUNK_BYTES
from arraycomm._transports.base import Transport


def reserve(transport: Transport) -> None:
    """Take the memory that large reductions of host memory use, before the ranks count on it."""
    if transport.size > 1:
        transport.take(2 * CHUNK_BYTES + 64 * transport.size, np.dtype(np.uint8))
