"""What nodes tell one another in a step of the control channel: all slots, as far as used.

One rank of each node sends and receives. The slots of a node travel as records (`records.py`), and
in ⌈log₂ nodes⌉ rounds: in round k each node passes on what it knows to the node 2^k before it
(Bruck et al. 1997).

Common records of reductions that repeat go by persistent messages, prepared once for each number
of bytes: they take memory of MPI's. The native part takes whole steps by them (`_native/nodes.c`),
and leaves those to this module that it cannot finish.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

from mpi4py import MPI

from arraycomm._native import compiled
from arraycomm._transports.mpi.pieces import AHEAD, Pieces, Prepared, addresses_of, free, prepared
from arraycomm._transports.mpi.records import Bytes, Lengths, Message, Records, Rows, in_turn, place

_TAG: Final = 0
# For how many numbers of bytes prepared messages are kept.
_KEPT: Final = 64
# The most bytes of a status that the native part has room for.
_STATUS: Final = 128


class NodeExchange:
    """The messages of one step; each step is finished before the next one begins.

    The first rank of each node makes one, over a communicator for these messages alone.
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
        self._comm = comm
        self._records = Records(nodes, own, rows, lengths, pieces)
        # What the native part knows of these messages.
        self.native: Any = None
        self._kept: dict[tuple[int, int], list[Prepared]] = {}
        # The first piece that is to come in a round, the others, and what is on its way out.
        self._first: MPI.Request | None = None
        self._rest: list[Callable[[], bool]] = []
        self._sending: list[MPI.Request] = []
        count = len(nodes)
        ranks = [len(node) for node in in_turn(nodes, own)]
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
        # Where the native part builds a common record.
        self.box = self._records.first_box

    @property
    def alike(self) -> bool:
        """Whether no more than payloads are put into the slots of other nodes."""
        return self._records.alike

    def start(self, parity: int) -> None:
        """Begin to send the slots of this node, which are complete."""
        self._round = 0
        self._sending, self._rest = [], []
        self._records.begin(parity)
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
        records, self._round = self._records, reached
        records.resume(parity, len(records.members) + sum(self.received_ranks[:reached]))
        lanes = self.prepare(records.nbytes(parity), parity)
        self._sending = [sent for lane in lanes[: reached + 1] for _, sent in lane]
        for _, send in lanes[reached][AHEAD + 1 :]:
            if send:
                send.Start()
        self._rest = []
        self._first_came(None)

    def prepare(self, nbytes: int, parity: int) -> list[Prepared]:
        """Return the messages for a payload of `nbytes`; no step is under way if they are new."""
        key = nbytes, place(nbytes, parity)
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

    def _make(self, nbytes: int, parity: int) -> list[Prepared]:
        """Return new messages, a lane for each round."""
        lanes, known = [], len(self._records.members)
        for to, origin, sent, received in self._plan:
            message = self._records.repeated(nbytes, parity, known, sent, received)
            lanes.append(self._prepared(message, to, origin))
            known += received
        return lanes

    def _prepared(self, message: Message, to: int, origin: int) -> Prepared:
        """Prepare to receive the first piece, of which nobody knows the length, and the others."""
        come = [
            self._comm.Recv_init([piece, MPI.BYTE], origin, _TAG)
            for piece in (message.into, *message.rest)
        ]
        sends = [self._comm.Send_init([piece, MPI.BYTE], to, _TAG) for piece in message.out]
        return prepared(come, sends)

    def _begin_round(self) -> None:
        to, origin, sent, _ = self._plan[self._round]
        self._first = self._comm.Irecv([self._records.room, MPI.BYTE], origin, _TAG)
        pieces = self._records.going(sent)
        self._sending += [self._comm.Isend([piece, MPI.BYTE], to, _TAG) for piece in pieces]

    def _first_came(self, length: int | None) -> None:
        """Go on with a message whose first piece has come; its `length` may be unknown."""
        _, origin, _, received = self._plan[self._round]
        self._first = None
        for piece in self._records.rest(received, length):
            self._rest.append(self._comm.Irecv([piece, MPI.BYTE], origin, _TAG).Test)

    def _rest_came(self) -> bool:
        while self._rest:
            if not self._rest[-1]():
                return False
            self._rest.pop()
        return True

    def _end_round(self) -> None:
        """Take the message of this round, and begin the next one."""
        self._records.add(self._plan[self._round][3])
        self._round += 1
        if self._round < len(self._plan):
            self._begin_round()
        else:
            self._records.unpack()


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
    _, *others = in_turn(nodes, own)
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
