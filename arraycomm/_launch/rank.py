"""Runs the program of one rank, passes on its lines, and tells the job how it ended.

A program of its own, started once a rank: it imports nothing but the standard library, and little
of that. Its arguments are the mark of its reports, whether lines get the rank as a prefix, a
directory for what the rank prints, whether a failed rank waits to be ended, and the program with
its arguments.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

# The rank, by launcher.
_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds that a program has to act on a signal, and those after which a failed rank waits no
# longer.
_PATIENCE = 3
_LONGEST = 20.0
# Seconds in which the launcher has seen that a connection is closed.
_NOTICED = 0.3
_NOT_RUN = 127
_SIGNALLED = 128
_CHUNK = 1 << 16
# Bytes of which a pipe takes all at once: more of them a launcher might mix with other ranks'.
_WHOLE = select.PIPE_BUF
# Seconds after which a line is shown that has not ended.
UNENDED = 0.3
# What the job does with a piece of a line: keep it, show it, or show it and end the line.
_HOLD, _SHOW, _END = b"+", b".", b"$"
_PR_SET_PDEATHSIG = 1
# Progress bars begin their lines by a carriage return.
_END_OF_LINE = re.compile(rb"\r?\n|\r(?=[^\n])")


class Output:
    """One stream of the rank: what comes through a pipe goes on to a descriptor of this process.

    It goes on in lines. Those that fit are written as they are. The others go in pieces, which the
    job puts together: the beginning of a line that is too long, one that is shown though its line
    has not ended, and the end.
    """

    def __init__(self, target: int, sender: bytes, prefix: bytes, log: int | None) -> None:
        self.source, self.entrance = os.pipe()
        os.set_blocking(self.source, False)
        self._target, self._sender, self._prefix, self._log = target, sender, prefix, log
        # The parts of a line that has not ended, when it began, and whether a part of it is shown.
        self.rest: list[bytes] = []
        self._since = 0.0
        self._shown = False
        self.open = True

    def relay(self) -> None:
        """Pass on what has come so far."""
        while self.open:
            try:
                chunk = os.read(self.source, _CHUNK)
            except BlockingIOError:
                break
            self.open = bool(chunk)
            self._pass_on(chunk)
        if self.rest and not self._prefix and time.monotonic() > self._since + UNENDED:
            self._show_rest()

    def finish(self) -> None:
        """Pass on what is left, also a line without an end."""
        self.relay()
        if self.rest and self._prefix:
            self._write_lines(self._prefix + b"".join(self.rest).rstrip(b"\r") + b"\n")
        elif self.rest:
            self._show_rest()

    def _pass_on(self, chunk: bytes) -> None:
        if self._log is not None:
            os.write(self._log, chunk)
        before = self.rest[-1][-1:] if self.rest else b""
        ended = _END_OF_LINE.search(before + chunk) if self._prefix else b"\n" in chunk
        if chunk and not self.rest:
            self._since = time.monotonic()
        self.rest += [chunk] if chunk else []
        if not ended:
            return
        text = b"".join(self.rest)
        end = text.rfind(b"\n") + 1
        lines, end = self._prefixed(text) if self._prefix else (text[:end], end)
        self._write_lines(lines)
        # Writing may have taken long, in which the program could not go on.
        self.rest, self._since = [text[end:]] if text[end:] else [], time.monotonic()

    def _prefixed(self, text: bytes) -> tuple[bytes, int]:
        """Return the lines that have ended, each with its rank, and where the next one begins."""
        start, lines = 0, list[bytes]()
        for end in _END_OF_LINE.finditer(text):
            line, start = text[start : end.start()], end.end()
            if line or end[0] != b"\r":
                lines.append(self._prefix + line + b"\n")
        return b"".join(lines), start

    def _show_rest(self) -> None:
        self._write_pieces(memoryview(b"".join(self.rest)), _SHOW)
        self.rest = []

    def _write_lines(self, text: bytes) -> None:
        start = 0
        while start < len(text):
            end = 0 if self._shown else text.rfind(b"\n", start, start + _WHOLE) + 1
            if end:
                self._write(text[start:end])
            else:
                end = text.index(b"\n", start) + 1
                self._write_pieces(memoryview(text)[start : end - 1], _END)
            start = end

    def _write_pieces(self, text: memoryview, last: bytes) -> None:
        room = _WHOLE - len(self._sender) - 3
        starts = range(0, max(len(text), 1), room)
        for start in starts:
            kind = last if start == starts[-1] else _HOLD
            piece = bytes(text[start : start + room])
            self._write(self._sender + kind + b"\x03" + piece + b"\n")
        self._shown = last == _SHOW

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._target, data) :]


class Program:
    """The program of this rank, as a process of its own."""

    def __init__(self, command: list[str], outputs: list[Output]) -> None:
        self.told_to_end = False
        self.status: int | None = None
        parent, self._launcher = os.getpid(), os.getppid()
        self._pid = os.fork()
        if self._pid == 0:
            _become(command, [output.entrance for output in outputs], parent)
        for output in outputs:
            os.close(output.entrance)
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        # Launchers may die, as of a pipe that nobody reads, and leave their ranks behind.
        signal.signal(signal.SIGURG, self._end_with_launcher)
        _signal_at_end_of_parent(signal.SIGURG)

    def _forward(self, number: int, _: object) -> None:
        if self.status is not None:
            os._exit(1)
        if number in _ENDS:
            self.told_to_end = True
            signal.signal(signal.SIGALRM, lambda *_: os.kill(self._pid, signal.SIGKILL))
            signal.alarm(_PATIENCE)
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def _end_with_launcher(self, *_: object) -> None:
        # The kernel takes the end of the thread that has started this process for that of its
        # parent.
        if os.getppid() != self._launcher:
            self._forward(signal.SIGTERM, None)

    def wait(self, outputs: list[Output]) -> int:
        """Return how it ended: its status, or a signal's number below zero; pass its output on."""
        ended, written = os.pipe()
        for end in (ended, written):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        while True:
            # Before the output is read: what it has written is there once it has ended.
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            for output in outputs:
                output.relay()
            if pid:
                break
            sources = [output.source for output in outputs if output.open]
            unended = any(output.rest for output in outputs)
            select.select([ended, *sources], [], [], UNENDED if unended else 1.0)
            with suppress(BlockingIOError):
                os.read(ended, _CHUNK)
        signal.set_wakeup_fd(-1)
        for output in outputs:
            output.finish()
        self.status = os.waitstatus_to_exitcode(status)
        return self.status


def _become(command: list[str], entrances: list[int], parent: int) -> NoReturn:
    """Replace this process by the program, which is to end with its parent."""
    for target, entrance in enumerate(entrances, 1):
        os.dup2(entrance, target)
    _signal_at_end_of_parent(signal.SIGKILL)
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


def main(mark: str, prefix: str, logs: str, hold: str, *command: str) -> NoReturn:
    """Run the program, and end as it has ended."""
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
    if rank != "0":
        # Launchers pass the standard input on to rank 0; what the others have may never end.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Into a pipe Python would write late, and not in lines.
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    program_outputs = _outputs(f"\x02{mark} {rank} ".encode(), rank, prefix, logs)
    program = Program(list(command), program_outputs)
    status = program.wait(program_outputs)
    if not program.told_to_end:
        # Open MPI passes on whole lines.
        os.write(2, f"\x02{mark} {rank} {status}\x03\n".encode())
        if not status and "PMI_FD" in os.environ:
            _leave_connection(int(os.environ["PMI_FD"]))
        if status and hold:
            # Launchers end all ranks, or none, once one has failed: the job decides.
            end = time.monotonic() + _LONGEST
            while time.monotonic() < end:
                time.sleep(1.0)
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


def _outputs(sender: bytes, rank: str, prefix: str, logs: str) -> list[Output]:
    log = None
    if logs:
        path = os.path.join(logs, f"rank-{rank}.log")
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    begin = f"[{rank}] ".encode() if prefix else b""
    return [Output(target, sender, begin, log) for target in (1, 2)]


if __name__ == "__main__":
    main(*sys.argv[1:])
