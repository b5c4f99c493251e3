"""The order between streams, kept by events; the device waits for these, the host never does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from arraycomm._arrays.device_memory import DeviceMemory
from arraycomm._transports.base import Handle


def order(memory: DeviceMemory, first: Iterable[int], then: Iterable[int]) -> None:
    """Make the streams `then` wait for the work that is on the streams `first` now."""
    if first == then:
        return
    for before in first:
        later = [stream for stream in then if not is_same(stream, before)]
        if not later:
            continue
        event = memory.at(before).record()
        for stream in later:
            event.wait_on(stream)


def is_same(stream: int, other: int) -> bool:
    """Return whether two handles name one stream; 0 and 1 both name the legacy default stream."""
    return stream == other or {stream, other} == {0, 1}


class _Foreign:
    """Another library's stream, as the CUDA stream protocol describes it."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


def cupy_stream(stream: int, device: int) -> Any:
    """Return a raw stream as a CuPy stream, which can be made the current one."""
    import cupy

    # CuPy 14 deprecates `ExternalStream`, and CuPy 13 has nothing else.
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Foreign(stream))
    return cupy.cuda.ExternalStream(stream, device)


class Leases:
    """Objects whose memory the device still uses; they are kept alive until it has finished."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Handle, object]] = deque()

    def add(self, use: Handle, thing: object) -> None:
        """Keep `thing` alive until the device is done with a use of it."""
        self.sweep()
        self._kept.append((use, thing))

    def __len__(self) -> int:
        return len(self._kept)

    def sweep(self) -> None:
        """Release the objects that the device has finished with."""
        with suppress(IndexError):  # another thread may sweep as well
            for _ in range(len(self._kept)):
                kept = self._kept.popleft()
                finished = False
                try:
                    finished = kept[0].done()
                finally:
                    # The device may use it still if it cannot say so.
                    if not finished:
                        self._kept.append(kept)


# Arrays whose framework has no stream that could wait. Swept by every call of such arrays, and
# between calls by the thread that looks at events: JAX refuses to donate an array that is held
# here.
LEASES: Final = Leases()
