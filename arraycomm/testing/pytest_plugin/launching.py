"""`pytest --mpiexec N`: runs itself again, under mpiexec."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from arraycomm import _launch
from arraycomm._errors import BackendUnavailableError
from arraycomm._launch.launchers import find_launcher


def launch(config: pytest.Config) -> int | None:
    """Run pytest with the same arguments on ranks and return its status; None if this is a rank."""
    if _launch.detect(os.environ) is not None:
        return None
    count = config.getoption("mpiexec")
    try:
        launcher = find_launcher(os.environ)
    except BackendUnavailableError as error:
        raise pytest.UsageError(
            f"--mpiexec {count} needs an MPI launcher, but {error}; install one with: pip install "
            f"'arraycomm[mpich]', or use threads: --ranks {count}"
        ) from None
    arguments = config.invocation_params.args
    command = [*launcher.command(count), sys.executable, "-m", "pytest", *map(str, arguments)]
    environment = launcher.environment(os.environ)
    if sys.stdout.isatty():
        # The ranks write into pipes.
        width = str(os.get_terminal_size(sys.stdout.fileno()).columns)
        environment = {"PY_COLORS": "1", "COLUMNS": width} | environment
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    try:
        return job.wait()
    except KeyboardInterrupt:
        # On SIGTERM the launcher ends its ranks; a killed launcher would leave them behind.
        job.terminate()
        job.wait()
        return int(pytest.ExitCode.INTERRUPTED)
