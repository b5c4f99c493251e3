"""Process 0 brings processes together without MPI: what one of them sets, all get.

Each process has a connection to the coordinator, a thread of process 0, which carries lines of
JSON. The coordinator sends a challenge and what a batch system calls its job: a process of another
job leaves and comes again, since the address is free once this job has met. The other side answers
with its number, the number of all, its name and its proof that it knows the secret. Once all are
there, each gets every text that one of them sets. If something is wrong, every process hears what.
Whoever sends anything else is cut off.
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
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from hashlib import blake2b
from typing import Any, Final

from arraycomm._errors import (
    ArrayCommError,
    BackendUnavailableError,
    CommTimeoutError,
    TransportError,
)
from arraycomm._start.numbering import Numbering, Place

SECRET: Final = "ARRAYCOMM_COORDINATOR_SECRET"
LIMIT: Final = "ARRAYCOMM_START_TIMEOUT"
DEFAULT_LIMIT: Final = 60.0
# Where batch systems say which job this is.
_JOBS: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID")
_PROTOCOL: Final = 4
# The bytes of the longest line, and the seconds in which a line can be sent.
LONGEST: Final = 1 << 20
_SENDING: Final = struct.pack("ll", 2, 0)
# Seconds for which those who come later still hear what is wrong.
GRACE: Final = 3.0
# Seconds between looks at the clock, and between attempts to come.
_NAP: Final = 0.05
# Seconds that the coordinator has to say what is wrong after time was up for a process.
_LATER: Final = 2.0
# How many connections may be open of those who have not said who they are.
_STRANGERS: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")
# What a process says of itself.
_NUMBERS, _TEXTS = ("rank", "size", "pid"), ("name", "nonce", "proof")
_ERRORS: Final[dict[str, type[ArrayCommError]]] = {
    kind.__name__: kind for kind in (BackendUnavailableError, CommTimeoutError, TransportError)
}

Message = dict[str, Any]


def seconds_to_start(environment: Mapping[str, str]) -> float:
    """Return the seconds in which all processes have to come."""
    said = environment.get(LIMIT) or str(DEFAULT_LIMIT)
    try:
        limit = float(said)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise ValueError(f"init: {LIMIT} must be a number of seconds; got {said!r}")
    return limit


def _job_of(environment: Mapping[str, str]) -> str:
    """Return what a batch system calls this job, as in `SLURM_JOB_ID 17`; empty without one."""
    found = next((name for name in _JOBS if environment.get(name)), "")
    return found and f"{found} {environment[found]}"


def _proof(secret: str, nonce: str, side: str) -> str:
    """Return what only those can answer to a challenge who know the secret."""
    return hmac.new(secret.encode(), f"{side}:{nonce}".encode(), "sha256").hexdigest()


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


def listen(place: Place) -> socket.socket:
    """Return a socket that listens at the place, and nowhere else; raises `OSError`."""
    if place.host:
        info = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((place.host, place.port), family=info[0])
    if sys.platform != "linux":
        raise OSError("this system has no sockets with such names")
    with ExitStack() as to_close:
        listener = to_close.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(_local_name(place))
        listener.listen()
        to_close.pop_all()
        return listener


class _Wire:
    """A connection that carries messages, each a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def write(self, message: Message) -> None:
        """Send a message; raises `OSError`."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[Message]:
        """Return the messages that end in what comes next.

        Raises `OSError`, `EOFError` at the end, and `ValueError` for what is no message.
        """
        chunk = self.connection.recv(LONGEST)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST or (self._rest and not chunk):
            raise ValueError
        if not chunk:
            raise EOFError
        return list(map(_message, lines))


def _message(line: bytes) -> Message:
    try:
        found = json.loads(line)
        # JSON can hold halves of characters, which no text of a process has, and which cannot be
        # sent on.
        json.dumps(found, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError from error
    if not isinstance(found, dict):
        raise ValueError
    return found


class _Guest(_Wire):
    """A connection of the coordinator: a stranger's until it has said which process it is."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.nonce, self.rank, self.proof = secrets.token_hex(16), -1, ""

    def tell(self, message: Message) -> None:
        """Send a message; if that is not possible, the end of the connection is seen."""
        try:
            self.write(message)
        except OSError:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


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
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._guests: list[_Guest] = []
        # Who has come with each number.
        self._ranks: dict[int, str] = {}
        self._met = False
        self._error: Message = {}
        # The first process that has left because of an error: the others may find the same error by
        # themselves, and hear of it a little later.
        self._gave_up = -1

    def run(self) -> None:
        """Serve."""
        while self._goes_on():
            for key, _ in self._selector.select(_NAP):
                if key.data is None:
                    self._accept()
                elif key.data in self._guests:
                    self._hear(key.data)
        for connection in (self._listener, *(guest.connection for guest in self._guests)):
            connection.close()
        self._selector.close()

    def _goes_on(self) -> bool:
        """Return whether processes may still come, or have not left; say if their time is up."""
        late = time.monotonic() > self._deadline
        if late and self._error:
            return False
        if late:
            kind, text = CommTimeoutError, self._who_is_missing()
            self._fail(*(TransportError, _ended(self._gave_up)) if self._met else (kind, text))
        return len(self._ranks) < self._size or any(guest.rank >= 0 for guest in self._guests)

    def _who_is_missing(self) -> str:
        missing = [str(rank) for rank in range(self._size) if rank not in self._ranks]
        return (
            f"init: {len(self._ranks)} of {self._size} processes came to {self._place} in "
            f"{self._limit:g} s; missing: {', '.join(missing)}{self._place.reach}"
        )

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            if not _is_own(connection):
                connection.close()
                return
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SENDING)
            self._guests.append(guest := _Guest(connection))
            self._selector.register(connection, selectors.EVENT_READ, guest)
            guest.tell({"arraycomm": _PROTOCOL, "nonce": guest.nonce, "job": self._job})
        strangers = [guest for guest in self._guests if guest.rank < 0]
        for guest in strangers[: -_STRANGERS - self._size]:
            self._cut_off(guest)

    def _hear(self, guest: _Guest) -> None:
        """Take what one process says until it ends, or says what is none."""
        try:
            for message in guest.read():
                if guest.rank < 0:
                    self._arrive(guest, message)
                elif "bye" in message:
                    if not (message["bye"] or self._gave_up >= 0):
                        self._gave_up, self._deadline = guest.rank, time.monotonic() + GRACE
                    guest.rank = -1
                    raise EOFError
                elif self._met and not self._error:
                    self._tell_all(message)
        except (OSError, EOFError, ValueError):
            self._cut_off(guest)
            if guest.rank >= 0 and not self._error:
                self._fail(TransportError, _ended(guest.rank))

    def _cut_off(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.connection)
        guest.connection.close()

    def _arrive(self, guest: _Guest, said: Message) -> None:
        """Take a process in; raises `ValueError` if it is none."""
        for names, kind in ((_NUMBERS, int), (_TEXTS, str)):
            if any(type(said.get(name)) is not kind for name in names):
                raise ValueError
        right = _proof(self._secret, guest.nonce, "process")
        if not hmac.compare_digest(said["proof"].encode(), right.encode()):
            guest.tell(
                {
                    "error": "init: the secret of this process is not that of process 0 at "
                    f"{self._place}; set ARRAYCOMM_COORDINATOR_SECRET to the same on every "
                    "process, or on none"
                }
            )
            raise ValueError
        rank, about = said["rank"], f"process {said['pid']} on {said['name']}"
        guest.rank, guest.proof = rank, _proof(self._secret, said["nonce"], "coordinator")
        if self._error:
            guest.tell(self._error)
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
            self._meet()

    def _meet(self) -> None:
        """Let all go on; who belongs to another job comes again."""
        self._met, self._deadline = True, float("inf")
        self._selector.unregister(self._listener)
        self._listener.close()
        for guest in list(self._guests):
            if guest.rank < 0:
                self._cut_off(guest)
            else:
                guest.tell({"met": True, "proof": guest.proof})

    def _fail(self, kind: type[ArrayCommError], text: str) -> None:
        """Tell everybody what is wrong, also those who come now."""
        self._deadline = time.monotonic() + GRACE
        self._error = {"error": text, "kind": kind.__name__}
        self._tell_all(self._error)

    def _tell_all(self, message: Message) -> None:
        for guest in self._guests:
            if guest.rank >= 0:
                guest.tell(message)


class _NotYetError(Exception):
    """Somebody else has the address at present; its argument is the error if that remains."""


class Meeting(_Wire):
    """The connection of this process to the coordinator; a store of texts for all of them."""

    def __init__(
        self, connection: socket.socket, place: Place, limit: float, served: Coordinator | None
    ) -> None:
        super().__init__(connection)
        self._place, self._limit, self._served = place, limit, served
        self._came: list[Message] = []
        self._texts: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        """Let the other processes get a text."""
        self._send({"set": key, "value": value})

    def get(self, key: str, /) -> bytes:
        """Return a text that a process has set, or will set."""
        deadline = time.monotonic() + self._limit
        while key not in self._texts:
            said = self._receive(deadline)
            self._texts[str(said.get("set"))] = str(said.get("value"))
        return self._texts[key].encode()

    def leave(self, *, well: bool) -> None:
        """Part from the others; after an error, let them first read what they need to find it."""
        with suppress(ArrayCommError):
            self._send({"bye": well})
            # What others have set meanwhile: a connection that is closed over it loses the above.
            deadline = time.monotonic() + _LATER
            while time.monotonic() < deadline:
                self._receive(deadline)
        self.connection.close()
        if not well and self._served is not None:
            self._served.join(2 * GRACE)

    def _send(self, message: Message) -> None:
        try:
            self.write(message)
        except OSError as error:
            raise self._lost() from error

    def _receive(self, deadline: float) -> Message:
        """Return the next message, or raise the error that has come in its place."""
        try:
            while not self._came:
                self.connection.settimeout(max(deadline - time.monotonic(), _NAP))
                self._came += self.read()
        except TimeoutError:
            raise CommTimeoutError(
                f"init: process 0, the coordinator at {self._place}, has not answered in "
                f"{self._limit:g} s"
            ) from None
        except (OSError, EOFError) as error:
            raise self._lost() from error
        except ValueError as error:
            raise self._foreign() from error
        message = self._came.pop(0)
        if "error" in message:
            kind = _ERRORS.get(str(message.get("kind")), BackendUnavailableError)
            raise kind(str(message["error"]))
        return message

    def introduce(self, found: Numbering, secret: str, job: str, deadline: float) -> None:
        """Say who this process is, and wait until all others have done so."""
        try:
            challenge = self._receive(deadline)
        except TransportError as error:
            # The last job has met, and frees the address.
            raise _NotYetError(
                _absent(self._place, self._limit, "it closes connections")
            ) from error
        if challenge.get("arraycomm") != _PROTOCOL:
            raise self._foreign()
        other = challenge.get("job")
        if other and job and other != job:
            raise _NotYetError(
                BackendUnavailableError(
                    f"init: two jobs use the coordinator address {self._place} at the same time, "
                    f"this one ({job}) and another one ({other}); give each job an address of its "
                    "own"
                )
            )
        nonce = secrets.token_hex(16)
        answer = {
            "rank": found.rank,
            "size": found.size,
            "pid": os.getpid(),
            "name": socket.gethostname(),
            "nonce": nonce,
            "proof": _proof(secret, str(challenge.get("nonce")), "process"),
        }
        self._send(answer)
        reply = self._receive(deadline)
        if reply.get("proof") != _proof(secret, nonce, "coordinator"):
            raise BackendUnavailableError(
                f"init: the coordinator at {self._place} does not know the secret of this process; "
                f"set {SECRET} to the same on every process, or on none"
            )

    def _lost(self) -> TransportError:
        return TransportError(
            f"init: process 0, the coordinator at {self._place}, has ended before all processes "
            "were connected"
        )

    def _foreign(self) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"init: what answers at {self._place} is no arraycomm; choose another coordinator "
            "address"
        )


def join(found: Numbering, environment: Mapping[str, str]) -> Meeting:
    """Return a connection to all others, once all have come; process 0 serves them."""
    limit = seconds_to_start(environment)
    deadline = time.monotonic() + limit
    secret, job = environment.get(SECRET, ""), _job_of(environment)
    while True:
        served = _serve(found, secret, limit, job) if found.rank == 0 else None
        try:
            with ExitStack() as to_close:
                connection = to_close.enter_context(_connect(found.place, limit))
                meeting = Meeting(connection, found.place, limit, served)
                meeting.introduce(found, secret, job, deadline + _LATER)
                to_close.pop_all()
                return meeting
        except _NotYetError as error:
            if time.monotonic() > deadline:
                raise error.args[0] from error.__cause__
            time.sleep(_NAP)
        except Exception:
            if served is not None:
                # Those who come later hear of it.
                served.join()
            raise


def _serve(found: Numbering, secret: str, limit: float, job: str) -> Coordinator | None:
    """Start the coordinator; None if its address is in use, where somebody will say why."""
    try:
        listener = listen(found.place)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise BackendUnavailableError(
            f"init: process 0 cannot listen at {found.place}: {error.strerror or error}; the "
            "coordinator address has to be one of the host of process 0"
        ) from error
    made = Coordinator(listener, found, secret, limit, job)
    made.start()
    return made


def _connect(place: Place, limit: float) -> socket.socket:
    try:
        return _connected(place)
    except socket.gaierror as error:
        raise BackendUnavailableError(
            f"init: the host of the coordinator address {place} is not known here: {error.strerror}"
        ) from error
    except OSError as error:
        raise _NotYetError(_absent(place, limit, error.strerror or str(error))) from error


def _absent(place: Place, limit: float, why: str) -> CommTimeoutError:
    return CommTimeoutError(
        f"init: process 0, the coordinator, was not at {place} for {limit:g} s ({why}); start "
        f"process 0 as well, or set {LIMIT} to more seconds{place.reach}"
    )


def _connected(place: Place) -> socket.socket:
    if place.host:
        return socket.create_connection((place.host, place.port), timeout=DEFAULT_LIMIT)
    with ExitStack() as to_close:
        connection = to_close.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.connect(_local_name(place))
        if not _is_own(connection):
            raise BackendUnavailableError(f"init: a process of another user answers at {place}")
        to_close.pop_all()
        return connection
