"""Process 0 brings processes together without MPI, and passes on what each of them says.

process 0, the coordinator                   another process
listens where all are told to meet           comes, and again until somebody is there
sends a challenge, and the name of its job   is of another job: leaves, and comes again
knows who comes, once all of its answer      answers: its number, the number of all, its name, and
is right                                     its proof that it knows the secret
sends its own proof once all have come       goes on
hears one text of each, sends all to each    says a text, and waits for those of all

If something is wrong, every process hears what, also who comes a little later. A message is a line
of JSON; whoever sends anything else is cut off.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final

from arraycomm._errors import (
    ArrayCommError,
    BackendUnavailableError,
    CommTimeoutError,
    TransportError,
)
from arraycomm._start.numbering import LIMIT, SECRET, Numbering, Place

_PROTOCOL: Final = 5
# The bytes of the longest line, and the seconds in which process 0 can send one.
LONGEST: Final = 1 << 20
_SENDING: Final = 2.0
# Seconds for which those who come later still hear what is wrong.
GRACE: Final = 3.0
# Seconds between looks at the clock, and between attempts to come.
_NAP: Final = 0.05
# Seconds that process 0 has to say what is wrong after time was up for a process.
_LATER: Final = 2.0
# How many connections may be open of those who have not said who they are.
_STRANGERS: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")
_ERRORS: Final[dict[str, type[ArrayCommError]]] = {
    kind.__name__: kind for kind in (BackendUnavailableError, CommTimeoutError, TransportError)
}


def _proof(secret: str, nonce: str, side: str) -> str:
    """Return what only those can answer to a challenge who know the secret."""
    return hmac.new(secret.encode(), f"{side}:{nonce}".encode(), "sha256").hexdigest()


# Messages


class _Wire:
    """A connection that carries messages, each a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def close(self) -> None:
        self.connection.close()

    def write(self, *messages: Mapping[str, object]) -> None:
        """Send messages; if that is not possible, whoever reads here sees the end."""
        # At once: TCP holds a second small piece back until the first has been acknowledged.
        lines = "".join(f"{json.dumps(message)}\n" for message in messages)
        try:
            self.connection.sendall(lines.encode())
        except OSError:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def read(self) -> list[Any]:
        """Return the messages that end in what comes next.

        Raises `OSError`, also at the end, and `ValueError` for what is no message.
        """
        chunk = self.connection.recv(LONGEST)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST or (self._rest and not chunk):
            raise ValueError
        if not chunk:
            raise ConnectionAbortedError
        try:
            return list(map(json.loads, lines))
        except RecursionError as error:
            raise ValueError from error


def _ready(files: Iterable[Any]) -> list[Any]:
    """Return what can be read of; maybe none, so that one can look at the clock."""
    # This kind needs no descriptor, of which strangers may leave none.
    with selectors.PollSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(_NAP)]


# Process 0


class _Guest(_Wire):
    """A connection of process 0: a stranger's until it has said which process it is."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.nonce, self.rank, self.proof = secrets.token_hex(16), -1, ""


class Coordinator:
    """Process 0, which has connections to all others."""

    def __init__(self, listener: socket.socket, told: Numbering) -> None:
        self._listener, self._told = listener, told
        self._guests: list[_Guest] = []
        # Who has come with each number, and what each has said last.
        self._ranks = {told.rank: f"process {os.getpid()} on {socket.gethostname()}"}
        self._texts: dict[int, str] = {}
        # What is wrong.
        self._error: dict[str, str] = {}

    def meet(self, deadline: float) -> None:
        """Wait until all have come, and let them go on; who is of another job comes again."""
        self._wait_for(self._ranks, f"came to {self._told.place}", self._told.place.reach, deadline)
        self._listener.close()
        for guest in self._strangers():
            self._cut_off(guest)
        for guest in self._guests:
            guest.write({"proof": guest.proof})

    def tell(self, _: str, text: str) -> list[str]:
        """Return what all processes tell, by rank."""
        self._texts = {self._told.rank: text}
        deadline = time.monotonic() + self._told.limit
        self._wait_for(self._texts, "have answered process 0", "", deadline)
        texts = [self._texts[rank] for rank in range(self._told.size)]
        for guest in self._guests:
            guest.write(*({"text": each} for each in texts))
        return texts

    def close(self) -> None:
        """Part from the others."""
        self._listener.close()
        for guest in self._guests:
            guest.close()

    def _wait_for(self, here: dict[int, str], what: str, hint: str, deadline: float) -> None:
        """Hear the others until each is `here`; if something is wrong, raise, and tell them."""
        size = self._told.size
        try:
            while len(here) < size:
                if time.monotonic() > deadline:
                    missing = ", ".join(str(rank) for rank in range(size) if rank not in here)
                    raise CommTimeoutError(
                        f"init: {len(here)} of {size} processes {what} in {self._told.limit:g} s; "
                        f"missing: {missing}{hint}"
                    )
                self._hear()
        except ArrayCommError as error:
            self._give_up(error)
            raise

    def _give_up(self, error: ArrayCommError) -> None:
        """Tell everybody what is wrong, also those who come now."""
        self._error = {"error": str(error), "kind": type(error).__name__}
        for guest in self._guests:
            if guest.rank >= 0:
                guest.write(self._error)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and (
            len(self._ranks) < self._told.size or len(self._guests) > len(self._strangers())
        ):
            self._hear()

    def _strangers(self) -> list[_Guest]:
        return [guest for guest in self._guests if guest.rank < 0]

    def _hear(self) -> None:
        """Wait a little, and take what somebody says, or who comes."""
        listening = self._listener.fileno() >= 0
        for file in _ready([*self._guests, *[self._listener] * listening]):
            if file is self._listener:
                self._accept()
            elif file in self._guests:
                self._hear_one(file)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            if not _is_own(connection):
                connection.close()
                return
            connection.settimeout(_SENDING)
            self._guests.append(guest := _Guest(connection))
            guest.write({"arraycomm": _PROTOCOL, "nonce": guest.nonce, "job": self._told.job})
        for guest in self._strangers()[: -_STRANGERS - self._told.size]:
            self._cut_off(guest)

    def _cut_off(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        guest.close()

    def _hear_one(self, guest: _Guest) -> None:
        """Take what one process says until it ends, or says what is none."""
        try:
            for message in guest.read():
                self._take(guest, message)
        except (OSError, ValueError):
            self._cut_off(guest)
            if guest.rank >= 0 and not self._error:
                raise TransportError(
                    f"init: process {guest.rank} has ended before all processes were connected"
                ) from None

    def _take(self, guest: _Guest, message: Any) -> None:
        """Take a message; raises `ValueError` for what no process says."""
        match message:
            case {"text": str(text)} if guest.rank >= 0:
                self._texts[guest.rank] = text
            case {
                "rank": int(rank),
                "size": int(size),
                "name": str(name),
                "nonce": str(nonce),
                "proof": str(proof),
            } if guest.rank < 0 <= rank < size:
                right = _proof(self._told.secret, guest.nonce, "process")
                if not hmac.compare_digest(proof.encode(), right.encode()):
                    guest.write({"proof": ""})
                    raise ValueError
                guest.rank, guest.proof = rank, _proof(self._told.secret, nonce, "coordinator")
                self._arrive(guest, size, name)
            case _:
                raise ValueError

    def _arrive(self, guest: _Guest, size: int, name: str) -> None:
        """Take a process in; raise if there cannot be such a one."""
        rank, first = guest.rank, self._ranks.get(guest.rank)
        self._ranks.setdefault(rank, name)
        if self._error:
            guest.write(self._error)
        elif size != self._told.size:
            raise BackendUnavailableError(
                f"init: process 0 was told that there are {self._told.size} processes, and process "
                f"{rank} that there are {size}; start them with the same number, and each with a "
                "number of its own"
            )
        elif first is not None:
            raise BackendUnavailableError(
                f"init: two processes have the number {rank}: {first}, and {name}; start each of "
                "them once, with a number of its own, and jobs at the same time with coordinator "
                "addresses of their own"
            )


# The others


class _NotYetError(Exception):
    """Somebody else has the address at present; its argument is the error if that remains."""


class Member(_Wire):
    """A process that has a connection to process 0."""

    def __init__(self, connection: socket.socket, told: Numbering) -> None:
        super().__init__(connection)
        self._told = told
        self._came: list[Any] = []

    def meet(self, deadline: float) -> None:
        """Say who this process is, and wait until all others have done so."""
        told, place = self._told, self._told.place
        deadline += _LATER
        if not _is_own(self.connection):
            raise BackendUnavailableError(f"init: a process of another user answers at {place}")
        try:
            challenge = self._receive(deadline)
        except TransportError as error:
            # The last job has met, and frees the address.
            raise _NotYetError(_absent(told, "it closes connections")) from error
        if challenge.get("arraycomm") != _PROTOCOL:
            raise self._foreign()
        job = challenge.get("job")
        if job and told.job and job != told.job:
            raise _NotYetError(
                BackendUnavailableError(
                    f"init: two jobs use the coordinator address {place} at the same time, this "
                    f"one ({told.job}) and another one ({job}); give each job an address of its own"
                )
            )
        nonce = secrets.token_hex(16)
        self.write(
            {
                "rank": told.rank,
                "size": told.size,
                "name": f"process {os.getpid()} on {socket.gethostname()}",
                "nonce": nonce,
                "proof": _proof(told.secret, str(challenge.get("nonce")), "process"),
            }
        )
        if self._receive(deadline).get("proof") != _proof(told.secret, nonce, "coordinator"):
            raise BackendUnavailableError(
                f"init: the secret of this process is not that of process 0 at {place}; set "
                f"{SECRET} to the same on every process, or on none"
            )

    def tell(self, _: str, text: str) -> list[str]:
        """Return what all processes tell, by rank."""
        self.write({"text": text})
        deadline = time.monotonic() + self._told.limit + _LATER
        return [str(self._receive(deadline).get("text")) for _ in range(self._told.size)]

    def _receive(self, deadline: float) -> dict[str, Any]:
        """Return the next message, or raise the error that has come in its place."""
        coordinator = f"init: process 0, the coordinator at {self._told.place},"
        try:
            while not self._came:
                self.connection.settimeout(max(deadline - time.monotonic(), _NAP))
                self._came += self.read()
        except TimeoutError:
            raise CommTimeoutError(
                f"{coordinator} has not answered in {self._told.limit:g} s"
            ) from None
        except OSError as error:
            raise TransportError(
                f"{coordinator} has ended before all processes were connected"
            ) from error
        except ValueError as error:
            raise self._foreign() from error
        match self._came.pop(0):
            case {"error": error, **about}:
                raise _ERRORS.get(str(about.get("kind")), BackendUnavailableError)(str(error))
            case dict(message):
                return message
        raise self._foreign()

    def _foreign(self) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"init: what answers at {self._told.place} is no arraycomm, or another version of it; "
            "choose another coordinator address, or install the same version for all processes"
        )


# How each begins


def join(told: Numbering) -> Coordinator | Member:
    """Return the connection of this process to the others, once all have come."""
    deadline = time.monotonic() + told.limit
    while True:
        try:
            return _met(told, deadline)
        except _NotYetError as error:
            if time.monotonic() > deadline:
                raise error.args[0] from error.__cause__
            time.sleep(_NAP)


def _met(told: Numbering, deadline: float) -> Coordinator | Member:
    # Process 0, too, if its address is in use: somebody there says why.
    listener = _listening(told) if told.rank == 0 else None
    made = Coordinator(listener, told) if listener else Member(_connected(told), told)
    try:
        made.meet(deadline)
    except BaseException:
        made.close()
        raise
    return made


def _listening(told: Numbering) -> socket.socket | None:
    """Return a socket that listens at the place; None if that is in use."""
    try:
        return listen(told.place)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise BackendUnavailableError(
            f"init: process 0 cannot listen at {told.place}: {error.strerror or error}; the "
            "coordinator address has to be one of the host of process 0"
        ) from error


def listen(place: Place) -> socket.socket:
    """Return a socket that listens at the place, and nowhere else; raises `OSError`."""
    if place.host:
        info = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((place.host, place.port), family=info[0])
    if sys.platform != "linux":
        raise OSError("this system has no sockets with such names")
    return socket.create_server(_local_name(place), family=socket.AF_UNIX)


def _connected(told: Numbering) -> socket.socket:
    place = told.place
    try:
        if place.host:
            return socket.create_connection((place.host, place.port), timeout=told.limit)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(_local_name(place))
        except OSError:
            connection.close()
            raise
        return connection
    except socket.gaierror as error:
        raise BackendUnavailableError(
            f"init: the host of the coordinator address {place} is not known here: {error.strerror}"
        ) from error
    except OSError as error:
        raise _NotYetError(_absent(told, error.strerror or str(error))) from error


def _local_name(place: Place) -> str:
    """Return the name of a socket that is known on this host alone, and leaves no file behind."""
    return f"\0arraycomm-{blake2b(place.name.encode(), digest_size=16).hexdigest()}"


def _is_own(connection: socket.socket) -> bool:
    """Return whether the other side of a local connection is a process of the same user."""
    if connection.family != socket.AF_UNIX:
        return True
    option = socket.SO_PEERCRED  # type: ignore[attr-defined,unused-ignore]
    found = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.getuid())


def _absent(told: Numbering, why: str) -> CommTimeoutError:
    return CommTimeoutError(
        f"init: process 0, the coordinator, was not at {told.place} for {told.limit:g} s ({why}); "
        f"start process 0 as well, or set {LIMIT} to more seconds{told.place.reach}"
    )
