"""Whether the MPI that was loaded takes addresses of device memory.

The MPI standard has no query for this; Open MPI and MPICH have `MPIX_Query_cuda_support`. A trial
cannot answer it: an MPI without GPU support takes the address for the host's, and crashes.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Final

VARIABLE: Final = "ARRAYCOMM_GPU_AWARE_MPI"
_VALUES: Final = {"1": True, "true": True, "0": False, "false": False}


def gpu_aware() -> bool:
    """Return whether device memory may be handed to MPI.

    `ARRAYCOMM_GPU_AWARE_MPI` decides if it is set. Otherwise the library is asked, which is only
    possible between `MPI_Init` and `MPI_Finalize`; before and after, the answer is no.

    Raises
    ------
    ValueError
        The variable is neither 0 or 1 nor true or false.
    """
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value and value not in _VALUES:
        raise ValueError(
            f"init: {VARIABLE} must be 0 or 1, or true or false; got {os.environ[VARIABLE]!r}"
        )
    if value:
        return _VALUES[value]
    from mpi4py import MPI

    # MPICH ends a process that asks too early.
    return MPI.Is_initialized() and not MPI.Is_finalized() and _asked(MPI.__file__)


@cache
def _asked(library: str) -> bool:
    """Ask the MPI library that mpi4py's extension module has loaded; False if it has no answer."""
    try:
        query = ctypes.CDLL(library).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return False
    query.argtypes = ()
    query.restype = ctypes.c_int
    return bool(query())
