"""Prints which MPI mpi4py loads, as a line of JSON; a program that imports nothing else."""

import ctypes
import json
import os
import sys

# As Debian and Ubuntu call the library of MPICH.
_DEBIANS = "libmpich.so.12"


def loaded() -> dict[str, str]:
    """Return the vendor, the version and the file of the MPI that mpi4py loads, or the error."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        os.environ.pop("MPI4PY_RC_INITIALIZE", None)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return {"error": f"{in_short(str(error))}{hidden()}"}
    return {
        "vendor": MPI.get_vendor()[0],
        "version": in_short(MPI.Get_library_version()),
        "path": _library_path(),
    }


def hidden() -> str:
    """Say which MPICH there is that wheels of mpi4py do not find, as the end of a sentence."""
    try:
        ctypes.CDLL(_DEBIANS)
    except OSError:
        return ""
    return (
        f"; there is MPICH as {_DEBIANS}, which mpi4py's wheels know as libmpi.so.12 alone: link "
        "it under that name into a directory of LD_LIBRARY_PATH, or install mpi4py by: pip install "
        "--no-binary mpi4py mpi4py"
    )


def in_short(version: str) -> str:
    """Return name and number of an MPI library, of all that it says of its version."""
    return " ".join(version.splitlines()[0].partition(", package")[0].strip("\0").split())


def _library_path() -> str:
    """Return the file of the MPI library; empty where the system does not tell."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            found = [line.split()[-1] for line in maps]
    except OSError:
        return ""
    return next((path for path in found if os.path.basename(path).startswith("libmpi")), "")


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(loaded())}\n")
