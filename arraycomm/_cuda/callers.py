"""What a call takes along from its caller's thread.

Current streams and torch's grad mode belong to a thread. The steps of a call may run in another one:
in the thread that pushes on requests, or in a later wait. There they find what the caller had.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final, NamedTuple

from arraycomm._arrays.current_device import imported, working_on
from arraycomm._arrays.device_memory import DeviceMemory, Event
from arraycomm._cuda.streams import is_same


class State(NamedTuple):
    """One thing that belongs to a thread; `read` returns None if this process does not use it.

    `handle` returns CUDA's handle if it is a stream.
    """

    read: Callable[[int | None], Any]
    within: Callable[[Any], AbstractContextManager[Any]]
    handle: Callable[[Any], int] | None = None


def _torch_on_cuda() -> Any:
    torch = imported("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _torch_stream(device: int | None) -> Any:
    torch = _torch_on_cuda()
    return None if torch is None else torch.cuda.current_stream(device)


def _in_torch_stream(stream: Any) -> Any:
    return sys.modules["torch"].cuda.stream(stream)


def _cupy_stream(device: int | None) -> Any:
    cupy = imported("cupy")
    if cupy is None:
        return None
    return cupy.cuda.get_current_stream(-1 if device is None else device)


def _in_cupy_stream(stream: Any) -> Any:
    return stream


def _grad_mode(_device: int | None) -> Any:
    torch = imported("torch")
    return None if torch is None else torch.is_grad_enabled()


def _in_grad_mode(enabled: bool) -> Any:
    return sys.modules["torch"].set_grad_enabled(enabled)


STATES: Final[dict[str, State]] = {
    "torch": State(_torch_stream, _in_torch_stream, lambda stream: int(stream.cuda_stream)),
    "cupy": State(_cupy_stream, _in_cupy_stream, lambda stream: int(stream.ptr)),
    "grad mode": State(_grad_mode, _in_grad_mode),
}


class Caller:
    """What was current in the thread that makes this object, which is the caller's.

    Parameters
    ----------
    device : int or None
        The device whose current streams are meant; None for the current one.
    """

    def __init__(self, device: int | None) -> None:
        self._device = device
        read = {name: state.read(device) for name, state in STATES.items()}
        self._taken = {name: found for name, found in read.items() if found is not None}

    def here(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread has what the caller had in its own."""
        device = self._device
        differing = [
            STATES[name].within(taken)
            for name, taken in self._taken.items()
            if STATES[name].read(device) != taken
        ]
        if device is not None and not differing:
            return working_on(device)
        return self._within(differing)

    @contextmanager
    def _within(self, differing: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
        with ExitStack() as stack:
            if self._device is not None:
                stack.enter_context(working_on(self._device))
            for context in differing:
                stack.enter_context(context)
            yield


def follow(memory: DeviceMemory, event: Event) -> None:
    """Have this thread's current streams wait for an event of the memory's stream."""
    for state in STATES.values():
        found = None if state.handle is None else state.read(memory.device)
        if found is not None and state.handle is not None:
            stream = state.handle(found)
            if not is_same(stream, memory.stream):
                event.wait_on(stream)
