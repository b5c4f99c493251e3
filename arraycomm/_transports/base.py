"""What a transport gives: a control channel for small steps, and a few movements of bytes for large ones.

A movement returns a `Handle` at once and is finished when `done()` says so; the buffers stay
untouched by the caller until then. All ranks of a group issue the same movements in the same order,
each after the one before has finished.
Buffers are one-dimensional, contiguous arrays of bytes; no single movement exceeds `MAX_BYTES`.

A `Link` is the movements alone, and the folding of what they move: over a device's memory, which has
no control channel. A `Transport` is a link over the host's memory, and the group.
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory
from arraycomm._arrays.results import allocate
from arraycomm._dtypes import DType
from arraycomm._errors import TransportError
from arraycomm._folds import fold, prefixes
from arraycomm._transports.control import ControlChannel

Bytes = np.ndarray[Any, Any]
# One-dimensional, contiguous memory of a link: a NumPy array, or a `Span` on a device.
Flat: TypeAlias = Any
Steps: TypeAlias = Generator["Handle", None, Any]

# Counts and offsets of MPI before version 4 are 32-bit integers.
MAX_BYTES: Final = 2**31 - 4096


class Handle(Protocol):
    """A movement under way, or a step of the control channel."""

    def done(self) -> bool:
        """Push the movement on and tell whether it is finished; never waits."""


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
    """The movements between the ranks of a group, and the folding of what they move.

    Attributes
    ----------
    chunk_bytes : int
        Larger reductions go in chunks of about so many bytes; 0 for what suits a host's caches.
    """

    rank: int
    size: int
    chunk_bytes: int = 0

    @property
    def slot(self) -> tuple[int, bool]:
        """How many bytes one step of the group's control channel takes, and whether that is shared memory."""
        return -1, False

    @abc.abstractmethod
    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        """Send block r to rank r; receive rank r's block in block r."""

    @abc.abstractmethod
    def allgather(self, recv: Blocks) -> Handle:
        """Everyone's own block of `recv` becomes known to all, in place."""

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

        Messages between two ranks, and sends and receives of this kind may be many at once; those
        of one tag arrive in the order of their sending.
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

    @abc.abstractmethod
    def fold(self, op: str, dtype: DType, rows: Sequence[Flat], out: Flat) -> None:
        """Fold the rows into `out`, in their order."""

    @abc.abstractmethod
    def prefixes(self, op: str, dtype: DType, rows: Sequence[Flat], outs: Sequence[Flat]) -> None:
        """Fold the rows up to and with k into `outs[k]`."""

    def native(self, op: str, dtype: DType) -> bool:
        """Tell whether `allreduce` of this link keeps what is promised of this reduction."""
        return False

    def allreduce(self, source: Flat, target: Flat, op: str) -> Handle:
        """Reduce by the link's own means, in an order of its own."""
        raise NotImplementedError


class DeviceLink(Link):
    """The movements between the ranks' devices, in the order of the memory's stream.

    Attributes
    ----------
    ahead : bool
        Whether a movement waits for the other ranks on the device, and the host for nothing: then
        calls go ahead of their headers.
    """

    name: str
    memory: DeviceMemory
    ahead: bool = False

    def take(self, count: int, dtype: DType) -> DeviceBuffer:
        return self.empty(count, dtype)

    def empty(self, count: int, dtype: DType) -> DeviceBuffer:
        return self.memory.allocate(count * dtype.itemsize).view(dtype)

    def fold(self, op: str, dtype: DType, rows: Sequence[DeviceBuffer], out: DeviceBuffer) -> None:
        self.memory.fold(op, dtype, rows, out)

    def prefixes(
        self, op: str, dtype: DType, rows: Sequence[DeviceBuffer], outs: Sequence[DeviceBuffer]
    ) -> None:
        self.memory.prefixes(op, dtype, rows, outs)

    def send(self, buffer: DeviceBuffer, dest: int, tag: int) -> Handle:
        raise NotImplementedError

    def recv(self, buffer: DeviceBuffer, source: int, tag: int) -> Handle:
        raise NotImplementedError

    def split(self, color: int | None, key: int) -> Steps:
        """Return the link of the ranks of one color, or None where that has to be opened anew."""
        yield from ()
        return None

    def error(self) -> TransportError | None:
        """Return what went wrong on the way since the last movement was issued."""
        return None

    def abort(self) -> None:
        """End what is under way; called once the ranks are out of step, by any thread."""

    def close(self) -> None:
        """Release the link, once all is done."""


class Transport(Link):
    """One group of ranks, and the movements between their hosts."""

    name: str
    local_rank: int
    local_size: int
    control: ControlChannel
    mpi_comm: Any = None
    # Polls before the first one that gives up the core.
    spins: int = 0
    # Whether a thread of its own may push movements on while the caller computes.
    threaded: bool = True
    # Whether the death of a process lets the others live.
    outlives: bool = False
    _scratch: Bytes = np.empty(0, np.uint8)

    @property
    def slot(self) -> tuple[int, bool]:
        return self.control.payload, self.control.shared

    def take(self, count: int, dtype: DType) -> Bytes:
        nbytes = count * dtype.itemsize
        if self._scratch.nbytes < nbytes:
            # Aligned alike on every rank, so that vectorized folds treat the same elements alike.
            self._scratch = allocate((nbytes,), np.dtype(np.uint8))
        return self._scratch[:nbytes].view(dtype)

    def empty(self, count: int, dtype: DType) -> Bytes:
        return np.empty(count, dtype)

    def fold(self, op: str, dtype: DType, rows: Sequence[Bytes], out: Bytes) -> None:
        fold(op, dtype, rows, out)

    def prefixes(self, op: str, dtype: DType, rows: Sequence[Bytes], outs: Sequence[Bytes]) -> None:
        prefixes(op, dtype, rows, outs)

    @abc.abstractmethod
    def split(self, color: int | None, members: Sequence[int]) -> Transport | None:
        """Return the group of `members` (ranks of this group, in their new order), or None.

        Collective: every rank of this group calls it; `color` tells the new groups apart, and is
        None on a rank that belongs to none. May block.
        """

    @abc.abstractmethod
    def free(self) -> None:
        """Release the group, with every rank in it. May block."""

    @abc.abstractmethod
    def nodes(self) -> Sequence[int]:
        """For each rank, a number that it shares with the ranks on its node."""

    def offer_memory(self, nbytes: int) -> str:
        """Make memory that the ranks of this group can share; return its name, empty for none."""
        return ""

    def open_memory(self, name: str, nbytes: int) -> Bytes | None:
        """Return the memory that a rank has offered by this name, or None."""
        return None

    def close_memory(self, name: str) -> None:
        """Let no further rank open the memory; what is open stays so."""

    def progress(self) -> None:
        """Give movements of other ranks that involve this one a chance to go on."""

    def failed(self) -> list[int]:
        """Return the ranks whose process has died, where this transport outlives that."""
        return []

    def shrink(self) -> Transport | None:
        """Return the group of the ranks that live; None where this transport cannot do that.

        Called by every one of them; what is under way in the old group ends. May block.
        """
        return None

    def abort(self, code: int) -> None:
        """End the whole job at once, as far as this transport reaches."""
        raise SystemExit(code)
