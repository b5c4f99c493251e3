"""Memory that processes of one node share: files in memory that nothing leaves behind.

They have no name, so that they are gone with the last process that has them open, however that
ends. Other processes open them through the process that made them. If the system forbids that, as
between some containers, they have a name until all have opened them.

In another container, and on another host, a path may lead to another file. So what tells of a file
is its path and how it is known: by the host, by device and inode, and by a secret behind its bytes.
Nothing is mapped that is not known so.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import numpy as np

from arraycomm._launch.places import known_by

T = TypeVar("T")

_UNNAMED: Final = "/proc/{}/fd/{}"
# What tells all ranks what the one passes that makes a file, and whether all pass True.
Tell = Callable[[str], str]
Agree = Callable[[bool], bool]
_ZEROS: Final = bytes(1 << 20)
# The bytes of the secret.
_SECRET: Final = 16
# The most bytes of what tells of a file.
LONGEST: Final = 4096 + 256
# Whether a rank could not open a file without a name.
_names_needed = False


def need_names() -> None:
    """Give files a name from now on, for as long as it takes to open them."""
    global _names_needed  # noqa: PLW0603 - one fact about the system that this process is on
    _names_needed = True


def make_file(nbytes: int) -> str:
    """Create a file of `nbytes` zeros; return what others open it by, empty if there is no room."""
    return _make_named(nbytes) if _names_needed else _make_unnamed(nbytes) or _make_named(nbytes)


def close_file(told: str) -> None:
    """Let nobody open a file any more that `make_file` has made here; those who have it keep it."""
    path, *_ = _read(told)
    if path.startswith("/proc/"):
        os.close(int(path.rpartition("/")[2]))
    else:
        os.unlink(path)


def open_path(told: str, nbytes: int) -> int | None:
    """Open a file that this process or another has made; return None if that is not possible.

    One of another user is not taken: what ranks read from it they trust.
    """
    path, known, secret = _read(told)
    try:
        # Looked at first: a device or a pipe would notice that it is opened.
        if known_by(os.stat(path)) != known:
            return None
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    with suppress(OSError):
        found = os.fstat(descriptor)
        same = known_by(found) == known and os.pread(descriptor, _SECRET, nbytes).hex() == secret
        if same and found.st_uid == os.geteuid():
            return descriptor
    os.close(descriptor)
    return None


def open_file(told: str, nbytes: int) -> np.ndarray[Any, Any] | None:
    """Map such a file; return None if that is not possible."""
    descriptor = open_path(told, nbytes)
    if descriptor is None:
        return None
    try:
        return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def share_file(
    nbytes: int, tell: Tell, agree: Agree, *, makes: bool
) -> np.ndarray[Any, Any] | None:
    """Map one zeroed file on all ranks, which one `makes`; return None on all if one cannot."""
    return share_opened(nbytes, tell, agree, open_file, makes=makes)


def share_opened(
    nbytes: int, tell: Tell, agree: Agree, opens: Callable[[str, int], T | None], *, makes: bool
) -> T | None:
    """Open one zeroed file on all ranks, which one `makes`; return None on all if one cannot."""
    for _ in range(2):
        own, found, opened = make_file(nbytes) if makes else "", None, False
        try:
            found = opens(tell(own), nbytes)
            opened = agree(found is not None)
        finally:
            if own:
                close_file(own)
            # A mapping goes by itself.
            if isinstance(found, int) and not opened:
                os.close(found)
        if opened:
            return found
        need_names()
    return None


def _make_unnamed(nbytes: int) -> str:
    try:
        descriptor = os.memfd_create("arraycomm")
    except (OSError, AttributeError):
        return ""
    return _filled(descriptor, _UNNAMED.format(os.getpid(), descriptor), nbytes)


def _make_named(nbytes: int) -> str:
    for directory in ("/dev/shm", None):
        try:
            descriptor, path = tempfile.mkstemp(prefix="arraycomm-", dir=directory)
        except OSError:
            continue
        if told := _filled(descriptor, path, nbytes):
            os.close(descriptor)
            return told
        os.unlink(path)
    return ""


def _filled(descriptor: int, path: str, nbytes: int) -> str:
    """Allocate a new file's memory; return what others open it by, or close it if there is none."""
    secret = secrets.token_bytes(_SECRET)
    try:
        _allocate(descriptor, nbytes + _SECRET)
        os.pwrite(descriptor, secret, nbytes)
    except OSError:
        os.close(descriptor)
        return ""
    return f"{path} {known_by(os.fstat(descriptor))} {secret.hex()}"


def _read(told: str) -> tuple[str, str, str]:
    """Return the path of a file, what it is known by, and its secret."""
    path, known, secret = told.rsplit(" ", 2) if told else ("", "", "")
    return path, known, secret


def _allocate(descriptor: int, nbytes: int) -> None:
    """Allocate memory now: with a sparse file, a signal would end the process if it runs out."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:  # on macOS
        for begin in range(0, nbytes, len(_ZEROS)):
            os.pwrite(descriptor, _ZEROS[: nbytes - begin], begin)
