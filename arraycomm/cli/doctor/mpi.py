"""What the MPI of this environment is like; a program too, since starting an MPI may fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

from arraycomm._cuda.links.gpu_aware import gpu_aware
from arraycomm._errors import BackendUnavailableError
from arraycomm._jobs.launchers import launcher_of
from arraycomm._launch.library import Library, family_of, find_library
from arraycomm._launch.probe import loaded

_PATIENCE: Final = 60
_LEVELS: Final = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


def about_started_mpi() -> dict[str, Any]:
    """Describe the MPI that this process has started, or starts now."""
    import mpi4py
    from mpi4py import MPI

    level = next(name for name in _LEVELS if MPI.Query_thread() == getattr(MPI, f"THREAD_{name}"))
    found = loaded()
    return {
        "library": found["version"],
        "file": found["path"],
        "family": family_of(found["vendor"]),
        "mpi4py": mpi4py.__version__,
        "threads": f"MPI_THREAD_{level}",
        "gpu_aware": gpu_aware(),
        "ulfm": _knows_failures(MPI),
    }


def _knows_failures(module: Any) -> bool:
    """Return whether the library can name processes that have died."""
    try:
        module.COMM_SELF.Get_failed().Free()
    except (module.Exception, NotImplementedError):
        return False
    return True


def about_mpi() -> dict[str, Any]:
    """Describe the MPI that mpi4py loads, and its launcher; starts it in another process.

    `error` says why there is none, or why it does not start.
    """
    try:
        library = find_library(os.environ)
    except BackendUnavailableError as error:
        return {"error": str(error)}
    return {**_started_elsewhere(library), **about_launcher(library)}


def about_launcher(library: Library) -> dict[str, Any]:
    """Describe the launcher of a library, or say why there is none."""
    try:
        return {"launcher": launcher_of(library, os.environ.get("PATH", "")).path}
    except BackendUnavailableError as error:
        return {"launcher": None, "launcher_error": str(error)}


def _started_elsewhere(library: Library) -> dict[str, Any]:
    found = {"library": library.version, "file": library.path, "family": library.family}
    try:
        asked = subprocess.run(
            [sys.executable, "-m", __name__],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PATIENCE,
        )
        started: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
        return found | started
    except subprocess.TimeoutExpired:
        reason = f"it had not started after {_PATIENCE} s"
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip().splitlines()
        reason = f"it ended with status {error.returncode}: {said[-1] if said else 'no word'}"
    return found | {"error": f"this MPI does not start in one process: {reason}"}


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(about_started_mpi())}\n")
