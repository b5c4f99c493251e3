"""Memory that processes of one node share: files in memory that nothing leaves behind.

They have no name, so that they are gone with the last process that has them open, however that
ends. Other processes open them through the process that made them. If the system forbids that, as
between some containers, they have a name until all have opened them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Any, Final

import numpy as np

_UNNAMED: Final = "/proc/{}/fd/{}"
_ZEROS: Final = bytes(1 << 20)
# Whether a rank could not open a file without a name.
_names_needed = False


def need_names() -> None:
    """Give files a name from now on, for as long as it takes to open them."""
    global _names_needed  # noqa: PLW0603 - one fact about the system that this process is on
    _names_needed = True


def make_file(nbytes: int) -> str:
    """Create a file of `nbytes` zeros; return a path at which it can be opened, or an empty one."""
    return _make_named(nbytes) if _names_needed else _make_unnamed(nbytes) or _make_named(nbytes)


def close_file(path: str) -> None:
    """Let nobody open a file any more that `make_file` has made here; those who have it keep it."""
    if path.startswith("/proc/"):
        os.close(int(path.rpartition("/")[2]))
    else:
        os.unlink(path)


def open_file(path: str, nbytes: int) -> np.ndarray[Any, Any] | None:
    """Map a file that this process or another has made; return None if that is not possible.

    One of another user is not taken: what ranks read from it they trust.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return None
        return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def share_file(
    nbytes: int, tell: Callable[[str], str], agree: Callable[[bool], bool], *, makes: bool
) -> np.ndarray[Any, Any] | None:
    """Map one zeroed file on all ranks, which one `makes`; return None on all if one cannot.

    `tell` returns the path that this rank passes, and `agree` whether all ranks pass True.
    """
    for _ in range(2):
        own = make_file(nbytes) if makes else ""
        memory = open_file(tell(own), nbytes)
        opened = agree(memory is not None)
        if own:
            close_file(own)
        if opened:
            return memory
        need_names()
    return None


def _make_unnamed(nbytes: int) -> str:
    try:
        descriptor = os.memfd_create("arraycomm")
    except (OSError, AttributeError):
        return ""
    return _UNNAMED.format(os.getpid(), descriptor) if _allocate(descriptor, nbytes) else ""


def _make_named(nbytes: int) -> str:
    for directory in ("/dev/shm", tempfile.gettempdir()):
        try:
            descriptor, path = tempfile.mkstemp(prefix="arraycomm-", dir=directory)
        except OSError:
            continue
        if _allocate(descriptor, nbytes):
            os.close(descriptor)
            return path
        os.unlink(path)
    return ""


def _allocate(descriptor: int, nbytes: int) -> bool:
    """Allocate memory now: with a sparse file, a signal would end the process if it runs out."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)
        else:  # on macOS
            for begin in range(0, nbytes, len(_ZEROS)):
                os.pwrite(descriptor, _ZEROS[: nbytes - begin], begin)
    except OSError:
        os.close(descriptor)
        return False
    return True
