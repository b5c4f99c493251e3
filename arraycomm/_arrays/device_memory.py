"""Memory on a device, as the algorithms use it: one-dimensional and contiguous, by address.

A `DeviceBuffer` only does arithmetic on addresses, so it can have dtypes that CuPy lacks. A
`DeviceMemory` does the work on the device, in the order of its current stream.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np

from arraycomm._dtypes import DType

Array = np.ndarray[Any, Any]
# One piece to pack: its source (None for zeros), its offset in the target, and its bytes.
Piece = tuple["DeviceBuffer | None", int, int]


class DeviceBuffer:
    """One-dimensional, contiguous memory on a device."""

    __slots__ = ("address", "dtype", "memory", "owner", "size")

    def __init__(
        self, address: int, count: int, dtype: DType, owner: object, memory: DeviceMemory
    ) -> None:
        self.address = address
        self.size = count
        self.dtype = dtype
        # Kept alive as long as this buffer and every slice of it.
        self.owner = owner
        # Copies elements that are assigned to a slice.
        self.memory = memory

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"<DeviceBuffer of {self.size} {self.dtype} at {self.address:#x}>"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def __getitem__(self, part: slice) -> DeviceBuffer:
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise ValueError(f"a device buffer is contiguous; got a step of {step}")
        address = self.address + start * self.dtype.itemsize
        return DeviceBuffer(address, max(stop - start, 0), self.dtype, self.owner, self.memory)

    def __setitem__(self, part: Any, source: DeviceBuffer) -> None:
        target = self if part is Ellipsis else self[part]
        if target.nbytes != source.nbytes:
            raise ValueError(f"{source.nbytes} bytes do not fit in {target.nbytes}")
        if target.nbytes and target.address != source.address:
            self.memory.copy(target, source)

    def view(self, dtype: Any) -> DeviceBuffer:
        """Return the same bytes as elements of another dtype."""
        wanted = np.dtype(dtype)
        if self.nbytes % wanted.itemsize:
            raise ValueError(f"{self.nbytes} bytes are not a whole number of {wanted}")
        count = self.nbytes // wanted.itemsize
        return DeviceBuffer(self.address, count, wanted, self.owner, self.memory)

    def copy(self) -> DeviceBuffer:
        """Return a copy in new memory."""
        made = self.memory.allocate(self.nbytes).view(self.dtype)
        made[...] = self
        return made

    def shares(self, other: DeviceBuffer) -> bool:
        """Return whether the two buffers overlap."""
        first, last = sorted((self, other), key=lambda buffer: buffer.address)
        return bool(first.nbytes and last.nbytes) and first.address + first.nbytes > last.address


class Event(Protocol):
    """A point in the order of a stream."""

    def done(self) -> bool:
        """Return whether the device has reached it; raise `TransportError` on an error of CUDA."""

    def wait_on(self, stream: int) -> None:
        """Have another stream wait for it; the host does not wait."""

    def synchronize(self) -> None:
        """Block this thread until the device has reached it."""


class DeviceMemory(abc.ABC):
    """The memory of one device, and the work on it, in the order of one stream.

    A call has its own object, from `at`: its caller and the thread that pushes it on share no
    stream.
    """

    # The device's number.
    device: int
    # A `cudaStream_t`; 0 is the legacy default stream.
    stream: int = 0
    # A stream that only this memory uses, for arrays whose framework does not tell its stream.
    own_stream: int = 0

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Return uninitialised bytes, aligned to 256 bytes, for use in the order of the stream."""

    @abc.abstractmethod
    def copy(self, target: DeviceBuffer, source: DeviceBuffer) -> None:
        """Copy the bytes of `source`."""

    @abc.abstractmethod
    def upload(self, array: Array) -> DeviceBuffer:
        """Return a copy of contiguous host memory on the device; `array` is free on return."""

    @abc.abstractmethod
    def download(self, device_buffer: DeviceBuffer, into: Array) -> None:
        """Copy to contiguous host memory, and wait for the copy."""

    @abc.abstractmethod
    def fold(self, op: str, dtype: DType, rows: Sequence[DeviceBuffer], out: DeviceBuffer) -> None:
        """Fold as `arraycomm._folds.fold`. `out` may be the first row, but overlaps no other."""

    @abc.abstractmethod
    def prefixes(
        self, op: str, dtype: DType, rows: Sequence[DeviceBuffer], outs: Sequence[DeviceBuffer]
    ) -> None:
        """Do what `arraycomm._folds.prefixes` does."""

    @abc.abstractmethod
    def gather_pieces(self, pieces: Sequence[Piece], target: DeviceBuffer) -> None:
        """Copy each piece to its offset in `target`, in as few kernel launches as possible."""

    @abc.abstractmethod
    def record(self) -> Event:
        """Return an event for the work that is on the stream now."""

    @abc.abstractmethod
    def words(self, count: int) -> Array:
        """Return numbers of 32 bits in pinned memory of the host, all 0."""

    @abc.abstractmethod
    def write(self, word: int, value: int) -> None:
        """Write a number of 32 bits to an address once the device comes to it.

        It is that of one of the `words`, or in this memory.
        """

    @abc.abstractmethod
    def spoil(
        self, device_buffer: DeviceBuffer, given_up: int, digests: DeviceBuffer | None = None
    ) -> None:
        """Set every bit if the word at `given_up`, one of `words`, is not 0 then on the device.

        Also if not all `digests` are equal. They are numbers of 64 bits.
        Floating-point numbers are NaN then.
        """

    def load(self, op: str | None = None, dtype: DType | None = None) -> None:
        """Load what folds elements of a dtype, or what does the work that depends on none.

        To load it later may wait until the device is idle, and so for other ranks.
        """

    def close(self) -> None:
        """Give back the memory kept for the own stream, to which nothing is added any more."""

    def separate(self) -> Self:
        """Return the memory of the same device with an own stream of its own."""
        return copy.copy(self)

    def at(self, stream: int) -> Self:
        """Return the same memory for work in another stream; this object keeps its own."""
        # Quicker than by the module `copy`: each call makes one.
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, stream=stream)
        return other
