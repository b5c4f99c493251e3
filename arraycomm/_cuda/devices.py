"""The devices of a communicator: the link between them, and a watch over the work under way.

The ranks choose the link together, in the first call with an array on a device. It is NCCL if every
rank can use that, MPI if it reads device memory, and otherwise MPI over copies in pinned memory. If
a rank has no device, all arrays are copied to the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from arraycomm._arrays.device_memory import Event
from arraycomm._collectives.custom_ops import Op
from arraycomm._collectives.placement import (
    HostPlacement,
    HostPlacements,
    Placements,
    StagedTreePlacement,
)
from arraycomm._cuda import arrays
from arraycomm._cuda.link import DeviceLink
from arraycomm._cuda.placement import DevicePlacement, TreePlacement, UploadedTreePlacement
from arraycomm._errors import BackendUnavailableError
from arraycomm._protocol import clock
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.details import exchange_details
from arraycomm._protocol.group import Group
from arraycomm._protocol.header import ALL_ON_DEVICE, digest
from arraycomm._transports.base import Steps

# Seconds between two checks of the work under way on devices.
_LOOK: Final = 0.02
# cudaStreamPerThread is another stream in each of the threads that NCCL works in.
_PER_THREAD: Final = 2


@dataclass(frozen=True)
class DeviceRequest:
    """What `init` was asked for: a backend ("nccl" requires NCCL, "mpi" rules it out), a device."""

    backend: str = "auto"
    device: str | None = None

    @classmethod
    def checked(cls, backend: str, device: str | None) -> DeviceRequest:
        """Return the request, or raise if it cannot be met here."""
        if device in (None, "cpu") and backend != "nccl":
            return cls(backend, device)
        if not isinstance(device, str | None):
            raise TypeError(f'init: device must be "cpu", "cuda" or "cuda:1"; got {device!r}')
        from arraycomm._cuda.device import choose_device, missing

        reason = missing()
        if reason is not None:
            wanted = f"device {device!r}" if backend != "nccl" else f"backend {backend!r}"
            raise BackendUnavailableError(f"init: {wanted} cannot be had: {reason}")
        if device != "cpu":
            choose_device(0, device)
        return cls(backend, device)


class _Pending(NamedTuple):
    """Work on a device that had not finished at the last check."""

    event: Event
    since: float


class Devices(HostPlacements):
    """The placements of one communicator if arrays may be on devices, and its devices' state.

    Attributes
    ----------
    request : DeviceRequest
        What `init` was asked for.
    link : DeviceLink or None
        Moves arrays between devices; None if they are copied to the host.
    reason : str
        Why the link is not NCCL.
    """

    def __init__(self, group: Group, request: DeviceRequest) -> None:
        super().__init__(group)
        self._group = group
        self.request = request
        self.link: DeviceLink | None = None
        self._negotiated = False
        self.reason = "no array on a device has been communicated so far"
        self._stream: int | None = None
        self._last: Event | None = None
        self._pending: list[_Pending] = []
        self._looking = threading.Lock()
        group.on_failure.append(self.abort)
        group.on_exit.append(self.finish)
        group.on_free.append(self.close)

    @property
    def device_name(self) -> str:
        """Where this rank makes arrays if no argument says where."""
        if self.request.device in (None, "cpu"):
            return "cpu"
        from arraycomm._cuda.device import choose_device

        return f"cuda:{choose_device(self._group.transport.local_rank, self.request.device)}"

    @property
    def negotiated(self) -> bool:
        return self._negotiated

    # Placements

    def on_device(self, x: Any) -> bool:
        return arrays.on_cuda(x)

    def of(self, *given: Any) -> HostPlacement:
        if self._negotiated and self.link is None:
            return self.host
        x = next((x for x in given if arrays.may_be_on_cuda(type(x)) and arrays.on_cuda(x)), None)
        if x is None or any(isinstance(argument, Op) for argument in given):
            return self.host
        if self.link is not None:
            return DevicePlacement(self._group, self.link, self, self._stream_for(x))
        # Ranks negotiate when a header shows an array on a device; check=False sends no headers.
        check = self._group.options.check
        return HostPlacement(self._group, ALL_ON_DEVICE) if check else self.host

    def of_tree(self, leaves: Sequence[Any]) -> HostPlacement:
        host = self.host_tree
        if (self._negotiated and self.link is None) or not self._group.options.check:
            return host
        if not any(map(arrays.may_be_on_cuda, set(map(type, leaves)))):
            return host
        on_device = [arrays.on_cuda(leaf) for leaf in leaves]
        if not any(on_device):
            return host
        # The ranks compare the flag, which differs if a leaf is on a device on some ranks only.
        flag = digest(on_device) >> 1 & (1 << 62) - 1 | 2
        if all(there or leaf is None for there, leaf in zip(on_device, leaves, strict=True)):
            flag = ALL_ON_DEVICE
        if self.link is None:
            return StagedTreePlacement(self._group, flag)
        stream = self._stream_for(leaves[on_device.index(True)])
        return TreePlacement(self._group, self.link, self, stream, flag)

    def of_mixed_tree(self, agreement: Agreement) -> HostPlacement:
        """Return the placement of a tree whose leaves are on the host on some ranks only.

        Ranks whose leaves are all on devices may have started before the header was checked. If so,
        this rank joins them.
        """
        link = self.link
        if link is not None and link.async_check and agreement.some_on_devices():
            return UploadedTreePlacement(self._group, link, self, self._own_stream, ALL_ON_DEVICE)
        return self.host_tree

    def joining_devices(self) -> HostPlacement:
        assert self.link is not None
        return DevicePlacement(self._group, self.link, self, self._own_stream)

    def _stream_for(self, x: Any) -> int:
        """Return the stream of a call: the framework's current one, if the link can use that."""
        stream = arrays.stream_of(x)
        return self._own_stream if stream is None or stream == _PER_THREAD else stream

    @property
    def _own_stream(self) -> int:
        assert self.link is not None
        return self.link.memory.own_stream

    # Negotiation

    def negotiate(self) -> Steps:
        """Choose a link together with the other ranks."""
        # Drivers and NCCL are looked for only once there is an array on a device.
        from arraycomm._cuda import selection

        local = selection.capabilities(self._group, self.request)
        replies = yield from exchange_details(self._group.control, local)
        self._negotiated = True
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
        return (yield from self.link.split(color, key))

    def child(self, group: Group, link: DeviceLink | None) -> Placements:
        made = Devices(group, self.request)
        group.backend = self._group.backend
        if link is not None or (self._negotiated and self.link is None):
            made._negotiated, made.link, made.reason = True, link, self.reason
        return made

    def for_survivors(self, group: Group) -> Placements:
        return Devices(group, self.request)

    # Work under way

    def enter(self, stream: int) -> None:
        """Continue in a stream, after this communicator's work in other streams."""
        assert self.link is not None
        self.link.memory.at(stream)
        if self._last is not None and self._stream != stream:
            self._last.wait_on(stream)
        self._stream = stream

    def leave(self) -> None:
        """Record that a call has put its work on the device."""
        if self.link is None:
            return
        self._last = self.link.memory.record()
        self._pending.append(_Pending(self._last, clock.now()))
        _watch.add(self)

    def look(self) -> bool:
        """Check deferred headers and the device's work; tell whether anything is under way."""
        with self._looking:
            group = self._group
            if self.link is None or group.closed is not None:
                self._pending.clear()
                return False
            try:
                self._look(self.link)
            except Exception as error:
                group.deferred_error = group.deferred_error or error
                group.close(error)
            return bool(self._pending) or not group.engine.idle

    def _look(self, link: DeviceLink) -> None:
        group = self._group
        # First, since an aborted operation looks finished to the device.
        error = link.error()
        if error is not None:
            raise error
        self._pending = [pending for pending in self._pending if not pending.event.done()]
        if not group.transport.threaded:
            # Only the calling thread may use MPI.
            return
        group.engine.advance()
        if self._pending and group.closed is None:
            group.watchdog.check(clock.now() - self._pending[0].since)

    @property
    def pending(self) -> bool:
        """Whether work is under way on the device."""
        return bool(self._pending)

    def check(self) -> None:
        """Raise if the work under way has been aborted, so that there is no result."""
        error = None if self.link is None else self.link.error()
        if self._group.closed is not None:
            raise self._group.closed_error("on the device")
        if error is not None:
            raise error

    def abort(self) -> None:
        """Abort the work under way, so that nothing on the device waits for it."""
        if self.link is not None:
            self.link.abort()

    def finish(self) -> None:
        """Wait for the work under way: other ranks' devices may wait for this one's part in it."""
        if self.link is not None and self._last is not None and self._group.closed is None:
            self._group.engine.wait_for(self._last.done)
            self.check()

    def close(self) -> None:
        """Wait for the work under way, and release the link."""
        if self.link is None:
            return
        self.finish()
        with self._looking:
            link, self.link = self.link, None
            self._pending.clear()
        link.close()


class _Watch:
    """A thread that checks the work on devices, as long as there is any.

    The caller may wait for its device outside Python. This thread then finds out that another rank
    has failed, or that the time is up, and ends the wait.
    """

    def __init__(self) -> None:
        self._devices: WeakSet[Devices] = WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, devices: Devices) -> None:
        """Check these until nothing is under way there."""
        with self._lock:
            self._devices.add(devices)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="arraycomm-devices", daemon=True)
                # If the system has no thread for it, the next call checks.
                with suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK)
            with self._lock:
                watched = list(self._devices)
            idle = [devices for devices in watched if not devices.look()]
            with self._lock:
                for devices in idle:
                    # Work that began meanwhile is pending, or its call adds these devices again.
                    if not devices.pending:
                        self._devices.discard(devices)
                if not self._devices:
                    self._thread = None
                    return


_watch = _Watch()
