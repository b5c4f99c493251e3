"""What stands in for a device where there is none: memory of the host behind a stream that runs late.

Nothing is shown about CUDA or NCCL by it. It shows that calls take the device's way, that headers,
links and results fit together there, and that whoever reads too early reads what was there before.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from arraycomm import _explain, _folds
from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory, Event, Piece
from arraycomm._arrays.pinned import Staging
from arraycomm._arrays.views import NOTHING
from arraycomm._cuda import arrays, callers, selection
from arraycomm._cuda.gpu_aware_link import GpuAwareMpiLink
from arraycomm._cuda.link import DeviceLink
from arraycomm._cuda.staged_link import HostStagedLink
from arraycomm._transports.base import Steps

Array = np.ndarray[Any, Any]


def peek(device_buffer: DeviceBuffer) -> Array:
    """Return the elements where they are."""
    if not device_buffer.nbytes:
        return np.empty(0, device_buffer.dtype)
    raw: Any = (ctypes.c_ubyte * device_buffer.nbytes).from_address(device_buffer.address)
    return np.frombuffer(raw, np.uint8).view(device_buffer.dtype)


class _CurrentStream(threading.local):
    """The stream in which a thread's frameworks work; the default stream in a thread of its own."""

    stream = 0


CURRENT = _CurrentStream()


@contextmanager
def working_in(stream: int) -> Iterator[None]:
    """Have this thread's frameworks work in a stream for a while."""
    before, CURRENT.stream = CURRENT.stream, stream
    try:
        yield
    finally:
        CURRENT.stream = before


class _Mark:
    """Comes when it has been looked for twice, and does the work up to it."""

    def __init__(self, memory: LateMemory, end: int) -> None:
        self._memory, self._end, self._looks = memory, end, 0
        self._stream = memory.stream

    def done(self) -> bool:
        self._looks += 1
        if self._looks > 2:
            self._memory.catch_up(self._end, wait=False)
        return self._memory.finished >= self._end

    def wait_on(self, stream: int) -> None:
        """There is one order for all streams."""
        self._memory.queue.waits.append((stream, self._stream))


class Never:
    """A mark to which the device does not come."""

    def done(self) -> bool:
        return False

    def wait_on(self, stream: int) -> None:
        """What is to come after it does not matter."""


class _Queue:
    """The work on a device, in one order for all streams; in which streams it is, and what waits."""

    def __init__(self) -> None:
        self.begun = self.finished = 0
        self.work: deque[Callable[[], None]] = deque()
        self.streams: list[int] = []
        self.waits: list[tuple[int, int]] = []
        # Held to put work at the end, and to do what is there: several threads look at marks.
        self.putting, self.doing = threading.Lock(), threading.RLock()


class LateMemory(DeviceMemory):
    """Does nothing before somebody waits for it."""

    def __init__(self) -> None:
        self.device, self.stream = 0, 0
        self.queue = _Queue()

    @property
    def finished(self) -> int:
        return self.queue.finished

    def put(self, work: Callable[[], None]) -> None:
        """Put work at the end of the stream."""
        queue = self.queue
        with queue.putting:
            queue.streams.append(self.stream)
            queue.work.append(work)
            queue.begun += 1

    def catch_up(self, end: int | None = None, *, wait: bool = True) -> None:
        """Do what comes before `end`, or everything; if another thread does that, perhaps wait for it."""
        queue = self.queue
        if not queue.doing.acquire(wait):
            return
        try:
            while queue.finished < (queue.begun if end is None else end):
                queue.work.popleft()()
                queue.finished += 1
        finally:
            queue.doing.release()

    def allocate(self, nbytes: int) -> DeviceBuffer:
        made = np.full(nbytes + 256, 0xA5, np.uint8)
        skip = -made.ctypes.data % 256
        return DeviceBuffer(made.ctypes.data + skip, nbytes, np.dtype(np.uint8), made, self)

    def copy(self, target: DeviceBuffer, source: DeviceBuffer) -> None:
        self.put(lambda: np.copyto(peek(target.view("u1")), peek(source.view("u1")).copy()))

    def upload(self, array: Array) -> DeviceBuffer:
        made = self.allocate(array.nbytes).view(array.dtype)
        copied = array.copy()
        self.put(lambda: np.copyto(peek(made), copied))
        return made

    def download(self, device_buffer: DeviceBuffer, into: Array) -> None:
        self.catch_up()
        into[...] = peek(device_buffer)

    def fold(self, op: str, dtype: Any, rows: Sequence[DeviceBuffer], out: DeviceBuffer) -> None:
        self.put(lambda: _folds.fold(op, dtype, [peek(row).copy() for row in rows], peek(out)))

    def prefixes(
        self, op: str, dtype: Any, rows: Sequence[DeviceBuffer], outs: Sequence[DeviceBuffer]
    ) -> None:
        self.put(
            lambda: _folds.prefixes(op, dtype, [peek(row) for row in rows], [peek(o) for o in outs])
        )

    def gather_pieces(self, pieces: Sequence[Piece], target: DeviceBuffer) -> None:
        def gather() -> None:
            for source, offset, nbytes in pieces:
                part = peek(target.view("u1"))[offset : offset + nbytes]
                part[...] = 0 if source is None else peek(source.view("u1"))

        self.put(gather)

    def record(self) -> Event:
        return _Mark(self, self.queue.begun)


class DeviceArray:
    """An array on the device that is not there."""

    def __init__(
        self, array: Any, memory: LateMemory | None = None, framework: str = "standin"
    ) -> None:
        self.array = np.asarray(array)
        # Whose stream makes it, where it is a result.
        self.memory = memory
        self.framework = framework

    @property
    def __array_interface__(self) -> Any:
        return self.array.__array_interface__

    def __getitem__(self, part: Any) -> DeviceArray:
        return DeviceArray(self.array[part], self.memory, self.framework)

    def reshape(self, shape: tuple[int, ...]) -> DeviceArray:
        return DeviceArray(self.array.reshape(shape), self.memory, self.framework)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def host(self) -> Array:
        """Wait for it."""
        if self.memory is not None:
            self.memory.catch_up()
        return self.array


class _View(BufferView):
    def __init__(self, x: DeviceArray, memory: DeviceMemory) -> None:
        super().__init__(NOTHING, x.framework, x, not x.array.flags.writeable, False, ("cuda", 0))
        flat = np.ascontiguousarray(x.array).reshape(-1)
        self.device_buffer = DeviceBuffer(flat.ctypes.data, flat.size, flat.dtype, flat, memory)
        self.copied = flat.size > 0 and not np.may_share_memory(flat, x.array)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> Any:
        return self.source.dtype


def _seen() -> None:
    """Note in which stream this thread's frameworks make or change an array."""
    MADE_IN.append((threading.current_thread(), CURRENT.stream))


# What frameworks have made or changed: the threads, and the streams that were current there.
MADE_IN: list[tuple[threading.Thread, int]] = []


def _on_device(x: Any) -> bool:
    return isinstance(x, DeviceArray)


def _view(x: Any, name: str, memory: DeviceMemory) -> _View:
    if x.memory is not None:
        x.memory.catch_up()
    return _View(x, memory)


def _view_out(out: Any, shape: Any, dtype: Any, memory: DeviceMemory) -> _View:
    if out.shape != shape:
        raise ValueError(f"out must have the shape {shape}; got {out.shape}")
    out.memory = memory
    return _View(out, memory)


def _written(out: _View, flat: DeviceBuffer) -> Any:
    _seen()
    memory = out.device_buffer.memory
    assert isinstance(memory, LateMemory)
    memory.put(lambda: np.copyto(out.source.array, peek(flat).reshape(out.shape)))
    return out.source


def _empty_like(like: Any, shape: Any, dtype: Any, memory: LateMemory) -> tuple[Any, DeviceBuffer]:
    _seen()
    array = np.full(int(np.prod(shape)) * dtype.itemsize, 0xA5, np.uint8).view(dtype)
    made = DeviceArray(array.reshape(shape), memory, like.source.framework)
    return made, DeviceBuffer(array.ctypes.data, array.size, dtype, array, memory)


def _finish(made: Any, like: Any) -> Any:
    _seen()
    return made


class AheadLink(GpuAwareMpiLink):
    """Goes ahead of headers, as NCCL does."""

    name = "ahead"
    async_check = True


def staged(transport: Any, memory: DeviceMemory) -> HostStagedLink:
    """A link with memory of the host for pinned memory, and chunks of which a test has several."""
    return HostStagedLink(transport, memory, Staging(lambda n: np.full(n, 0xA5, np.uint8)), 1 << 14)


LINKS: dict[str, Callable[[Any, DeviceMemory], DeviceLink]] = {
    "ahead": AheadLink,
    "addressed": GpuAwareMpiLink,
    "staged": staged,
}


class Standin:
    """What tests may ask of the stand-in, and change."""

    def __init__(self, link: str = "ahead") -> None:
        self.available = True
        self.links: list[DeviceLink] = []
        # The link of each rank.
        self.link = LINKS[link]


@contextmanager
def devices(link: str = "ahead") -> Iterator[Standin]:
    """Have `DeviceArray`s taken for arrays on a device, for a while, and go over a link."""
    standin = Standin(link)

    def choose(group: Any, request: Any, replies: Any) -> Steps:
        yield from ()
        if any(reply.device for reply in replies):
            return None, "a rank has no device"
        link = standin.link(group.transport, LateMemory())
        standin.links.append(link)
        return link, "" if link.async_check else "rank 0: no NCCL"

    def capabilities(group: Any, request: Any) -> selection.DeviceCapabilities:
        return selection.DeviceCapabilities("" if standin.available else "no device")

    with ExitStack() as patches:
        for module, name, value in (
            (arrays, "on_cuda", _on_device),
            (_explain, "on_cuda", _on_device),
            (_explain, "device_view", _view),
            (arrays, "stream_of", lambda x: CURRENT.stream),
            (arrays, "check_stream", lambda x: None),
            (arrays, "device_view", _view),
            (arrays, "view_out", _view_out),
            (arrays, "commit_out", _written),
            (arrays, "empty_like", _empty_like),
            (arrays, "finish", _finish),
            (arrays, "release", lambda view: None),
            (selection, "capabilities", capabilities),
            (selection, "choose", choose),
        ):
            patches.enter_context(mock.patch.object(module, name, value))
        state = callers.State(lambda _: CURRENT.stream, working_in, int)
        patches.enter_context(mock.patch.dict(callers.STATES, standin=state))
        yield standin
