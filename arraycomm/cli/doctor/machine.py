"""What there is beside MPI: cores, shared memory, devices, the native part."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from importlib.util import find_spec
from typing import Any, Final

from arraycomm import _native
from arraycomm._cuda import device
from arraycomm._cuda.links import libnccl

_SHARED: Final = "/dev/shm"
_COMPILERS: Final = ("cc", "gcc", "clang")


def about_place() -> dict[str, Any]:
    """Describe where this process runs: its node, the cores that it may use, its threads."""
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return {
        "node": socket.gethostname(),
        "cores": sorted(affinity(0)),
        "of": os.cpu_count() or 1,
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


def about_machine() -> dict[str, Any]:
    """Describe what all ranks of a node have in common."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "shared_memory": _shared_memory(),
        **_about_devices(),
        "native": about_native(),
    }


def _about_devices() -> dict[str, str]:
    if (missing := device.missing()) is not None:
        return {"cuda": missing, "nccl": "needs CUDA"}
    count = device.count()
    return {
        "cuda": f"{count} device{'s' if count > 1 else ''}",
        "nccl": libnccl.missing() or ".".join(map(str, libnccl.load().version())),
    }


def _shared_memory() -> dict[str, Any] | None:
    try:
        found = os.statvfs(_SHARED)
    except OSError:
        return None
    return {
        "path": _SHARED,
        "bytes": found.f_blocks * found.f_frsize,
        "free": found.f_bavail * found.f_frsize,
    }


def about_native() -> dict[str, Any]:
    """Describe the native part: whether it is used, and if not, why."""
    if _native.compiled is not None:
        return {"used": True, "level": _native.compiled.levels()[-1], "reason": ""}
    return {"used": False, "level": "", "reason": _why_not_native()}


def _why_not_native() -> str:
    if os.environ.get(_native.SETTING) == "0":
        return f"{_native.SETTING} is 0"
    if find_spec(f"{_native.__name__}.compiled") is not None:
        return "it was built, but cannot be loaded here"
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    there = f"there is a C compiler, {compiler}" if compiler else "there is no C compiler"
    return f"it was not built; {there}"
