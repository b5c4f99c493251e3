"""joblib: the ranks work for whatever takes `n_jobs`, as scikit-learn's searches and forests do.

Importing this module registers joblib's backend "arraycomm". It gives a rank one task at a time,
and the next one once it is done. Rank 0 hands the tasks out, and works in a thread beside that.
"""

from __future__ import annotations

import io
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from joblib import parallel_config, register_parallel_backend
from joblib.parallel import AutoBatchingMixin, ParallelBackendBase, SequentialBackend

import arraycomm as ac
from arraycomm._arrays.typing import T
from arraycomm._errors import forgiving
from arraycomm._jobs.process import cloudpickle, outcome_of

__all__ = ["run"]

_BACKEND: Final = "arraycomm"
# Bytes from which on an array that several tasks have is sent once; where joblib's own processes
# begin to share memory.
_LARGE: Final = 1_000_000
# Seconds between two looks for results: they become longer while nothing comes.
_NAP, _LONG_NAP = 5e-5, 2e-3

Arrays = dict[int, Any]


def run(fn: Callable[..., T], *args: Any, comm: ac.Communicator | None = None) -> T:
    """Run `fn(*args)` on rank 0, with all ranks as the workers of joblib; collective.

    Parameters
    ----------
    fn : callable
        Called on rank 0 alone, where `joblib.parallel_config("arraycomm")` holds: what is not told
        otherwise uses all ranks. It may not communicate, nor may its tasks. The other ranks need
        not pass it: their arguments are not used.
    *args : object
        Passed to `fn`.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    object
        What `fn` returned, on every rank; it has to pickle. Return None to keep it on rank 0.

    Raises
    ------
    Exception
        On rank 0 what `fn` has raised, a task's exception among it: with a note that has the
        task's rank and traceback. The other ranks raise `PeerError`. `comm` can still be used.
    PeerError
        A rank has died or left.

    Notes
    -----
    Tasks and results travel as pickles by cloudpickle, as in joblib's own processes: what they
    need has to be importable on every rank, apart from what the program itself defines. An array
    of over 1 MB which is in several tasks of one call, such as the samples of a search, is sent to
    a rank once; tasks cannot write to it, and rank 0 may not change it during the call. Parallel
    calls inside a task are sequential.

    After an error, and after Ctrl-C, a rank leaves once the task is done that it works on.

    Examples
    --------
    >>> from joblib import Parallel, delayed
    >>> from arraycomm.adapters import joblib
    >>> from arraycomm.testing import run
    >>> def squares():
    ...     return Parallel()(delayed(pow)(number, 2) for number in range(5))
    >>> run(2, lambda comm: joblib.run(squares, comm=comm))
    [[0, 1, 4, 9, 16], [0, 1, 4, 9, 16]]
    """
    # A rank without a task waits for one for as long as `fn` takes.
    ranks = (comm or ac.world()).dup(timeout=None)
    team = _Team(ranks)
    try:
        with ranks:
            result = team.drive(fn, args) if ranks.rank == 0 else _serve(ranks)
            found: T = ranks.bcast_object(result)
    finally:
        team.forget()
    return found


@dataclass
class _Job:
    """A task of joblib: its pickle, the large arrays in it, and what has become of it."""

    team: _Team
    task: bytes
    arrays: Arrays
    callback: Callable[[Any], object] | None
    outcome: bytes | None = None

    def get(self, timeout: float | None = None) -> Any:
        """Return the task's result, or raise its exception, once it is done."""
        self.team.wait_for(self, timeout)
        assert self.outcome is not None
        result, error = pickle.loads(self.outcome)
        self.outcome = None
        if error is not None:
            raise error
        return result


class _Team:
    """What rank 0 knows of the ranks that work for it."""

    def __init__(self, ranks: ac.Communicator) -> None:
        self._ranks, self.size = ranks, ranks.size
        self.most_at_once = ranks.size
        self._waiting: deque[_Job] = deque()
        # The ranks that have one, with what is done once that is: a receive, or rank 0's own work.
        self._busy: dict[int, tuple[_Job, ac.Request[Any] | _Work]] = {}
        # The large arrays that each rank has kept of its last task.
        self._kept: dict[int, Arrays] = {}

    def drive(self, fn: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Run `fn`, then let the ranks go."""
        token = _team.set(self)
        try:
            with parallel_config(_BACKEND):
                result = fn(*args)
        finally:
            _team.reset(token)
        self.abort()
        self._wait(lambda: not self._busy, None)
        for rank in range(1, self.size):
            self._ranks.send_object(None, rank)
        return result

    def begin(self) -> None:
        """Let no rank take an array for one of an earlier call, which may have changed."""
        self._kept.clear()

    def submit(self, func: Callable[[], Any], callback: Callable[[Any], object] | None) -> _Job:
        """Take a task, which runs on the next rank that has none."""
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(func)
        job = _Job(self, stream.getvalue(), pickler.arrays, callback)
        self._waiting.append(job)
        self._hand_out()
        return job

    def abort(self) -> None:
        """Forget all tasks; a rank that works on one is used again once it has done that."""
        self._waiting.clear()
        for job, _ in self._busy.values():
            job.callback = None

    def forget(self) -> None:
        """See the errors of receives that end with the communicator, which are no news."""
        for request in (work for _, work in self._busy.values() if isinstance(work, ac.Request)):
            with forgiving:
                request.wait()

    def wait_for(self, job: _Job, timeout: float | None) -> None:
        """Wait until a task is done; raise `TimeoutError` if that takes too long."""
        self._wait(lambda: job.outcome is not None, timeout)

    def _wait(self, done: Callable[[], bool], timeout: float | None) -> None:
        started, nap = time.monotonic(), _NAP
        while not done():
            if sum([self._take(rank) for rank in list(self._busy)]):
                nap = _NAP
                continue
            if timeout is not None and time.monotonic() - started > timeout:
                raise TimeoutError(f"a task of joblib was not done in {timeout:g} s")
            time.sleep(nap)
            nap = min(2 * nap, _LONG_NAP)

    def _take(self, rank: int) -> bool:
        """Take a rank's result if there is one, and give it another task."""
        job, work = self._busy[rank]
        if not work.test():
            return False
        outcome = work.wait()
        del self._busy[rank]
        self._hand_out()
        job.outcome = outcome
        if job.callback is not None:
            # It may submit more.
            job.callback(job)
        return True

    def _hand_out(self) -> None:
        for rank in (*range(1, self.size), 0):
            if not self._waiting or len(self._busy) >= self.most_at_once:
                return
            if rank not in self._busy:
                job = self._waiting.popleft()
                self._busy[rank] = job, self._started(rank, job)

    def _started(self, rank: int, job: _Job) -> ac.Request[Any] | _Work:
        if rank == 0:
            return _Work(job)
        kept = self._kept.get(rank, {})
        new = {key: array for key, array in job.arrays.items() if key not in kept}
        self._kept[rank] = job.arrays
        self._ranks.send_object((job.task, new, list(job.arrays)), rank)
        return self._ranks.irecv_object(rank)


class _Work(threading.Thread):
    """A task on rank 0; it is waited for as a request is."""

    def __init__(self, job: _Job) -> None:
        # A daemon: nobody waits for it if Ctrl-C ends this rank.
        super().__init__(daemon=True)
        arrays = {key: array.view() for key, array in job.arrays.items()}
        self._task, self._arrays = job.task, _protected(arrays)
        self._outcome = b""
        self.start()

    def run(self) -> None:
        self._outcome = _outcome(self._task, self._arrays, 0)

    def test(self) -> bool:
        """Return whether it is done."""
        return not self.is_alive()

    def wait(self) -> bytes:
        """Return what it gave."""
        return self._outcome


def _serve(ranks: ac.Communicator) -> Any:
    """Do what rank 0 sends, until it lets this rank go."""
    arrays: Arrays = {}
    while (sent := ranks.recv_object(0)) is not None:
        task, new, used = sent
        known = arrays | new
        arrays = _protected({key: known[key] for key in used})
        ranks.send_object(_outcome(task, arrays, ranks.rank), 0)


def _protected(arrays: Arrays) -> Arrays:
    """Let nobody write to arrays that other tasks have as well."""
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def _outcome(task: bytes, arrays: Mapping[int, Any], rank: int) -> bytes:
    """Do a task; return the pickle of its result, or of its exception."""

    def work() -> Any:
        return _Unpickler(task, arrays).load()()

    outcome, error = outcome_of(work, f"raised by a task of joblib on rank {rank}")
    if isinstance(error, KeyboardInterrupt):
        raise error
    return outcome


class _Pickler(cloudpickle().Pickler):  # type: ignore[misc]
    """Leaves large arrays out, and names them."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.arrays: Arrays = {}

    def persistent_id(self, obj: Any) -> int | None:
        """Return the name of a large array, which holds while the array lives."""
        if type(obj) is not np.ndarray or obj.nbytes < _LARGE or obj.dtype.hasobject:
            return None
        self.arrays[id(obj)] = obj
        return id(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, arrays: Mapping[int, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._arrays = arrays

    def persistent_load(self, pid: int) -> Any:
        return self._arrays[pid]


_team: ContextVar[_Team | None] = ContextVar("team", default=None)


class _Backend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """joblib's backend; its methods are those of `ParallelBackendBase`."""

    default_n_jobs = -1
    supports_timeout = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        team = _team.get()
        if team is None:
            raise RuntimeError(
                f"joblib's backend {_BACKEND!r} works in the function that "
                "arraycomm.adapters.joblib.run calls on rank 0, and in its thread; pass what uses "
                "the backend to that, on all ranks"
            )
        self._team = team

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        if n_jobs == 0:
            raise ValueError("n_jobs must not be 0; pass -1 for all ranks")
        if n_jobs is None:
            return 1
        return min(n_jobs if n_jobs > 0 else max(self._team.size + 1 + n_jobs, 1), self._team.size)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **_: Any) -> int:
        self.parallel = parallel
        self._team.most_at_once = self.effective_n_jobs(n_jobs)
        return self._team.most_at_once

    def start_call(self) -> None:
        self._team.begin()

    def submit(self, func: Callable[[], Any], callback: Any = None) -> _Job:
        return self._team.submit(func, callback)

    # What joblib before 1.5 calls.
    apply_async = submit

    def abort_everything(self, ensure_ready: bool = True) -> None:
        self._team.abort()

    def terminate(self) -> None:
        self.reset_batch_stats()

    def get_nested_backend(self) -> tuple[SequentialBackend, None]:
        return SequentialBackend(nesting_level=(self.nesting_level or 0) + 1), None


register_parallel_backend(_BACKEND, _Backend)
