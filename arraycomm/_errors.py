"""What can go wrong between ranks, as one tree of exceptions.

::

    ArrayCommError
    ├── NotInitializedError       the world was asked for before `init`
    ├── BackendUnavailableError   the transport asked for cannot run here
    ├── MismatchError             ranks called different things
    ├── PeerError                 another rank failed or left
    ├── CommTimeoutError          another rank did not come in time
    ├── CommunicatorClosedError   the communicator was freed, or an earlier failure ended it
    ├── ConcurrentUseError        two threads called one communicator at once
    └── TransportError            MPI or NCCL reported an error

A wrong argument is not in this tree: it is the built-in `TypeError`, `ValueError` or `BufferError`
on the rank that passed it, and a `PeerError` on the others.
"""

from __future__ import annotations


class ArrayCommError(Exception):
    """Root of every error that concerns more than the caller's own arguments."""


class NotInitializedError(ArrayCommError):
    """`world()` was called before `init()`."""


class BackendUnavailableError(ArrayCommError):
    """The backend cannot run here; the message says what is missing and how to mend it."""


class MismatchError(ArrayCommError):
    """Ranks of one communicator called different things; raised on every rank."""


class PeerError(ArrayCommError):
    """Another rank raised or left.

    Attributes
    ----------
    rank : int
        The rank that failed, in the communicator of the call.
    traceback : str
        That rank's traceback, or an empty string where it left without one.
    in_step : bool
        Whether the communicator can still be used: the rank had only passed a wrong argument.
    """

    def __init__(self, message: str, *, rank: int = -1, traceback: str = "") -> None:
        super().__init__(message)
        self.in_step = False
        self.rank = rank
        self.traceback = traceback


class CommTimeoutError(ArrayCommError):
    """Other ranks did not take part within the communicator's timeout."""


class CommunicatorClosedError(ArrayCommError):
    """The communicator was freed, or an earlier failure (its cause) left the ranks out of step."""


class ConcurrentUseError(ArrayCommError):
    """Two threads called the same communicator at the same time."""


class TransportError(ArrayCommError):
    """The library underneath (MPI or NCCL) reported an error."""

    # Whether it is that another rank has called `shrink`.
    revoked = False
