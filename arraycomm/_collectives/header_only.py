"""Operations that are finished with their header: a barrier, and an exchange of a few bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraycomm._collectives.operation import Context, Operation
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.header import Signature
from arraycomm._transports.base import Bytes


class SmallExchange(Operation):
    """An operation that is finished with its header; it returns every rank's data, of one length."""

    def __init__(self, context: Context, op: str | None = None, data: bytes = b"") -> None:
        super().__init__(context)
        self.signature = Signature(self.name, op)
        self._data = np.frombuffer(data, np.uint8)

    def pack(self, room: int) -> Bytes:
        return self._data

    def result(self, agreement: Agreement) -> Any:
        count = len(self._data)
        return [agreement.payload(rank, count).tobytes() for rank in range(self.group.size)]


class Barrier(Operation):
    """See `Communicator.barrier`."""

    name, code = "barrier", 7

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.signature = Signature(self.name)
