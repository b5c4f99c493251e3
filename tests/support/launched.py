"""Several checks in one launched program, each of which a test reports under its own name.

Most of what a launched program takes is its start. A program hands its checks to `perform`; the tests
get the program's `Report` and ask it for one check each.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryFile
from types import FunctionType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
_BEGUN, _PASSED = "<{} begins>", "<{} passed>"

Check = Callable[[], None]


def checks_in(names: dict[str, Any]) -> list[Check]:
    """Return a program's functions that take and return nothing, as they stand."""
    own = [value for value in names.values() if isinstance(value, FunctionType)]
    own = [check for check in own if check.__module__ == names["__name__"]]
    nothing = {"return": "None"}
    return [check for check in own if check.__annotations__ == nothing and check.__name__[0] != "_"]


def perform(checks: Iterable[Check]) -> None:
    """Run the checks in turn. The first that raises ends the program, as any exception does."""
    for check in checks:
        _say(_BEGUN, check)
        check()
        _say(_PASSED, check)


def _say(text: str, check: Check) -> None:
    # In one piece, so that the ranks' lines do not mix.
    sys.stdout.write(f"{text.format(check.__name__)}\n")
    sys.stdout.flush()


class Report:
    """What the ranks of a program said of its checks."""

    def __init__(self, job: subprocess.CompletedProcess[str], ranks: int) -> None:
        self.job: Final = job
        self._ranks = ranks

    def assert_passed(self, name: str) -> None:
        """Fail unless a check has passed on every rank."""
        begun, passed = (self.job.stdout.count(text.format(name)) for text in (_BEGUN, _PASSED))
        assert begun, f"{name} did not begin, since the program ended before:\n{self._output}"
        assert passed == self._ranks, f"{name} passed on {passed} ranks:\n{self._output}"

    def assert_ended_well(self) -> None:
        """Fail unless the program's status is 0."""
        assert self.job.returncode == 0, self._output

    @property
    def _output(self) -> str:
        return f"{self.job.stdout}\n{self.job.stderr}"


# Plugins that these tests do not use, and that take as long to import as all else.
_LEFT_OUT: Final = ("cacheprovider", "jaxtyping", "xdist", "xdist.looponfail", "platformdirs")
WITHOUT_PLUGINS: Final = tuple(word for name in _LEFT_OUT for word in ("-p", f"no:{name}"))


def run_pytest(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own, under mpiexec where `ranks` is given."""
    # Not above: the launcher needs pytest, which programs on ranks would import too.
    from tests.support.launcher import run_python

    # Open MPI gives its ranks a terminal.
    command = ("-m", "pytest", "-q", "--color=no", *WITHOUT_PLUGINS, *arguments)
    return run_python(*command, cwd=ROOT, **options)


_LIMIT: Final = 60.0


def start_numbered(
    ranks: int, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    """Run a program as a shell's loop would; return what all have printed, and the status of each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    numbers = {"ARRAYCOMM_COORDINATOR_ADDRESS": address, "ARRAYCOMM_NUM_PROCESSES": str(ranks)}
    with TemporaryFile("w+") as out:
        processes = [
            subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=os.environ
                | numbers
                | {"ARRAYCOMM_PROCESS_ID": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=out,
                stderr=out,
            )
            for rank in range(ranks)
        ]
        deadline = time.monotonic() + _LIMIT
        try:
            statuses = [
                process.wait(max(deadline - time.monotonic(), 0.1)) for process in processes
            ]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        out.seek(0)
        said = out.read()
    return subprocess.CompletedProcess(arguments, max(statuses), said, ""), statuses
