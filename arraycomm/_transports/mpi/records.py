"""What a node knows in a step of the control channel: its own records, and those that have come.

A record is the number of payload bytes, the words in front of the payload, and the payload, in
whole words. Ranks that show the same words, and as many bytes, have a common record: the words
once, and everyone's payload. It begins with the complement of the number. So a header costs the
same on any number of ranks that agree, and whoever finds two records that differ passes on a record
for each rank.

Long common records go in pieces (`pieces.py`). The first one says how many follow: only
then does a node begin to receive these. If payloads are large, the first piece of a common record
is what is in front of them, and they go from slot to slot; short ones go by way of a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._transports.control import PAYLOAD
from arraycomm._transports.mpi.pieces import Pieces

_WORD: Final = 8
_WORDS: Final = PAYLOAD // _WORD
# Records lie in the same place in all steps.
_ANY: Final = -1
# The least bytes of payloads that go from slot to slot: it takes an empty message, and saves two
# copies.
_LARGE: Final = 32 << 10

Bytes = np.ndarray[Any, Any]
Rows = Sequence[Bytes]
Lengths = Sequence[memoryview]


class Message(NamedTuple):
    """Where the message of a round comes and goes: its first piece, and the others."""

    # Room for the first piece, of which nobody knows the length.
    into: Bytes
    rest: list[Bytes]
    out: list[Bytes]


class Records:
    """The records of one step, in the order in which they arrive: from this node on.

    `nodes` has the ranks of each node, and `own` is the number of this one. `rows` has for each
    parity all slots, and `lengths` how many payload bytes each rank of this node shows.
    """

    def __init__(
        self, nodes: Sequence[Sequence[int]], own: int, rows: Rows, lengths: Lengths, pieces: Pieces
    ) -> None:
        self._rows, self._lengths, self._cut = rows, lengths, pieces.of
        # Whether all ranks show the words of this one in front of their payload, once all has been
        # received. Then no more than the payload is put into the slots of other nodes.
        self.alike = False
        self.members = nodes[own]
        self._turned = [rank for node in in_turn(nodes, own) for rank in node]
        self._others = _selection(self._turned[len(self.members) :])
        self._here = _selection(self.members)
        # For each parity, what each rank of this node shows in front of its payload.
        self._shown = [
            [row[rank, _WORD:PAYLOAD].data.cast("q") for rank in self.members] for row in rows
        ]
        # Each has room for all records, and a message behind them. A step begins in the first one,
        # where common records are built.
        self._boxes = [np.empty(2 * rows[0].size, np.uint8) for _ in range(2)]
        self.first_box = self._boxes[0]
        self._use_box(0)
        # The length of the message that is coming; that of a payload, and of its part in a record.
        self._coming = self._each = self._boxed = 0

    def begin(self, parity: int) -> None:
        """Write what this node shows."""
        self._parity, self._end = parity, 0
        self._use_box(0)
        self.alike = self._have_common(parity)
        (self._pack_common if self.alike else self._pack)(parity)
        self._known = len(self.members)

    def resume(self, parity: int, known: int) -> None:
        """Go on with a step of the native part, in which `known` ranks have a common record."""
        self._parity, self.alike = parity, True
        self._use_box(0)
        self._each, self._boxed = _payload(self.nbytes(parity))
        self._known = known
        self._end = self._end_of(known)

    def nbytes(self, parity: int) -> int:
        """Return how many payload bytes the first rank of this node shows."""
        return self._lengths[parity][self.members[0]]

    def repeated(self, nbytes: int, parity: int, known: int, sent: int, received: int) -> Message:
        """Return the message of a round in which all have a common record with this payload.

        `known` ranks' is there then, that of `sent` ranks goes, and that of `received` comes.
        """
        each, boxed = _payload(nbytes)
        into, out = (
            self.first_box[PAYLOAD + known * boxed :],
            self.first_box[: PAYLOAD + sent * boxed],
        )
        come, own = self._cut(into[: PAYLOAD + received * boxed]), self._cut(out)
        if boxed < each:
            come += self._payloads(parity, self._turned[known:][:received], each)
            own += self._payloads(parity, self._turned[:sent], each)
        return Message(into, come[1:], own)

    def going(self, sent: int) -> list[Bytes]:
        """Return the pieces of the message with the records of the first `sent` ranks."""
        out = self._box[: self._end_of(sent)]
        if not self.alike:
            return [out]
        pieces = self._cut(out)
        if self._boxed < self._each:
            pieces += self._payloads(self._parity, self._turned[:sent], self._each)
        return pieces

    @property
    def room(self) -> Bytes:
        """Where the first piece of the next message goes."""
        return self._box[self._end :]

    def rest(self, received: int, length: int | None) -> list[Bytes]:
        """Return where the other pieces go of a message whose first piece has come.

        It has the records of `received` ranks. The `length` of the first piece may be unknown.
        """
        words, first = self._words, self._end // _WORD
        if words[first] >= 0:
            self._coming = self._length(received) if length is None else length
            return []
        from_slots = self.alike and self._boxed < self._each
        if from_slots and words[first : first + _WORDS] == words[:_WORDS]:
            self._coming = PAYLOAD
            ranks = self._turned[self._known :][:received]
            return self._payloads(self._parity, ranks, self._each)
        self._coming = self._length(received)
        record = self.room[: self._coming]
        if ~words[first] >= _LARGE:
            rows = record[PAYLOAD:].reshape(received, -1)
            return [piece for row in rows for piece in self._cut(row)]
        return self._cut(record)[1:]

    def add(self, count: int) -> None:
        """Add the records of `count` ranks, which have come behind the others."""
        message = self.room[: self._coming]
        known, self._known = self._known, self._known + count
        first, words = self._end // _WORD, self._words
        if self.alike:
            if words[first : first + _WORDS] == words[:_WORDS]:
                if len(message) > PAYLOAD:
                    end = self._end + len(message) - PAYLOAD
                    self._box[self._end : end] = message[PAYLOAD:]
                    self._end = end
                return
            # What is on its way is still to be sent from where it is.
            common = self._box[: self._end]
            if self._boxed < self._each:
                ranks = self._turned[:known]
                common = np.concatenate([common, *self._payloads(self._parity, ranks, self._each)])
            self._use_box(1)
            self.alike, self._end = False, 0
            self._write_records(common, known)
            self._write_records(message, count)
        elif words[first] < 0:
            self._write_records(message.copy(), count)
        else:
            self._end += len(message)

    def unpack(self) -> None:
        """Put what other nodes show into their slots."""
        rows, box, others = self._rows[self._parity], self._box, self._others
        own, end = self._end_of(len(self.members)), self._end
        count = len(rows) - len(self.members)
        if self.alike:
            if each := self._boxed:
                rows[others, PAYLOAD : PAYLOAD + each] = box[own:end].reshape(count, each)
            return
        stride = self._stride(own, end, count)
        if stride:
            rows[others, _WORD:stride] = box[own:end].reshape(count, stride)[:, _WORD:]
            return
        for row in np.arange(len(rows))[others]:
            record = box[own : self._skip(own, 1)]
            rows[row, _WORD : len(record)] = record[_WORD:]
            own += len(record)

    def _use_box(self, number: int) -> None:
        self._box = self._boxes[number]
        self._words = self._box.data.cast("q")

    def _payloads(self, parity: int, ranks: Sequence[int], each: int) -> list[Bytes]:
        """Return the pieces of the payloads of these ranks in their slots."""
        slots = [self._rows[parity][rank, PAYLOAD : PAYLOAD + each] for rank in ranks]
        return [piece for slot in slots for piece in self._cut(slot)]

    def _have_common(self, parity: int) -> bool:
        """Return whether the ranks of this node have a common record."""
        lengths, (first, *others) = self._lengths[parity], self._shown[parity]
        nbytes = self.nbytes(parity)
        if any(lengths[rank] != nbytes for rank in self.members[1:]):
            return False
        return all(words == first for words in others)

    def _pack_common(self, parity: int) -> None:
        """Write the common record of this node."""
        count, nbytes = len(self.members), self.nbytes(parity)
        self._words[0], self._words[1:_WORDS] = ~nbytes, self._shown[parity][0]
        self._each, self._boxed = _payload(nbytes)
        self._end = PAYLOAD + count * self._boxed
        if each := self._boxed:
            payloads = self._box[PAYLOAD : self._end].reshape(count, each)
            payloads[...] = self._rows[parity][self._here, PAYLOAD : PAYLOAD + each]

    def _pack(self, parity: int) -> None:
        """Write the records of this node."""
        rows, lengths = self._rows[parity], self._lengths[parity]
        for rank in self.members:
            start, self._end = self._end, self._end + _record(lengths[rank])
            self._box[start : self._end] = rows[rank, : self._end - start]
            self._words[start // _WORD] = lengths[rank]

    def _write_records(self, message: Bytes, count: int) -> None:
        """Write a record for each of `count` ranks, which may have a common one in the message."""
        nbytes = int(message[:_WORD].view(np.int64)[0])
        if nbytes >= 0:
            self._box[self._end :][: len(message)] = message
            self._end += len(message)
            return
        start, stride = self._end, _record(~nbytes)
        self._end += count * stride
        records = self._box[start : self._end].reshape(count, stride)
        records[:, :PAYLOAD] = message[:PAYLOAD]
        records[:, :_WORD].view(np.int64)[...] = ~nbytes
        records[:, PAYLOAD:] = message[PAYLOAD:].reshape(count, stride - PAYLOAD)

    def _end_of(self, count: int) -> int:
        """Return where the first `count` records end, or a common record of this many ranks."""
        if self.alike:
            return PAYLOAD + count * self._boxed
        if count == self._known:
            return self._end
        stride = self._stride(0, self._end, self._known)
        return count * stride if stride else self._skip(0, count)

    def _length(self, count: int) -> int:
        """Return the length of the message that comes, with the records of `count` ranks."""
        nbytes = self._words[self._end // _WORD]
        if nbytes < 0:
            return PAYLOAD + count * _whole(~nbytes)
        return self._skip(self._end, count) - self._end

    def _skip(self, start: int, count: int) -> int:
        """Return where this many records end that begin at `start`."""
        for _ in range(count):
            start += _record(self._words[start // _WORD])
        return start

    def _stride(self, start: int, end: int, count: int) -> int:
        """Return the length of each of this many records, or 0 if they differ in it."""
        nbytes = self._words[start // _WORD]
        stride = _record(nbytes)
        if end - start != count * stride:
            return 0
        lengths = self._box[start:end].view(np.int64)[:: stride // _WORD]
        return stride if (lengths == nbytes).all() else 0


def _payload(nbytes: int) -> tuple[int, int]:
    """Return the length of a payload in whole words, and of its part in a common record."""
    each = _whole(nbytes)
    return each, 0 if nbytes >= _LARGE else each


def place(nbytes: int, parity: int) -> int:
    """Return the parity of the steps whose messages lie in the same place, or `_ANY`."""
    return parity if nbytes >= _LARGE else _ANY


def in_turn(nodes: Sequence[Sequence[int]], own: int) -> list[Sequence[int]]:
    """Return the nodes from this one on."""
    return [nodes[(own + k) % len(nodes)] for k in range(len(nodes))]


def _selection(ranks: Sequence[int]) -> slice | np.ndarray[Any, Any]:
    """Return what selects the rows of these ranks: a slice, which is faster, if it can be one."""
    first, count = ranks[0], len(ranks)
    consecutive = list(ranks) == list(range(first, first + count))
    return slice(first, first + count) if consecutive else np.array(ranks, np.intp)


def _record(nbytes: int) -> int:
    """Return the length of a record with this many bytes of payload."""
    return PAYLOAD + _whole(nbytes)


def _whole(nbytes: int) -> int:
    return -(-nbytes // _WORD) * _WORD
