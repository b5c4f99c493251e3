"""Whether the MPI that was loaded takes addresses of device memory.

MPI itself has no such question; Open MPI and MPICH answer `MPIX_Query_cuda_support`. Nothing is
tried out, since an MPI that does not know device memory reads the address as the host's and dies.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Final

VARIABLE: Final = "ARRAYCOMM_GPU_AWARE_MPI"
_WORDS: Final = {"1": True, "true": True, "0": False, "false": False}


def gpu_aware() -> bool:
    """Tell whether device memory may be handed to MPI.

    `ARRAYCOMM_GPU_AWARE_MPI` decides where it is set; else the library is asked, which it can be
    between `MPI_Init` and `MPI_Finalize` only. At any other time the answer is no.

    Raises
    ------
    ValueError
        The variable is neither 0 or 1 nor true or false.
    """
    told = os.environ.get(VARIABLE, "").strip().lower()
    if told and told not in _WORDS:
        raise ValueError(
            f"init: {VARIABLE} must be 0 or 1, or true or false; got {os.environ[VARIABLE]!r}"
        )
    if told:
        return _WORDS[told]
    from mpi4py import MPI

    # MPICH ends the process that asks too early.
    return MPI.Is_initialized() and not MPI.Is_finalized() and _asked(MPI.__file__)


@cache
def _asked(library: str) -> bool:
    """Ask the MPI that mpi4py's extension module has loaded, and has symbols of in its reach."""
    try:
        query = ctypes.CDLL(library).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return False
    query.argtypes = ()
    query.restype = ctypes.c_int
    return bool(query())
