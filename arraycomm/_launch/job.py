"""A program on several ranks: started, its output passed on, ended whole once one rank fails."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from types import FrameType
from typing import IO, Final, NamedTuple

from arraycomm._launch.launchers import Launcher, threads_for
from arraycomm._launch.library import MPICH

_RANK, _TIED = (Path(__file__).with_name(name) for name in ("rank.py", "tied.py"))
# Without the site's packages it starts in a hundredth of a second.
_BARE_PYTHON: Final = (sys.executable, "-I", "-S")
_SIGNALLED: Final = 128
# Signals by which the job is told to end, and those that are for the programs.
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
_PASSED_ON: Final = (signal.SIGUSR1, signal.SIGUSR2)
# How begins what a rank's process sends for this one, among what its program prints.
_OPENS: Final = b"\x02"
# Seconds that the other ranks have to end by themselves once one has failed: those that waited for
# it print that it has failed. Then those in which a launcher has forwarded what ranks have printed.
_GRACE: Final = 1.0
_FORWARDING: Final = 0.2
# Seconds that a launcher has to end its ranks.
_PATIENCE: Final = 10.0
# Seconds between looks for signals: the kernel may give one to a thread that passes output on,
# which leaves the main thread, the one that runs handlers, asleep.
_LOOK: Final = 0.2


@dataclass(frozen=True)
class Program:
    """What runs on each rank, and how."""

    # The program and its arguments.
    command: Sequence[str]
    # Whether each line that it prints begins with its rank.
    prefix: bool = False
    # A directory for a file of each rank with what it prints, or an empty string.
    logs: str = ""
    # Whether the other ranks live on if one fails.
    fault_tolerant: bool = False
    # Whether rank 0 reads what this process would.
    stdin: bool = False

    def on_rank(self, mark: str) -> list[str]:
        """Return the words that the launcher starts on each rank."""
        flags = ("1" if self.prefix else "", self.logs, "" if self.fault_tolerant else "1")
        return [*_BARE_PYTHON, str(_RANK), mark, *flags, *self.command]


Handler = Callable[[int, FrameType | None], object]


class Ended(NamedTuple):
    """How a job ended: its status, and the statuses of ranks that failed, the first one first.

    A status below zero is that of a rank that a signal has ended. Nothing was heard of the ranks
    that are `cut_off`: the launcher ended them once another one had left without MPI's end.
    """

    status: int
    failed: dict[int, int]
    cut_off: Sequence[int] = ()


class _Report(NamedTuple):
    rank: int
    status: int


class _LauncherEnded(NamedTuple):
    status: int


# No `SimpleQueue`: a handler of a signal that outlasts its timeout lets that wait without limit.
_Events = Queue[_Report | _LauncherEnded]


def run_job(
    launcher: Launcher, ranks: int, environment: Mapping[str, str], program: Program
) -> Ended:
    """Run a program on ranks in an environment, and return how it ended.

    If a rank fails, the others are ended, unless the program is fault-tolerant. `KeyboardInterrupt`
    ends all ranks and is raised again.
    """
    threads = threads_for(ranks, environment)
    mark = secrets.token_hex(8)
    started = launcher.command(ranks, threads=threads, fault_tolerant=program.fault_tolerant)
    reads = program.stdin and sys.stdin is not None and not sys.stdin.isatty()
    # A group of its own: Ctrl-C reaches this process alone, which ends the others. From there a
    # terminal could not be read.
    with subprocess.Popen(
        _tied([*started, *program.on_rank(mark)]),
        stdin=None if reads else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=launcher.environment(environment, threads),
        process_group=0,
    ) as process:
        hides_ends = launcher.family == MPICH and not program.fault_tolerant
        return _Job(process, ranks, mark, program, hides_ends).run()


def ranks_here(mark: str) -> list[int]:
    """Return the processes of this node that run a rank's program for the job with this mark."""
    begin = "\0".join((*_BARE_PYTHON, str(_RANK), mark, "")).encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().startswith(begin):
                found.append(int(path.parent.name))
    # A child that is about to become the program still has the words of its parent.
    parents = {pid: _parent(pid) for pid in found}
    return [pid for pid in found if parents[pid] not in found]


def _send(how: Callable[[int, int], None], target: int, number: int) -> None:
    # It may have ended, or be in a group of others.
    with suppress(ProcessLookupError):
        how(target, number)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _tied(command: Sequence[str]) -> list[str]:
    """Return the words of a command that ends with this process, even if that is killed."""
    if sys.platform != "linux":
        return list(command)
    return [*_BARE_PYTHON, str(_TIED), str(os.getpid()), *command]


class _Job:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        ranks: int,
        mark: str,
        program: Program,
        hides_ends: bool,
    ) -> None:
        self._process, self._ranks, self._mark = process, ranks, mark
        # Whether the launcher may end ranks, and report success.
        self._hides_ends = hides_ends
        self._ends_together = not program.fault_tolerant
        self._events: _Events = Queue()
        # The signal by which the job is told to end; handlers put nothing into a `Queue`.
        self._told = 0
        out = _Line()
        err = out if os.path.sameopenfile(1, 2) else _Line()
        self._relays = [
            _Relay(process.stdout, 1, out, mark, self._events),
            _Relay(process.stderr, 2, err, mark, self._events),
        ]
        self._failed: dict[int, int] = {}
        self._ended: set[int] = set()

    def run(self) -> Ended:
        threading.Thread(target=self._wait_for_launcher, daemon=True).start()
        try:
            with _handling(self._handlers()):
                status = self._until_end()
        except KeyboardInterrupt:
            self._end_ranks()
            raise
        if not self._failed:
            silent = [rank for rank in range(self._ranks) if rank not in self._ended]
            if self._hides_ends and (not status or (self._ended and status == signal.SIGKILL)):
                return Ended(1 if silent else 0, {}, silent)
            return Ended(status, {})
        # An uncaught error, such as that of a rank that only waited for the one that failed, is
        # status 1.
        failed = dict(sorted(self._failed.items(), key=lambda item: item[1] == 1))
        return Ended(_shell_status(next(iter(failed.values()))), failed)

    def _handlers(self) -> dict[int, Handler]:
        """Return what this process does with signals; the launcher is in another group."""
        return {
            **dict.fromkeys(_ENDING, lambda number, _: setattr(self, "_told", number)),
            **dict.fromkeys(_PASSED_ON, lambda number, _: self._pass_on(number)),
            signal.SIGTSTP: lambda *_: self._stop(),
        }

    def _pass_on(self, number: int) -> None:
        """Give a signal to the ranks of this node; their launcher might die of it."""
        ranks = ranks_here(self._mark)
        for rank in ranks:
            _send(os.kill, rank, number)
        if not ranks:
            self._process.send_signal(number)

    def _stop(self) -> None:
        """Stop with this node's ranks, as a shell asks by Ctrl-Z, until it lets this one go on."""
        # With their programs, and what those have started.
        ranks = ranks_here(self._mark)
        for rank in ranks:
            _send(os.killpg, rank, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in ranks:
            _send(os.killpg, rank, signal.SIGCONT)

    def _wait_for_launcher(self) -> None:
        self._events.put(_LauncherEnded(self._process.wait()))

    def _until_end(self) -> int:
        """Return the launcher's status, or 0 if a rank has failed."""
        deadline: float | None = None
        while True:
            left = _LOOK if deadline is None else max(deadline - time.monotonic(), 0)
            try:
                event = self._events.get(timeout=min(left, _LOOK))
            except Empty:
                if not self._told and (deadline is None or time.monotonic() < deadline):
                    continue
                self._end_ranks()
                return self._told and _SIGNALLED + self._told
            if isinstance(event, _LauncherEnded):
                for relay in self._relays:
                    relay.join()
                while not self._events.empty():
                    if isinstance(report := self._events.get(), _Report):
                        self._count(report)
                return _shell_status(event.status)
            self._count(event)
            if self._failed and self._ends_together:
                now = time.monotonic()
                deadline = deadline or now + _GRACE
                if len(self._ended) == self._ranks:
                    deadline = now + _FORWARDING

    def _count(self, report: _Report) -> None:
        self._ended.add(report.rank)
        if report.status and self._ends_together:
            self._failed[report.rank] = report.status

    def _end_ranks(self) -> None:
        """End the launcher, which ends its ranks; a killed one would leave them behind."""
        for relay in self._relays:
            relay.quiet = True
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()


def _shell_status(status: int) -> int:
    return status if status >= 0 else _SIGNALLED - status


class _Line:
    """The last line of a file or terminal: the rank of which a part is shown, -1 for none."""

    def __init__(self) -> None:
        self.rank = -1
        self.lock = threading.Lock()


class _Relay(threading.Thread):
    """Writes what a job prints to a descriptor of this process, unless it has been made quiet.

    Takes out what `rank.py` sends for this process: reports, and pieces of lines. A line of which a
    part is shown is broken if another rank's comes.
    """

    def __init__(
        self, source: IO[bytes] | None, target: int, line: _Line, mark: str, events: _Events
    ) -> None:
        super().__init__(daemon=True)
        self._source, self._target, self._line, self._events = source, target, line, events
        sender = re.escape(_OPENS + mark.encode())
        self._sent = re.compile(sender + rb" (\d+) (?:([+.$])\x03([^\n]*)|(-?\d+)\x03)\n")
        # The pieces of lines, by rank.
        self._held: dict[int, list[bytes]] = {}
        self.quiet = False
        self.start()

    def run(self) -> None:
        assert self._source is not None
        rest = b""
        with self._source as source:
            while chunk := os.read(source.fileno(), 1 << 16):
                lines, end, rest = (rest + chunk).rpartition(b"\n")
                self._pass_on(lines + end)
        self._write(rest, -1)

    def _pass_on(self, text: bytes) -> None:
        start = 0
        for found in self._sent.finditer(text):
            self._write(text[start : found.start()], -1)
            start, rank = found.end(), int(found[1])
            if found[4]:
                self._events.put(_Report(rank, int(found[4])))
                continue
            held = self._held.setdefault(rank, [])
            held.append(found[3])
            if found[2] != b"+":
                self._write(b"".join(held) + b"\n" * (found[2] == b"$"), rank)
                held.clear()
        self._write(text[start:], -1)

    def _write(self, data: bytes, rank: int) -> None:
        if not data or self.quiet:
            return
        with self._line.lock:
            if self._line.rank not in (-1, rank):
                data = b"\n" + data
            self._line.rank = -1 if data.endswith(b"\n") else rank
            try:
                while data:
                    data = data[os.write(self._target, data) :]
            except BrokenPipeError:
                # Nobody reads it any more; the ranks go on.
                self.quiet = True


@contextmanager
def _handling(handlers: Mapping[int, Handler]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
