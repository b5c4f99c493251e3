"""The fast path of calls that travel as bytes, of which each rank has as many as it has."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from arraycomm._calls.runner import Runner
from arraycomm._calls.statistics import Count
from arraycomm._collectives.neighbors import NeighborAlltoall
from arraycomm._collectives.objects import ObjectOperation
from arraycomm._errors import is_interrupt
from arraycomm._prepared.exchanged import Exchanged
from arraycomm._prepared.steps import Call, Step


class Packed(Protocol):
    """What a call is given that is packed into bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of what is packed."""

    def packed(self, room: int) -> Any:
        """Return the bytes; None if there are more than `room`."""

    def taken(self, received: list[bytes], exchange: Any, rows: Any) -> Any:
        """Return what is made of the bytes that came, before another step takes their rows."""


class PackedCall(Exchanged):
    """The fast path of calls that pack what they are given into bytes, with the header if they fit.

    How many these are may differ from call to call and from rank to rank.
    """

    def __init__(
        self, runner: Runner, call: Call, step: Step, made: ObjectOperation | NeighborAlltoall
    ) -> None:
        super().__init__(runner, call, step, made)
        self._sends, self._root, self._loaded = made.sends, made.root, made.loaded
        self._nbytes = 0

    @staticmethod
    def arguments(x: Any, rest: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        return x, *rest

    def __call__(self, x: Packed, out: Any) -> Any:
        try:
            data = x.packed(self._group.inline_bytes) if self._sends else b""
        except BaseException as error:
            if not is_interrupt(error):
                return NotImplemented
            # As in a full call: the other ranks wait for the object.
            self.give_up(error)
            raise
        if data is None:
            return NotImplemented
        with self._engine.turn:
            exchange = self.exchange
            if exchange is None or self._engine.queue or self._group.closed is not None:
                return NotImplemented
            received = exchange.show(data)
            if received is None:
                return self.settle(x, out)
            self._nbytes += x.nbytes if self._sends else 0
            control = self._group.control
            taken = x.taken(received, exchange, control.rows[control.step & 1])
        return self.handed_over(partial(self._loaded, self._root, taken))

    def count(self) -> Count:
        calls, seconds = self.exchange.counts()
        return Count(self._call.operation.name, calls, self._nbytes, seconds)
