"""`pytest --mpiexec N`: runs itself again, under mpiexec."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NoReturn

import pytest

from arraycomm._errors import BackendUnavailableError
from arraycomm._jobs.job import tied
from arraycomm._jobs.launchers import find_launcher, remove_files_of
from arraycomm._launch import children_of
from arraycomm._launch import find_launcher as find_launcher_of
from arraycomm.testing.pytest_plugin.start import launch_of_this
from arraycomm_pytest import ENDED, JOB, PID

# Seconds in which the ranks end by themselves after Ctrl-C or another signal.
_ENDING: Final = 10.0


class Launcher:
    """Starts jobs of ranks that run pytest with the arguments of this one."""

    def __init__(self, config: pytest.Config) -> None:
        count = config.getoption("mpiexec")
        try:
            launcher = find_launcher(os.environ)
        except BackendUnavailableError as error:
            raise pytest.UsageError(
                f"--mpiexec {count} needs an MPI launcher, but {error}; install one with: pip "
                f"install 'arraycomm[mpich]', or use threads: --ranks {count}"
            ) from None
        self._command = [*launcher.command(count), sys.executable, "-m", "pytest"]
        # Before the tests are imported, which may begin MPI here.
        self._environment = launcher.environment(os.environ)

    def run(self, arguments: list[str], directory: Path, **streams: Any) -> int:
        """Run a job, and return its status; the ranks write into the directory."""
        environment = self._environment | {JOB: str(directory)}
        if not streams and sys.stdout.isatty():
            # The ranks write into pipes.
            width = str(os.get_terminal_size(sys.stdout.fileno()).columns)
            environment = {"PY_COLORS": "1", "COLUMNS": width} | environment
        # In a session of its own: Ctrl-C would have the launcher end the ranks before their report.
        job = subprocess.Popen(
            tied([*self._command, *arguments]),
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            **streams,
        )
        usual = signal.signal(signal.SIGTERM, _raise_exit)
        try:
            status = job.wait()
        except KeyboardInterrupt:
            # Rank 0 ends the run, and reports what was found before.
            with suppress(OSError, ValueError, subprocess.TimeoutExpired, KeyboardInterrupt):
                os.kill(int((directory / PID).read_text("utf-8")), signal.SIGINT)
                job.wait(_ENDING)
            # Here as well, so that it is ended below if the user presses Ctrl-C once more.
            _end(job)
            return int(pytest.ExitCode.INTERRUPTED)
        finally:
            # On SIGTERM the launcher ends its ranks; a killed launcher would leave them behind.
            _end(job)
            signal.signal(signal.SIGTERM, usual)
        if status == 0 and not (directory / ENDED).exists():
            sys.stderr.write("\narraycomm: the ranks ended before their run of pytest was over\n")
            return int(pytest.ExitCode.TESTS_FAILED)
        return status


def _end(job: subprocess.Popen[bytes]) -> None:
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(_ENDING)
        except subprocess.TimeoutExpired:
            for process in (*_ranks_below(job.pid), job.pid):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            job.wait()
            remove_files_of(job.pid)


def _ranks_below(launcher: int) -> Iterator[int]:
    """Yield the ranks of this node that a launcher has started, directly or by one of its own."""
    for child in children_of(launcher):
        found = find_launcher_of(child)
        yield from _ranks_below(child) if found and found.pid == child else [child]


def _raise_exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def launch(config: pytest.Config) -> int | None:
    """Run pytest with the same arguments on ranks and return its status; None if this is a rank.

    It is also None if this process collects the tests, and starts a job for some at a time.
    """
    if launch_of_this() is not None:
        return None
    launcher = Launcher(config)
    if config.getoption("mpiexec_per") is not None:
        from arraycomm.testing.pytest_plugin.jobs import Jobs

        config.pluginmanager.register(Jobs(config, launcher), "arraycomm-jobs")
        return None
    with TemporaryDirectory(prefix="arraycomm-job-") as directory:
        return launcher.run([*map(str, config.invocation_params.args)], Path(directory))
