"""The interface of a transport: a control channel for small steps, and movements of bytes.

A movement returns a `Handle` at once and is finished when `done()` says so; the caller leaves the
buffers alone until then. All ranks of a group issue the same movements in the same order, each
after the one before has finished, unless the link lets movements overlap. Buffers are
one-dimensional, contiguous arrays of bytes; no single movement exceeds `MAX_BYTES`.

A `Link` has the movements and the folding of what they move, without a control channel; a
`DeviceLink` has them over device memory. A `Transport` is a link over host memory, and the group. A
`NodeChain` hands what one node's ranks send on to the next node, in the order of ranks.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple, Protocol, Self, TypeAlias

import numpy as np

from arraycomm._arrays.buffer import allocate
from arraycomm._dtypes import DType
from arraycomm._folds import fold, fold_on, prefixes
from arraycomm._transports import shared_files
from arraycomm._transports.control import ControlChannel, SharedControl

Bytes = np.ndarray[Any, Any]
Steps: TypeAlias = Generator["Handle", None, Any]

# MPI before version 4 has 32-bit counts and offsets.
MAX_BYTES: Final = 2**31 - 4096
# Up to this many ranks of several nodes send each other messages of their own.
DIRECT_RANKS: Final = 128


class Handle(Protocol):
    """A movement under way, or a step of the control channel."""

    def done(self) -> bool:
        """Make progress with all movements; return whether this one is finished. Never waits."""


Wait = Callable[[Handle], object]


def poll(handle: Handle) -> None:
    """Wait for a handle, whatever becomes of the other ranks."""
    while not handle.done():
        os.sched_yield()


class Repeated(Handle, Protocol):
    """Memory that is sent to one rank, or into which a message of one rank comes."""

    def begin(self) -> bool:
        """Begin the message once more, after the one before; return whether it is finished."""

    def free(self, *, finished: bool) -> None:
        """Give back what the transport keeps for it; before the group ends."""


class PlainRepeated:
    """A repeated message of any transport, which `start` begins anew."""

    def __init__(self, start: Callable[[], Handle]) -> None:
        self._start = start

    def begin(self) -> bool:
        self._handle = self._start()
        return self._handle.done()

    def done(self) -> bool:
        return self._handle.done()

    def free(self, *, finished: bool) -> None:
        pass


# One-dimensional, contiguous memory of a link: a NumPy array, or a `DeviceBuffer`.
Flat: TypeAlias = Any


class Blocks(NamedTuple):
    """One block of `buffer` for each rank: `counts[r]` bytes from `offsets[r]`."""

    buffer: Flat
    counts: Sequence[int]
    offsets: Sequence[int]

    def block(self, rank: int) -> Flat:
        """Return the bytes that belong to `rank`."""
        start = self.offsets[rank]
        return self.buffer[start : start + self.counts[rank]]


class Link(abc.ABC):
    """The movements between the ranks of a group, and the folding of what they move."""

    rank: int
    size: int
    # Larger reductions go in chunks of about this many bytes; 0 if the host's caches decide.
    chunk_bytes: int = 0
    # Whether a movement may begin before those before it have finished.
    overlaps: bool = False
    # What modules above keep for this link, by keys of their own.
    kept: dict[Any, Any]

    def __new__(cls, *_: object, **__: object) -> Self:
        made = super().__new__(cls)
        made.kept = {}
        return made

    @property
    def slot(self) -> tuple[int, bool]:
        """Bytes that one step of the control channel takes, and whether it is shared memory."""
        return -1, False

    @abc.abstractmethod
    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        """Send block r to rank r; receive rank r's block in block r."""

    @abc.abstractmethod
    def allgather(self, recv: Blocks) -> Handle:
        """Send this rank's own block of `recv` to all, and receive theirs, in place."""

    @abc.abstractmethod
    def gather(self, send: Flat, recv: Blocks | None, root: int) -> Handle:
        """Send bytes to `root`, which receives rank r's in block r; `recv` is None elsewhere."""

    @abc.abstractmethod
    def scatter(self, send: Blocks | None, recv: Flat, root: int) -> Handle:
        """Send block r of `root` to rank r; `send` is None elsewhere."""

    @abc.abstractmethod
    def bcast(self, buffer: Flat, root: int) -> Handle:
        """Make every rank's buffer that of `root`."""

    @abc.abstractmethod
    def send(self, buffer: Flat, dest: int, tag: int) -> Handle:
        """Send bytes to one rank; finished when the buffer may be used again.

        Any number of sends and receives may be under way at once. Messages of one tag between two
        ranks arrive in the order of their sending.
        """

    @abc.abstractmethod
    def recv(self, buffer: Flat, source: int, tag: int) -> Handle:
        """Receive what `source` sends with this tag into the first bytes of `buffer`."""

    @abc.abstractmethod
    def take(self, count: int, dtype: DType) -> Flat:
        """Return uninitialised temporary memory, valid until the next call."""

    @abc.abstractmethod
    def empty(self, count: int, dtype: DType) -> Flat:
        """Return uninitialised memory."""

    def load(self, op: str, dtype: DType) -> None:
        """Make ready what folds: later that might wait for ranks that wait for this one."""

    @abc.abstractmethod
    def fold(self, op: str, dtype: DType, rows: Sequence[Flat], out: Flat) -> None:
        """Fold the rows into `out`, in their order."""

    @abc.abstractmethod
    def prefixes(self, op: str, dtype: DType, rows: Sequence[Flat], outs: Sequence[Flat]) -> None:
        """Fold the rows 0 to k into `outs[k]`."""

    def reduces(self, op: str, dtype: DType) -> bool:
        """Return whether this link's own `allreduce` gives the promised result."""
        return False

    def allreduce(self, source: Flat, target: Flat, op: str) -> Handle:
        """Reduce by the link's own means, in an order of its own."""
        raise NotImplementedError


def is_chain(members: Sequence[Sequence[int]]) -> bool:
    """Return whether there are several nodes, of several ranks each, with ranks in order."""
    in_order = [rank for ranks in members for rank in ranks]
    several = len(members) > 1 and min(map(len, members)) > 1
    return several and in_order == sorted(in_order)


class NodeChain(abc.ABC):
    """One rank's place in the chain of nodes with these `members`, for which `is_chain` holds.

    The steps of `control` are those of the ranks of this node alone.
    """

    def __init__(self, rank: int, members: Sequence[Sequence[int]], control: SharedControl) -> None:
        self.control, self._members, place = control, members, control.rank
        # The number of this rank's node, and how many nodes there are.
        self.node = next(node for node, ranks in enumerate(members) if rank in ranks)
        self.nodes = len(members)
        # The ranks of the smallest node, and of the largest.
        self.lanes, self.most = min(map(len, members)), max(map(len, members))
        self.first = members[self.node][0]
        # Whether this rank exchanges messages: the smallest node has a counterpart of it.
        self.carries = place < self.lanes
        # With whom on the neighbouring nodes it exchanges totals and results; -1 if there is none.
        self.before, self.after = self._peer(self.node - 1), self._peer(self.node + 1)

    def _peer(self, node: int) -> int:
        """Return the rank of a node that exchanges messages with this one; -1 if there is none."""
        there = self.carries and 0 <= node < self.nodes
        return self._members[node][self.control.rank] if there else -1

    @abc.abstractmethod
    def send(self, buffer: Bytes, peer: int) -> Handle:
        """Send bytes to a neighbour; several messages to one arrive in their order."""

    @abc.abstractmethod
    def recv(self, buffer: Bytes, peer: int) -> Handle:
        """Receive what a neighbour sends."""

    def fold_on(
        self, op: str, dtype: DType, total: Bytes | None, rows: Sequence[Bytes], out: Bytes
    ) -> None:
        """Fold this node's rows onto the total before it; on the last, `out` gets the result."""
        fold_on(op, dtype, total, self.first, rows, out, more=self.node + 1 < self.nodes)


class Transport(Link):
    """One group of ranks, and the movements between their hosts."""

    name: str
    local_rank: int
    local_size: int
    control: ControlChannel
    # The chain of nodes, if there are several with several ranks each, in order.
    chain: NodeChain | None = None
    mpi_comm: Any = None
    # A message of more bytes is finished only when it is received.
    copied: int = 4096
    # Number of polls before a waiting rank starts to yield its core.
    spins: int = 0
    # Whether a background thread may make progress with movements while the caller computes.
    threaded: bool = True
    # Whether the ranks that survive the death of a process can make a group of their own, and the
    # seconds in which they know of the death.
    shrinks: bool = False
    death_delay: float = 0.0
    _scratch: Bytes = np.empty(0, np.uint8)

    @property
    def slot(self) -> tuple[int, bool]:
        return self.control.payload, self.control.shared

    def take(self, count: int, dtype: DType) -> Bytes:
        nbytes = count * dtype.itemsize
        if self._scratch.nbytes < nbytes:
            # The same alignment on every rank, so that vectorized folds give the same bits.
            self._scratch = allocate((nbytes,), np.dtype(np.uint8))
        return self._scratch[:nbytes].view(dtype)

    def empty(self, count: int, dtype: DType) -> Bytes:
        return np.empty(count, dtype)

    def fold(self, op: str, dtype: DType, rows: Sequence[Bytes], out: Bytes) -> None:
        fold(op, dtype, rows, out)

    def prefixes(self, op: str, dtype: DType, rows: Sequence[Bytes], outs: Sequence[Bytes]) -> None:
        prefixes(op, dtype, rows, outs)

    def repeated_send(self, buffer: Bytes, dest: int, tag: int) -> Repeated:
        """Return a message to another rank, which can be begun again and again."""
        return PlainRepeated(lambda: self.send(buffer, dest, tag))

    def repeated_recv(self, buffer: Bytes, source: int, tag: int) -> Repeated:
        """Return a message from another rank, which can be begun again and again."""
        return PlainRepeated(lambda: self.recv(buffer, source, tag))

    @abc.abstractmethod
    def probe(self, source: int | None, tags: range) -> tuple[int, int] | None:
        """Return source and tag of a message that a receive begun now would get, or None.

        From any rank if `source` is None. The message stays. One that an earlier receive is to get
        is not found, and none is passed over for ever.
        """

    @abc.abstractmethod
    def split(
        self, color: int | None, members: Sequence[int], wait: Wait = poll
    ) -> Transport | None:
        """Return the group of `members` (ranks of this group, in their new order), or None.

        Collective: every rank of this group calls it. Each new group has its own `color`, which is
        None on a rank that joins none. May block; where it need not, it calls `wait`, which may
        raise.
        """

    @abc.abstractmethod
    def free(self) -> None:
        """Release the group; collective. May block."""

    @abc.abstractmethod
    def nodes(self) -> Sequence[int]:
        """Return, for each rank, a number that only the ranks on its node have too."""

    def offer_memory(self, nbytes: int) -> str:
        """Make memory of zeros that the ranks can share; return its name, empty if there is none.

        Of processes, it is a file.
        """
        return shared_files.make_file(nbytes)

    def open_memory(self, name: str, nbytes: int) -> Bytes | None:
        """Return the memory that a rank has offered under this name, or None."""
        return shared_files.open_file(name, nbytes)

    def close_memory(self, name: str) -> None:
        """Let no further rank open the memory; ranks that have opened it keep it."""
        shared_files.close_file(name)

    def progress(self) -> None:
        """Let movements of other ranks that involve this one make progress."""

    def failed(self) -> list[int]:
        """Return the ranks whose process has died, as far as this transport can tell."""
        return []

    def shrink(self) -> Transport | None:
        """Return the group of the ranks that live, or None if this transport cannot make it.

        Every one of them calls it. Movements under way in the old group end. May block.
        """
        return None

    def abort(self, code: int) -> None:
        """End the whole job at once, as far as this transport reaches."""
        raise SystemExit(code)


# What goes to each rank, or comes from each: those without a part are not named.
Parts = dict[int, Bytes]


class PartsTransport(Transport):
    """A transport all of whose movements send one part to each of some ranks."""

    @abc.abstractmethod
    def move(self, parts: Parts, into: Parts) -> Handle:
        """Send a part to each rank that there is one for, and receive one from each.

        A part of this rank for itself may be the memory that it goes to.
        """

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        return self.move(_parts(send), _parts(recv))

    def allgather(self, recv: Blocks) -> Handle:
        into = _parts(recv)
        return self.move(dict.fromkeys(into, into[self.rank]), into)

    def gather(self, send: Bytes, recv: Blocks | None, root: int) -> Handle:
        return self.move({root: send}, _parts(recv))

    def scatter(self, send: Blocks | None, recv: Bytes, root: int) -> Handle:
        return self.move(_parts(send), {root: recv})

    def bcast(self, buffer: Bytes, root: int) -> Handle:
        parts = dict.fromkeys(range(self.size), buffer) if self.rank == root else {}
        return self.move(parts, {root: buffer})


def _parts(blocks: Blocks | None) -> Parts:
    return {} if blocks is None else {r: blocks.block(r) for r in range(len(blocks.counts))}
