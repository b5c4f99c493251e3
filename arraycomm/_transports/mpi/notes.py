"""The notes between nodes: that a rank has left, and requests for the wait status of others.

Ranks look for such messages while they wait.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import numpy as np
from mpi4py import MPI

from arraycomm._errors import TransportError
from arraycomm._transports.mpi.under_way import NOTES_TAG, translated
from arraycomm._transports.mpi.wait_replies import ASKING, COLLECTING, WaitReplies
from arraycomm._transports.notes import FAILED, GAVE_UP, WELL, ExitNotice

# The number of the control channel, the kind, a step, a state, and the length of the text. Such
# messages are short enough for MPI to send them at once.
_MESSAGE: Final = struct.Struct("<5q")
_MOST: Final = 3_000
_EXITING: Final = 0


class MpiNotes(WaitReplies):
    """The notes of one rank; `posted` returns the last step that it has posted."""

    def __init__(self, comm: MPI.Intracomm, posted: Callable[[], int]) -> None:
        self._comm = comm
        self._peers = [rank for rank in range(comm.size) if rank != comm.rank]
        # MPI may deliver an unread message to a later communicator that has reused this one's id.
        self._number = int.from_bytes(comm.bcast(os.urandom(7)), "little")
        self._sent: list[tuple[MPI.Request, bytes]] = []
        # Held while MPI looks at these: two threads may wait at once, and a signal's handler.
        self._posting = threading.RLock()
        self._own: ExitNotice | None = None
        self._notices: dict[int, ExitNotice] = {}
        super().__init__(comm.rank, comm.size, posted, self._post)

    def announce_exit(self, state: int, completed: int, text: str) -> None:
        if self._own and state in (FAILED, GAVE_UP):
            return
        before = self._own
        first = before or ExitNotice(state, completed, text)
        self._own = first._replace(state=state)
        # A last step of the group says it of a rank that ends well in step.
        if state not in WELL or before is not None:
            for peer in self._peers:
                # A rank that has died needs no notice.
                with suppress(TransportError):
                    self._post(peer, _EXITING, completed, first.text, state)

    def exit_notices(self) -> dict[int, ExitNotice]:
        self.answer_requests()
        return self._notices

    def answer_requests(self) -> None:
        try:
            while message := self._comm.Improbe(MPI.ANY_SOURCE, NOTES_TAG, status := MPI.Status()):
                data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                message.Recv([data, MPI.BYTE])
                self._read(status.Get_source(), data.tobytes())
            self.go_on()
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
        if kind in (ASKING, COLLECTING) and (own := self._own) is not None:
            self._post(source, _EXITING, own.step, own.text, own.state)
        else:
            self.receive(source, kind, step, text)

    def _post(self, peer: int, kind: int, step: int, text: str, state: int = 0) -> None:
        data = text.encode(errors="replace")[-_MOST:]
        message = _MESSAGE.pack(self._number, kind, step, state, len(data)) + data
        try:
            with self._posting:
                self._sent = [sent for sent in self._sent if not sent[0].Test()]
                self._sent.append((self._comm.Isend([message, MPI.BYTE], peer, NOTES_TAG), message))
        except MPI.Exception as error:
            raise translated(error) from error
