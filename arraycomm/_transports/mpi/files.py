"""The files that MPI keeps in shared memory while it runs: room for them, and their removal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from arraycomm._errors import BackendUnavailableError

_MIB: Final = 1 << 20
_SHARED: Final = "/dev/shm"
_MPI_FILES: Final = ("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.", "/dev/shm/vader_segment.")


def check_room(environment: Mapping[str, str]) -> None:
    """Raise if an MPI of the MPICH family would find too little shared memory, and crash.

    It maps its files before it knows whether there is memory for them. What is free is not asked:
    other ranks of the node may have begun.
    """
    ranks = environment.get("MPI_LOCALNRANKS", "")
    if not ranks.isdigit():
        return
    if not os.path.isdir(_SHARED):
        if int(ranks) > 1:
            raise BackendUnavailableError(
                f"init: MPI needs shared memory for {ranks} ranks on one node, but there is no "
                f"{_SHARED}; make it, for example with: mkdir {_SHARED} && mount -t tmpfs tmpfs "
                f"{_SHARED}"
            )
        return
    # Measured with 2 to 8 ranks. Docker's own limit, 64 MiB, is never too little.
    needed = min(24 + 2 * int(ranks), 64)
    found = os.statvfs(_SHARED)
    size = found.f_blocks * found.f_frsize
    if 0 < size < needed * _MIB:
        raise BackendUnavailableError(
            f"init: MPI needs {needed} MiB of shared memory for {ranks} ranks on one node, but "
            f"{_SHARED} has {size / _MIB:.3g} MiB; make it larger, for example with: docker run "
            f"--shm-size=1g, or mount -o remount,size=1g {_SHARED}"
        )


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
