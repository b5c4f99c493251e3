"""What nodes tell one another in a step of the control channel: all slots, as far as used.

One rank of each node sends and receives. The slots of a node travel as records, and in ⌈log₂ nodes⌉
rounds: in round k each node passes on what it knows to the node 2^k before it (Bruck et al. 1997).

A record is the number of payload bytes, the words in front of the payload, and the payload, in
whole words. Ranks that show the same words, and as many bytes, have a common record: the words
once, and everyone's payload. It begins with the complement of the number. So a header costs the
same on any number of ranks that agree, and whoever finds two records that differ passes on a record
for each rank.

Long common records go in pieces (`pieces.py`). The first one says how many follow: only
then does a node begin to receive these. If payloads are large, the first piece of a common record
is what is in front of them, and they go from slot to slot; short ones go by way of a record.

Common records of reductions that repeat go by persistent messages, prepared once for each number
of bytes: they take memory of MPI's. The native part takes whole steps by them (`_native/nodes.c`),
and leaves those to this module that it cannot finish.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from mpi4py import MPI

from arraycomm._native import compiled
from arraycomm._transports.control import PAYLOAD
from arraycomm._transports.mpi.pieces import AHEAD, Pieces, Prepared, addresses_of, free, prepared

_TAG: Final = 0
_WORD: Final = 8
_WORDS: Final = PAYLOAD // _WORD
# For how many numbers of bytes prepared messages are kept.
_KEPT: Final = 64
# Records lie in the same place in all steps.
_ANY: Final = -1
# The least bytes of payloads that go from slot to slot: it takes an empty message, and saves two
# copies.
_LARGE: Final = 32 << 10
# The most bytes of a status that the native part has room for.
_STATUS: Final = 128

Bytes = np.ndarray[Any, Any]
Rows = Sequence[Bytes]
Parts = Sequence[Bytes]
Lengths = Sequence[memoryview]


class NodeExchange:
    """The messages of one step; each step is finished before the next one begins.

    The first rank of each node makes one, over a communicator for these messages alone. `rows` has
    for each parity all slots, and `lengths` how many payload bytes each rank of this node shows.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        nodes: Sequence[Sequence[int]],
        own: int,
        rows: Rows,
        lengths: Lengths,
        pieces: Pieces,
    ) -> None:
        self._comm, self._rows, self._lengths, self._cut = comm, rows, lengths, pieces.of
        # What the native part knows of these messages.
        self.native: Any = None
        self._kept: dict[tuple[int, int], list[Prepared]] = {}
        # The first piece that is to come in a round, the others, and what is on its way out.
        self._first: MPI.Request | None = None
        self._rest: list[Callable[[], bool]] = []
        self._sending: list[MPI.Request] = []
        # Whether all ranks show the words of this one in front of their payload, once all has been
        # received. Then no more than the payload is put into the slots of other nodes.
        self.alike = False
        self._members = nodes[own]
        count = len(nodes)
        # From this node on, in the order in which their records arrive.
        turned = _in_turn(nodes, own)
        self._turned = [rank for node in turned for rank in node]
        self._others = _selection(self._turned[len(self._members) :])
        self._here = _selection(self._members)
        # For each parity, what each rank of this node shows in front of its payload.
        self._shown = [
            [row[rank, _WORD:PAYLOAD].data.cast("q") for rank in self._members] for row in rows
        ]
        ranks = [len(node) for node in turned]
        # For each round: to whom, from whom, and the records of how many ranks are sent and
        # received.
        self._plan = [
            (
                nodes[(own - shift) % count][0],
                nodes[(own + shift) % count][0],
                sum(ranks[: count - shift][:shift]),
                sum(ranks[shift:][:shift]),
            )
            for shift in (1 << k for k in range((count - 1).bit_length()))
        ]
        # The number of ranks whose slots come in each round.
        self.received_ranks = [received for *_, received in self._plan]
        # Each has room for all records, and a message behind them. A step begins in the first one,
        # where common records are built.
        self._boxes = [np.empty(2 * rows[0].size, np.uint8) for _ in range(2)]
        self.box = self._boxes[0]
        self._use_box(0)
        # The length of the message that is coming; that of a payload in whole words, and whether it
        # goes from slot to slot.
        self._coming = self._each = 0
        self._large = False

    def start(self, parity: int) -> None:
        """Begin to send the slots of this node, which are complete."""
        self._parity, self._round = parity, 0
        self._sending, self._rest = [], []
        self._use_box(0)
        self._end = 0
        self.alike = self._have_common(parity)
        (self._pack_common if self.alike else self._pack)(parity)
        self._known = len(self._members)
        self._begin_round()

    def received(self) -> bool:
        """Return whether the slots of all other nodes are in place; makes progress."""
        while self._round < len(self._plan):
            if self._first is not None:
                status = MPI.Status()
                if not self._first.Test(status):
                    return False
                self._first_came(status.Get_count(MPI.BYTE))
            if not self._rest_came():
                return False
            self._end_round()
        return True

    def sent(self) -> bool:
        """Return whether nothing of this node's is still to be sent, once all has been received."""
        # MPICH 5 leaves persistent requests active if null ones are among more than 64 that it
        # tests at once.
        return MPI.Request.Testall([send for send in self._sending if send])

    def take_over(self, parity: int, reached: int) -> None:
        """Go on with a step of the native part in the round in which others show something else.

        The first piece of that round has come, and the sends of `AHEAD + 1` pieces have begun.
        """
        self._parity, self._round, self.alike = parity, reached, True
        self._use_box(0)
        nbytes = self._lengths[parity][self._members[0]]
        self._each, self._large = _whole(nbytes), nbytes >= _LARGE
        self._known = len(self._members) + sum(self.received_ranks[:reached])
        self._end = self._end_of(self._known)
        lanes = self.prepare(nbytes, parity)
        self._sending = [sent for lane in lanes[: reached + 1] for _, sent in lane]
        for _, send in lanes[reached][AHEAD + 1 :]:
            if send:
                send.Start()
        self._rest = []
        self._first_came(None)

    def prepare(self, nbytes: int, parity: int) -> list[Prepared]:
        """Return the messages for a payload of `nbytes`; no step is under way if they are new."""
        key = nbytes, self._place(nbytes, parity)
        lanes = self._kept.get(key)
        if lanes is None:
            if len(self._kept) >= _KEPT:
                self.free()
            lanes = self._kept[key] = self._make(*key)
            if self.native is not None:
                self.native.add(*key, [*map(addresses_of, lanes)])
        return lanes

    def free(self) -> None:
        """Free what MPI keeps between steps."""
        if self.native is not None:
            self.native.clear()
        for lanes in self._kept.values():
            free(lanes)
        self._kept.clear()

    def _receives(self, into: Bytes, rest: Parts, origin: int) -> list[MPI.Prequest]:
        """Prepare to receive: the first piece, of which nobody knows the length, and the others."""
        return [self._comm.Recv_init([p, MPI.BYTE], origin, _TAG) for p in (into, *rest)]

    def _sends(self, parts: Parts, to: int) -> list[MPI.Prequest]:
        return [self._comm.Send_init([piece, MPI.BYTE], to, _TAG) for piece in parts]

    def _receive_rest(self, into: Parts, origin: int) -> None:
        for piece in into:
            self._rest.append(self._comm.Irecv([piece, MPI.BYTE], origin, _TAG).Test)

    def _rest_came(self) -> bool:
        while self._rest:
            if not self._rest[-1]():
                return False
            self._rest.pop()
        return True

    def _use_box(self, number: int) -> None:
        self._box = self._boxes[number]
        self._words = self._box.data.cast("q")

    @property
    def _boxed(self) -> int:
        """Return the bytes that a common record has of each rank."""
        return 0 if self._large else self._each

    def _place(self, nbytes: int, parity: int) -> int:
        """Return the parity of the steps whose messages lie in the same place, or `_ANY`."""
        return parity if nbytes >= _LARGE else _ANY

    def _make(self, nbytes: int, parity: int) -> list[Prepared]:
        """Return new messages, a lane for each round."""
        lanes, known, each = [], len(self._members), _whole(nbytes)
        box, boxed = self._boxes[0], 0 if nbytes >= _LARGE else each
        for to, origin, sent, received in self._plan:
            into, out = box[PAYLOAD + known * boxed :], box[: PAYLOAD + sent * boxed]
            come, own = self._cut(into[: PAYLOAD + received * boxed]), self._cut(out)
            if boxed < each:
                come += self._payloads(parity, self._turned[known:][:received], each)
                own += self._payloads(parity, self._turned[:sent], each)
            lanes.append(prepared(self._receives(into, come[1:], origin), self._sends(own, to)))
            known += received
        return lanes

    def _payloads(self, parity: int, ranks: Sequence[int], each: int) -> list[Bytes]:
        """Return the pieces of the payloads of these ranks in their slots."""
        slots = [self._rows[parity][rank, PAYLOAD : PAYLOAD + each] for rank in ranks]
        return [piece for slot in slots for piece in self._cut(slot)]

    def _begin_round(self) -> None:
        to, origin, sent, _ = self._plan[self._round]
        into, out = self._box[self._end :], self._box[: self._end_of(sent)]
        self._first = self._comm.Irecv([into, MPI.BYTE], origin, _TAG)
        pieces = self._cut(out) if self.alike else [out]
        if self.alike and self._large:
            pieces += self._payloads(self._parity, self._turned[:sent], self._each)
        self._sending += [self._comm.Isend([piece, MPI.BYTE], to, _TAG) for piece in pieces]

    def _first_came(self, length: int | None) -> None:
        """Go on with a message whose first piece has come; its `length` may be unknown."""
        _, origin, _, received = self._plan[self._round]
        self._first = None
        words, first = self._words, self._end // _WORD
        come: list[Bytes] = []
        if words[first] >= 0:
            self._coming = self._length(received) if length is None else length
        elif self.alike and self._large and words[first : first + _WORDS] == words[:_WORDS]:
            self._coming = PAYLOAD
            ranks = self._turned[self._known :][:received]
            come = self._payloads(self._parity, ranks, self._each)
        else:
            self._coming = self._length(received)
            record = self._box[self._end :][: self._coming]
            if ~words[first] >= _LARGE:
                rows = record[PAYLOAD:].reshape(received, -1)
                come = [piece for row in rows for piece in self._cut(row)]
            else:
                _, *come = self._cut(record)
        self._receive_rest(come, origin)

    def _end_round(self) -> None:
        """Take the message of this round, and begin the next one."""
        count = self._plan[self._round][3]
        self._add(self._box[self._end :][: self._coming], count)
        self._known += count
        self._round += 1
        if self._round < len(self._plan):
            self._begin_round()
        else:
            self._unpack()

    def _have_common(self, parity: int) -> bool:
        """Return whether the ranks of this node have a common record."""
        lengths, (first, *others) = self._lengths[parity], self._shown[parity]
        nbytes = lengths[self._members[0]]
        if any(lengths[rank] != nbytes for rank in self._members[1:]):
            return False
        return all(words == first for words in others)

    def _pack_common(self, parity: int) -> None:
        """Write the common record of this node."""
        count = len(self._members)
        nbytes = self._lengths[parity][self._members[0]]
        self._words[0], self._words[1:_WORDS] = ~nbytes, self._shown[parity][0]
        self._each, self._large = _whole(nbytes), nbytes >= _LARGE
        each = self._boxed
        self._end = PAYLOAD + count * each
        if each:
            payloads = self._box[PAYLOAD : self._end].reshape(count, each)
            payloads[...] = self._rows[parity][self._here, PAYLOAD : PAYLOAD + each]

    def _pack(self, parity: int) -> None:
        """Write the records of this node."""
        rows, lengths = self._rows[parity], self._lengths[parity]
        for rank in self._members:
            start, self._end = self._end, self._end + _record(lengths[rank])
            self._box[start : self._end] = rows[rank, : self._end - start]
            self._words[start // _WORD] = lengths[rank]

    def _add(self, message: Bytes, count: int) -> None:
        """Add the records of this many ranks, which have come behind the others."""
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
            if self._large:
                ranks = self._turned[: self._known]
                common = np.concatenate([common, *self._payloads(self._parity, ranks, self._each)])
            self._use_box(1)
            self.alike, self._end = False, 0
            self._write_records(common, self._known)
            self._write_records(message, count)
        elif words[first] < 0:
            self._write_records(message.copy(), count)
        else:
            self._end += len(message)

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

    def _unpack(self) -> None:
        """Put what other nodes show into their slots."""
        rows, box, others = self._rows[self._parity], self._box, self._others
        own, end = self._end_of(len(self._members)), self._end
        count = len(rows) - len(self._members)
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


def _in_turn(nodes: Sequence[Sequence[int]], own: int) -> list[Sequence[int]]:
    """Return the nodes from this one on."""
    return [nodes[(own + k) % len(nodes)] for k in range(len(nodes))]


def _functions() -> dict[str, int]:
    """Return where MPI's functions are that the native part calls; none if they are not found."""
    try:
        library = ctypes.CDLL(MPI.__file__)
        found = {"start": library.MPI_Start, "test": library.MPI_Test}
    except (OSError, AttributeError):
        return {}
    return {
        name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in found.items()
    }


def native_steps(
    exchange: NodeExchange | None,
    memory: Bytes,
    rank: int,
    nodes: Sequence[Sequence[int]],
    slot: int,
) -> Any:
    """Return what takes whole steps in the native part; None if that is not possible.

    `exchange` is None for all but the first rank of a node. `memory` is that of the node, with
    slots of `slot` bytes.
    """
    # Whoever calls MPI there holds no lock of Python's.
    possible = compiled is not None and MPI.Query_thread() == MPI.THREAD_MULTIPLE
    functions = _functions() if possible and MPI._sizeof(MPI.Status) <= _STATUS else {}
    if not functions:
        return None
    own = next(number for number, ranks in enumerate(nodes) if rank in ranks)
    _, *others = _in_turn(nodes, own)
    size = sum(map(len, nodes))
    native = compiled.Nodes(
        memory=memory,
        rank=rank,
        size=size,
        slot=slot,
        members=nodes[own],
        others=[rank for node in others for rank in node],
        received=exchange.received_ranks if exchange is not None else [size - len(nodes[own])],
        ahead=AHEAD,
        box=exchange.box if exchange is not None else None,
        **functions,
    )
    if exchange is not None:
        exchange.native = native
    return native


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
