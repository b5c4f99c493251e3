"""The sending side: an array or object becomes an envelope, and pieces behind it if it is long.

The pieces have a tag of their own, which the envelope names, so that receives under way at the same
time never take one another's.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from arraycomm._arrays.views import view
from arraycomm._calls.arguments import check_rank
from arraycomm._calls.pickles import dumps
from arraycomm._calls.placement import flatten
from arraycomm._callsite import describe_raise
from arraycomm._checks import check_seconds
from arraycomm._errors import forgiving, name_operation
from arraycomm._messages import envelopes
from arraycomm._messages.delivery import Message, nothing
from arraycomm._messages.envelopes import Pickled
from arraycomm._messages.matching import PROC_NULL, TAGS, check_tag
from arraycomm._protocol.agreement import UndeliveredError
from arraycomm._protocol.group import Group
from arraycomm._reduce.blocks import cut
from arraycomm._transports.base import Bytes, Handle, Steps


class Outgoing(NamedTuple):
    """An array on its way: its envelope, with few elements inside it or many behind it.

    Bytes and copies are counted.
    """

    envelope: Bytes
    data: Bytes | None
    nbytes: int
    copies: int


class Sender:
    """Sends the messages of one group; `place` returns that of the thread in its program."""

    def __init__(self, group: Group, place: Callable[[], int]) -> None:
        self._group, self._place = group, place
        # The numbers of further pieces: of the last ones, and of messages under way.
        self._pieces, self._under_way = count(1), WeakValueDictionary[int, Handle]()

    def message(
        self,
        x: Any,
        dest: Any,
        tag: Any,
        timeout: Any = None,
        out: Any = None,
        wrong: Exception | None = None,
    ) -> Message:
        """Return a message to send; the receiver is told what is `wrong` with another argument."""
        if dest is PROC_NULL:
            self.read(x)
            check_tag(tag)
            return Message("send", nothing())
        dest, tag = check_rank(dest, self._group.size, "dest"), check_tag(tag)
        tags = range(tag, tag + 1)
        try:
            timeout = check_seconds(timeout)
            if wrong is not None:
                raise wrong
            outgoing = self.read(x, out)
        except Exception as error:
            name_operation(error, "send")
            return Message("send", self._refuse(error, dest, tag), dest, tags, 1, wrong=True)
        steps, (_, _, nbytes, copies) = self._send(outgoing, dest, tag), outgoing
        return Message("send", steps, dest, tags, 1, nbytes, copies, None, timeout)

    def read(self, x: Any, *outs: Any) -> Outgoing:
        """Return an array on its way, which may be written to as one of `outs` meanwhile."""
        if isinstance(x, Pickled):
            data, copies = dumps(x.obj), 0
            start = envelopes.start_of_pickle(len(data))
        else:
            source = view(x)
            start, (flat, copies) = envelopes.start_of(source, self._place()), flatten(source)
            data = flat.view(np.uint8)
        if envelopes.has_room(start, len(data)):
            envelope = np.frombuffer(start + data.tobytes(), np.uint8)
            return Outgoing(envelope, None, len(data), copies)
        if any(_may_change(data, out) for out in outs if out is not None):
            data, copies = data.copy(), copies + 1
        return Outgoing(np.frombuffer(bytearray(start), np.uint8), data, len(data), copies)

    def begin(self, outgoing: Outgoing, dest: int, tag: int) -> list[Handle]:
        """Begin to send an envelope and what follows it, which is to be waited for first."""
        transport, envelope, data = self._group.transport, outgoing.envelope, outgoing.data
        self._group.sent[dest, tag][0] += 1
        if data is None:
            return [transport.send(envelope, dest, tag)]
        # A number for the further pieces, which no message under way has.
        numbers = (number % (TAGS - 1) for number in self._pieces)
        pieces = next(number for number in numbers if number not in self._under_way)
        envelopes.set_pieces(envelope, pieces)
        self._under_way[pieces] = begun = transport.send(envelope, dest, tag)
        return [*(transport.send(piece, dest, TAGS + pieces) for piece in cut(data)), begun]

    def _send(self, outgoing: Outgoing, dest: int, tag: int) -> Steps:
        yield from self.begin(outgoing, dest, tag)

    def _refuse(self, error: Exception, dest: int, tag: int) -> Steps:
        """Tell the receiver why there is no message, and raise."""
        told = Outgoing(envelopes.of_error(describe_raise(error)), None, 0, 0)
        yield from self.begin(told, dest, tag)
        raise UndeliveredError(error)


def _may_change(data: Bytes, out: Any) -> bool:
    """Return whether elements may change when `out` is written to."""
    # What is wrong with it is raised by the receive, which writes nothing then.
    with forgiving:
        into = view(out, "out")
        return into.copied or np.may_share_memory(data, into.array)
    return False
