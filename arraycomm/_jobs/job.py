"""A program on several ranks: started, its output passed on, ended whole once one rank fails."""

from __future__ import annotations

import os
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
from queue import Empty
from types import FrameType
from typing import Final, NamedTuple

from arraycomm._jobs.launchers import Launcher, nodes_of, remove_files_of
from arraycomm._jobs.relay import LOOK, Relay, Report
from arraycomm._launch.library import MPICH
from arraycomm._launch.places import threads_for

_RANK, _TIED = (Path(__file__).with_name(name) for name in ("rank.py", "tied.py"))
# Without the site's packages it starts in a hundredth of a second.
_BARE_PYTHON: Final = (sys.executable, "-I", "-S")
_SIGNALLED: Final = 128
# Signals by which the job is told to end, and those that are for the programs.
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON: Final = (signal.SIGUSR1, signal.SIGUSR2)
# Seconds that ranks have to act on a signal that tells them to end: as long as docker waits.
GRACE: Final = 10.0
# Seconds that the other ranks have to end by themselves once one has failed: those that waited for
# it print that it has failed. Then those in which a launcher has forwarded what ranks have printed,
# and in which it is heard that a rank has ended.
_AFTER_FAILURE: Final = 1.0
_FORWARDING: Final = 0.2
_HEARD: Final = 1.0
# Seconds that a launcher has to end its ranks.
_PATIENCE: Final = 10.0


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
    # Seconds that it has to act on a signal that tells it to end.
    grace: float = GRACE

    def on_rank(self, mark: str) -> list[str]:
        """Return the words that the launcher starts on each rank."""
        hold = "" if self.fault_tolerant else "1"
        return [*_BARE_PYTHON, str(_RANK), mark, str(self.grace), hold, *self.command]


Handler = Callable[[int, FrameType | None], object]


class Ended(NamedTuple):
    """How a job ended: its status, and the statuses of ranks that failed, the first one first.

    A status below zero is that of a rank that a signal has ended. Nothing was heard of the ranks
    that are `cut_off`: the launcher ended them once another one had left without MPI's end. `told`
    is the signal that told the job to end, 0 for none; the ranks that are `late` were killed since
    they had not done so in time.
    """

    status: int
    failed: dict[int, int]
    cut_off: Sequence[int] = ()
    told: int = 0
    late: Sequence[int] = ()


def run_job(
    launcher: Launcher, ranks: int, environment: Mapping[str, str], program: Program
) -> Ended:
    """Run a program on ranks in an environment, and return how it ended.

    If a rank fails, the others are ended, unless the program is fault-tolerant. A signal that tells
    this process to end is passed on to the ranks.
    """
    threads = threads_for(ranks, environment)
    mark = secrets.token_hex(8)
    started = launcher.command(ranks, threads=threads, fault_tolerant=program.fault_tolerant)
    reads = program.stdin and sys.stdin is not None and not sys.stdin.isatty()
    relay = Relay(ranks, mark, nodes_of(environment), prefix=program.prefix, logs=program.logs)
    # A group of its own: Ctrl-C reaches this process alone, which passes it on. From there a
    # terminal could not be read.
    with subprocess.Popen(
        tied([*started, *program.on_rank(mark)]),
        stdin=None if reads else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=launcher.environment(environment, threads),
        process_group=0,
    ) as process:
        hides_ends = launcher.family == MPICH and not program.fault_tolerant
        return _Job(process, ranks, program, relay, hides_ends).run()


def tied(command: Sequence[str]) -> list[str]:
    """Return the words of a command that ends with this process, even if that is killed."""
    if sys.platform != "linux":
        return list(command)
    return [*_BARE_PYTHON, str(_TIED), str(os.getpid()), *command]


class _Job:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        ranks: int,
        program: Program,
        relay: Relay,
        hides_ends: bool,
    ) -> None:
        self._process, self._ranks, self._relay = process, ranks, relay
        # Whether the launcher may end ranks, and report success.
        self._hides_ends = hides_ends
        self._ends_together, self._grace = not program.fault_tolerant, program.grace
        # The signals by which the job was told to end; handlers put nothing into a `Queue`.
        self._told: list[int] = []
        # Whether the ranks were told to end, and when they have to have done so.
        self._has_told = False
        self._deadline = float("inf")
        # The statuses of the ranks that have ended, and of those that have failed by themselves.
        self._statuses: dict[int, int] = {}
        self._failed: dict[int, int] = {}
        relay.listen_to(process)

    def run(self) -> Ended:
        threading.Thread(target=self._wait_for_launcher, daemon=True).start()
        with _handling(self._handlers()):
            status = self._until_end()
        silent = [rank for rank in range(self._ranks) if rank not in self._statuses]
        if self._told:
            return self._ended_as_told(silent)
        if not self._failed:
            if self._hides_ends and (not status or (self._statuses and status == signal.SIGKILL)):
                return Ended(1 if silent else 0, {}, silent)
            return Ended(status, {})
        return Ended(_status_of(self._failed), _by_cause(self._failed))

    def _ended_as_told(self, silent: Sequence[int]) -> Ended:
        """Return how the ranks ended that were told to: their handlers may say so by a status."""
        told = self._told[0]
        failed = {rank: status for rank, status in self._statuses.items() if status}
        status = _status_of(failed) if failed else silent and _SIGNALLED + told
        late = sorted(rank for rank in failed if failed[rank] == -signal.SIGKILL)
        return Ended(status or 0, {}, told=told, late=late)

    def _handlers(self) -> dict[int, Handler]:
        """Return what this process does with signals; the launcher is in another group."""
        return {
            **dict.fromkeys(_ENDING, lambda number, _: self._told.append(number)),
            **dict.fromkeys(_PASSED_ON, lambda number, _: self._pass_on(number)),
            signal.SIGTSTP: lambda *_: self._stop(),
        }

    def _pass_on(self, number: int) -> None:
        """Give a signal to the ranks of this node; their launcher might die of it."""
        ranks = self._relay.processes()
        for rank in ranks:
            _send(os.kill, rank, number)
        if not ranks:
            self._process.send_signal(number)

    def _stop(self) -> None:
        """Stop with this node's ranks, as a shell asks by Ctrl-Z, until it lets this one go on."""
        # With their programs, and what those have started.
        ranks = self._relay.processes()
        for rank in ranks:
            _send(os.killpg, rank, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in ranks:
            _send(os.killpg, rank, signal.SIGCONT)

    def _wait_for_launcher(self) -> None:
        self._relay.events.put(Report(-1, self._process.wait()))

    def _until_end(self) -> int:
        """Return the launcher's status, or 0 if it was ended here."""
        while True:
            left = max(self._deadline - time.monotonic(), 0)
            event = None
            with suppress(Empty):
                event = self._relay.events.get(timeout=min(left, LOOK))
            if event is not None and event.rank < 0:
                self._hear_all()
                return _shell_status(event.status)
            if event is not None:
                self._count(event)
            elif len(self._told) > 1:
                self._deadline = 0.0
            if self._told and not self._has_told:
                self._tell_ranks(self._told[0])
            if time.monotonic() < self._deadline:
                continue
            if self._has_told or len(self._statuses) == self._ranks:
                self._end_launcher()
                return 0
            self._tell_ranks(signal.SIGTERM)

    def _count(self, report: Report) -> None:
        self._statuses[report.rank] = report.status
        if report.status and self._ends_together and not self._has_told:
            self._failed[report.rank] = report.status
        now = time.monotonic()
        if self._failed and not self._has_told:
            self._deadline = min(self._deadline, now + _AFTER_FAILURE)
        has_to_end = self._has_told or any(self._statuses.values())
        if len(self._statuses) == self._ranks and has_to_end:
            # They wait to be ended.
            self._deadline = now + _FORWARDING

    def _hear_all(self) -> None:
        """Wait for what the launcher has left in its pipes, unless a signal tells to end."""
        while self._relay.is_alive() and not self._told[1:]:
            self._relay.join(LOOK)
        while not self._relay.events.empty():
            self._count(self._relay.events.get())

    def _tell_ranks(self, number: int) -> None:
        """Tell the ranks to end, and give them the time to; others of them by their launcher."""
        self._has_told = True
        self._deadline = time.monotonic() + self._grace + _HEARD
        if self._relay.connected == self._ranks:
            self._pass_on(number)
        else:
            self._relay.quiet = True
            self._process.terminate()

    def _end_launcher(self) -> None:
        """End the launcher, which ends its ranks; a killed one would leave them behind."""
        self._relay.quiet = True
        for rank in self._relay.processes():
            _send(os.kill, rank, signal.SIGKILL)
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            remove_files_of(self._process.pid)
        self._relay.join(LOOK)


def _send(how: Callable[[int, int], None], target: int, number: int) -> None:
    # It may have ended, or be in a group of others.
    with suppress(ProcessLookupError):
        how(target, number)


def _by_cause(failed: Mapping[int, int]) -> dict[int, int]:
    # An uncaught error, such as that of a rank that only waited for the one that failed, is
    # status 1.
    return dict(sorted(failed.items(), key=lambda item: item[1] == 1))


def _status_of(failed: Mapping[int, int]) -> int:
    return _shell_status(next(iter(_by_cause(failed).values())))


def _shell_status(status: int) -> int:
    return status if status >= 0 else _SIGNALLED - status


@contextmanager
def _handling(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Handle signals; one that is ignored stays so, as SIGHUP under nohup."""
    before = {number: signal.getsignal(number) for number in handlers}
    changed = [number for number in handlers if before[number] != signal.SIG_IGN]
    for number in changed:
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number])
