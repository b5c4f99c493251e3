"""The process of one rank that `launch` has started, and what work in another process gave."""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import sys
from collections.abc import Callable
from mmap import ACCESS_READ, mmap
from typing import Any

from arraycomm._callsite import describe_exception
from arraycomm._errors import CommTimeoutError, CommunicatorClosedError, PeerError, chain_of
from arraycomm._session import init

# The first byte of an outcome, written last: what the function returned, or raised by itself, or
# raised since another rank was late, or since one had failed. Before, that the function has begun.
RETURNED, RAISED, LATE, CAUSED, BEGUN = (b"%d" % number for number in range(5))

_PR_SET_PDEATHSIG = 1


def main(parent: int, rank: int, size: int, task: int, result: int) -> None:
    """Run a function as rank `rank`; `task` and `result` are files that are open here."""
    if sys.platform == "linux":
        # If the process is killed that has called `launch`.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # In a PID namespace of its own it has parents that it cannot see.
    if os.getppid() not in (parent, 0):
        return
    # The caller of `launch` raises it; the other ranks are told by what stands around this.
    sys.excepthook = lambda *_: None

    def work() -> object:
        arguments, timeout, call = pickle.loads(mmap(task, 0, access=ACCESS_READ))
        sys.argv[:] = arguments
        comm = init(timeout=timeout)
        fn, args = pickle.loads(call)
        os.pwrite(result, BEGUN, 0)
        return fn(comm, *args)

    data, error = outcome_of(work, f"raised on rank {rank} of {size}")
    try:
        _write(result, data)
    except OSError as full:
        # There is no room for the result, but there may be for this.
        os.ftruncate(result, 1)
        full.add_note("launch: there was no room for what the function returned or raised")
        error = full
        _write(result, pickle.dumps((None, full)))
    os.pwrite(result, RETURNED if error is None else _kind(error), 0)
    if error is not None:
        raise error


def _write(result: int, data: bytes) -> None:
    with open(result, "wb", closefd=False) as file:
        file.seek(1)
        file.write(data)


def _kind(error: BaseException) -> bytes:
    if any(isinstance(link, PeerError | CommunicatorClosedError) for link in chain_of(error)):
        return CAUSED
    return LATE if isinstance(error, CommTimeoutError) else RAISED


def cloudpickle() -> Any:
    """Return what pickles the functions of a program itself, None if it is not installed."""
    # Before 1.6 joblib has a copy of its own.
    for name in ("cloudpickle", "joblib.externals.cloudpickle"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def outcome_of(work: Callable[[], Any], where: str) -> tuple[bytes, BaseException | None]:
    """Do some work; return the pickle of its result and its exception, and the latter.

    A note of the exception says `where`, and has the traceback.
    """
    dumps = (cloudpickle() or pickle).dumps
    try:
        return dumps((work(), None)), None
    except BaseException as error:
        note = f"{where}:\n{describe_exception(error)}"
        error.add_note(note)
        try:
            data: bytes = dumps((None, error))
            pickle.loads(data)
        except Exception:
            # Exceptions of some classes cannot be pickled, or not be read again.
            data = pickle.dumps((None, RuntimeError(note)))
        return data, error
