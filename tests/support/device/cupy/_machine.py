"""Devices in software: streams that do their work late, each in its own order, and the memory of the host.

What is read too early is what was there before, or poison, with which the pools fill what they take back.

They are as strict as CUDA's documents let a device be. All streams share a few queues, so that work waits for
what other streams were given before it. To allocate memory for which the pool has no block, to pin memory, to load
a module and to abort a communicator of NCCL waits for all streams.
"""

from __future__ import annotations

import _thread
import bisect
import ctypes
import itertools
import os
import random
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import numpy as np

Work = Callable[[], Any]

# cudaError_t and CUresult, which have the same numbers.
INVALID_VALUE: Final = 1
NO_CONTEXT: Final = 201
INVALID_HANDLE: Final = 400
NOT_READY: Final = 600
ILLEGAL_ADDRESS: Final = 700
LAUNCH_FAILURE: Final = 719
CAPTURE_UNSUPPORTED: Final = 900
CAPTURED: Final = 901

POISON: Final = 0xA5
ALIGNMENT: Final = 512
_noise: Final = random.Random()
# Half of the work waits for up to this many seconds before it is done.
LATE: Final = 3e-4
# How many queues the streams of a process share, if CUDA_DEVICE_MAX_CONNECTIONS does not say it; 8 is CUDA's default.
CONNECTIONS: Final = 1, 2, 8


class CudaError(RuntimeError):
    """As CuPy's `CUDARuntimeError` and `CUDADriverError`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class Note(NamedTuple):
    """One piece of work, the thread that put it on a stream, and the stream that it waits for there, if any."""

    thread: str
    stream: int
    what: str
    after: int | None


class Mark:
    """A place in the order of a stream."""

    __slots__ = ("_come", "stream")

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self._come = threading.Event()

    def come(self) -> bool:
        return self._come.is_set()

    def reach(self) -> None:
        self._come.set()

    def wait(self) -> None:
        self._come.wait()


class Queue:
    """A thread that does the work of several streams in the order in which it was put there."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        # Reentrant: memory is given back whenever Python deletes its owner, also in here.
        self._lock = threading.RLock()
        self._runs = False
        self._closed = False

    def put(self, work: Work) -> None:
        with self._lock:
            self._work.put(work)
            if self._closed:
                self._work.put(None)
            if not self._runs:
                self._runs = True
                # None of the `threading` module's: it makes no calls, for which another rank might wait.
                _thread.start_new_thread(self._run, ())

    def close(self) -> None:
        """Have the thread end after what is in the queue."""
        self._closed = True
        self._work.put(None)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if work is not None:
                work()
                # Before the next one comes, which may be long.
                del work
                continue
            with self._lock:
                if self._work.empty():
                    self._runs = False
                    return


class Stream:
    """One stream: work that a queue does in order, and late. `owner` is the rank that has it, if ranks are threads."""

    def __init__(
        self, machine: Machine, device: int, handle: int, owner: object, queue: Queue
    ) -> None:
        self.device, self.handle, self.owner = device, handle, owner
        # The thread that captures a graph from it, or 0.
        self.capturing = 0
        self._machine, self._queue = machine, queue
        # Its memory stays until the work is done, also behind a restart.
        self._pool = machine.pool
        # Reentrant as well.
        self._lock = threading.RLock()
        self._begun = self._finished = 0

    def put(self, what: str, work: Work, after: int | None = None) -> None:
        if self.capturing:
            raise CudaError(CAPTURED)
        thread = threading.current_thread().name
        self._machine.log.append(Note(thread, self.handle, what, after))
        with self._lock:
            self._begun += 1
            self._queue.put(partial(self._do, work))

    def _do(self, work: Work) -> None:
        if _noise.random() < 0.5:
            time.sleep(_noise.random() * LATE)
        try:
            work()
        except Exception:
            self._machine.fail(LAUNCH_FAILURE, traceback.format_exc())
        self._finished += 1

    @property
    def busy(self) -> bool:
        return self._begun != self._finished

    def mark(self, what: str = "mark") -> Mark:
        mark = Mark(self.handle)
        self.put(what, mark.reach)
        return mark

    def wait(self) -> None:
        if self.busy:
            self.mark("synchronize").wait()


class Block:
    """Memory of a pool."""

    __slots__ = ("end", "raw", "start", "stream")

    def __init__(self, size: int, stream: Stream) -> None:
        self.raw = np.empty(size + ALIGNMENT, np.uint8)
        self.raw.fill(POISON)
        address = self.raw.__array_interface__["data"][0]
        self.start = address + -address % ALIGNMENT
        self.end = self.start + size
        self.stream = stream

    def poison(self) -> None:
        ctypes.memset(self.start, POISON, self.end - self.start)


class Pool:
    """Memory of all devices, with free lists for each stream; freed memory is poisoned in its stream's order."""

    def __init__(self) -> None:
        self.total = 0
        self._free: dict[tuple[Stream, int], list[Block]] = defaultdict(list)
        self._blocks: dict[int, Block] = {}
        self._starts: list[int] = []
        self._lock = threading.RLock()
        # Given back at any time, also by a thread that holds the lock.
        self._back: deque[Block] = deque()

    def take(self, nbytes: int, stream: Stream) -> Block:
        self.sweep()
        size = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
        with self._lock:
            free = self._free[stream, size]
            if free:
                return free.pop()
        machine.wait_for_all(stream.owner)
        with self._lock:
            block = Block(size, stream)
            self.total += size
            self._blocks[block.start] = block
            bisect.insort(self._starts, block.start)
            return block

    def give_back(self, block: Block) -> None:
        self._back.append(block)

    def sweep(self) -> None:
        while self._back:
            try:
                block = self._back.popleft()
            except IndexError:
                return
            if not block.stream.capturing:
                block.stream.put("free", block.poison)
            with self._lock:
                self._free[block.stream, block.end - block.start].append(block)

    def drop(self, handle: int | None = None) -> None:
        """Give up what is free, for one stream or for all, once nothing is under way there."""
        self.sweep()
        with self._lock:
            chosen = [key for key in self._free if handle is None or key[0].handle == handle]
            dropped = [block for key in chosen for block in self._free.pop(key)]
        for stream in {block.stream for block in dropped}:
            stream.wait()
        with self._lock:
            for block in dropped:
                self.total -= block.end - block.start
                del self._blocks[block.start]
                self._starts.remove(block.start)

    def find(self, address: int) -> Block | None:
        with self._lock:
            place = bisect.bisect_right(self._starts, address) - 1
            block = self._blocks[self._starts[place]] if place >= 0 else None
        return block if block is not None and address < block.end else None


class _Thread(threading.local):
    """What belongs to each thread: its current device, whether it has a context, its streams."""

    def __init__(self) -> None:
        self.device = 0
        self.bound = False
        # CuPy's current stream on each device, and those before it.
        self.current: dict[int, Any] = {}
        self.before: list[Any] = []
        self.capture_mode = 0
        # What this thread's streams belong to: a rank if ranks are threads, otherwise the process.
        self.owner: object = None


class Machine:
    """The devices of this process, and what was asked of them."""

    # Handles are never used again, by no machine either.
    _handles = itertools.count(0x7F0000001000, 0x100)

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}
        self._defaults: dict[int, Stream] = {}
        self._queues: dict[Any, Queue] = {}
        self.restart()

    def restart(self, devices: int | None = None) -> None:
        """Begin anew, with as many devices as CUDA_VISIBLE_DEVICES lists if no number is given, or one."""
        for queue in self._queues.values():
            queue.close()
        # How many devices there are, or an error that is reported instead.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        self.devices: int | CudaError = len(visible) if devices is None else devices
        # The devices on which this process has a context.
        self.contexts: set[int] = set()
        # The error that all calls report from now on.
        self.error = 0
        self.tracebacks: list[str] = []
        self.log: deque[Note] = deque(maxlen=100_000)
        self.pool = Pool()
        self.pinned: dict[int, int] = {}
        # Memory that is pinned no more: what still uses it does no harm.
        self.unpinned: deque[Any] = deque(maxlen=64)
        self.marks: dict[int, tuple[int, Mark | None]] = {}
        self.here = _Thread()
        self._streams = {}
        self._defaults = {}
        # The queues of each owner; how many there are, and how many streams it has made.
        self._queues = {}
        connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
        self.connections = int(connections) if connections else _noise.choice(CONNECTIONS)
        self._made: Counter[object] = Counter()
        self._making = threading.Lock()

    # Devices

    def count(self) -> int:
        if isinstance(self.devices, CudaError):
            raise self.devices
        return self.devices

    def use(self, device: int) -> None:
        """Make a device current, as `cudaSetDevice` does since CUDA 12: it makes a context."""
        if not 0 <= device < self.count():
            raise CudaError(101)
        self.here.device, self.here.bound = device, True
        self.contexts.add(device)

    def enter(self) -> None:
        """Do what every call of the runtime does that needs a context."""
        if self.error:
            raise CudaError(self.error)
        self.use(self.here.device)

    def fail(self, status: int, reason: str = "") -> None:
        """Have all calls report an error, as CUDA does after one on a device."""
        self.error = self.error or status
        if reason:
            self.tracebacks.append(reason)

    # Streams and events

    def new_stream(self) -> int:
        self.enter()
        handle = next(self._handles)
        with self._making:
            self._streams[handle] = self._make(self.here.device, handle)
        return handle

    def _make(self, device: int, handle: int) -> Stream:
        owner = self.here.owner
        key = owner, device, self._made[owner] % self.connections
        self._made[owner] += 1
        if key not in self._queues:
            self._queues[key] = Queue()
        return Stream(self, device, handle, owner, self._queues[key])

    def close_stream(self, handle: int) -> None:
        """Destroy a stream; what is on it is still done."""
        self._streams.pop(handle, None)

    def stream(self, handle: int) -> Stream:
        """Return a stream of the current device."""
        self.enter()
        self.pool.sweep()
        return self.stream_of(self.here.device, handle)

    def stream_of(self, device: int, handle: int) -> Stream:
        if handle in (0, 1, 2):
            with self._making:
                key = device << 2 | handle & 2
                if key not in self._defaults:
                    self._defaults[key] = self._make(device, handle & 2)
                return self._defaults[key]
        found = self._streams.get(handle)
        if found is None or found.device != device:
            raise CudaError(INVALID_HANDLE)
        return found

    def wait(self, stream: int) -> None:
        self.stream(stream).wait()
        self.enter()

    def synchronize(self) -> None:
        """Wait for all work."""
        self.pool.sweep()
        for stream in (*self._streams.values(), *self._defaults.values()):
            stream.wait()

    def wait_for_all(self, owner: object) -> None:
        """Wait for all work of one owner, as much as CUDA may do so to get memory or to give it back."""
        for stream in (*list(self._streams.values()), *list(self._defaults.values())):
            if stream.owner == owner and not stream.capturing:
                stream.wait()

    def new_event(self) -> int:
        self.enter()
        handle = next(self._handles)
        self.marks[handle] = self.here.device, None
        return handle

    def record(self, event: int, stream: int) -> None:
        found = self.stream(stream)
        device, _ = self.marks[event]
        if device != found.device:
            raise CudaError(INVALID_HANDLE)
        self.marks[event] = device, found.mark("record")

    def wait_event(self, stream: int, event: int, _flags: int = 0) -> None:
        _, mark = self.marks[event]
        found = self.stream(stream)
        if mark is not None:
            found.put("wait", mark.wait, mark.stream)

    def query(self, event: int) -> int:
        _, mark = self.marks[event]
        owned = [
            stream for stream in list(self._streams.values()) if stream.owner == self.here.owner
        ]
        # Unless its mode is relaxed, a thread may not ask while another one captures.
        if self.here.capture_mode != 2 and {s.capturing for s in owned} - {
            0,
            threading.get_ident(),
        }:
            return CAPTURE_UNSUPPORTED
        return self.error or (0 if mark is None or mark.come() else NOT_READY)

    def synchronize_event(self, event: int) -> None:
        self.enter()
        _, mark = self.marks[event]
        if mark is not None:
            mark.wait()
        self.enter()

    # Memory

    def pin(self, start: int, end: int) -> None:
        self.enter()
        self.wait_for_all(self.here.owner)
        self.pinned[start] = end

    def unpin(self, start: int, space: Any) -> None:
        self.pinned.pop(start, None)
        self.unpinned.append(space)

    def is_pinned(self, address: int) -> bool:
        return any(start <= address < end for start, end in list(self.pinned.items()))

    def copy(self, target: int, source: int, nbytes: int, _kind: int, stream: int) -> None:
        """Copy later; but ordinary memory of the host is read now."""
        found = self.stream(stream)
        there = [self.pool.find(address) is not None for address in (target, source)]
        if not any(there) and not (self.is_pinned(target) and self.is_pinned(source)):
            raise CudaError(INVALID_VALUE)
        if there[1] or self.is_pinned(source):
            found.put("copy", lambda: ctypes.memmove(target, source, nbytes))
        else:
            aside = ctypes.string_at(source, nbytes)
            found.put("copy", lambda: ctypes.memmove(target, aside, nbytes))


machine: Final = Machine()
