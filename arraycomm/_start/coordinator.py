"""Process 0 brings processes together without MPI: what one of them sets, all get.

Each connection carries lines of JSON. The coordinator sends a challenge and what a batch system
calls its job: a process of another job leaves and comes again, since the address is free once this
job has met. The other side answers with its number, the number of all, its name and its proof that
it knows the secret. Once all are there, each gets every text that one of them sets. If something is
wrong, every process hears what. Whoever sends anything else is cut off.

A thread hears one connection, so that who sends half a line holds up nobody else.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from hashlib import blake2b
from os import getuid
from typing import Any, Final

from arraycomm._errors import (
    ArrayCommError,
    BackendUnavailableError,
    CommTimeoutError,
    TransportError,
)
from arraycomm._start.numbering import Numbering, Place

PROTOCOL: Final = 4
# The bytes of the longest line, and the seconds in which a line can be sent.
LONGEST: Final = 1 << 16
_SENDING: Final = struct.pack("ll", 2, 0)
# Seconds for which those who come later still hear what is wrong.
GRACE: Final = 3.0
# Seconds between looks at the clock.
_LOOK: Final = 0.05
# How many connections may be open of those who have not said who they are.
_STRANGERS: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")
# What a process says of itself.
_NUMBERS, _TEXTS = ("rank", "size", "pid"), ("name", "nonce", "proof")
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


class Wire:
    """A connection that carries messages, each a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lines = connection.makefile("rb")

    def send(self, message: Message) -> None:
        """Send a message; raises `OSError`."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message:
        """Return the next one; raises `OSError`, `EOFError` at the end, `ValueError` if none."""
        line = self._lines.readline(LONGEST)
        if not line:
            raise EOFError
        try:
            found = json.loads(line)
        except RecursionError as error:
            raise ValueError from error
        # JSON can hold halves of characters, which no text of a process has, and which cannot be
        # sent on.
        json.dumps(found, ensure_ascii=False).encode()
        if not isinstance(found, dict) or not line.endswith(b"\n"):
            raise ValueError
        return found

    def shut(self) -> None:
        """Let both sides come to the end of what has been sent."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self._lines.close()
        self.connection.close()


def _ended(rank: int) -> str:
    return f"init: process {rank} has ended before all processes were connected"


class Coordinator(threading.Thread):
    """Serves the processes until all have left, or have heard what is wrong.

    they come --> all have met --> all have left
        |              |
        +--------------+--> told what is wrong --> all have left, or the grace is over
    """

    def __init__(
        self, listener: socket.socket, found: Numbering, secret: str, limit: float, job: str
    ) -> None:
        super().__init__(name="arraycomm-coordinator", daemon=True)
        self._listener, self._place, self._size = listener, found.place, found.size
        self._secret, self._limit, self._job = secret, limit, job
        self._deadline = time.monotonic() + limit
        # Held to read or change what follows.
        self._changed = threading.Condition()
        # Those who have not said who they are, and the number and the proof of those who have.
        self._strangers: list[Wire] = []
        self._guests: dict[Wire, tuple[int, str]] = {}
        # Who has come with each number.
        self._ranks: dict[int, str] = {}
        self._met = False
        self._error: Message = {}
        self._told: set[int] = set()
        # The first process that has left because of an error: the others may find the same error by
        # themselves, and hear of it a little later.
        self._gave_up = -1

    def run(self) -> None:
        """Serve."""
        with self._listener:
            self._listener.settimeout(_LOOK)
            while self._gathers():
                with suppress(OSError):
                    self._accept(self._listener.accept()[0])
        with self._changed:
            for stranger in self._strangers:
                stranger.shut()
            self._changed.wait_for(lambda: self._is_over() or self._gave_up >= 0)
            if not self._changed.wait_for(self._is_over, GRACE):
                self._fail(TransportError, _ended(self._gave_up))
            self._changed.wait_for(lambda: not self._guests, self._deadline - time.monotonic())
            for guest in self._guests:
                guest.shut()

    def _gathers(self) -> bool:
        """Return whether processes may still come: to meet the others, or to hear what is wrong."""
        with self._changed:
            late = time.monotonic() > self._deadline
            if late and not self._met and not self._error:
                self._fail(CommTimeoutError, self._who_is_missing())
                return True
            # Those who were told close their connection.
            heard = len(self._told) >= self._size and not self._guests
            return not (self._met or late or heard)

    def _is_over(self) -> bool:
        return bool(self._error) or not self._guests

    def _who_is_missing(self) -> str:
        missing = [str(rank) for rank in range(self._size) if rank not in self._ranks]
        return (
            f"init: {len(self._ranks)} of {self._size} processes came to {self._place} in "
            f"{self._limit:g} s; missing: {', '.join(missing)}{self._place.reach}"
        )

    def _accept(self, connection: socket.socket) -> None:
        if self._met or not is_own(connection):
            # Who belongs to another job comes again.
            connection.close()
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SENDING)
        guest = Wire(connection)
        with self._changed:
            self._strangers.append(guest)
            if len(self._strangers) > _STRANGERS + self._size:
                self._strangers.pop(0).shut()
        threading.Thread(target=self._hear, args=(guest,), daemon=True).start()

    def _hear(self, guest: Wire) -> None:
        """Take what one process says until it ends, or says what is none."""
        with suppress(OSError, EOFError, ValueError):
            nonce = secrets.token_hex(16)
            guest.send({"arraycomm": PROTOCOL, "nonce": nonce, "job": self._job})
            self._arrive(guest, nonce, guest.receive())
            while True:
                message = guest.receive()
                with self._changed:
                    self._take(guest, message)
        with self._changed:
            guest.close()
            if guest in self._strangers:
                self._strangers.remove(guest)
            rank, _ = self._guests.pop(guest, (-1, ""))
            if rank >= 0 and not self._error:
                self._fail(TransportError, _ended(rank))
            self._changed.notify_all()

    def _arrive(self, guest: Wire, nonce: str, said: Message) -> None:
        """Take a process in; raises `ValueError` if it is none."""
        for names, kind in ((_NUMBERS, int), (_TEXTS, str)):
            if any(type(said.get(name)) is not kind for name in names):
                raise ValueError
        right = proof(self._secret, nonce, "process")
        if not hmac.compare_digest(said["proof"].encode(), right.encode()):
            guest.send(
                {
                    "error": "init: the secret of this process is not that of process 0 at "
                    f"{self._place}; set ARRAYCOMM_COORDINATOR_SECRET to the same on every "
                    "process, or on none"
                }
            )
            raise ValueError
        with self._changed:
            if self._met or guest not in self._strangers:
                raise ValueError
            self._strangers.remove(guest)
            rank, about = said["rank"], f"process {said['pid']} on {said['name']}"
            self._guests[guest] = rank, proof(self._secret, said["nonce"], "coordinator")
            if self._error:
                self._tell(guest)
            elif said["size"] != self._size:
                self._fail(
                    BackendUnavailableError,
                    f"init: process 0 was told that there are {self._size} processes, and process "
                    f"{rank} that there are {said['size']}; start them with the same number, and "
                    "each with a number of its own",
                )
            elif rank in self._ranks:
                self._fail(
                    BackendUnavailableError,
                    f"init: two processes have the number {rank}: {self._ranks[rank]}, and "
                    f"{about}; start each of them once, with a number of its own, and jobs at the "
                    "same time with coordinator addresses of their own",
                )
            self._ranks.setdefault(rank, about)
            if len(self._ranks) == self._size and not self._error:
                self._met = True
                for other, (_, own) in self._guests.items():
                    self._send(other, {"met": True, "proof": own})

    def _take(self, guest: Wire, message: Message) -> None:
        """Act on what a process says that has been taken in."""
        if "bye" in message:
            rank, _ = self._guests.pop(guest)
            if not message["bye"] and self._gave_up < 0:
                self._gave_up = rank
            raise EOFError
        if self._met and not self._error:
            for other in self._guests:
                self._send(other, message)

    def _fail(self, kind: type[ArrayCommError], text: str) -> None:
        """Tell everybody what is wrong, also those who come now."""
        self._deadline = time.monotonic() + GRACE
        self._error = {"error": text, "kind": kind.__name__}
        for guest in self._guests:
            self._tell(guest)
        self._changed.notify_all()

    def _tell(self, guest: Wire) -> None:
        self._send(guest, self._error)
        self._told.add(self._guests[guest][0])

    def _send(self, guest: Wire, message: Message) -> None:
        """Send a message; if that is not possible, the end of the connection is seen."""
        try:
            guest.send(message)
        except OSError:
            guest.shut()
