"""Where processes are: on which host, with which cores, and in which namespaces of containers."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES: Final = {"mnt": "mount", "ipc": "IPC", "pid": "PID", "user": "user", "net": "network"}


@cache
def host() -> str:
    """Return what tells this host from others."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def known_by(found: os.stat_result) -> str:
    """Return what an open file is known by to all processes of its host."""
    return f"{host()}:{found.st_dev}:{found.st_ino}"


def proc_is_own() -> bool:
    """Return whether the numbers of processes in /proc are those that this process has."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def namespaces() -> dict[str, str]:
    """Return the namespaces of this process, by their names, and its user; empty if not known.

    Numbers of processes and paths of files mean something else in others.
    """
    found = {}
    for kind, name in _NAMESPACES.items():
        with suppress(OSError):
            found[f"{name} namespace"] = os.readlink(f"/proc/self/ns/{kind}")
    return {**found, "user": str(os.geteuid())}


def threads_for(ranks: int, environment: Mapping[str, str]) -> int:
    """Return how many threads a rank gets, if that many share this machine's cores."""
    wanted = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    if wanted.isdigit():
        return int(wanted)
    return max(cores() // ranks, 1)


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
