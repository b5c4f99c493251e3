"""Runs the program of one rank, and tells the job what it prints and how it ended.

A program of its own, started once a rank: it imports nothing but the standard library, and little
of that. Its arguments are the mark of its messages, the seconds in which the program may act on a
signal, whether a failed rank waits to be ended, and the program with its arguments.
"""

from __future__ import annotations

import _socket  # Without the part in Python it takes a fifth of the time.
import ctypes
import os
import select
import signal
import sys
import time
from binascii import b2a_base64
from contextlib import suppress
from typing import NoReturn

# The rank, by launcher.
_RANKS = (
    *("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"),
    *("ARRAYCOMM_PROCESS_ID", "SLURM_PROCID"),
)
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds after which a failed rank waits no longer, if it cannot see that the job has ended.
_LONGEST = 20.0
# A timer of no seconds would never end.
_SOON = 0.001
# Seconds in which the launcher has seen that a connection is closed.
_NOTICED = 0.3
_NOT_RUN = 127
_SIGNALLED = 128
_CHUNK = 1 << 16
# The most that a pipe holds, in chunks: what a program has started may print for ever.
_MOST_LEFT = 17
# Bytes of which a message is made that a pipe takes all at once: more of them a launcher might mix
# with other ranks'.
_WHOLE = 3000
_PR_SET_PDEATHSIG = 1


class Job:
    """The way to the job: a connection, or else, as from another host, what the launcher forwards.

    Launchers may break lines, and print their own.
    """

    def __init__(self, mark: str, rank: str) -> None:
        self._begin = f"\x02{mark} {rank} ".encode()
        self.connection = _connection(mark)
        self._target = 2 if self.connection is None else self.connection.fileno()
        self._room = _WHOLE if self.connection is None else _CHUNK

    def send(self, kind: bytes, data: bytes) -> None:
        """Send a message: its kind is the stream on which the data were printed, or `s`."""
        for start in range(0, len(data), self._room):
            text = b2a_base64(data[start : start + self._room])
            message = self._begin + kind + b" " + text
            while message:
                message = message[os.write(self._target, message) :]

    def wait_for_end(self) -> None:
        """Wait until the job has ended: launchers may end all ranks once one has left."""
        if self.connection is not None:
            self.connection.recv(1)
            return
        end = time.monotonic() + _LONGEST
        while time.monotonic() < end:
            time.sleep(1.0)


def _connection(mark: str) -> _socket.socket | None:
    """Return a connection to the job, which listens on its host under a name that has its mark."""
    found = _socket.socket(_socket.AF_UNIX)
    try:
        found.connect(f"\0arraycomm-{mark}")
    except OSError:
        found.close()
        return None
    return found


class Program:
    """The program of this rank, as a process of its own."""

    def __init__(self, command: list[str], patience: float, job: Job) -> None:
        self._patience, self._job = patience, job
        self.told_to_end = False
        self.status: int | None = None
        parent, self._launcher = os.getpid(), os.getppid()
        # What it prints, by the number of the stream.
        self._sources: dict[int, bytes] = {}
        entrances = []
        for stream in (b"1", b"2"):
            source, entrance = os.pipe()
            os.set_blocking(source, False)
            self._sources[source] = stream
            entrances.append(entrance)
        self._pid = os.fork()
        if self._pid == 0:
            _become(command, entrances, parent)
        for entrance in entrances:
            os.close(entrance)
        for number in _FORWARDED:
            # One that is ignored when the job starts, as under nohup, stays so.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._forward)
        # Launchers may die, as of a pipe that nobody reads, and leave their ranks behind.
        signal.signal(signal.SIGURG, self._end_with_launcher)
        _signal_at_end_of_parent(signal.SIGURG)

    def _forward(self, number: int, _: object) -> None:
        if self.status is not None:
            # The job ends this process, if it can, once the other ranks have had their time.
            if self._job.connection is None:
                os._exit(1)
            return
        if number in _ENDS and not self.told_to_end:
            self.told_to_end = True
            signal.signal(signal.SIGALRM, lambda *_: os.kill(self._pid, signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, max(self._patience, _SOON))
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def _end_with_launcher(self, *_: object) -> None:
        # The kernel takes the end of the thread that has started this process for that of its
        # parent.
        if os.getppid() != self._launcher:
            self._forward(signal.SIGTERM, None)

    def wait(self) -> int:
        """Return how it ended: its status, or a signal's number below zero; send what it prints."""
        ended, written = os.pipe()
        for end in (ended, written):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        pid = 0
        while not pid:
            # Before its output is read: what it has written is there once it has ended.
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            for source in list(self._sources):
                self._pass_on(source)
            if not pid:
                select.select([ended, *self._sources], [], [], 1.0)
                with suppress(BlockingIOError):
                    os.read(ended, _CHUNK)
        signal.set_wakeup_fd(-1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def _pass_on(self, source: int) -> None:
        with suppress(BlockingIOError):
            for _ in range(_MOST_LEFT):
                chunk = os.read(source, _CHUNK)
                if not chunk:
                    del self._sources[source]
                    return
                self._job.send(self._sources[source], chunk)


def _become(command: list[str], entrances: list[int], parent: int) -> NoReturn:
    """Replace this process by the program, which is to end with its parent."""
    for target, entrance in enumerate(entrances, 1):
        os.dup2(entrance, target)
    _signal_at_end_of_parent(signal.SIGKILL)
    # Which Python ignores.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if os.getppid() != parent:
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"arraycomm run: cannot run {command[0]}: {error.strerror}\n".encode())
    os._exit(_NOT_RUN)


def _signal_at_end_of_parent(number: int) -> None:
    """Have the kernel send this process a signal once its parent has ended, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def main(mark: str, patience: str, hold: str, *command: str) -> NoReturn:
    """Run the program, and end as it has ended."""
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
    if rank != "0":
        # Launchers pass the standard input on to rank 0; what the others have may never end.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Into a pipe Python would write late, and not in lines.
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    job = Job(mark, rank)
    program = Program(list(command), float(patience), job)
    status = program.wait()
    job.send(b"s", str(status).encode())
    told = program.told_to_end
    if hold and (status or told) and (job.connection is not None or not told):
        job.wait_for_end()
    if not status and "PMI_FD" in os.environ:
        _leave_connection(int(os.environ["PMI_FD"]))
    if status < 0 and not hold:
        _die_by(-status)
    os._exit(status if status >= 0 else _SIGNALLED - status)


def _leave_connection(connection: int) -> None:
    """Let the launcher see whether the program left without MPI's end; it ends all ranks then.

    At MPI's end it has closed the connection. Otherwise it must see this end closed in time.
    """
    with suppress(OSError):  # An outer launcher's may not be open here.
        if not select.select([connection], [], [], 0)[0]:
            os.close(connection)
            time.sleep(_NOTICED)


def _die_by(number: int) -> None:
    """Let the launcher see this rank die; without a second core file."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main(*sys.argv[1:])
