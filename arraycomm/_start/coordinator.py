"""Process 0 brings processes together without MPI: it keeps texts that all can set and get.

Each connection carries lines of JSON. The coordinator sends a challenge and what a batch system
calls its job: a process of another job leaves and comes again, since the address is free once this
job has met. The other side answers with its number, the number of all, its name and its proof that
it knows the secret. Once all are there they set and get texts. If something is wrong, every process
hears what. Whoever sends anything else is cut off.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from enum import Enum
from hashlib import blake2b
from os import getuid
from typing import Any, Final

from arraycomm._errors import (
    ArrayCommError,
    BackendUnavailableError,
    CommTimeoutError,
    TransportError,
)
from arraycomm._start.numbering import Place

PROTOCOL: Final = 3
# The bytes of the longest line, and the seconds in which a line can be sent.
LONGEST: Final = 1 << 16
_SENDING: Final = 2.0
# Seconds for which those who come later still hear what is wrong.
GRACE: Final = 3.0
# How many connections may be open of those who have not said who they are.
_STRANGERS: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")
_ERRORS: Final[dict[str, type[ArrayCommError]]] = {
    kind.__name__: kind for kind in (BackendUnavailableError, CommTimeoutError, TransportError)
}

Message = dict[str, Any]


def error_of(message: Message) -> ArrayCommError:
    """Return the error that a coordinator has sent."""
    kind = _ERRORS.get(str(message.get("kind")), BackendUnavailableError)
    return kind(str(message["error"]))


def proof(secret: str, nonce: str, side: str) -> str:
    """Return what only those can answer to a challenge who know the secret."""
    return hmac.new(secret.encode(), f"{side}:{nonce}".encode(), "sha256").hexdigest()


def encode(message: Message) -> bytes:
    """Return a message as a line."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> Message | None:
    """Return the message of a line, None if it is none."""
    try:
        found = json.loads(line)
        # JSON can hold halves of characters, which no text of a process has, and which cannot be
        # sent on.
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def local_name(place: Place) -> str:
    """Return the name of a socket that is known on this host alone, and leaves no file behind."""
    return f"\0arraycomm-{blake2b(place.name.encode(), digest_size=16).hexdigest()}"


def is_own(connection: socket.socket) -> bool:
    """Return whether the other side of a local connection is a process of the same user."""
    if connection.family != socket.AF_UNIX:
        return True
    option = socket.SO_PEERCRED  # type: ignore[attr-defined,unused-ignore]
    found = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == getuid())


def listen(place: Place) -> socket.socket:
    """Return a socket that listens at the place, and nowhere else; raises `OSError`."""
    if place.host:
        info = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((place.host, place.port), family=info[0])
    if sys.platform != "linux":
        raise OSError("this system has no sockets with such names")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(local_name(place))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _ended(rank: int) -> str:
    return f"init: process {rank} has ended before all processes were connected"


class _State(Enum):
    GATHERING, MET, FAILED = range(3)


class _Guest:
    """A connection: what has come of a line, and who it is once it has said so."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.nonce = secrets.token_hex(16)
        self.rank = -1
        self.answer_nonce = ""
        self.about = ""
        self.done = False
        self._rest = b""

    def lines(self) -> list[bytes] | None:
        """Return the lines that have come; None at the end, or if one is too long."""
        try:
            chunk = self.connection.recv(LONGEST)
        except OSError:
            return None
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return None if not chunk or len(self._rest) > LONGEST else lines

    def send(self, message: Message) -> None:
        """Send a message; if that is not possible, the end of the connection is seen later."""
        with suppress(OSError):
            self.connection.sendall(encode(message))


class Coordinator(threading.Thread):
    """Serves the processes until all have left, or have heard what is wrong."""

    def __init__(
        self, listener: socket.socket, place: Place, size: int, secret: str, limit: float, job: str
    ) -> None:
        super().__init__(name="arraycomm-coordinator", daemon=True)
        self._listener, self._place, self._size, self._secret = listener, place, size, secret
        self._job = job
        self._limit = limit
        self._deadline = time.monotonic() + limit
        self._state = _State.GATHERING
        self._guests: list[_Guest] = []
        self._ranks: dict[int, _Guest] = {}
        self._error: Message = {}
        self._told: set[int] = set()
        # The first process that has left because of an error, and when the others hear of it: they
        # may find the same error by themselves.
        self._gave_up = -1
        self._texts: dict[str, str] = {}
        self._waiting: list[tuple[str, _Guest]] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Serve."""
        try:
            while not self._is_over():
                for key, _ in self._selector.select(0.2):
                    if key.data is None:
                        self._accept()
                    else:
                        self._read(key.data)
                if time.monotonic() > self._deadline:
                    self._fail_if_late()
        finally:
            self._listener.close()
            for guest in self._guests:
                guest.connection.close()
            self._selector.close()

    def _fail_if_late(self) -> None:
        if self._state is _State.GATHERING:
            self._fail(CommTimeoutError, self._who_is_missing())
        elif self._state is _State.MET and self._gave_up >= 0:
            self._fail(TransportError, _ended(self._gave_up))

    def _is_over(self) -> bool:
        if self._state is _State.FAILED:
            # Those who were told close their connection.
            heard = len(self._told) >= self._size and all(g.rank < 0 for g in self._guests)
            return heard or time.monotonic() > self._deadline
        return self._state is _State.MET and all(guest.rank < 0 for guest in self._guests)

    def _who_is_missing(self) -> str:
        missing = [str(rank) for rank in range(self._size) if rank not in self._ranks]
        return (
            f"init: {len(self._ranks)} of {self._size} processes came to {self._place} in "
            f"{self._limit:g} s; missing: {', '.join(missing)}{self._place.reach}"
        )

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.settimeout(_SENDING)
        if not is_own(connection):
            connection.close()
            return
        guest = _Guest(connection)
        self._guests.append(guest)
        self._selector.register(connection, selectors.EVENT_READ, guest)
        guest.send({"arraycomm": PROTOCOL, "nonce": guest.nonce, "job": self._job})
        strangers = [other for other in self._guests if other.rank < 0]
        if len(strangers) > _STRANGERS + self._size:
            self._drop(strangers[0])

    def _read(self, guest: _Guest) -> None:
        lines = guest.lines()
        if lines is None:
            self._drop(guest)
            return
        for line in lines:
            message = decode(line)
            if message is None or not self._take(guest, message):
                self._drop(guest)
                return

    def _take(self, guest: _Guest, message: Message) -> bool:
        """Act on a message; return whether it was one."""
        if guest.rank < 0:
            return self._arrive(guest, message)
        key = message.get("set", message.get("get"))
        if "bye" in message:
            guest.done = True
            if not message["bye"] and self._gave_up < 0:
                self._gave_up, self._deadline = guest.rank, time.monotonic() + GRACE
        elif not isinstance(key, str):
            return False
        elif "set" in message:
            self._texts[key] = str(message.get("value"))
            self._answer()
        else:
            self._waiting.append((key, guest))
            self._answer()
        return True

    def _answer(self) -> None:
        """Answer everybody who waits for a text that is there."""
        for key, guest in self._waiting:
            if key in self._texts:
                guest.send({"value": self._texts[key]})
        self._waiting = [(key, guest) for key, guest in self._waiting if key not in self._texts]

    def _arrive(self, guest: _Guest, said: Message) -> bool:
        """Take a process in; return whether it has said who it is."""
        rank, size, pid = said.get("rank"), said.get("size"), said.get("pid")
        texts = [said.get(name) for name in ("proof", "nonce", "name")]
        if not all(type(number) is int for number in (rank, size, pid)):
            return False
        if not all(isinstance(text, str) for text in texts):
            return False
        right = proof(self._secret, guest.nonce, "process")
        if not hmac.compare_digest(str(said["proof"]).encode(), right.encode()):
            guest.send(
                {
                    "error": "init: the secret of this process is not that of process 0 at "
                    f"{self._place}; set ARRAYCOMM_COORDINATOR_SECRET to the same on every "
                    "process, or on none"
                }
            )
            return False
        if self._state is _State.MET:
            return False
        guest.rank, guest.about = int(said["rank"]), f"process {pid} on {said['name']}"
        guest.answer_nonce = str(said["nonce"])
        self._welcome(guest, said)
        return True

    def _welcome(self, guest: _Guest, said: Message) -> None:
        """Let a process wait for the others, or tell all what is wrong."""
        if self._state is _State.FAILED:
            self._tell(guest)
            return
        rank, first = guest.rank, self._ranks.setdefault(guest.rank, guest)
        if said["size"] != self._size:
            self._fail(
                BackendUnavailableError,
                f"init: process 0 was told that there are {self._size} processes, and process "
                f"{rank} that there are {said['size']}; start them with the same number, and each "
                "with a number of its own",
            )
        elif first is not guest:
            self._fail(
                BackendUnavailableError,
                f"init: two processes have the number {rank}: {first.about}, and {guest.about}; "
                "start each of them once, with a number of its own, and jobs at the same time with "
                "coordinator addresses of their own",
            )
        elif len(self._ranks) == self._size:
            self._begin()

    def _begin(self) -> None:
        self._state = _State.MET
        self._selector.unregister(self._listener)
        self._listener.close()
        for guest in self._ranks.values():
            guest.send(
                {"met": True, "proof": proof(self._secret, guest.answer_nonce, "coordinator")}
            )

    def _drop(self, guest: _Guest) -> None:
        if guest not in self._guests:
            return
        self._guests.remove(guest)
        self._selector.unregister(guest.connection)
        guest.connection.close()
        if guest.rank >= 0 and not guest.done and self._state is not _State.FAILED:
            self._fail(TransportError, _ended(guest.rank))

    def _fail(self, kind: type[ArrayCommError], text: str) -> None:
        """Tell everybody what is wrong, also those who come now."""
        if self._state is not _State.GATHERING:
            # Nobody else can come.
            self._size = 0
        self._state = _State.FAILED
        self._deadline = time.monotonic() + GRACE
        self._error = {"error": text, "kind": kind.__name__}
        for guest in list(self._guests):
            if guest.rank >= 0 and not guest.done:
                self._tell(guest)

    def _tell(self, guest: _Guest) -> None:
        guest.send(self._error)
        self._told.add(guest.rank)
