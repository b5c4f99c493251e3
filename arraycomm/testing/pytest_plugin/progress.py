"""What each rank is doing, in files that are there even if the rank does not answer any more.

Rank 0 makes the directory, which the ranks on its node use, and starts a process that reads it if a
rank dies: see `crash_reporter.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from arraycomm.testing.pytest_plugin.crash_reporter import PLAN, REPORTS, SLOT, stacks, unagreed
from arraycomm.testing.pytest_plugin.job import Job

_REPORTER: Final = str(Path(__file__).with_name("crash_reporter.py"))
# Launchers that forward nothing more of what their ranks have written once one of them has died.
_HASTY: Final = ("prterun", "mpirun", "orterun", "mpiexec")
# Seconds after which rank 0 ends the job if it is stuck, so that the others have said what they
# know; and those after which another one does, since rank 0 does not.
_FIRST: Final = 2.0
_LAST: Final = 20.0


class Progress:
    """This rank's notes of what it does, and those of the others."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._reporter: subprocess.Popen[bytes] | None = None
        # The terminal itself, also while pytest captures what a test writes.
        self._terminal = os.dup(2)
        made = tempfile.mkdtemp(prefix="arraycomm-pytest-") if job.rank == 0 else ""
        try:
            self._directory = Path(job.exchange("the start", made)[0])
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        self._notes = self._reports = -1
        if job.rank in job.near:
            self._notes = os.open(self._directory / "notes", os.O_CREAT | os.O_RDWR)
            appending = os.O_CREAT | os.O_WRONLY | os.O_APPEND
            self._reports = os.open(self._directory / REPORTS, appending)
        if job.rank == 0:
            self._start_reporter()

    def _start_reporter(self) -> None:
        command = [sys.executable, "-I", "-S", _REPORTER, str(self._directory)]
        try:
            # Opened here, while all live.
            near = {rank: (pid, os.pidfd_open(pid)) for rank, pid in self._job.near.items()}
        except (AttributeError, OSError):
            # Kernels before 5.3 have none, and containers processes with numbers of their own.
            return
        stderr = _stderr_of_launcher()
        handles = [handle for _, handle in near.values()]
        self._reporter = subprocess.Popen(
            [*command, json.dumps(near)],
            pass_fds=handles,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
        for handle in [*handles, *([] if stderr is None else [stderr])]:
            os.close(handle)

    def plan(self, tests: list[str], junit: str) -> None:
        """Write down which tests are to be run, and where the JUnit file is to be; on rank 0."""
        if self._reporter is not None:
            path = self._directory / PLAN
            path.write_text(json.dumps({"tests": tests, "junit": junit}), encoding="utf-8")

    def report(self, report: Any, order: Any = None) -> None:
        """Write down a report, for the case that rank 0 does not come to show it.

        Without its `order` among those of the ranks, it is one that all ranks have agreed on.
        """
        if self._reports >= 0 and (order is not None or self._job.rank == 0):
            crash = getattr(report.longrepr, "reprcrash", None)
            found = {
                "rank": None if order is None else self._job.rank,
                "order": order,
                "nodeid": report.nodeid,
                "when": report.when,
                "outcome": report.outcome,
                "seconds": report.duration,
                "crash": "" if crash is None else str(crash.message),
                "text": str(report.longreprtext) if report.outcome == "failed" else "",
            }
            os.write(self._reports, f"{json.dumps(found)}\n".encode())

    def note(self, text: str) -> None:
        """Note what this rank does from now on."""
        if self._notes >= 0:
            data = text.encode(errors="replace")[:SLOT].ljust(SLOT)
            os.pwrite(self._notes, data, self._job.rank * SLOT)

    def tell_stuck(self, stack: str) -> None:
        """Say from another thread where this rank is stuck; end the job if rank 0 does not."""
        if self._notes >= 0:
            part = self._directory / f"part-{self._job.rank}"
            part.write_text(stack, encoding="utf-8")
            part.rename(self._directory / f"stuck-{self._job.rank}")
        if self._notes < 0 or not (self._directory / PLAN).exists():
            self.say(f"rank {self._job.rank} is stuck outside Python; it is here:\n{stack}")
        time.sleep(_FIRST if self._job.rank == 0 else _LAST)
        self._job.abort()

    def say(self, text: str) -> None:
        """Write to the terminal what no report will show."""
        os.write(self._terminal, f"\narraycomm: {text}\n".encode(errors="replace"))

    def is_stuck(self) -> bool:
        """Return whether a rank has said that it is stuck."""
        return any(self._directory.glob("stuck-*"))

    def stuck(self, test: str) -> tuple[list[int], str, str]:
        """Return the ranks that are stuck in a test, and what `unagreed` does."""
        return (list(stacks(self._directory)), *unagreed(self._directory, test))

    def end(self) -> None:
        """Note nothing any more."""
        for handle in (self._notes, self._reports, self._terminal):
            if handle >= 0:
                os.close(handle)
        self._notes = self._reports = self._terminal = -1
        if self._reporter is not None and self._reporter.stdin is not None:
            self._reporter.stdin.write(b"end")
            self._reporter.stdin.close()
            self._reporter.wait()
            self._reporter = None
        if self._job.rank == 0:
            shutil.rmtree(self._directory, ignore_errors=True)


def _stderr_of_launcher() -> int | None:
    """Open what a hasty launcher writes its own errors to; None to write to this rank's."""
    parent = Path("/proc", str(os.getppid()))
    try:
        if (parent / "comm").read_text(encoding="utf-8").strip() not in _HASTY:
            return None
        return os.open(parent / "fd" / "2", os.O_WRONLY | os.O_APPEND)
    except OSError:
        return None
