"""The frameworks: one module for each, with everything that the core knows about it.

No framework is imported at import time. The modules of a type's base classes show which framework
an array is of, and the caller has imported that. To add a framework, write its module and add it to
the tables below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from arraycomm._arrays.arithmetic import has_own, refuse
from arraycomm._arrays.buffer import Reader
from arraycomm._arrays.frameworks import cupy, jax, mlx, numpy, python, strict, torch
from arraycomm._arrays.frameworks.base import Framework
from arraycomm._arrays.frameworks.namespace import NAMESPACE

# Finds the reader of a type, by the top-level module of one of its base classes.
_FIND_READER: Final[dict[str, Callable[[type], Reader | None]]] = {
    "numpy": numpy.find_reader,
    "builtins": python.find_reader,
    "torch": torch.find_reader,
    "jax": jax.find_reader,
    "jaxlib": jax.find_reader,
    "cupy": cupy.find_reader,
    "array_api_strict": strict.find_reader,
    "mlx": mlx.find_reader,
}

_ALL: Final = (
    numpy.NUMPY,
    torch.TORCH,
    jax.JAX,
    cupy.CUPY,
    strict.STRICT,
    mlx.MLX,
    numpy.NUMPY_RECORD,
    numpy.NUMPY_SCALAR,
    python.PYTHON,
    NAMESPACE,
)
BY_NAME: Final[dict[str, Framework]] = {row.name: row for row in _ALL}
BY_READER: Final[dict[Reader, Framework]] = {row.read: row for row in _ALL if row.read is not None}


def find_reader(kind: type) -> Reader | None:
    """Return the reader of a type, or what refuses it; None if no framework claims it."""
    for base in kind.__mro__:
        module = str(getattr(base, "__module__", "")).partition(".")[0]
        find = _FIND_READER.get(module)
        reader = find(kind) if find is not None else None
        if reader is not None:
            is_array = reader is not python.refuse_object
            return refuse if is_array and has_own(kind, _FIND_READER) else reader
    return None
