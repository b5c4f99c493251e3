"""How one process joins the others at their coordinator, which is process 0."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from arraycomm._errors import (
    ArrayCommError,
    BackendUnavailableError,
    CommTimeoutError,
    TransportError,
)
from arraycomm._start.coordinator import (
    GRACE,
    PROTOCOL,
    Coordinator,
    Message,
    Wire,
    error_of,
    is_own,
    listen,
    local_name,
    proof,
)
from arraycomm._start.numbering import Numbering, Place

SECRET: Final = "ARRAYCOMM_COORDINATOR_SECRET"
LIMIT: Final = "ARRAYCOMM_START_TIMEOUT"
DEFAULT_LIMIT: Final = 60.0
# Where batch systems say which job this is.
_JOBS: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID")
_NAP: Final = 0.05
# Seconds that the coordinator has to say what is wrong after time was up for a process.
_LATER: Final = 2.0


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


def job_of(environment: Mapping[str, str]) -> str:
    """Return what a batch system calls this job, as in `SLURM_JOB_ID 17`; empty without one."""
    found = next((name for name in _JOBS if environment.get(name)), "")
    return found and f"{found} {environment[found]}"


class _NotYetError(Exception):
    """Somebody else has the address at present; its argument is the error if that remains."""


class Meeting:
    """The connection of this process to the coordinator; a store of texts for all of them."""

    def __init__(
        self, connection: socket.socket, place: Place, limit: float, served: Coordinator | None
    ) -> None:
        self._wire, self._place, self._limit = Wire(connection), place, limit
        self._served = served
        self._texts: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        """Let the other processes get a text."""
        self.send({"set": key, "value": value})

    def get(self, key: str, /) -> bytes:
        """Return a text that a process has set, or will set."""
        deadline = time.monotonic() + self._limit
        while key not in self._texts:
            said = self.receive(deadline)
            self._texts[str(said.get("set"))] = str(said.get("value"))
        return self._texts[key].encode()

    def leave(self, *, well: bool) -> None:
        """Part from the others; after an error, let them first read what they need to find it."""
        with suppress(ArrayCommError):
            self.send({"bye": well})
            # What others have set meanwhile: a connection that is closed over it loses the above.
            deadline = time.monotonic() + _LATER
            while time.monotonic() < deadline:
                self.receive(deadline)
        self.close()
        if not well and self._served is not None:
            self._served.join(2 * GRACE)

    def close(self) -> None:
        """End the connection."""
        self._wire.close()

    def send(self, message: Message) -> None:
        """Send a message."""
        try:
            self._wire.send(message)
        except OSError as error:
            raise self._lost() from error

    def receive(self, deadline: float) -> Message:
        """Return the next message, or raise the error that has come in its place."""
        self._wire.connection.settimeout(max(deadline - time.monotonic(), _NAP))
        try:
            message = self._wire.receive()
        except TimeoutError:
            raise CommTimeoutError(
                f"init: process 0, the coordinator at {self._place}, has not answered in "
                f"{self._limit:g} s"
            ) from None
        except (OSError, EOFError) as error:
            raise self._lost() from error
        except ValueError as error:
            raise self._foreign() from error
        if "error" in message:
            raise error_of(message)
        return message

    def introduce(self, found: Numbering, secret: str, job: str, deadline: float) -> None:
        """Say who this process is, and wait until all others have done so."""
        try:
            challenge = self.receive(deadline)
        except TransportError as error:
            # The last job has met, and frees the address.
            raise _NotYetError(
                _absent(self._place, self._limit, "it closes connections")
            ) from error
        if challenge.get("arraycomm") != PROTOCOL:
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
        nonce = os.urandom(16).hex()
        answer = {
            "rank": found.rank,
            "size": found.size,
            "pid": os.getpid(),
            "name": socket.gethostname(),
            "nonce": nonce,
            "proof": proof(secret, str(challenge.get("nonce")), "process"),
        }
        self.send(answer)
        reply = self.receive(deadline)
        if reply.get("proof") != proof(secret, nonce, "coordinator"):
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
    while True:
        try:
            return _join(found, environment, limit, deadline)
        except _NotYetError as error:
            if time.monotonic() > deadline:
                raise error.args[0] from error.__cause__
            time.sleep(_NAP)


def _join(
    found: Numbering, environment: Mapping[str, str], limit: float, deadline: float
) -> Meeting:
    secret, job = environment.get(SECRET, ""), job_of(environment)
    served = _serve(found, secret, limit, job) if found.rank == 0 else None
    try:
        meeting = Meeting(_connect(found.place, limit), found.place, limit, served)
        try:
            meeting.introduce(found, secret, job, deadline + _LATER)
        except BaseException:
            meeting.close()
            raise
    except _NotYetError:
        raise
    except Exception:
        if served is not None:
            # Those who come later hear of it.
            served.join()
        raise
    return meeting


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
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(local_name(place))
        if is_own(connection):
            return connection
    except OSError:
        connection.close()
        raise
    connection.close()
    raise BackendUnavailableError(f"init: a process of another user answers at {place}")
