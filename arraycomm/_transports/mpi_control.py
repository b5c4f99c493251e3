"""A control channel that travels between nodes, and the letters in which ranks tell what no step can.

A step is one allgather. Between steps a rank may tell the others that it has failed, or ask where
they are: by letters, short messages that are looked for while waiting.
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
from arraycomm._transports.control import FINISHED, MESSAGE_SLOT, ControlChannel, ExitNotice

# Beyond the tags of messages and of their further pieces.
TAG: Final = 1 << 21
# The control channel's own number, the kind, a step, a state, and the length of the text. Letters are short
# enough to be sent at once.
_LETTER: Final = struct.Struct("<5q")
_MOST: Final = 3_000
_LEAVING, _ASKING, _TELLING = range(3)


def translated(error: MPI.Exception) -> TransportError:
    """Return MPI's error as one of ours."""
    found = TransportError(f"MPI reported: {error.Get_error_string()}")
    # Another rank has begun to leave the dead behind.
    found.revoked = error.Get_error_class() == MPI.ERR_REVOKED
    return found


class MpiControl(ControlChannel):
    """Each step is one allgather, prepared once for each parity."""

    # MPI may still write a step that was given up, when its peers come at last.
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
        # MPI may give a letter that nobody has read to a later communicator in the place of this one.
        self._number = int.from_bytes(comm.bcast(os.urandom(7)), "little")
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._own: ExitNotice | None = None
        self._left: dict[int, ExitNotice] = {}
        self._doing = ""
        # What others have answered: the step that they had posted, and what they waited in.
        self._told: dict[int, tuple[int, str]] = {}

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
        return [r for r in self.peers if self._told.get(r, (0, ""))[0] < self.step]

    def leave(self, state: int, completed: int, text: str) -> None:
        first = self._own or ExitNotice(state, completed, text)
        self._own = first._replace(state=state)
        if state != FINISHED:
            for peer in self.peers:
                # A rank that has died need not be told.
                with suppress(TransportError):
                    self._send(peer, _LEAVING, completed, state, first.text)

    def exit_notices(self) -> dict[int, ExitNotice]:
        self.attend()
        return self._left

    def tell(self, doing: str) -> None:
        self._doing = doing

    def ask(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._send(rank, _ASKING)

    def told(self, rank: int) -> str:
        return self._told.get(rank, (0, ""))[1]

    def attend(self) -> None:
        try:
            while message := self._comm.Improbe(MPI.ANY_SOURCE, TAG, status := MPI.Status()):
                letter = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                message.Recv([letter, MPI.BYTE])
                self._read(status.Get_source(), letter.tobytes())
        except MPI.Exception as error:
            raise translated(error) from error

    def _read(self, source: int, letter: bytes) -> None:
        if len(letter) < _LETTER.size:
            raise TransportError(f"rank {source} sent a malformed letter")
        number, kind, step, state, length = _LETTER.unpack_from(letter)
        if number != self._number:
            return
        text = letter[_LETTER.size : _LETTER.size + max(length, 0)].decode(errors="replace")
        if kind == _LEAVING:
            first = self._left.get(source) or ExitNotice(state, step, text)
            self._left[source] = first._replace(state=state)
        elif kind == _TELLING:
            self._told[source] = (step, text)
        elif self._own is not None:
            self._send(source, _LEAVING, self._own.step, self._own.state, self._own.text)
        else:
            self._send(source, _TELLING, self.step, 0, self._doing)

    def _send(self, peer: int, kind: int, step: int = 0, state: int = 0, text: str = "") -> None:
        data = text.encode(errors="replace")[-_MOST:]
        letter = _LETTER.pack(self._number, kind, step, state, len(data)) + data
        try:
            self._sent = [sent for sent in self._sent if not sent[0].Test()]
            self._sent.append((self._comm.Isend([letter, MPI.BYTE], peer, TAG), letter))
        except MPI.Exception as error:
            raise translated(error) from error

    def close(self) -> None:
        for request in self._requests:
            request.Free()
        self.not_closed.discard(self)
