"""Ranks as threads of this process, for tests, notebooks and debuggers."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

from arraycomm._callsite import describe_exception
from arraycomm._communicator import Communicator, Options
from arraycomm._errors import ArrayCommError, CommTimeoutError
from arraycomm._transports.board import FAILED, FINISHED
from arraycomm._transports.threads import make_group

# Seconds beyond the timeout in which a rank that waits in arraycomm has long given up.
_SLACK: Final = 5.0


class _Rank:
    """One rank's thread, and how it ended."""

    def __init__(self, comm: Communicator, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.comm = comm
        self._fn, self._args = fn, args
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = 0.0
        context = contextvars.copy_context()
        self.thread = threading.Thread(
            target=context.run, args=(self._run,), name=f"rank {comm.rank}", daemon=True
        )

    def _run(self) -> None:
        try:
            self.result = self._fn(self.comm, *self._args)
        except BaseException as error:
            self.ended = time.monotonic()
            self.error = error
            self.leave(FAILED, describe_exception(error))
        else:
            self.leave(FINISHED, "")

    def leave(self, state: int, text: str) -> None:
        """Tell the other ranks, on every communicator, that this one takes part no more."""
        for comm in self.comm._family:
            if comm._closed is None:
                comm._board.leave(state, comm._completed, text)

    def state(self) -> str:
        """Say how this rank ended, or where it is."""
        if self.thread.is_alive():
            frame = sys._current_frames().get(self.thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame else ""
            return f"rank {self.comm.rank} is still running:\n{stack}"
        if self.error is not None:
            said = traceback.format_exception_only(self.error)[-1].strip()
            return f"rank {self.comm.rank} raised {said}"
        return f"rank {self.comm.rank} returned"


def run(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run `fn(comm, *args)` on `size` ranks, each a thread of this process.

    Parameters
    ----------
    size : int
        How many ranks.
    fn : callable
        Called on every rank with that rank's communicator and `args`. The arguments are the same
        objects on every rank.
    timeout : float
        Seconds after which a rank that still waits for others raises `CommTimeoutError`.

    Returns
    -------
    list
        What `fn` returned, by rank.

    Raises
    ------
    BaseException
        What the first rank to fail raised, with notes that name the rank and tell how the others
        ended.

    Notes
    -----
    Threads share the state of the process: seeds of random generators, environment, and the
    caches of JAX, whose jitted collectives need a process for each rank.

    Examples
    --------
    >>> import arraycomm.testing
    >>> arraycomm.testing.run(3, lambda comm: comm.allreduce(comm.rank))
    [3, 3, 3]
    """
    if size < 1:
        raise ValueError(f"run: size must be at least 1; got {size}")
    options = Options(timeout=timeout)
    ranks = [_Rank(Communicator(link, options), fn, args) for link in make_group(size)]
    for rank in ranks:
        rank.thread.start()
    try:
        _join(ranks, timeout)
    except BaseException as error:
        for rank in ranks:
            rank.leave(FAILED, describe_exception(error))
        raise
    failed = [rank for rank in ranks if rank.error is not None]
    if failed:
        raise _explained(min(failed, key=lambda rank: rank.ended), ranks)
    return [rank.result for rank in ranks]


def _join(ranks: list[_Rank], timeout: float) -> None:
    """Wait until all have ended; once one has failed, the others have the timeout to follow."""
    deadline = None
    while alive := [rank for rank in ranks if rank.thread.is_alive()]:
        alive[0].thread.join(0.05)
        if deadline is None and any(rank.error is not None for rank in ranks):
            deadline = time.monotonic() + timeout + _SLACK
        if deadline is not None and time.monotonic() > deadline:
            states = "\n".join(rank.state() for rank in ranks)
            raise CommTimeoutError(f"run: ranks did not end after another had failed:\n{states}")


def _explained(first: _Rank, ranks: list[_Rank]) -> BaseException:
    error = first.error
    assert error is not None
    error.add_note(f"raised on rank {first.comm.rank} of {len(ranks)}")
    for rank in ranks:
        if rank is not first and not isinstance(rank.error, ArrayCommError):
            error.add_note(rank.state())
    return error
