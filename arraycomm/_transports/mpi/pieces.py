"""Long messages between two ranks on different nodes, in pieces of which only few are under way.

TCP sends up to 64 KiB as one packet. Of what is longer, pacing holds the rest back, and what two
ranks send one another no longer fits into the caches: in such pieces, 64 MB each way between two
network namespaces took 0.6 of the time.

Each rank begins a piece once the other one's piece of that place before the last `AHEAD` has come.
So nobody sends more than is being received, and slices that go one way only are not cut.

A network card that reads and writes memory by itself takes messages whole: for each piece the
processor would have to act.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Final, NamedTuple

from mpi4py import MPI

from arraycomm._transports.base import Bytes
from arraycomm._transports.mpi.under_way import KEPT_ALIVE, on_all, start, translated
from arraycomm._transports.undivided import Undivided

# The most bytes of a piece, but for what makes whole cache lines of it, and how many are under way.
PIECE: Final = 64_000
_WHOLE: Final = 1 << 62
_LINE: Final = 64
AHEAD: Final = 4
# Where Linux lists cards that access memory by themselves: those of InfiniBand, RoCE, EFA and
# Omni-Path, and of Slingshot.
_CARDS: Final = Path("/sys/class/infiniband"), Path("/sys/class/cxi")

# Of each piece a receive and a send; a null request stands for none.
Prepared = Sequence[tuple[MPI.Prequest, MPI.Prequest]]


class Pieces(NamedTuple):
    """How messages between nodes are cut: the same on all ranks of a group."""

    # The most bytes of a piece.
    most: int

    def count(self, nbytes: int) -> int:
        """Return how many pieces this many bytes make."""
        return max(-(-nbytes // self.most), 1)

    def count_both(self, received: int, sent: int) -> int:
        """Return in how many pieces this many bytes go each way; both ranks find the same."""
        longer, shorter = max(received, sent), min(received, sent)
        return self.count(longer) if longer <= 2 * shorter else 1

    def of(self, memory: Bytes) -> list[Bytes]:
        """Return the pieces of a message that goes one way."""
        return cut(memory, self.count(len(memory)))


def agreed(comm: MPI.Intracomm) -> Pieces:
    """Return how these ranks cut messages; collective."""
    here = any(cards.is_dir() and any(cards.iterdir()) for cards in _CARDS)
    return Pieces(_WHOLE if on_all(comm, here) else PIECE)


def cut(memory: Bytes, count: int) -> list[Bytes]:
    """Cut memory into this many pieces."""
    if count == 1:
        return [memory]
    bounds = [len(memory) * number // count // _LINE * _LINE for number in range(count)]
    return [memory[i:j] for i, j in zip(bounds, [*bounds[1:], len(memory)], strict=True)]


class Lane:
    """The pieces between this rank and another one, as many each way; what is empty is not sent.

    If it has the messages of a lane `before` for its own, it begins when that one has begun all of
    its pieces.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        to: tuple[int, int],
        into: Bytes,
        block: Bytes,
        count: int,
        before: Lane | None,
    ) -> None:
        self._comm, self._to = comm, to
        self._into, self._out = cut(into, count), cut(block, count)
        self._count, self._begun, self._before = count, 0, before
        # The messages that are under way.
        self.receives: deque[MPI.Request] = deque()
        self.sends: list[MPI.Request] = []
        self._moving = Undivided()

    def start(self, number: int) -> None:
        """Begin a piece each way."""
        self._start(self.receives, self._comm.Irecv, self._into[number])
        self._start(self.sends, self._comm.Isend, self._out[number])

    def _start(
        self, begun: MutableSequence[MPI.Request], begin: Callable[..., MPI.Request], piece: Bytes
    ) -> None:
        if len(piece):
            start(begun, begin, [piece, MPI.BYTE], *self._to)
        else:
            begun.append(MPI.Request())

    @property
    def begun(self) -> bool:
        """Whether all pieces have been begun."""
        return self._begun == self._count

    def begin(self) -> None:
        """Begin as many pieces as may be under way."""
        if self._before is not None:
            if not self._before.begun:
                return
            self._before = None
        while self._begun < self._count and len(self.receives) < AHEAD:
            self.start(self._begun)
            self._begun += 1

    def done(self) -> bool:
        """Begin what can be begun; return whether all pieces are over. Never waits."""
        with self._moving:
            return self._move()

    def _move(self) -> bool:
        if self._before is not None:
            self._before.done()
            self.begin()
            if self._before is not None:
                return False
        while self.receives:
            if not self.receives[0].Test():
                return False
            self.receives.popleft()
            self.begin()
        while self.sends:
            if not self.sends[-1].Test():
                return False
            self.sends.pop()
        return True


def prepared(received: Sequence[MPI.Prequest], sent: Sequence[MPI.Prequest]) -> Prepared:
    """Return pieces of a lane, of which one way may have more."""
    return [*zip_longest(received, sent, fillvalue=MPI.Prequest())]


def addresses_of(pieces: Prepared) -> list[int]:
    """Return where the native part finds the receives and sends in turn; 0 stands for none."""
    return [MPI._addressof(request) if request else 0 for pair in pieces for request in pair]


def free(lanes: Iterable[Prepared]) -> None:
    """Free what MPI keeps for pieces; none is under way."""
    for request in chain.from_iterable(chain.from_iterable(lanes)):
        if request:
            request.Free()


Requests = list[MPI.Request]


class Messages:
    """Messages of one movement, whole or in pieces, and the buffers that they keep alive.

    Those in `later` are waited for after the others. In between `then` is called, which begins
    those that need what the others bring.
    """

    def __init__(self, *buffers: Bytes) -> None:
        self.requests, self.later = Requests(), Requests()
        self.lanes: list[Lane] = []
        self.then: Callable[[], None] | None = None
        self._buffers, self._moving = buffers, Undivided()
        KEPT_ALIVE.add(self)

    def done(self) -> bool:
        with self._moving:
            return self._move()

    def _move(self) -> bool:
        try:
            while True:
                self.lanes = [lane for lane in self.lanes if not lane.done()]
                while self.requests:
                    if not self.requests[-1].Test():
                        return False
                    self.requests.pop()
                if self.lanes:
                    return False
                if self.then is None:
                    KEPT_ALIVE.discard(self)
                    return True
                then, self.then = self.then, None
                self.requests = self.later
                then()
        except MPI.Exception as error:
            raise translated(error) from error
