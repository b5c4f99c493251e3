"""The devices of this process, and the memory of one, by CuPy's CUDA runtime."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from arraycomm._arrays.current_device import driver, working_on
from arraycomm._arrays.device_memory import Array, DeviceBuffer, DeviceMemory, Piece
from arraycomm._arrays.pinned import pinned
from arraycomm._cuda.driver import NOT_READY, call, check, status_of
from arraycomm._cuda.kernels import Kernels, Shown
from arraycomm._cuda.streams import cupy_stream
from arraycomm._dtypes import DType
from arraycomm._errors import BackendUnavailableError, TransportError, raise_interrupt
from arraycomm._protocol.mismatch import name_ranks, ranks_of

# cudaErrorInsufficientDriver
_INSUFFICIENT_DRIVER: Final = 35
# cudaMemcpyDefault: CUDA finds out from the addresses whether they are the host's.
_DEFAULT: Final = 4

_BYTE: Final = np.dtype(np.uint8)


def missing() -> str | None:
    """Say why CUDA devices cannot be used here, and what to do about it; None if they can."""
    try:
        import cupy
    except Exception as error:
        raise_interrupt(error)
        return (
            f"CuPy cannot be imported ({error}); install it, for CUDA 12 with: "
            "pip install cupy-cuda12x"
        )
    runtime = cupy.cuda.runtime
    if runtime.is_hip:
        return "this CuPy is built for ROCm; install one for CUDA, as in: pip install cupy-cuda12x"
    try:
        found = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        if error.status == _INSUFFICIENT_DRIVER:
            return f"there is no NVIDIA driver that CuPy could use ({error}); install a newer one"
        return f"there is no CUDA device to be had ({error}); look at CUDA_VISIBLE_DEVICES"
    return None if found else "there is no CUDA device; look at CUDA_VISIBLE_DEVICES"


def count() -> int:
    """Return how many devices this process sees."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def choose_device(local_rank: int, wanted: str | None) -> int:
    """Return the number of the device that a rank works on.

    Parameters
    ----------
    local_rank : int
        The rank's number on its node. If no number is wanted, ranks take the devices in turn.
    wanted : str or None
        "cuda", or "cuda:" and a number. None means "cuda".

    Raises
    ------
    ValueError
        There is no such device.
    """
    found = re.fullmatch(r"cuda(?::(\d+))?", "cuda" if wanted is None else wanted)
    devices = count()
    if found is None or not devices:
        raise ValueError(f'init: device must be "cuda" or "cuda:N"; got {wanted!r}')
    if found[1] is None:
        return local_rank % devices
    if int(found[1]) >= devices:
        raise ValueError(
            f"init: device {wanted!r} is not among the {devices} that this process sees, numbered "
            "from 0; look at CUDA_VISIBLE_DEVICES"
        )
    return int(found[1])


@dataclass(frozen=True)
class DeviceRequest:
    """What `init` was asked for: a backend ("nccl" requires NCCL, "mpi" rules it out), a device.

    `local_rank` is the one in the first communicator. Those of parts of its ranks differ from it.
    """

    backend: str = "auto"
    device: str | None = None
    local_rank: int = 0

    @classmethod
    def checked(cls, backend: str, device: str | None, local_rank: int) -> DeviceRequest:
        """Return the request, or raise if it cannot be met here."""
        if device in (None, "cpu") and backend != "nccl":
            return cls(backend, device, local_rank)
        if not isinstance(device, str | None):
            raise TypeError(f'init: device must be "cpu", "cuda" or "cuda:1"; got {device!r}')
        reason = missing()
        if reason is not None:
            wanted = f"device {device!r}" if backend != "nccl" else f"backend {backend!r}"
            raise BackendUnavailableError(f"init: {wanted} cannot be had: {reason}")
        if device != "cpu":
            choose_device(0, device)
        return cls(backend, device, local_rank)

    def number(self) -> int:
        """Return the number of this rank's device, the same in all communicators that follow."""
        return choose_device(self.local_rank, self.device)


def uuid(device: int) -> str:
    """Return the UUID of a device, or of a part of one (MIG), in hexadecimal digits."""
    # Not by CuPy, which cuts it off at the first byte that is zero.
    library = driver()
    if library is None:
        raise TransportError("CUDA's driver library, libcuda.so.1, cannot be loaded")
    number, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    status = (
        library.cuInit(0)
        or library.cuDeviceGet(ctypes.byref(number), device)
        or library.cuDeviceGetUuid_v2(found, number)
    )
    if status:
        raise TransportError(f"CUDA reported error {status} when asked for the UUID of a device")
    return bytes(found).hex()


def shared_devices(uuids: Sequence[str]) -> str:
    """Say which ranks share a device; empty if each has its own. `uuids` are in rank order."""
    groups = [name_ranks(own) for own in ranks_of(enumerate(uuids)).values() if len(own) > 1]
    return f"{' and '.join(groups)} share a CUDA device" if groups else ""


class current(working_on):  # noqa: N801
    """A context in which a device is current; CUDA's errors leave it as `TransportError`."""

    __slots__ = ()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        error = raised[1]
        if isinstance(error, RuntimeError):
            import cupy

            cuda = cupy.cuda
            if isinstance(error, (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError)):
                raise TransportError(f"CUDA reported: {error}") from error


class _Event:
    """A CUDA event, recorded on a stream."""

    def __init__(self, cuda: Any, device: int, stream: int | None = None) -> None:
        self._runtime = cuda.runtime
        self._device = device
        with current(device):
            self._event = cuda.Event(disable_timing=True)
            if stream is not None:
                self._runtime.eventRecord(self._event.ptr, stream)
        self._done = False

    @property
    def handle(self) -> int:
        """The event, as the driver has it."""
        return int(self._event.ptr)

    def renew(self) -> None:
        """Note that it has been recorded anew."""
        self._done = False

    def done(self) -> bool:
        # Not by CuPy: its `Event.done` treats an error as work that is still under way, and its
        # `eventQuery` holds the GIL, even while CUDA has it wait for another thread's call.
        if not self._done:
            with current(self._device):
                status = status_of(self._device, "cuEventQuery", self._event.ptr)
            if status != NOT_READY:
                check(status)
                self._done = True
        return self._done

    def wait_on(self, stream: int) -> None:
        with current(self._device):
            self._runtime.streamWaitEvent(stream, self._event.ptr)

    def synchronize(self) -> None:
        """Block this thread, without the GIL."""
        with current(self._device):
            self._runtime.eventSynchronize(self._event.ptr)


class CudaMemory(DeviceMemory):
    """The memory of one CUDA device, from CuPy's pool.

    The pool has a free list for each stream. Memory that is no longer used goes to later work on
    the same stream, which needs no wait.
    """

    def __init__(self, device: int) -> None:
        import cupy

        self.device = device
        self.stream = 0
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        with current(device):
            # Non-blocking: this stream and the legacy default stream do not wait for each other.
            self._own = cupy.cuda.Stream(non_blocking=True)
        self.own_stream = self._own.ptr

    def separate(self) -> Self:
        return type(self)(self.device)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        # CuPy rounds sizes up to multiples of 512 bytes, and aligns addresses to 512 bytes.
        cuda = self._cupy.cuda
        with current(self.device):
            if cuda.get_current_stream(self.device).ptr == self.stream:
                found = cuda.alloc(nbytes)
            else:
                with cupy_stream(self.stream, self.device):
                    found = cuda.alloc(nbytes)
        return DeviceBuffer(found.ptr, nbytes, _BYTE, found, self)

    def copy(self, target: DeviceBuffer, source: DeviceBuffer) -> None:
        self._copy(target.address, source.address, source.nbytes)

    def upload(self, array: Array) -> DeviceBuffer:
        made = self.allocate(array.nbytes).view(array.dtype)
        if array.nbytes:
            self._copy(made.address, array.ctypes.data, array.nbytes)
            # CUDA reads pinned memory later, and may do so with other memory.
            self.record().synchronize()
        return made

    def download(self, device_buffer: DeviceBuffer, into: Array) -> None:
        if into.nbytes != device_buffer.nbytes:
            raise ValueError(
                f"{device_buffer.nbytes} bytes do not fit in an array of {into.nbytes}"
            )
        if device_buffer.nbytes:
            self._copy(into.ctypes.data, device_buffer.address, device_buffer.nbytes)
        self.record().synchronize()

    def fold(self, op: str, dtype: DType, rows: Sequence[DeviceBuffer], out: DeviceBuffer) -> None:
        self._reduce("fold", op, dtype, rows, [out])

    def prefixes(
        self, op: str, dtype: DType, rows: Sequence[DeviceBuffer], outs: Sequence[DeviceBuffer]
    ) -> None:
        self._reduce("prefixes", op, dtype, rows, outs)

    def _reduce(
        self,
        kernel: str,
        op: str,
        dtype: DType,
        rows: Sequence[DeviceBuffer],
        outs: Sequence[DeviceBuffer],
    ) -> None:
        sources, targets = [each.address for each in rows], [each.address for each in outs]
        with current(self.device):
            self._kernels.reduce(kernel, op, dtype, sources, targets, len(outs[0]), self.stream)

    def gather_pieces(self, pieces: Sequence[Piece], target: DeviceBuffer) -> None:
        plain = [(0 if source is None else source.address, at, size) for source, at, size in pieces]
        with current(self.device):
            self._kernels.gather_pieces(plain, target.address, self.stream)

    def load(self, op: str | None = None, dtype: DType | None = None) -> None:
        with current(self.device):
            self._kernels.load(op, dtype)

    def record(self) -> _Event:
        return _Event(self._cupy.cuda, self.device, self.stream)

    def event(self) -> _Event:
        """Return an event that is recorded otherwise."""
        return _Event(self._cupy.cuda, self.device)

    def words(self, count: int) -> Array:
        found = pinned(self.device).empty(4 * count).view(np.uint32)
        found[...] = 0
        return found

    def write(self, word: int, value: int) -> None:
        # Within a call, in which the device is current.
        call(self.device, "cuStreamWriteValue32_v2", self.stream, word, value, 0)

    def spoil(
        self, device_buffer: DeviceBuffer, given_up: int, digests: DeviceBuffer | None = None
    ) -> None:
        nbytes, shown = device_buffer.nbytes, Shown.of(digests)
        if nbytes:
            with current(self.device):
                self._kernels.spoil(device_buffer.address, nbytes, given_up, shown, self.stream)

    def close(self) -> None:
        # CuPy's pool keeps memory for each stream, and would keep it for one that is gone.
        with current(self.device):
            self._cupy.get_default_memory_pool().free_all_blocks(self._own)

    @property
    def _kernels(self) -> Kernels:
        # Not kept: it allocates in the order of this object's stream.
        return Kernels(self.device, self.allocate)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        with current(self.device):
            self._runtime.memcpyAsync(target, source, nbytes, _DEFAULT, self.stream)
