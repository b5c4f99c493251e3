"""The control channel between nodes: shared memory on each node, and messages between nodes.

A step has three parts. The ranks of a node write their slots to memory that they share. The first
of them exchanges the slots of all with the first ranks of the other nodes, and then says so to its
node, and whether all ranks show the same. If the ranks of a node cannot share memory, each counts
as a node.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from mpi4py import MPI

from arraycomm._transports.control import ControlChannel, message_slot
from arraycomm._transports.mpi.nodes import NodeExchange, native_steps
from arraycomm._transports.mpi.notes import MpiNotes
from arraycomm._transports.mpi.pieces import Pieces
from arraycomm._transports.mpi.routes import Places
from arraycomm._transports.mpi.under_way import KEPT_ALIVE, on_all, shared_memory, translated
from arraycomm._transports.notes import ExitNotice, fence
from arraycomm._transports.undivided import Undivided

# Seconds. A rank that gives up a step has waited for longer since it began the step before.
_SOON: Final = 1e-3
# Looks for the notices of others: MPI may need some to see a message that is there. A look takes
# about a microsecond, all together a half per cent of the time since.
_MOST_LOOKS: Final = 50
_LOOKS: Final = 5000


class MpiControl(ControlChannel):
    """A control channel over MPI.

    `between` is a duplicate of the group's communicator, in which nobody else sends messages of tag
    0. `nodes` has, for each rank, a number that only the ranks on its node have too.
    """

    def __init__(
        self, comm: MPI.Intracomm, between: MPI.Intracomm, nodes: Sequence[int], pieces: Pieces
    ) -> None:
        rank, size = comm.rank, comm.size
        memory, members = _node_memory(comm, nodes)
        slot = message_slot(size)
        slots = memory[: 2 * size * slot].reshape(2, size, slot)
        super().__init__(rank, size, [*slots], [*slots[:, rank]])
        words = memory[2 * size * slot :].data.cast("q")
        # For each parity, how many bytes of its payload a rank of this node shows; the last step
        # that is complete on this node; and for each parity whether all ranks show the same, also
        # in steps of the native part.
        self._lengths = [words[:size], words[size : 2 * size]]
        self._complete, self.alike = words[2 * size :][:1], words[2 * size + 1 :]
        own = next(number for number, ranks in enumerate(members) if rank in ranks)
        self._neighbours = [peer for peer in members[own] if peer != rank]
        self._stamps = [peer * self.stride for peer in self._neighbours]
        self._leads = rank == members[own][0]
        self._exchange: NodeExchange | None = None
        if self._leads and len(members) > 1:
            shown = self.rows, self._lengths
            self._exchange = NodeExchange(between, members, own, *shown, pieces)
        if len(members) > 1 and type(self) is MpiControl:
            self.slots = memory[: 2 * size * slot]
            self.native = native_steps(self._exchange, memory, rank, members, slot)
        self._exchanging = Undivided()
        self._pending = self._started = self._received = self._natively = False
        # When this rank began its last step and the one before, as far as Python knows; and the
        # ranks that have given up the step that is complete otherwise.
        self._begun = self._before = 0.0
        self._given_up: list[int] = []
        KEPT_ALIVE.add(self)
        self.notes: MpiNotes = MpiNotes(between, lambda: self.step)

    def post(self, nbytes: int | None = None) -> None:
        self.step = step = self.step + 1
        parity = step & 1
        self._lengths[parity][self.rank] = self.payload if nbytes is None else nbytes
        if self._stamps:
            fence()
        self.my_words[parity][0] = step
        self._before, self._begun = self._begun, time.monotonic()
        self._pending = True
        self._started = self._received = self._natively = False
        if not self._stamps:
            with self._exchanging:
                self._start()

    def go_on(self) -> None:
        self._pending, self._natively = True, self._leads
        self._started = self._received = False

    def done(self) -> bool:
        if self._pending and (self._led() if self._leads else self._follow()):
            self._given_up = [*self.given_up()]
            self._pending = bool(self._given_up)
        return not self._pending

    def given_up(self) -> dict[int, ExitNotice]:
        since = time.monotonic() - self._before
        if since < _SOON:
            return {}
        for _ in range(min(int(_LOOKS * since), _MOST_LOOKS)):
            self.notes.answer_requests()
        return super().given_up()

    def _follow(self) -> bool:
        """Return whether the first rank of this node has all slots."""
        if self._complete[0] < self.step:
            return False
        fence()
        return True

    def _led(self) -> bool:
        with self._exchanging:
            return self._lead()

    def _lead(self) -> bool:
        """Take the step further, and return whether it is complete and all of it is sent."""
        if self._natively:
            over = self.native.advance()
            if over is not None:
                return bool(over)
            self._take_over()
        if not self._started:
            if self._missing_here():
                return False
            fence()
            self._start()
        exchange = self._exchange
        try:
            if not self._received:
                if exchange is not None and not exchange.received():
                    return False
                self._received = True
                self.alike[self.step & 1] = exchange is not None and exchange.alike
                if self._stamps:
                    fence()
                    self._complete[0] = self.step
            return exchange is None or exchange.sent()
        except MPI.Exception as error:
            raise translated(error) from error

    def _take_over(self) -> None:
        """Make the rest of a step that the native part leaves to Python."""
        self._natively = False
        reached, error = self.native.state()
        if error:
            raise translated(MPI.Exception(error))
        exchange, parity = self._exchange, self.step & 1
        assert exchange is not None
        if reached < 0:
            # The next step like this one goes by these messages.
            exchange.prepare(self._lengths[parity][self.rank], parity)
        else:
            self._started = True
            exchange.take_over(parity, reached)

    def _start(self) -> None:
        self._started = True
        if self._exchange is not None:
            try:
                self._exchange.start(self.step & 1)
            except MPI.Exception as error:
                raise translated(error) from error

    def _missing_here(self) -> bool:
        words, step = self.words[self.step & 1], self.step
        return any(words[stamp] < step for stamp in self._stamps)

    def missing(self) -> list[int]:
        if not self._pending or self._given_up:
            return self._given_up
        words, step = self.words[self.step & 1], self.step
        here = [r for r in self._neighbours if words[r * self.stride] < step]
        elsewhere = [r for r in self.peers if r not in self._neighbours]
        return sorted(here + [r for r in elsewhere if self.notes.step(r) < step])

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.free()
        KEPT_ALIVE.discard(self)
        self.native = None
        self.rows, self.words, self.mine, self.my_words = [], [], [], []


def _node_memory(comm: MPI.Intracomm, nodes: Sequence[int]) -> tuple[Any, list[list[int]]]:
    """Return the memory of this node's slots, and the ranks of each node; collective.

    Each rank is a node of its own if some cannot share memory.
    """
    nbytes = _nbytes(comm.size)
    members = Places(nodes).members
    if len(members) < comm.size:
        here = comm.Split(nodes[comm.rank], comm.rank)
        assert isinstance(here, MPI.Intracomm)
        memory = shared_memory(here, nbytes) if here.size > 1 else np.zeros(nbytes, np.uint8)
        here.Free()
        if on_all(comm, memory is not None):
            return memory, members
    return np.zeros(nbytes, np.uint8), [[rank] for rank in range(comm.size)]


def _nbytes(size: int) -> int:
    """Return the bytes that the ranks of a node share: the slots, and the words about them."""
    return 2 * size * message_slot(size) + (2 * size + 3) * 8
