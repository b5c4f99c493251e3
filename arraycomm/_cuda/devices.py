"""The devices of a communicator: the link between them, and a watch over the work under way.

The ranks choose the link together, in the first call with an array on a device. It is NCCL if every
rank can use that, MPI if it reads device memory, and otherwise MPI over copies in pinned memory. If
a rank has no device, all arrays are copied to the host.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final
from weakref import WeakSet

import numpy as np

from arraycomm._arrays.current_device import spare_captures
from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory, Event
from arraycomm._calls.custom_ops import Op
from arraycomm._calls.operation import Operation
from arraycomm._calls.placement import HostPlacement, Placements
from arraycomm._cuda import arrays
from arraycomm._cuda.callers import Waiters
from arraycomm._cuda.device import CudaMemory, DeviceRequest, current
from arraycomm._cuda.frameworks import framework_of
from arraycomm._cuda.links.link import DeviceLink
from arraycomm._cuda.links.nccl_link import NcclLink
from arraycomm._cuda.placement import (
    CopiedPlacement,
    CopiedTreePlacement,
    DevicePlacement,
    PlainPlacement,
    TreePlacement,
    UploadedTreePlacement,
)
from arraycomm._cuda.prepared import Found, Make, PreparedCall, Recording, result_of
from arraycomm._cuda.streams import LEASES
from arraycomm._errors import BackendUnavailableError, raise_interrupt
from arraycomm._native import compiled
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.details import exchange_details
from arraycomm._protocol.group import Group
from arraycomm._protocol.header import ALL_ON_DEVICE, ON_HOST, digest, digest_of, encode
from arraycomm._protocol.waits import clock
from arraycomm._protocol.waits.progress import ProgressThread
from arraycomm._reduce.selection import GATHER_BYTES
from arraycomm._transports.base import Steps

# Seconds between two looks at the work under way on devices.
_LOOK: Final = 0.02
_DIGEST: Final = np.dtype(np.uint64)


class _Progress:
    """How far the device has come with the calls of a communicator; to read it asks CUDA nothing.

    The device writes a number to memory of the host where a call begins and where it ends: an odd
    one and an even one. So the time for which a call waits there for other ranks is told from the
    time that the caller's own work takes before it.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        # The number, and whether the calls under way are given up.
        self._number, self._given_up = memory.words(2).reshape(2, 1)
        self.addresses = self._number.ctypes.data, self._given_up.ctypes.data
        self._last = self._seen = 0
        self._since = 0.0

    def begin(self, memory: DeviceMemory) -> None:
        """Put the beginning of a call on the memory's stream."""
        memory.write(self.addresses[0], self.next())

    def end(self, memory: DeviceMemory) -> None:
        """Put the end of that call on the memory's stream."""
        self.over()
        memory.write(self.addresses[0], self._last)

    def next(self) -> int:
        """Return the number of the beginning of a call, to be put on its stream."""
        self._last = ((self._last + 1) | 1) % (1 << 32)
        return self._last

    def over(self) -> None:
        """Note that the end of that call is put there too; its number is the next one."""
        self._last = (self._last + 1) % (1 << 32)

    @property
    def pending(self) -> bool:
        """Whether the host must still put a call's end on its stream, or the device reach it."""
        return bool(self._last & 1) or int(self._number[0]) != self._last

    def waited(self) -> float:
        """Return for how many seconds the device has been seen in the call that it is in now."""
        number = int(self._number[0])
        if number != self._seen:
            self._seen, self._since = number, clock.now()
        return clock.now() - self._since if number & 1 else 0.0

    def give_up(self) -> None:
        """Have the results spoilt to which the device is still to come."""
        self._given_up[0] = 1
        if self.pending:
            _GIVEN_UP.append(self)


# The memory to which a device may still write.
_GIVEN_UP: Final[list[_Progress]] = []


class Devices(Placements):
    """The placements of one communicator if arrays may be on devices, and its devices' state.

    `request` is what `init` was asked for.
    """

    def __init__(self, group: Group, request: DeviceRequest) -> None:
        super().__init__(group)
        self.host = PlainPlacement(group, self)
        self._group = group
        self.request = request
        # Moves arrays between devices; None if they are copied to the host.
        self.link: DeviceLink | None = None
        self._progress: _Progress | None = None
        self.negotiated = False
        # Why the link is not NCCL.
        self.reason = "no array on a device has been communicated so far"
        self._stream: int | None = None
        self._last: Event | None = None
        # For the elements of all ranks in prepared calls, which are in order.
        self._scratch: DeviceBuffer | None = None
        # Of the headers of one call at a time, which are in order as well.
        self.digests: DeviceBuffer | None = None
        self._looking = threading.Lock()
        group.on_failure.append(self.abort)
        group.on_exit.append(self.finish)
        group.on_free.append(self.close)

    @property
    def device_name(self) -> str:
        """Where this rank makes arrays if no argument says where."""
        if self.request.device in (None, "cpu"):
            return "cpu"
        return f"cuda:{self.request.number()}"

    # Placements

    def is_other_on_device(self, x: Any) -> bool:
        return arrays.on_cuda(x)

    def of_others(self, others: Sequence[Any], is_request: bool) -> HostPlacement:
        x = next(filter(arrays.on_cuda, others), None)
        if x is None:
            return self.host
        streams = arrays.check_stream(x, self._home)
        custom = any(isinstance(argument, Op) for argument in others)
        if self.link is not None and not custom:
            stream = self._stream_for(streams, is_request)
            return DevicePlacement(self._group, self.link, self, stream)
        # Ranks negotiate when a header shows an array on a device; check=False sends no headers.
        undecided = not self.negotiated and self._group.options.check and not custom
        flag = ALL_ON_DEVICE if undecided else ON_HOST
        return CopiedPlacement(self._group, self, flag, arrays.number_of(x))

    def of_other_tree(self, leaves: Sequence[Any], is_request: bool) -> HostPlacement:
        on_device = [arrays.on_cuda(leaf) for leaf in leaves]
        if not any(on_device):
            return self.host_tree
        first = leaves[on_device.index(True)]
        one_of_each = {type(x): x for x, there in zip(leaves, on_device, strict=True) if there}
        streams = {
            kind: arrays.check_stream(leaf, self._home) for kind, leaf in one_of_each.items()
        }
        if (self.negotiated and self.link is None) or not self._group.options.check:
            return CopiedTreePlacement(self._group, self, ON_HOST, arrays.number_of(first))
        # The ranks compare the flag, which differs if a leaf is on a device on some ranks only.
        flag = digest(on_device) >> 1 & (1 << 62) - 1 | 2
        if all(there or leaf is None for there, leaf in zip(on_device, leaves, strict=True)):
            flag = ALL_ON_DEVICE
        if self.link is None:
            return CopiedTreePlacement(self._group, self, flag, arrays.number_of(first))
        stream = self._stream_for(streams[type(first)], is_request)
        return TreePlacement(self._group, self.link, self, stream, flag)

    def of_mixed_tree(self, agreement: Agreement) -> HostPlacement:
        """Return the placement of a tree whose leaves are on the host on some ranks only.

        Ranks whose leaves are all on devices may have started before the header was checked. If so,
        this rank joins them.
        """
        link = self.link
        if link is not None and link.async_check and ALL_ON_DEVICE in agreement.device_flags():
            return UploadedTreePlacement(self._group, link, self, self._own_stream, ALL_ON_DEVICE)
        return self.host_tree

    def joining_devices(self) -> HostPlacement:
        if self.link is None:
            # The ranks whose headers say otherwise began before the choice, and copy to the host
            # now.
            return self.host
        return DevicePlacement(self._group, self.link, self, self._own_stream)

    def _stream_for(self, streams: Sequence[int], is_request: bool) -> int:
        """Return a call's stream: a blocking one's is the framework's current one, if shown."""
        return self._own_stream if is_request or not streams else streams[0]

    @property
    def _home(self) -> int | None:
        return None if self.link is None else self.link.memory.device

    @property
    def _own_stream(self) -> int:
        assert self.link is not None
        return self.link.memory.own_stream

    # Negotiation

    def negotiate(self) -> Steps:
        """Choose a link together with the other ranks."""
        # Drivers and NCCL are looked for only once there is an array on a device.
        from arraycomm._cuda import selection

        ProgressThread.prepare = spare_captures
        local = selection.capabilities(self._group, self.request)
        replies = yield from exchange_details(self._group.control, local)
        self.negotiated = True
        self.link, self.reason = yield from selection.choose(self._group, self.request, replies)

    def require(self) -> None:
        """Negotiate now, and raise on every rank if the link is not NCCL."""
        self._group.run(self.negotiate())
        if self.link is None or self.link.name != "nccl":
            raise BackendUnavailableError(f"init: NCCL cannot be used: {self.reason}")

    def split(self, color: int | None, key: int) -> Steps:
        """Return the link of the ranks of one color, or None without a link; collective."""
        if self.link is None:
            return None
        if self.link.async_check:
            # NCCL may hang if it splits a communicator with work under way.
            self.finish()
        return (yield from self.link.split(color, key))

    def child(self, group: Group, link: DeviceLink | None) -> Placements:
        made = Devices(group, self.request)
        group.backend = self._group.backend
        if link is None and self.link is not None and not group.options.check:
            # Ranks that show no headers cannot find out that they have to choose one.
            link = self.link.over(group.transport)
        if link is not None or (self.negotiated and self.link is None):
            made.negotiated, made.link, made.reason = True, link, self.reason
        return made

    def for_survivors(self, group: Group) -> Placements:
        return Devices(group, self.request)

    # Work under way

    def begin(self, memory: DeviceMemory) -> None:
        """Put the beginning of a call on the memory's stream, after work in other streams."""
        if self._last is not None and self._stream != memory.stream:
            self._last.wait_on(memory.stream)
        self._stream = memory.stream
        if self.link is not None and self.link.async_check:
            self._progress = self._progress or _Progress(memory)
            if self.digests is None:
                room = _DIGEST.itemsize * (self._group.size + 1)
                self.digests = memory.allocate(room).view(_DIGEST)
            self._progress.begin(memory)
            # This thread may have to wait in CUDA for a rank that does not come.
            _watch.add(self)

    def guard(self, result: DeviceBuffer, digests: DeviceBuffer | None) -> None:
        """Let nobody take the result of a call for right that is given up, or differs elsewhere.

        It is spoilt then, and the next call raises. Elsewhere the call itself raises.
        """
        if self._progress is not None:
            _, given_up = self._progress.addresses
            result.memory.spoil(result, given_up, digests)

    def leave(self, memory: DeviceMemory, waiters: Waiters | None) -> None:
        """Record that a call has put its work on the device."""
        if self.link is None:
            return
        if self._progress is not None:
            self._progress.end(memory)
        self._last = memory.record()
        if waiters is not None:
            self.follow = partial(waiters.wait, self._last)
        if len(LEASES):
            _sweep.add(self)

    def prepare(
        self, make: Make, x: Sequence[Any], out: Any
    ) -> tuple[PreparedCall, Operation] | None:
        framework, link, progress = framework_of(x[0]), self.link, self._progress
        if framework is None or not isinstance(link, NcclLink) or link.size == 1:
            return None
        memory = link.memory
        if compiled is None or progress is None or not isinstance(memory, CudaMemory):
            return None
        if None in [framework.plain_address(each, memory.device) for each in x]:
            return None
        (stream,) = framework.streams(memory.device)
        if stream == memory.own_stream or {framework_of(each) for each in x} != {framework}:
            return None
        with current(memory.device):
            memory, prepared, first = memory.at(stream), None, None
            for in_place in (False, True)[: 1 + (out is not None)]:
                recording = Recording(self._group, link, self, memory, len(x), in_place=in_place)
                made, moving = make(recording)
                if in_place and (made.target is None or made.target.shape != tuple(x[0].shape)):
                    break
                first = first or made
                prepared = prepared or PreparedCall(framework, link, memory, made.nbytes)
                if made.may_go_ahead and self.digests is not None:
                    # Other calls wait for their headers.
                    prepared.digest = prepared.digest or self._digest_of(made, link.at(stream))
                    recording.link.gather_digests(prepared.digest, self.digests)
                prepared.parts = result_of(moving)
                word = progress.addresses[0]
                if not prepared.add(recording, word, len(x), in_place=in_place):
                    return None
            if prepared is None or first is None:
                return None
            # Now: a later call would wait for the device, behind a call that waits for ranks.
            self._scratch_of(prepared.scratch_bytes, memory, stream)
            return prepared, first

    def _digest_of(self, made: Operation, link: NcclLink) -> DeviceBuffer:
        """Return the digest of a call's header, on the device."""
        found = link.empty(1, _DIGEST)
        header = encode(made.signature, -1, device_flag=ALL_ON_DEVICE)
        link.put_digest(digest_of(header), found)
        return found

    def _scratch_of(self, nbytes: int, memory: DeviceMemory, stream: int) -> DeviceBuffer:
        """Return memory for a prepared call in a stream, that of all if it is little."""
        if nbytes > GATHER_BYTES:
            return memory.at(stream).allocate(nbytes)
        if self._scratch is None:
            self._scratch = memory.at(memory.own_stream).allocate(GATHER_BYTES)
        return self._scratch

    def put(
        self, prepared: PreparedCall, found: Found, show: Callable[[None], None], *, beside: bool
    ) -> Callable[[], None] | None:
        """Put a prepared call on its stream, after this communicator's work in other streams."""
        link, progress = self.link, self._progress
        assert isinstance(link, NcclLink)
        assert progress is not None
        stream = link.memory.own_stream if beside else prepared.stream
        if self._last is not None and self._stream != stream:
            self._last.wait_on(stream)
        self._stream = stream
        scratch = self._scratch_of(prepared.scratch_bytes, link.memory, stream)
        event = prepared.event_beside() if beside else prepared.event
        number = progress.next()
        _watch.add(self)
        done = prepared.begin(found, number, stream, event.handle, scratch.address, show)
        while not done:
            self._group.engine.wait_for(prepared.has_put)
            done = prepared.go_on(found)
        progress.over()
        event.renew()
        self._last = event
        if len(LEASES):
            _sweep.add(self)
        return prepared.follow(found, event) if beside else None

    def look(self, waited: float = 0.0) -> None:
        """Check deferred headers, NCCL's errors, and whether other ranks are late.

        It asks CUDA nothing. A call to CUDA may wait for another thread's, such as an allocation,
        that waits for a movement which only an abort from here ends.
        """
        with self._looking:
            group = self._group
            if self.link is not None and group.closed is None:
                with self._closing_on_error():
                    self._look(self.link)

    def _look(self, link: DeviceLink) -> None:
        group = self._group
        # Only the calling thread may use MPI if MPI is not threaded.
        if group.transport.threaded:
            group.engine.push_follower()
            if group.closed is not None:
                return
        error = link.error()
        if error is not None:
            raise error
        if self._progress is not None and group.transport.threaded:
            waited = self._progress.waited()
            if waited:
                group.watchdog.check(waited)

    def sweep(self) -> None:
        """Release what was kept for work that the device has done."""
        with self._closing_on_error():
            LEASES.sweep()

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        group = self._group
        try:
            yield
        except Exception as error:
            raise_interrupt(error)
            group.deferred_error = group.deferred_error or error
            group.close(error)

    @property
    def under_way(self) -> bool:
        """Whether there is anything to look at: a call on the device, or its header."""
        group = self._group
        if self.link is None or group.closed is not None:
            return False
        on_device = self._progress is not None and self._progress.pending
        return on_device or not group.engine.idle

    def check(self) -> None:
        """Raise if the work under way has been aborted, so that there is no result."""
        error = None if self.link is None else self.link.error()
        if self._group.closed is not None:
            raise self._group.closed_error("on the device")
        if error is not None:
            raise error

    def abort(self) -> None:
        """Abort the work under way, so that nothing on the device waits for it."""
        if self._progress is not None:
            self._progress.give_up()
        if self.link is not None:
            self.link.abort()

    def finish(self) -> None:
        """Wait for the work under way: other ranks' devices may wait for this one's part in it."""
        if self.link is not None and self._last is not None and self._group.closed is None:
            # However long this rank's own work takes; `look` sees whether other ranks are late.
            self._group.engine.wait_for(self._last.done, self.look)
            self.check()

    def close(self) -> None:
        """Wait for the work under way, and release the link."""
        if self.link is None:
            return
        self.finish()
        with self._looking:
            link, self.link, self._scratch, self.digests = self.link, None, None, None
        link.close()
        link.memory.close()


class _Watch:
    """A thread that looks at the work on devices, as long as they are busy."""

    def __init__(
        self, name: str, look: Callable[[Devices], None], busy: Callable[[Devices], bool]
    ) -> None:
        self._name = name
        self._look = look
        self._busy = busy
        self._devices: WeakSet[Devices] = WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, devices: Devices) -> None:
        """Check these until nothing is under way there."""
        with self._lock:
            self._devices.add(devices)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                # If the system has no thread for it, the next call checks.
                with suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        spare_captures()
        while True:
            time.sleep(_LOOK)
            with self._lock:
                watched = list(self._devices)
            for devices in watched:
                self._look(devices)
            with self._lock:
                for devices in watched:
                    # What begins meanwhile is under way, or its call adds these devices again.
                    if not self._busy(devices):
                        self._devices.discard(devices)
                if not self._devices:
                    self._thread = None
                    return


# The caller may wait for its device outside Python. One thread then finds out that another rank has
# failed, or that the time is up, and ends the wait. Another looks at events, and may have to wait
# for CUDA meanwhile.
_watch = _Watch("arraycomm-devices", Devices.look, operator.attrgetter("under_way"))
_sweep = _Watch("arraycomm-events", Devices.sweep, lambda _: bool(len(LEASES)))
