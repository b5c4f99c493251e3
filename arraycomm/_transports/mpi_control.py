"""The control channel between nodes: each step is one allgather.

Between steps, a rank may send short control messages: that it has left, or a request for the wait
status of others. Ranks look for such messages while they wait.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar, Final

import numpy as np
from mpi4py import MPI

from arraycomm._errors import TransportError
from arraycomm._transports.control import MESSAGE_SLOT, WELL, ControlChannel, ExitNotice

# Larger than the tags of users' messages and of their further pieces.
TAG: Final = 1 << 21
# The number of the control channel, the kind, a step, a state, and the length of the text. Control
# messages are short enough for MPI to send them at once.
_MESSAGE: Final = struct.Struct("<5q")
_MOST: Final = 3_000
_EXITING, _ASKING, _WAITING = range(3)


def translated(error: MPI.Exception) -> TransportError:
    """Return MPI's error as one of ours."""
    found = TransportError(f"MPI reported: {error.Get_error_string()}")
    # Another rank has called `shrink`.
    found.revoked = error.Get_error_class() == MPI.ERR_REVOKED
    return found


class MpiControl(ControlChannel):
    """A control channel over MPI: each step is an allgather, prepared once for each parity."""

    # Keeps channels alive: MPI may still write the rows of a step that this rank has given up.
    not_closed: ClassVar[set[MpiControl]] = set()

    def __init__(self, comm: MPI.Intracomm) -> None:
        size = comm.size
        rows = [np.zeros((size, MESSAGE_SLOT), np.uint8) for _ in range(2)]
        mine = [np.zeros(MESSAGE_SLOT, np.uint8) for _ in range(2)]
        super().__init__(comm.rank, size, rows, mine)
        self._requests = [
            comm.Allgather_init([mine[p], MPI.BYTE], [rows[p], MPI.BYTE]) for p in range(2)
        ]
        self._pending = False
        self.not_closed.add(self)
        self._comm = comm
        # MPI may deliver an unread message to a later communicator that has reused this one's id.
        self._number = int.from_bytes(comm.bcast(os.urandom(7)), "little")
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._own: ExitNotice | None = None
        self._notices: dict[int, ExitNotice] = {}
        self._status = ""
        # The other ranks' replies: the step that they had posted, and their wait status.
        self._replies: dict[int, tuple[int, str]] = {}

    def post(self) -> None:
        self.step = step = self.step + 1
        self.my_words[step & 1][0] = step
        try:
            self._requests[step & 1].Start()
        except MPI.Exception as error:
            raise translated(error) from error
        self._pending = True

    def done(self) -> bool:
        if self._pending:
            try:
                self._pending = not self._requests[self.step & 1].Test()
            except MPI.Exception as error:
                raise translated(error) from error
        return not self._pending

    def missing(self) -> list[int]:
        if not self._pending:
            return []
        return [r for r in self.peers if self._replies.get(r, (0, ""))[0] < self.step]

    def announce_exit(self, state: int, completed: int, text: str) -> None:
        first = self._own or ExitNotice(state, completed, text)
        self._own = first._replace(state=state)
        if state not in WELL:
            for peer in self.peers:
                # A rank that has died needs no notice.
                with suppress(TransportError):
                    self._send(peer, _EXITING, completed, state, first.text)

    def exit_notices(self) -> dict[int, ExitNotice]:
        self.answer_requests()
        return self._notices

    def report_wait(self, status: str) -> None:
        self._status = status

    def ask_wait_status(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._send(rank, _ASKING, self.step, 0, self._status)

    def wait_status(self, rank: int) -> str:
        return self._replies.get(rank, (0, ""))[1]

    def answer_requests(self) -> None:
        try:
            while message := self._comm.Improbe(MPI.ANY_SOURCE, TAG, status := MPI.Status()):
                data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                message.Recv([data, MPI.BYTE])
                self._read(status.Get_source(), data.tobytes())
        except MPI.Exception as error:
            raise translated(error) from error

    def _read(self, source: int, message: bytes) -> None:
        if len(message) < _MESSAGE.size:
            raise TransportError(f"rank {source} sent a malformed message")
        number, kind, step, state, length = _MESSAGE.unpack_from(message)
        if number != self._number:
            return
        text = message[_MESSAGE.size : _MESSAGE.size + max(length, 0)].decode(errors="replace")
        if kind == _EXITING:
            first = self._notices.get(source) or ExitNotice(state, step, text)
            self._notices[source] = first._replace(state=state)
            return
        self._replies[source] = (step, text)
        if kind == _ASKING and self._own is not None:
            self._send(source, _EXITING, self._own.step, self._own.state, self._own.text)
        elif kind == _ASKING:
            self._send(source, _WAITING, self.step, 0, self._status)

    def _send(self, peer: int, kind: int, step: int = 0, state: int = 0, text: str = "") -> None:
        data = text.encode(errors="replace")[-_MOST:]
        message = _MESSAGE.pack(self._number, kind, step, state, len(data)) + data
        try:
            self._sent = [sent for sent in self._sent if not sent[0].Test()]
            self._sent.append((self._comm.Isend([message, MPI.BYTE], peer, TAG), message))
        except MPI.Exception as error:
            raise translated(error) from error

    def close(self) -> None:
        for request in self._requests:
            request.Free()
        self.not_closed.discard(self)
