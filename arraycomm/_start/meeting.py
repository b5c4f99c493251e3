"""How ranks meet over MPI: it begins, and all come, before a call in which they could only wait."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from arraycomm import _launch
from arraycomm._errors import CommTimeoutError, PeerError
from arraycomm._exit.exit import mpi_function, take_over_the_end
from arraycomm._launch import find_launcher
from arraycomm._launch.library import refuse_foreign_launcher
from arraycomm._protocol.mismatch import name_ranks
from arraycomm._protocol.waits import clock
from arraycomm._protocol.waits.still_waiting import report_after, say
from arraycomm._protocol.waits.waiting import wait_for

# Tags that programs hardly use: of what a rank says to rank 0, and of what that says.
_TO_FIRST: Final = (1 << 20) + 7
_FROM_FIRST: Final = (1 << 20) + 8
# What they say: that they are there, that they still are, that all are, that they have given up,
# or why they do not come; rank 0 to those that wait, and to those that come too late, why all give
# up; and that no more follows.
_HERE, _STILL_HERE, _ALL_HERE, _GIVES_UP, _STAYS_AWAY = b"h", b"s", b"a", b"g", b"n"
_IN_VAIN, _TOO_LATE, _LAST = b"v", b"l", b"e"
# The longest message, and how many ranks one names.
_LONGEST: Final = 512
# Seconds in which rank 0, which is there, says for whom it has waited in vain; and those in which a
# message that has been sent is there.
_SAYING: Final = 2.0
_SHOWING: Final = 0.1


# MPI's own beginning


def begin_mpi(timeout: float) -> None:
    """Import mpi4py.MPI, and begin MPI as it does; what takes every rank may not take for ever.

    MPI cannot be called back from there: if it does not begin in time, the process ends.
    """
    import mpi4py

    rc = mpi4py.rc
    take_over_the_end()
    if rc.initialize not in (True, "yes") or "MPI4PY_RC_INITIALIZE" in os.environ:
        # The program begins it, or says that it must not begin.
        import mpi4py.MPI

        return
    initialize, rc.initialize = rc.initialize, False
    try:
        from mpi4py import MPI
    finally:
        rc.initialize = initialize
    if MPI.Is_initialized():
        return
    refuse_foreign_launcher(MPI, os.environ)
    begun = threading.Event()
    threading.Thread(target=_watch_beginning, args=(begun, timeout), daemon=True).start()
    try:
        _initialize(MPI, rc)
    finally:
        begun.set()
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
        # As mpi4py does if it begins MPI itself.
        comm.Set_errhandler(MPI.ERRORS_RETURN)


def _initialize(module: Any, rc: Any) -> None:
    name = f"THREAD_{rc.thread_level.upper()}" if rc.threads in (True, "yes") else "THREAD_SINGLE"
    level = getattr(module, name)
    # Not by mpi4py, which would hold Python's lock, so that no thread could look at the clock.
    begin = mpi_function("MPI_Init_thread")
    if begin is None:
        module.Init_thread(level)
        return
    status = begin(None, None, level, ctypes.byref(ctypes.c_int()))
    if status:
        raise RuntimeError(f"MPI_Init_thread returned {status}")


def _watch_beginning(begun: threading.Event, timeout: float) -> None:
    after = report_after() or timeout
    if after < timeout and not begun.wait(after):
        waiting = "arraycomm: still waiting in init for MPI to begin, which takes every rank"
        say(f"{waiting}{_absent()}\n")
        timeout -= after
    if not begun.wait(min(timeout, threading.TIMEOUT_MAX)):
        error = f"init: MPI has not begun in time, which takes every rank{_absent()}"
        say(f"arraycomm.CommTimeoutError: {error}; so this rank ends\n")
        os._exit(1)


def _absent() -> str:
    """Return which ranks of this node have not begun, as far as their processes show it."""
    ranks = [rank for rank, begun in sorted(ranks_here().items()) if not begun]
    return f": {name_ranks(ranks)} of this node {_have(ranks)} not called it" if ranks else ""


def ranks_here() -> dict[int, bool]:
    """Return the ranks of this job that have processes here, and whether each has loaded an MPI."""
    launcher, found = find_launcher(os.getppid()), dict[int, bool]()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if launcher is None or find_launcher(int(path.name)) != launcher:
                continue
            variables = dict(
                item.split(b"=", 1)
                for item in (path / "environ").read_bytes().split(b"\0")
                if b"=" in item
            )
            names = [name.encode() for name in _launch.RANKS if name.encode() in variables]
            if names:
                rank = int(variables[names[0]])
                loaded = "libmpi" in (path / "maps").read_text("utf-8", "replace")
                found[rank] = found.get(rank, False) or loaded
    return found


# The meeting


def meet(mpi_comm: Any, what: str, timeout: float) -> None:
    """Wait until every rank of an mpi4py communicator has come; raise if one does not in time.

    Rank 0 hears of each, and then lets all go on. Who comes once others have given up is told.
    """
    if mpi_comm.size > 1:
        meeting = _First if mpi_comm.rank == 0 else _Other
        meeting(mpi_comm, what, timeout).run()


def stay_away(mpi_comm: Any, why: str) -> None:
    """Let ranks that are in a meeting, or come to one, know why this one does not.

    It holds until all ranks call `forget`.
    """
    text = why.encode()[: _LONGEST - 1]
    if mpi_comm.rank > 0:
        _post(mpi_comm, _STAYS_AWAY + text, 0, _TO_FIRST)
    else:
        for rank in range(1, mpi_comm.size):
            _post(mpi_comm, _TOO_LATE + text, rank, _FROM_FIRST)


def forget(mpi_comm: Any) -> None:
    """Take what was said of meetings that did not come about; collective."""
    from mpi4py import MPI

    others, out, back = [0], _TO_FIRST, _FROM_FIRST
    if mpi_comm.rank == 0:
        others, out, back = list(range(1, mpi_comm.size)), _FROM_FIRST, _TO_FIRST
    for rank in others:
        _post(mpi_comm, _LAST, rank, out)
    for rank in others:
        text = bytearray(_LONGEST)
        while text[:1] != _LAST:
            mpi_comm.Recv([text, MPI.BYTE], rank, back)


class _Meeting:
    """One rank's part."""

    def __init__(self, comm: Any, what: str, timeout: float) -> None:
        self._comm, self._what, self._timeout = comm, what, timeout
        self._said = False

    def run(self) -> None:
        """Take part; raise if a rank has not come."""
        wait_for(self.done, 0, self.watch)
        self.end()

    def done(self) -> bool:
        """Push on; return whether all have come, or one has given up."""
        raise NotImplementedError

    def watch(self, waited: float) -> None:
        """Say for whom this rank waits, if it is time; raise if the time is up."""
        after = report_after()
        if not self._said and after is not None and waited > after and (missing := self.missing()):
            self._said = True
            say(f"arraycomm: still waiting in {self._what} for {missing}\n")
        if waited > self._timeout + self.grace():
            self.give_up()

    def end(self) -> None:
        """Take note of how the meeting has ended."""

    def missing(self) -> str:
        """Return for whom this rank waits; empty if another one says it."""
        raise NotImplementedError

    def grace(self) -> float:
        """Return the seconds beyond the timeout for which this rank waits."""
        return 0.0

    def give_up(self) -> None:
        """Tell the others, and raise."""
        raise NotImplementedError

    def _post(self, text: bytes, rank: int, tag: int) -> None:
        _post(self._comm, text, rank, tag)

    def _take(self, tag: int) -> tuple[int, bytes] | None:
        """Return who has sent a message with this tag, and the message; None if nobody has."""
        from mpi4py import MPI

        message = self._comm.Improbe(MPI.ANY_SOURCE, tag, status := MPI.Status())
        if not message:
            return None
        text = bytearray(_LONGEST)
        message.Recv([text, MPI.BYTE])
        return status.Get_source(), bytes(text[: status.Get_count(MPI.BYTE)])

    def _timed_out(self, missing: str) -> CommTimeoutError:
        return CommTimeoutError(
            f"{self._what}: waited {self._timeout:g} s (timeout {self._timeout:g} s) for {missing}"
        )


class _First(_Meeting):
    def __init__(self, comm: Any, what: str, timeout: float) -> None:
        super().__init__(comm, what, timeout)
        self._absent = set(range(1, comm.size))
        self._gave_up: list[int] = []
        # Why ranks do not come.
        self._away: dict[int, str] = {}

    def done(self) -> bool:
        while taken := self._take(_TO_FIRST):
            rank, text = taken
            if text == _HERE:
                # It may have been there, and have given up.
                self._post(_HERE, rank, _FROM_FIRST)
            elif text == _STILL_HERE:
                self._absent.discard(rank)
            elif text[:1] == _STAYS_AWAY:
                self._away[rank] = text[1:].decode(errors="replace")
            else:
                self._gave_up.append(rank)
        return not self._absent or bool(self._gave_up or self._away)

    def end(self) -> None:
        # MPI shows what ranks have sent before they gave up one after the other.
        until = clock.now() + _SHOWING
        while self._gave_up and clock.now() < until:
            self.done()
        if self._gave_up:
            text = f"{name_ranks(sorted(self._gave_up))} had given up waiting for rank 0"
            self._tell(text, self._absent.union(range(1, self._comm.size)))
            raise PeerError(f"{self._what}: {text}", rank=self._gave_up[0])
        for rank, text in self._away.items():
            self._tell(text, set(range(1, self._comm.size)))
            raise PeerError(f"{self._what}: {text}", rank=rank)
        for rank in range(1, self._comm.size):
            self._post(_ALL_HERE, rank, _FROM_FIRST)

    def missing(self) -> str:
        return f"{name_ranks(sorted(self._absent))}, which {_have(self._absent)} not called it"

    def give_up(self) -> None:
        missing = self.missing()
        self._tell(f"rank 0 has waited {self._timeout:g} s for {missing}", self._absent)
        raise self._timed_out(missing)

    def _tell(self, text: str, late: set[int]) -> None:
        for rank in range(1, self._comm.size):
            kind = _TOO_LATE if rank in late else _IN_VAIN
            self._post(kind + text.encode()[: _LONGEST - 1], rank, _FROM_FIRST)


class _Other(_Meeting):
    def __init__(self, comm: Any, what: str, timeout: float) -> None:
        super().__init__(comm, what, timeout)
        self._heard = b""
        self._post(_HERE, 0, _TO_FIRST)

    def done(self) -> bool:
        while taken := self._take(_FROM_FIRST):
            self._heard = taken[1]
            if self._heard != _HERE:
                return True
            self._post(_STILL_HERE, 0, _TO_FIRST)
        return False

    def end(self) -> None:
        if self._heard != _ALL_HERE:
            text = f"{self._what}: {self._heard[1:].decode(errors='replace')}"
            raise (
                PeerError(text, rank=0) if self._heard[:1] == _TOO_LATE else CommTimeoutError(text)
            )

    def missing(self) -> str:
        # Rank 0 says it if it is there.
        return "" if self._heard else "rank 0, which has not called it"

    def grace(self) -> float:
        return _SAYING if self._heard else 0.0

    def give_up(self) -> None:
        self._post(_GIVES_UP, 0, _TO_FIRST)
        raise self._timed_out(self.missing() or "ranks that rank 0 waits for")


# Messages that MPI has not taken yet, which it may do after this rank has gone on.
_POSTED: Final[list[tuple[Any, bytes]]] = []


def _post(comm: Any, text: bytes, rank: int, tag: int) -> None:
    from mpi4py import MPI

    _POSTED.append((comm.Isend([text, len(text), MPI.BYTE], rank, tag), text))
    _POSTED[:] = [posted for posted in _POSTED if not posted[0].Test()]


def _have(ranks: Collection[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


# A collective call of MPI's own


def finish(done: Callable[[], bool], what: str, timeout: float) -> None:
    """Wait for a nonblocking MPI call that every rank begins about now; raise if one does not."""

    def watch(waited: float) -> None:
        if waited > timeout:
            raise CommTimeoutError(
                f"{what}: waited {timeout:g} s (timeout {timeout:g} s) for a rank that had come, "
                "and has gone"
            )

    wait_for(done, 0, watch)
