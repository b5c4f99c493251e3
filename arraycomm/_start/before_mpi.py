"""What MPI needs before it begins: room in shared memory, and what it has to know of containers.

Ranks of one node tell one another numbers of processes, and names of files in /dev/shm. In another
container these mean something else: MPI would wait for ever, crash, or take a rank's own memory for
another's. So ranks without them in common are hosts of their own to MPI. If they have different
user namespaces alone, the system lets none read another's memory, and files need names.
"""

from __future__ import annotations

import os
import resource
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from arraycomm._errors import BackendUnavailableError
from arraycomm._launch import RANKS, find_launcher
from arraycomm._launch.places import proc_is_own

_HOSTS: Final = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "^posix,sysv,cma"}
_CLOSED: Final = {"MPIR_CVAR_CH4_CMA_ENABLE": "0", "UCX_POSIX_USE_PROC_LINK": "n"}
# Those that say what Open MPI moves messages by.
_BTL: Final = "OMPI_MCA_btl"
_SERVER: Final = "PMIX_SERVER_URI"
# Seconds in which the launcher, which is on this host, answers.
_ANSWER: Final = 2.0
_MIB: Final = 1 << 20
# A file of UCX has at most so many MiB.
_UCX: Final = 5
# How many files an error names.
_NAMED: Final = 3
_SHARED: Final = "/dev/shm"


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
    one = int(ranks) * 33 // 32 + 1
    needed = max(min(24 + 2 * int(ranks), 64), one)
    missing = _missing(needed * _MIB, one * _MIB)
    if missing and not any(ranks_here().values()):
        raise BackendUnavailableError(
            f"init: MPI needs {needed} MiB of shared memory for {ranks} ranks on one node, but "
            f"{missing}"
        )
    if _missing((24 + 12 * int(ranks)) * _MIB, _UCX * _MIB):
        environment.setdefault("UCX_TLS", "^posix")


def _missing(nbytes: int, one: int) -> str:
    """Say what is missing, and what to do; empty for room for `nbytes`, and a file of `one`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if resource.RLIM_INFINITY != limit < one:
        return (
            f"a file of this rank may have {limit / _MIB:.3g} MiB, and one needs {one / _MIB:.3g}; "
            "raise the limit, for example with: ulimit -f unlimited"
        )
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


def prepare_mpi(environment: MutableMapping[str, str]) -> None:
    """Let MPI know if this rank does not share all with those that its launcher has started here.

    What the user has set stays.
    """
    _refuse_unreachable_launcher(environment)
    apart = _apart(environment)
    if "PID" in apart and [name for _, name in socket.if_nameindex()] == ["lo"]:
        raise BackendUnavailableError(
            "init: this rank has a PID namespace of its own, and its network namespace has no "
            "network, so that MPI cannot reach the other ranks; let the ranks of a node have both "
            "in common, for example with: docker run --network=host"
        )
    for name, value in (_HOSTS if apart - {"user"} else _CLOSED if apart else {}).items():
        environment.setdefault(name, value)
    moves = environment.get(_BTL, "^")
    if "PID" in apart and moves.startswith("^"):
        environment[_BTL] = f"^sm,{moves[1:]}".rstrip(",")


def about_memory(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Return by what MPI reaches the memory of this rank, if it does; for `refuse_apart`."""
    return {} if environment.get("MPIR_CVAR_CH4_CMA_ENABLE") == "0" else _spaces("self")


def refuse_apart(said: Sequence[dict[str, str]], nodes: Sequence[int]) -> None:
    """Raise if MPI's ranks of a node have different namespaces, by what `about_memory` says."""
    for kind in ("PID", "user"):
        if len({(node, about.get(kind)) for node, about in zip(nodes, said, strict=True)}) > len(
            set(nodes)
        ):
            raise BackendUnavailableError(
                f"init: ranks of one node are in different {kind} namespaces, and MPI, which began "
                "before init, reads their memory by numbers of processes; call init before MPI "
                f"begins, or set {' and '.join(map('='.join, _CLOSED.items()))} for all ranks"
            )


def _apart(environment: MutableMapping[str, str]) -> set[str]:
    """Return what this rank does not have in common with all that its launcher has started."""
    if _is_contained(environment):
        return {"PID"}
    launcher, own = find_launcher(os.getppid()), _spaces("self")
    others = [] if launcher is None else [launcher.pid, *_below(launcher.pid)]
    return {
        kind
        for process in map(str, others)
        for kind, space in _spaces(process).items()
        if space != own.get(kind, space)
    }


def _is_contained(environment: MutableMapping[str, str]) -> bool:
    """Return whether the first process here was started as this rank, or cannot be seen."""
    name = next((name for name in RANKS if name in environment), "")
    with suppress(OSError):
        first = Path("/proc/1/environ").read_bytes().split(b"\0")
        if name and f"{name}={environment[name]}".encode() in first:
            return True
    return not proc_is_own()


def _below(process: int) -> Iterator[int]:
    """Return the processes that another one has started, and those that they have."""
    with suppress(OSError):
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            for child in map(int, children.read_text("ascii").split()):
                yield child
                yield from _below(child)


def _spaces(process: str) -> dict[str, str]:
    """Return what tells where a process of this user is."""
    about = f"/proc/{process}"
    try:
        if os.stat(about).st_uid != os.geteuid():
            return {}
        shared = os.stat(f"{about}/root/dev/shm")
        return {
            "PID": os.readlink(f"{about}/ns/pid"),
            "user": os.readlink(f"{about}/ns/user"),
            "mount": f"{shared.st_dev}:{shared.st_ino}",
        }
    except PermissionError:
        return {"user": ""}
    except OSError:
        return {}


def _refuse_unreachable_launcher(environment: MutableMapping[str, str]) -> None:
    """Raise if the launcher of Open MPI cannot be reached, which MPI says in no clear way."""
    said = next((value for name, value in environment.items() if name.startswith(_SERVER)), "")
    host, _, port = said.partition("tcp4://")[2].rpartition(":")
    try:
        if "PRTE_LAUNCHED" in environment:
            os.stat(environment.get("PMIX_SERVER_TMPDIR", "/"))
            socket.create_connection((host, int(port)), _ANSWER).close()
    except (TimeoutError, ValueError):
        return
    except OSError as error:
        what, kind, option = f"{host}:{port}", "network", "--network=host"
        if isinstance(error, FileNotFoundError):
            what, kind, option = str(error.filename), "mount", "-v /tmp:/tmp"
        raise BackendUnavailableError(
            f"init: {what} of the launcher cannot be reached ({error.strerror}), as from another "
            f"{kind} namespace; let all ranks have that of the launcher, for example with: docker "
            f"run {option}"
        ) from error
