"""Which link the arrays on devices take, and the watch over what is under way there.

The ranks choose together, when a call first shows that one of them has an array on a device: NCCL
where every rank can, else MPI where that reads device memory, else copies in pinned memory. Where a
rank has no device, all arrays are host memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakSet

from arraycomm._collectives.custom_ops import Op
from arraycomm._collectives.placement import (
    ALL_ON_DEVICE,
    DevicePlacement,
    HostPlacement,
    StagedTreePlacement,
    TreePlacement,
    UploadedTreePlacement,
)
from arraycomm._cuda import arrays
from arraycomm._errors import BackendUnavailableError
from arraycomm._protocol.header import Agreement, Steps, digest, exchange_details

if TYPE_CHECKING:
    from arraycomm._arrays.device_memory import Event
    from arraycomm._communicator import Communicator
    from arraycomm._transports.base import DeviceLink

# Seconds between two looks at what is under way on devices.
_LOOK: Final = 0.02
# cudaStreamPerThread is another stream in each of the threads that NCCL works in.
_PER_THREAD: Final = 2


@dataclass(frozen=True)
class DeviceRequest:
    """What `init` was asked for: "nccl" must be NCCL, "mpi" must not, and a device by name."""

    backend: str = "auto"
    device: str | None = None


class _Pending(NamedTuple):
    """Work on a device that was under way when it was last looked at."""

    event: Event
    since: float


class Devices:
    """The devices' side of one communicator.

    Attributes
    ----------
    link : DeviceLink or None
        What arrays on devices go over; None where they are taken for host memory.
    decided : bool
        Whether the ranks have chosen.
    reason : str
        Why it is not NCCL.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.device_request = DeviceRequest()
        self.link: DeviceLink | None = None
        self.negotiated = False
        self.reason = "no array on a device has been communicated so far"
        self._stream: int | None = None
        self._last: Event | None = None
        self._pending: list[_Pending] = []
        self._looking = threading.Lock()

    @property
    def name(self) -> str:
        """Where this rank makes arrays when no argument tells it."""
        return "cpu" if self.device_request.device in (None, "cpu") else self._device_name()

    def _device_name(self) -> str:
        from arraycomm._cuda.device import choose_device

        return f"cuda:{choose_device(self._comm.local_rank, self.device_request.device)}"

    # Ways

    def placement(self, args: tuple[Any, ...]) -> HostPlacement:
        """Return the way of a call's arrays."""
        host = self._comm._host_placement
        if self.negotiated and self.link is None:
            return host
        x = next(
            (arg for arg in args if arrays.may_be_on_cuda(type(arg)) and arrays.on_cuda(arg)), None
        )
        if x is None or any(isinstance(arg, Op) for arg in args):
            return host
        if self.link is not None:
            return DevicePlacement(self._comm, self, self._stream_for(x))
        # Without a header there is nothing to choose by.
        return HostPlacement(self._comm, ALL_ON_DEVICE, x) if self._comm._options.check else host

    def placement_of_tree(self, leaves: Sequence[Any]) -> HostPlacement:
        """Return the way of a tree's leaves."""
        host = self._comm._host_tree_placement
        if (self.negotiated and self.link is None) or not self._comm._options.check:
            return host
        if not any(map(arrays.may_be_on_cuda, set(map(type, leaves)))):
            return host
        on_device = [arrays.on_cuda(leaf) for leaf in leaves]
        if not any(on_device):
            return host
        # What the ranks compare: a leaf may not be on the host here and on a device there.
        place = digest(on_device) >> 1 & (1 << 62) - 1 | 2
        if all(there or leaf is None for there, leaf in zip(on_device, leaves, strict=True)):
            place = ALL_ON_DEVICE
        if self.link is None:
            return StagedTreePlacement(self._comm, place)
        stream = self._stream_for(leaves[on_device.index(True)])
        return TreePlacement(self._comm, self, stream, place)

    def placement_to_tree(self, agreement: Agreement) -> HostPlacement:
        """Return the way of a tree, some of whose leaves are in other places on other ranks.

        Some of these may have gone ahead, with all leaves on their devices: there the others join them.
        """
        ranks = range(self._comm.size)
        ahead = self.link is not None and self.link.ahead
        if ahead and ALL_ON_DEVICE in {agreement.word(rank, 15) for rank in ranks}:
            return UploadedTreePlacement(self._comm, self, self._own_stream, ALL_ON_DEVICE)
        return StagedTreePlacement(self._comm)

    def placement_after(self, placement: HostPlacement) -> HostPlacement:
        """Return the way for a call that was made for `way` before the ranks have chosen."""
        return (
            self._comm._host_placement if placement.tree else self.placement((placement.example,))
        )

    def placement_of_host(self) -> HostPlacement:
        """Return the way of an array of the host that meets others on their devices."""
        return DevicePlacement(self._comm, self, self._own_stream)

    def _stream_for(self, x: Any) -> int:
        """Return the stream of a call: the current one of the framework, where the link can use it."""
        stream = arrays.stream_of(x)
        return self._own_stream if stream is None or stream == _PER_THREAD else stream

    @property
    def _own_stream(self) -> int:
        assert self.link is not None
        return self.link.memory.own_stream

    # The choice

    def negotiate(self) -> Steps:
        """Choose together with the other ranks."""
        from arraycomm._cuda.selection import choose, offer

        comm = self._comm
        said = yield from exchange_details(
            comm._control, {"devices": offer(comm, self.device_request)}
        )
        self.negotiated = True
        offers = [detail["devices"] for detail in said]
        self.link, self.reason = yield from choose(comm, self.device_request, offers)

    def split(self, color: int | None, key: int) -> Steps:
        """Return the link of a part of the ranks, made of this one; collective. None without any."""
        if self.link is None:
            return None
        return (yield from self.link.split(color, key))

    def adopt(self, parent: Devices, link: DeviceLink | None) -> None:
        """Take over what the communicator that this one was made from was asked for, and a link."""
        self.device_request = parent.device_request
        self._comm.backend = parent._comm.backend
        if link is not None or (parent.negotiated and parent.link is None):
            self.negotiated, self.link, self.reason = True, link, parent.reason

    def require(self) -> None:
        """Choose now, and raise on every rank where that is not NCCL."""
        comm = self._comm
        with comm._turn():
            comm._engine.run(comm._guarded(self.negotiate()))
        if self.link is None or self.link.name != "nccl":
            raise BackendUnavailableError(f"init: NCCL cannot be used: {self.reason}")

    # What is under way

    def enter(self, stream: int) -> None:
        """Go on in a stream, behind what this communicator did in another."""
        assert self.link is not None
        self.link.memory.at(stream)
        if self._last is not None and self._stream != stream:
            self._last.wait_on(stream)
        self._stream = stream

    def leave(self) -> None:
        """Note that a call has put its work on the device."""
        if self.link is None:
            return
        self._last = self.link.memory.record()
        self._pending.append(_Pending(self._last, time.monotonic()))
        _watch.add(self)

    def look(self) -> bool:
        """See to the headers and to the device's work; tell whether something is under way."""
        with self._looking:
            comm = self._comm
            if self.link is None or comm._closed is not None:
                self._pending.clear()
                return False
            try:
                self._look(self.link)
            except Exception as error:
                comm._late = comm._late or error
                comm._close(error)
            return bool(self._pending) or not comm._engine.idle

    def _look(self, link: DeviceLink) -> None:
        comm = self._comm
        # First, since an ended wait on the device looks like one that has come to its end.
        error = link.error()
        if error is not None:
            raise error
        self._pending = [pending for pending in self._pending if not pending.event.done()]
        if not comm._link.threaded:
            # The host's MPI is the caller's alone.
            return
        comm._engine.advance()
        if self._pending and comm._closed is None:
            comm._watch(time.monotonic() - self._pending[0].since)

    def check(self) -> None:
        """Raise where what was under way has been ended, so that there is no result."""
        error = None if self.link is None else self.link.error()
        if self._comm._closed is not None:
            raise self._comm._closed_error("on the device")
        if error is not None:
            raise error

    def abort(self) -> None:
        """End what is under way, so that nothing waits for it on the device."""
        if self.link is not None:
            self.link.abort()

    def finish(self) -> None:
        """Wait for what is under way: other ranks' devices may wait for this one's part in it."""
        if self.link is not None and self._last is not None and self._comm._closed is None:
            self._comm._engine.wait_for(self._last.done)
            self.check()

    def close(self) -> None:
        """Wait for what is under way, and release the link."""
        if self.link is None:
            return
        self.finish()
        with self._looking:
            link, self.link = self.link, None
            self._pending.clear()
        link.close()


class _Watch:
    """A thread that looks at what is under way on devices, while anything is.

    The caller may wait for its device where no Python runs: it is this thread that then sees that
    another rank has failed, or that time is up, and ends the wait.
    """

    def __init__(self) -> None:
        self._devices: WeakSet[Devices] = WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, devices: Devices) -> None:
        """Look after these until nothing is under way there."""
        with self._lock:
            self._devices.add(devices)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="arraycomm-devices", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK)
            with self._lock:
                watched = list(self._devices)
            idle = [devices for devices in watched if not devices.look()]
            with self._lock:
                for devices in idle:
                    # What came meanwhile has been added again, or is seen to by the next call.
                    if not devices._pending:
                        self._devices.discard(devices)
                if not self._devices:
                    self._thread = None
                    return


_watch = _Watch()
