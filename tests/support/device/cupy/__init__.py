"""A CuPy in software: what arraycomm and its tests use of CuPy, CUDA and NCCL, over the host's memory.

To import it has ctypes find a CUDA driver and an NCCL in software as well.
"""

# ruff: noqa: F401 - these are the names that a CuPy has.
from cupy import _libraries, cuda
from cupy._arrays import (
    RawKernel,
    arange,
    asarray,
    asnumpy,
    empty,
    from_dlpack,
    full,
    get_default_memory_pool,
    ndarray,
    ones,
    zeros,
)

__version__ = "14.0.0+software"

_libraries.install()
