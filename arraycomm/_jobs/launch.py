"""`launch`: ranks that are processes of this node, started from a script or a notebook."""

from __future__ import annotations

import os
import pickle
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import TextIOWrapper
from tempfile import TemporaryFile
from typing import IO, Any, Final, TextIO

from arraycomm._arrays.typing import T, Ts
from arraycomm._checks import check_at_least, check_seconds
from arraycomm._communicator import Communicator
from arraycomm._entries import entry
from arraycomm._errors import PeerError, raise_interrupt, text_of
from arraycomm._jobs.job import GRACE
from arraycomm._jobs.launchers import without_launcher
from arraycomm._jobs.output import Lines, Target, write_all
from arraycomm._jobs.process import BEGUN, RAISED, RETURNED, cloudpickle
from arraycomm._launch import ADDRESS, NUMBER, RANK, claimed_by, launched
from arraycomm._launch.places import threads_for
from arraycomm._start.numbering import SECRET

# Seconds that the other ranks have to end by themselves once one has failed.
_AFTER_FAILURE: Final = 1.0
_LOOK: Final = 0.05
_HOST: Final = "127.0.0.1"


@entry
def launch(
    fn: Callable[[Communicator, *Ts], T], ranks: int, *args: *Ts, timeout: float | None = 1800.0
) -> list[T]:
    """Run `fn(comm, *args)` on `ranks` ranks, each a fresh process of this node, without MPI.

    For notebooks and scripts; `arraycomm.testing.run` does the same with threads.

    Parameters
    ----------
    fn : callable
        Called on every rank with `world()`, the communicator of all of them, and `args`. It may be
        defined in the notebook or script, and use what is defined there, if cloudpickle is
        installed; otherwise in a module.
    ranks : int
        How many ranks.
    *args : object
        The same on every rank, which gets a copy.
    timeout : float or None, default 1800.0
        As for `init`: seconds that a call may wait for other ranks; None means for ever.

    Returns
    -------
    list
        What `fn` returned, in rank order.

    Raises
    ------
    BaseException
        What the first rank has raised whose error no other rank's failure has caused; with notes
        that have its traceback and say how the others ended.
    PeerError
        A rank has died, or left before `fn` returned.
    RuntimeError
        This process is a rank itself.
    TypeError, ValueError
        An argument is wrong, or cannot be pickled.

    Notes
    -----
    Lines that ranks print are written to `sys.stdout` and `sys.stderr` of the caller. Once a rank
    has failed, the others have a second to end. Then they get `SIGTERM`, as they do if Ctrl-C,
    `SIGTERM` or `SIGHUP` ends the caller, and have ten seconds to act on it. None lives on after
    the call, or without this process. A rank has `OMP_NUM_THREADS` set to its share of the cores.

    Examples
    --------
    >>> import arraycomm as ac
    >>> ac.launch(lambda comm, x: float(comm.allreduce(x)), 2, 1.5)
    [3.0, 3.0]
    """
    ranks = check_at_least(ranks, 1, "launch: ranks")
    timeout = check_seconds(timeout, "launch: timeout")
    _refuse_in_rank()
    _refuse_here()
    task = pickle.dumps((sys.argv, timeout, _pickled(fn, args)))
    with ExitStack() as stack:
        files = [stack.enter_context(_file()) for _ in range(ranks)]
        shared = stack.enter_context(_file())
        shared.write(task)
        shared.flush()
        # Bound, so that nobody else gets its port; rank 0 listens there.
        place = stack.enter_context(socket.socket())
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((_HOST, 0))
        environment = _environment(ranks, place.getsockname()[1])
        job = _Job()
        stack.enter_context(_ending_ranks_first())
        try:
            for rank, file in enumerate(files):
                job.start(rank, ranks, environment, shared, file)
            job.run()
        finally:
            job.end()
        return _results(job.statuses, files)


def _refuse_in_rank() -> None:
    found = launched(os.environ)
    if found is not None and found.size > 1 and not claimed_by(os.environ, os.getpid()):
        raise RuntimeError(
            f"launch: this process is one of {found.size} ranks already; call launch in the "
            'program that is to start them, in a script under if __name__ == "__main__"'
        )


def _refuse_here() -> None:
    """Raise if this machine starts no processes that can meet."""
    if not sys.executable:
        raise RuntimeError(
            f"launch: sys.executable must be the Python that starts the ranks; got "
            f"{sys.executable!r}, as in a program that embeds Python; set it to the path of one"
        )
    try:
        with socket.socket(type=socket.SOCK_DGRAM) as trial:
            trial.connect((_HOST, 9))
    except OSError as error:
        raise RuntimeError(
            f"launch: the ranks meet at {_HOST}, which this machine or container cannot reach "
            f"({error.strerror}); set its loopback interface up, as by: ip link set lo up"
        ) from None


def _file() -> IO[bytes]:
    """Return a file for what a rank is passed, or returns: in memory, as disks may be full."""
    with suppress(AttributeError, OSError):
        return os.fdopen(os.memfd_create("arraycomm"), "w+b")
    return TemporaryFile()


@contextmanager
def _ending_ranks_first() -> Iterator[None]:
    """Let signals that would end this process at once leave the ranks the time to act on it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    ending = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    try:
        for number in ending:
            signal.signal(number, end)
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


def _pickled(fn: Any, args: tuple[Any, ...]) -> bytes:
    if not callable(fn):
        raise TypeError(f"launch: fn must be callable; got {fn!r}")
    by_value = cloudpickle()
    cannot = f"launch: {getattr(fn, '__qualname__', fn)} and its arguments cannot be pickled"
    try:
        data: bytes = (by_value or pickle).dumps((fn, args))
    except Exception as error:
        raise_interrupt(error)
        rest = "" if by_value else "; install cloudpickle, or define them in a module"
        raise TypeError(f"{cannot} ({type(error).__name__}: {text_of(error)}){rest}") from error
    if by_value is None and b"__main__" in data:
        raise TypeError(
            f"{cannot}, since they are defined in this program itself; install cloudpickle, or "
            "define them in a module"
        )
    return data


def _environment(ranks: int, port: int) -> dict[str, str]:
    return {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads_for(ranks, os.environ)),
        **without_launcher(os.environ),
        "PYTHONIOENCODING": "utf-8",
        ADDRESS: f"{_HOST}:{port}",
        NUMBER: str(ranks),
        SECRET: secrets.token_hex(16),
    }


class _Job:
    """The processes of the ranks, and what they print."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output = selectors.DefaultSelector()
        self._targets = {name: _target(name) for name in ("stdout", "stderr")}
        self._results: list[IO[bytes]] = []
        # The status of each rank that ended by itself.
        self.statuses: dict[int, int] = {}

    def start(
        self, rank: int, ranks: int, environment: dict[str, str], task: IO[bytes], result: IO[bytes]
    ) -> None:
        """Start the process of a rank."""
        numbers = (os.getpid(), rank, ranks, task.fileno(), result.fileno())
        path = f"import sys; sys.path[:] = {[str(place) for place in sys.path]}"
        begin = f"from arraycomm._jobs.process import main; main{numbers}"
        process = subprocess.Popen(
            [sys.executable, "-c", f"{path}\n{begin}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=numbers[-2:],
            env={**environment, RANK: str(rank)},
            # Ctrl-C reaches this process alone, which ends the others.
            process_group=0,
        )
        self._processes.append(process)
        self._results.append(result)
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._output.register(stream, selectors.EVENT_READ, Lines(rank, self._targets[name]))

    def run(self) -> None:
        """Pass on what the ranks print until all have ended, or one has failed."""
        deadline = float("inf")
        while len(self.statuses) < len(self._processes) and time.monotonic() < deadline:
            for rank, process in enumerate(self._processes):
                if rank not in self.statuses and process.poll() is not None:
                    self.statuses[rank] = process.returncode
            if deadline == float("inf") and self._has_failed():
                deadline = time.monotonic() + _AFTER_FAILURE
            self._pass_on(_LOOK)

    def _has_failed(self) -> bool:
        kinds = [os.pread(result.fileno(), 1, 0) for result in self._results]
        raised = any(kind.strip(b"\0" + BEGUN + RETURNED) for kind in kinds)
        return raised or any(self.statuses.values())

    def _pass_on(self, seconds: float) -> None:
        began = time.monotonic()
        ready = self._output.select(seconds)
        waited = time.monotonic() - began
        for key, _ in ready:
            if chunk := os.read(key.fd, 1 << 16):
                key.data.take(chunk)
            else:
                key.data.finish()
                self._output.unregister(key.fileobj)
        for key in self._output.get_map().values():
            key.data.wait(waited)

    def end(self) -> None:
        """End the ranks that still run, and what they have started; then close what is open."""
        try:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + GRACE
            while self._running() and time.monotonic() < deadline:
                self._pass_on(_LOOK)
            # What has come, though a process that a rank has left behind may still print.
            self._pass_on(0)
        finally:
            self._signal(signal.SIGKILL)
            for process in self._processes:
                process.wait()
                for stream in (process.stdout, process.stderr):
                    assert stream is not None
                    stream.close()
            for key in list(self._output.get_map().values()):
                key.data.finish()
            self._output.close()

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._processes if process.poll() is None]

    def _signal(self, number: int) -> None:
        for process in self._running():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _target(name: str) -> Target:
    """Return what writes to a standard stream of the caller, whatever that is at the time."""

    def write(data: bytes) -> None:
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            return
        text = data.decode("utf-8", "replace")
        if type(stream) is TextIOWrapper:
            # It would lose what cannot be written at present.
            with suppress(BlockingIOError):
                stream.flush()
            write_all(stream.fileno(), text.encode(stream.encoding, "replace"))
        else:
            stream.write(text)
            stream.flush()

    return Target(f"launch: sys.{name}", write)


def _results(statuses: dict[int, int], files: Sequence[IO[bytes]]) -> list[Any]:
    """Return the ranks' results, or raise the error that caused those of the others."""
    results: list[Any] = []
    failed: list[tuple[bytes, int, BaseException]] = []
    states: list[str] = []
    for rank, file in enumerate(files):
        file.seek(0)
        kind, data = file.read(1), file.read()
        if kind.strip(b"\0" + BEGUN):
            result, error = pickle.loads(data)
        else:
            left = _left(rank, statuses.get(rank), "returned" if kind == BEGUN else "began")
            kind, (result, error) = RAISED, (None, left)
        results.append(result)
        states.append("returned" if kind == RETURNED else "was ended, since another had failed")
        if error is not None:
            failed.append((kind, rank, error))
            said = text_of(error).partition("\n")[0]
            states[rank] = f"raised {type(error).__name__}: {said}"
    if not failed:
        return results
    _, first, error = min(failed, key=lambda each: each[:2])
    for rank, state in enumerate(states):
        if rank != first:
            error.add_note(f"rank {rank} {state}")
    raise error


def _left(rank: int, status: int | None, before: str) -> PeerError | None:
    """Return the error of a rank that has died before its function did; None if it was ended."""
    if status is None:
        return None
    way = f"died by {signal.Signals(-status).name}" if status < 0 else f"left with status {status}"
    return PeerError(f"launch: rank {rank} {way} before its function {before}", rank=rank)
