"""What a call takes along from its caller's thread.

Current streams and torch's grad mode belong to a thread. The steps of a call may run in another
one: in the thread that pushes on requests, or in a later wait. There they find what the caller had.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Final, NamedTuple

from arraycomm._arrays.current_device import imported, torch_stream, working_on
from arraycomm._arrays.device_memory import DeviceMemory, Event
from arraycomm._cuda.streams import cupy_stream, is_same


class State(NamedTuple):
    """One thing that belongs to a thread; `read` returns None if this process does not use it.

    If it is a stream, `handle` returns CUDA's handle, and `of` what `read` would of a handle.
    """

    read: Callable[[int | None], Any]
    # Of what `read` has returned, and the device.
    within: Callable[[Any, int | None], AbstractContextManager[Any]]
    handle: Callable[[Any], int] | None = None
    of: Callable[[int, int], Any] | None = None


def _torch() -> Any:
    return sys.modules["torch"]


def _torch_stream(device: int | None) -> int | None:
    torch = imported("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch_stream(torch.cuda.current_device() if device is None else device)


def _in_torch_stream(stream: int, device: int | None) -> Any:
    cuda = _torch().cuda
    return cuda.stream(cuda.ExternalStream(stream, device=device))


def _cupy_stream(device: int | None) -> Any:
    cupy = imported("cupy")
    if cupy is None:
        return None
    return cupy.cuda.get_current_stream(-1 if device is None else device)


def _grad_mode(_device: int | None) -> Any:
    torch = imported("torch")
    return None if torch is None else torch.is_grad_enabled()


STATES: Final[dict[str, State]] = {
    "torch": State(_torch_stream, _in_torch_stream, int, lambda stream, _device: stream),
    "cupy": State(
        _cupy_stream, lambda stream, _: stream, lambda stream: int(stream.ptr), cupy_stream
    ),
    "grad mode": State(_grad_mode, lambda on, _: _torch().set_grad_enabled(on)),
}


class Caller:
    """What was current in the thread that makes this object, which is the caller's.

    Current streams are those of `device`, or of the current one. With `stream` this is to be every
    framework's current stream there, in place of the caller's.
    """

    def __init__(self, device: int | None, stream: int | None = None) -> None:
        self._device = device
        self._taken = list[tuple[State, Any]]()
        for state in STATES.values():
            found = state.read(device)
            if found is None:
                continue
            if stream is not None and device is not None and state.of is not None:
                found = state.of(stream, device)
            self._taken.append((state, found))

    def here(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread has what the caller had in its own."""
        device = self._device
        differing = [
            state.within(taken, device)
            for state, taken in self._taken
            if state.read(device) != taken
        ]
        if device is not None and not differing:
            return working_on(device)
        return self._within(differing)

    def follower(self) -> Callable[[], None] | None:
        """Return what lets a thread use what CuPy has written in the caller's stream so far.

        None if CuPy is not used. PyTorch waits for its copies from the host by itself.
        """
        cupy = imported("cupy")
        if cupy is None:
            return None
        with self.here():
            device, event = cupy.cuda.Device().id, cupy.cuda.Event(disable_timing=True)
            event.record()

        def follow() -> None:
            with working_on(device):
                cupy.cuda.get_current_stream().wait_event(event)

        return follow

    @contextmanager
    def _within(self, differing: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
        with ExitStack() as stack:
            if self._device is not None:
                stack.enter_context(working_on(self._device))
            for context in differing:
                stack.enter_context(context)
            yield


class Waiters:
    """The streams that are to wait for a request's work on the device, once its result is taken.

    Until then they compute beside it, and the memory that the device uses is kept. The request's
    work is in the stream of `memory`.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._streams: dict[int, None] = {}
        self._kept: list[object] = []
        self._is_needed = False
        # What is current in the caller's thread, whose streams end with these objects.
        self._callers = [state.read(memory.device) for state in STATES.values() if state.handle]

    def add(self, kept: object, streams: Iterable[int] = ()) -> None:
        """Keep the owner of memory, and have streams wait."""
        self._is_needed = True
        self._kept.append(kept)
        self._streams.update(dict.fromkeys(streams))

    def wait(self, event: Event) -> None:
        """Have all these streams wait for the event, and those that are current in this thread."""
        if not self._is_needed:
            return
        for state in STATES.values():
            found = None if state.handle is None else state.read(self._memory.device)
            if found is not None and state.handle is not None:
                self._streams[state.handle(found)] = None
        for kept in self._kept:
            if hasattr(kept, "record_stream"):
                # It may have been made in the memory's stream, and is used in this one from now on.
                kept.record_stream(_torch().cuda.current_stream(self._memory.device))
        self._wait(event)

    def _wait(self, event: Event) -> None:
        for stream in self._streams:
            if not is_same(stream, self._memory.stream):
                event.wait_on(stream)
        self._streams.clear()
        self._callers.clear()
        # Results may be used in further streams.
        self._kept = [kept for kept in self._kept if hasattr(kept, "record_stream")]

    def __del__(self) -> None:
        if self._streams:
            with suppress(Exception):  # nobody has taken the result, or there is none
                self._wait(self._memory.record())
