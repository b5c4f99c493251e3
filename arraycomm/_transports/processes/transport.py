"""Ranks as processes of one node that no MPI connects: they share one file in memory.

It holds the control channel, and for each two ranks a ring for the movements and one for messages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Final

import numpy as np

from arraycomm._errors import TransportError
from arraycomm._transports.base import (
    Blocks,
    Bytes,
    Handle,
    Parts,
    PartsTransport,
    Transport,
    Wait,
    poll,
)
from arraycomm._transports.control import SharedControl
from arraycomm._transports.lives import DELAY, Lives, find_lives
from arraycomm._transports.processes.ring_messages import Messages
from arraycomm._transports.processes.rings import Ring, Transfer
from arraycomm._transports.shared_files import LONGEST, share_file

# As many polls as ranks of MPI make before they give up their cores.
_SPINS: Final = 8
# Memory in which parts begin has no line of a processor's cache in common with the part before.
_LINES: Final = 128
_Transfers = list[Transfer]


def _capacities(size: int) -> tuple[int, int]:
    """Return the bytes that a ring for movements and one for messages hold, of this many ranks."""
    movements = min(max((1 << 20) // size, 32 << 10), 256 << 10)
    # Whole lines, so that the next ring's words begin lines: a processor writes such words at once.
    return movements // _LINES * _LINES, movements // 4 // _LINES * _LINES


def memory_bytes(size: int) -> int:
    """Return the bytes of zeroed memory that a group of this many ranks shares."""
    rings = sum(map(Ring.nbytes, _capacities(size)))
    return SharedControl.nbytes(size) // _LINES * _LINES + _LINES + size * size * rings


class _Movement:
    """Transfers to and from other ranks, one after the other for each."""

    def __init__(self, transfers: _Transfers) -> None:
        self._left = transfers

    def done(self) -> bool:
        """Move what can move; return whether all has."""
        self._left = [transfer for transfer in self._left if not transfer.done()]
        return not self._left


class ProcessesTransport(PartsTransport):
    """One rank of a group of processes that have mapped the same `memory`."""

    name = "processes"
    spins = _SPINS
    death_delay = DELAY

    def __init__(self, memory: Bytes, rank: int, size: int, lives: Lives) -> None:
        self.rank = self.local_rank = rank
        self.size = self.local_size = size
        self.control = SharedControl(rank, size, memory)
        ring = partial(self._ring, memory)
        others = [other for other in range(size) if other != rank]
        self._to = {other: ring(rank, other, 0) for other in others}
        self._of = {other: ring(other, rank, 0) for other in others}
        pairs = {other: (ring(rank, other, 1), ring(other, rank, 1)) for other in others}
        self._messages = Messages(rank, pairs)
        self._lives = lives
        # The messages of this group and those made from it, in which others may wait for this rank.
        self._family = [self._messages]

    def _ring(self, memory: Bytes, source: int, dest: int, kind: int) -> Ring:
        """Return one of the rings, which follow the control channel."""
        lengths = [Ring.nbytes(capacity) for capacity in _capacities(self.size)]
        start = memory_bytes(self.size) - (self.size * self.size) * sum(lengths)
        start += (source * self.size + dest) * sum(lengths) + kind * lengths[0]
        return Ring(memory[start : start + lengths[kind]])

    def move(self, parts: Parts, into: Parts) -> Handle:
        if self.rank in parts and parts[self.rank] is not into[self.rank]:
            np.copyto(into[self.rank], parts[self.rank])
        sends = [Transfer(self._to[r], parts[r], sending=True) for r in parts if r != self.rank]
        recvs = [Transfer(self._of[r], into[r], sending=False) for r in into if r != self.rank]
        return _Movement([*sends, *recvs])

    def send(self, buffer: Bytes, dest: int, tag: int) -> Handle:
        return self._messages.send(buffer, dest, tag)

    def recv(self, buffer: Bytes, source: int, tag: int) -> Handle:
        return self._messages.recv(buffer, source, tag)

    def probe(self, source: int | None, tags: range) -> tuple[int, int] | None:
        return self._messages.probe(source, tags)

    def progress(self) -> None:
        for messages in self._family:
            with suppress(TransportError):
                messages.pump()

    def split(
        self, color: int | None, members: Sequence[int], wait: Wait = poll
    ) -> Transport | None:
        opened = False

        def tell(told: str) -> str:
            known = self._exchanged(told.encode().ljust(LONGEST, b"\0"), wait)
            return "" if color is None else known[members[0]].rstrip(b"\0").decode()

        def agree(mine: bool) -> bool:
            nonlocal opened
            opened = b"\0" not in self._exchanged(bytes([mine or color is None]), wait)
            return opened

        leads = color is not None and members[0] == self.rank
        nbytes = 0 if color is None else memory_bytes(len(members))
        memory = share_file(nbytes, tell, agree, makes=leads)
        if not opened:
            raise TransportError(
                "not every rank could open the memory that a new group shares; make room in "
                "/dev/shm, let containers have the same one (docker run --ipc=host), and allow "
                "more open files (ulimit -n)"
            )
        if memory is None:
            return None
        made = type(self)(memory, members.index(self.rank), len(members), self._lives.of(members))
        self._family.append(made._messages)
        made._family = self._family
        return made

    def _exchanged(self, mine: bytes, wait: Wait) -> list[bytes]:
        """Return what every rank passes, all of one length."""
        rows = np.zeros((self.size, len(mine)), np.uint8)
        rows[self.rank] = np.frombuffer(mine, np.uint8)
        lengths = [len(mine)] * self.size
        offsets = [r * len(mine) for r in range(self.size)]
        wait(self.allgather(Blocks(rows.reshape(-1), lengths, offsets)))
        return [row.tobytes() for row in rows]

    def free(self) -> None:
        self.control.close()
        self._family.remove(self._messages)
        # Now, as the channel does: Python collects the transport late, since it is in a cycle.
        self._messages.close()
        self._to, self._of = {}, {}

    def nodes(self) -> Sequence[int]:
        return [0] * self.size

    def failed(self) -> list[int]:
        return self._lives.dead(self.control.notes)

    def abort(self, code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        self._lives.end()
        os._exit(code)


# The meeting


def meet(
    tell_all: Callable[[str, str], Sequence[str]], rank: int, size: int
) -> tuple[Bytes | None, Lives]:
    """Return the memory that the ranks share, made by rank 0, and what tells which of them die.

    The memory is None on all if one cannot open it. `tell_all` gives the other ranks a text of a
    name that has not been used before, and returns those of all ranks.
    """
    tries = count(1)

    def tell(path: str) -> str:
        return tell_all(f"memory {next(tries)}", path)[0]

    def agree(opened: bool) -> bool:
        return "no" not in tell_all(f"opened {next(tries)}", "yes" if opened else "no")

    memory = share_file(memory_bytes(size), tell, agree, makes=rank == 0)
    return memory, Lives({}) if memory is None else find_lives(tell, agree, rank, range(size))
