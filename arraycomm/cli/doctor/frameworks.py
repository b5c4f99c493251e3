"""Which way the arrays of each framework take, and with which copies."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from arraycomm import Communicator, explain
from arraycomm._arrays.frameworks import BY_NAME as FRAMEWORKS
from arraycomm._cuda import device
from arraycomm._cuda.arrays import on_cuda

# The module with `ones` of each framework, beside that which says whether it is installed.
NAMESPACES: Final = {
    "numpy": "numpy",
    "torch": "torch",
    "jax": "jax.numpy",
    "cupy": "cupy",
    "mlx": "mlx.core",
    "array_api_strict": "array_api_strict",
}
_SHAPE: Final = (64, 48)


def about_frameworks(
    names: Iterable[str], comm: Communicator, *, trial: bool
) -> list[dict[str, Any]]:
    """Describe each framework: how its arrays travel on `comm`, and whether a `trial` call works.

    The trial is collective.
    """
    return [row for name in names for row in _rows(name, comm, trial)]


def _rows(name: str, comm: Communicator, trial: bool) -> Iterator[dict[str, Any]]:
    if find_spec(name) is None:
        yield {"framework": name, "installed": False}
        return
    try:
        namespace = importlib.import_module(NAMESPACES[name])
    except Exception as error:
        yield {"framework": name, "installed": True, "error": f"{type(error).__name__}: {error}"}
        return
    for where, make in _makers(name, namespace):
        about = {"framework": name, "installed": True, "version": _version(name), "arrays": where}
        try:
            yield about | _about_array(name, make(), comm, trial)
        except Exception as error:
            yield about | {"error": f"{type(error).__name__}: {error}"}


def _makers(name: str, namespace: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "by default", lambda: namespace.ones(_SHAPE, dtype=namespace.float32)
    if name == "torch" and device.missing() is None and namespace.cuda.is_available():
        yield "cuda", lambda: namespace.ones(_SHAPE, dtype=namespace.float32, device="cuda")


def _version(name: str) -> str:
    module = importlib.import_module(name)
    if not hasattr(module, "__version__"):
        module = importlib.import_module(NAMESPACES[name])
    return str(getattr(module, "__version__", "unknown"))


def _about_array(name: str, x: Any, comm: Communicator, trial: bool) -> dict[str, Any]:
    plain = explain(x, comm=comm)
    on_device = on_cuda(x)
    found = {
        "on": "cuda" if on_device else "cpu",
        "by": plain.backend,
        "copies": plain.copies,
        "copies_transposed": explain(x.T, comm=comm).copies,
        "copies_of_result": int(
            not on_device and not FRAMEWORKS[name].takes_over(np.dtype(np.float32))
        ),
        "notes": list(plain.notes),
    }
    if trial:
        total = comm.allreduce(x)
        if type(total) is not type(x) or float(total[1, 1]) != comm.size:
            raise AssertionError(f"allreduce of ones gave {total[1, 1]} on {comm.size} ranks")
    return found
