"""The files that MPI keeps in shared memory while it runs: room for them, and their removal."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from arraycomm._errors import BackendUnavailableError

_MIB: Final = 1 << 20
# How many files an error names.
_NAMED: Final = 3
_SHARED: Final = "/dev/shm"
_MPI_FILES: Final = ("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.", "/dev/shm/vader_segment.")


def check_room(
    environment: MutableMapping[str, str], ranks_here: Callable[[], Mapping[int, bool]]
) -> None:
    """Raise if an MPI of the MPICH family would find too little shared memory, and crash.

    It maps its files before it knows whether there is memory for them. UCX asks, but may crash if
    there is none: it is to do without files if there may be too little. `ranks_here` tells which
    ranks of this node have begun: what these have taken is not missing.
    """
    ranks = environment.get("MPI_LOCALNRANKS", "")
    if not ranks.isdigit() or (int(ranks) == 1 and not os.path.isdir(_SHARED)):
        return
    # Measured with 1 to 16 ranks.
    needed = max(min(24 + 2 * int(ranks), 64), int(ranks) * 33 // 32 + 1)
    missing = _missing(needed * _MIB)
    if missing and not any(ranks_here().values()):
        raise BackendUnavailableError(
            f"init: MPI needs {needed} MiB of shared memory for {ranks} ranks on one node, but "
            f"{missing}"
        )
    if _missing((24 + 12 * int(ranks)) * _MIB):
        environment.setdefault("UCX_TLS", "^posix")


def _missing(nbytes: int) -> str:
    """Say what shared memory lacks, and what to do; empty if there is room for `nbytes`."""
    if not os.path.isdir(_SHARED):
        return (
            f"there is no {_SHARED}; make it, for example with: mkdir {_SHARED} && mount -t tmpfs "
            f"tmpfs {_SHARED}"
        )
    found = os.statvfs(_SHARED)
    size, free = (blocks * found.f_frsize for blocks in (found.f_blocks, found.f_bavail))
    if size and free < nbytes:
        return (
            f"{_SHARED} has {free / _MIB:.3g} MiB free of {size / _MIB:.3g}{_largest()}; make it "
            "larger, for example with: docker run --shm-size=1g, or mount -o remount,size=1g "
            f"{_SHARED}"
        )
    try:
        with tempfile.TemporaryFile(dir=_SHARED):
            return ""
    except OSError as error:
        return (
            f"no file can be made in {_SHARED} ({error.strerror}){_largest()}; let this user write "
            f"there, for example with: mount -o remount,rw,nr_inodes=1m,mode=1777 {_SHARED}"
        )


def _largest() -> str:
    """Name the largest files in shared memory."""
    sizes = dict[str, int]()
    for path in Path(_SHARED).iterdir():
        with suppress(OSError):
            sizes[path.name] = path.lstat().st_blocks * 512
    files = sorted(sizes, key=sizes.__getitem__, reverse=True)[:_NAMED]
    named = ", ".join(f"{name}: {sizes[name] / _MIB:.3g} MiB" for name in files)
    return f" ({named}; remove what jobs have left behind)" if files else ""


def remove_mpi_files() -> None:
    """Remove the files of this job's MPI; for a process that ends without MPI_Finalize.

    Every rank maps those of all ranks of its node.
    """
    for path in _mapped_files():
        with suppress(OSError):
            os.unlink(path)


def _mapped_files() -> set[str]:
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return {line.split()[-1] for line in maps.splitlines() if _is_mpi_file(line)}


def _is_mpi_file(line: str) -> bool:
    return any(prefix in line for prefix in _MPI_FILES) and not line.endswith("(deleted)")
