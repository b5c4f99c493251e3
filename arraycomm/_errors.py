"""The library's exceptions, as one tree, and the operation's name in argument errors.

::

    ArrayCommError
    ├── NotInitializedError       `world` was called before `init`
    ├── BackendUnavailableError   the backend that was asked for cannot run here
    ├── MismatchError             ranks made different calls
    ├── PeerError                 another rank failed or left
    ├── CommTimeoutError          another rank did not make the call in time
    │   └── DeadlockError         ranks wait for one another, none can go on
    ├── CommunicatorClosedError   the communicator was freed, or an earlier failure ended it
    ├── ConcurrentUseError        a communicator was called while a call on it was under way
    └── TransportError            MPI or NCCL reported an error

A wrong argument is not in this tree: it is the built-in `TypeError`, `ValueError` or `BufferError`
on the rank that passed it, and a `PeerError` on the others.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import CO_VARARGS
from typing import Final

from arraycomm._callsite import is_ours, raised_by_us


class ArrayCommError(RuntimeError):
    """Root of every error that concerns more than the caller's own arguments.

    A `RuntimeError`, as the errors of mpi4py, torch.distributed and JAX are.
    """


class NotInitializedError(ArrayCommError):
    """`world()` was called before `init()`."""


class BackendUnavailableError(ArrayCommError):
    """The backend cannot run here; the message says what is missing and what to do."""


class MismatchError(ArrayCommError):
    """Ranks of one communicator made different calls; raised on every rank."""


class PeerError(ArrayCommError):
    """Another rank raised an error or left.

    Attributes
    ----------
    rank : int
        The rank that failed, in the communicator of the call.
    traceback : str
        That rank's traceback, or an empty string if it left without one.
    in_step : bool
        Whether the communicator can still be used, because the rank only passed a wrong argument.
    """

    def __init__(self, message: str, *, rank: int = -1, traceback: str = "") -> None:
        super().__init__(message)
        self.in_step = False
        self.rank = rank
        self.traceback = traceback


class CommTimeoutError(ArrayCommError):
    """Other ranks did not take part within the communicator's timeout."""


class DeadlockError(CommTimeoutError):
    """Ranks wait for one another, on different communicators or in messages; none can go on."""


class CommunicatorClosedError(ArrayCommError):
    """The communicator was freed, or an earlier failure (its cause) left the ranks out of step."""


class ConcurrentUseError(ArrayCommError):
    """Two threads called the same communicator at the same time."""


class TransportError(ArrayCommError):
    """The library underneath (MPI or NCCL) reported an error."""

    # Whether the cause is that another rank called `shrink`.
    revoked = False


_ARGUMENT_ERRORS = (TypeError, ValueError, BufferError, OverflowError)


def name_operation(error: Exception, operation: str) -> None:
    """Begin the message of an argument error with the operation's name, in place and only once.

    Only errors that the library's own code raised are changed, not those of a user's function.
    """
    if not isinstance(error, _ARGUMENT_ERRORS) or "operation" in vars(error):
        return
    if len(error.args) != 1 or not isinstance(error.args[0], str) or not raised_by_us(error):
        return
    vars(error)["operation"] = operation
    if not error.args[0].startswith(f"{operation}: "):
        error.args = (f"{operation}: {error.args[0]}",)
    alternative = vars(error).get("alternatives", {}).get(operation)
    if alternative is not None:
        error.args = (f"{error.args[0]}, or use {alternative}",)


def with_alternatives(error: TypeError, functions: Mapping[str, str]) -> TypeError:
    """Return an error whose message will name what takes the argument instead, by operation."""
    vars(error)["alternatives"] = functions
    return error


def text_of(error: BaseException) -> str:
    """Return an exception's message, also if its own `__str__` raises."""
    with forgiving:
        return str(error)
    return f"<{type(error).__name__} whose __str__ raises>"


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error is no failure of what was called: Ctrl-C, or of a signal's handler.

    A handler is given the frame that Python calls it from, as hardly any other function is.
    """
    if not isinstance(error, Exception):
        return True
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        # Ours may still run: to look at its variables would keep them, and with them the error.
        if is_ours(code.co_filename) or frame.f_back is None:
            continue
        values = frame.f_locals
        given = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
        if code.co_flags & CO_VARARGS:
            rest = values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
            # The function may have put anything in their place.
            given += rest if isinstance(rest, tuple) else ()
        if any(each is frame.f_back for each in given):
            return True
    return False


def raise_interrupt(error: Exception, *others: type[Exception]) -> None:
    """Raise an error again if it is an interrupt, or of one of the `others`.

    For an `except` block that goes on, or raises something else.
    """
    if isinstance(error, others) or is_interrupt(error):
        try:
            raise error
        finally:
            # Its traceback has this frame, and with it the caller's arrays.
            del error


class _Forgiving(suppress):
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return error is not None and not is_interrupt(error)


# Goes on behind a block that fails, unless it is interrupted.
forgiving: Final = _Forgiving()


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what led to it, each once: `raise error from error` makes a circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def naming(operation: str) -> Iterator[None]:
    """Begin the messages of a block's argument errors with the operation's name."""
    try:
        yield
    except Exception as error:
        name_operation(error, operation)
        raise
