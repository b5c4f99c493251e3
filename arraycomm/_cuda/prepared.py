"""Calls between devices through NCCL, prepared: recorded, and put on a stream by `DeviceCall`.

The steps of the full call are recorded, with memory that stands for the arrays. So ranks that make
it in full do the same on their devices.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn
from weakref import finalize

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.device_memory import DeviceBuffer
from arraycomm._calls.operation import Operation
from arraycomm._calls.placement import HostPlacement
from arraycomm._cuda.arrays import Result
from arraycomm._cuda.callers import STATES, Waiters
from arraycomm._cuda.device import CudaMemory
from arraycomm._cuda.driver import address_of, check
from arraycomm._cuda.frameworks import Framework
from arraycomm._cuda.kernels import THREADS, Few, Kernels, Shown, function_of
from arraycomm._cuda.links.libnccl import Call
from arraycomm._cuda.links.nccl_link import NcclLink
from arraycomm._cuda.placement import DevicePlacement, Streams
from arraycomm._dtypes import DType
from arraycomm._errors import forgiving
from arraycomm._native import compiled
from arraycomm._protocol.group import Group
from arraycomm._transports.base import Flat, Steps

# Of arrays: kernels take packs of them.
_ALIGNMENT: Final = 16
# Of the parts of scratch memory.
_APART: Final = 512
# More steps take longer on the device than in Python.
_MOST_STEPS: Final = 256
# Which memory an address is in: from this bit on it has a number, 0 in memory that does not differ.
_NUMBER_FROM: Final = 52
_SCRATCH, _FIRST = 1, 2
# What DeviceCall returns: NCCL is not done, or an error of NCCL's or of CUDA's from these numbers.
_UNFINISHED, _NCCL, _CUDA = 1, 1 << 12, 1 << 16
_OF_CUDA: Final = (
    *("cuCtxGetCurrent", "cuStreamIsCapturing", "cuStreamWriteValue32_v2", "cuLaunchKernel"),
    *("cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoDAsync_v2"),
)
# The kinds of steps in C, of which one word is the address from which elements go, or to which.
_GROUP, _COPY, _KERNEL = 0, 6, 7
_KINDS: Final = {"ncclAllGather": 1, "ncclAllReduce": 2, "ncclBroadcast": 3}
_SEND, _RECEIVE = 4, 5

_HERE: Final = nullcontext()
Step = tuple[int, int, int, int, int, int]


class Recorder(CudaMemory):
    """Notes what is put on a stream, in place of a device's memory and of NCCL's communicator."""

    def __init__(self, memory: CudaMemory) -> None:
        vars(self).update(vars(memory))
        self.steps: list[Step] = []
        self.arguments = bytearray()
        # Where in the arguments addresses are that differ.
        self.places: list[tuple[int, int]] = []
        self.scratch_bytes = 0
        # Where the argument of a fold is that also spoils the result, if it is the last step.
        self._spoiling: int | None = None

    def at(self, stream: int) -> Recorder:
        return self

    def lend(self, number: int, count: int, dtype: DType) -> DeviceBuffer:
        """Return what stands for an array."""
        return DeviceBuffer(number << _NUMBER_FROM, count, dtype, None, self)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        start = self.scratch_bytes
        self.scratch_bytes += -(-nbytes // _APART) * _APART
        return self.lend(_SCRATCH, start + nbytes, np.dtype(np.uint8))[start:]

    def upload(self, array: Any) -> NoReturn:
        raise NotImplementedError

    def download(self, device_buffer: DeviceBuffer, into: Any) -> NoReturn:
        raise NotImplementedError

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        self._note((_COPY, source, target, nbytes, 0, 0))

    @property
    def _kernels(self) -> Kernels:
        return _Launches(self)

    def spoil(
        self, device_buffer: DeviceBuffer, given_up: int, digests: DeviceBuffer | None = None
    ) -> None:
        # A fold of few rows that makes the result spoils it as well.
        if self._spoiling is not None:
            few = Few.from_buffer(self.arguments, self._spoiling)
            if few.out == device_buffer.address and few.elements == len(device_buffer):
                few.given_up, few.shown = given_up, Shown.of(digests)
                return
        super().spoil(device_buffer, given_up, digests)

    def launch(self, kernel: int, blocks: int, argument: bytes, *, spoils: bool) -> None:
        """Note a kernel."""
        at = len(self.arguments)
        words = enumerate(np.frombuffer(argument, np.int64).tolist())
        # No other number is as large as an address that differs.
        self.places += [(at + 8 * n, word) for n, word in words if word >> _NUMBER_FROM > 0]
        self.arguments += argument
        self._note((_KERNEL, kernel, at, blocks, THREADS, 0))
        self._spoiling = at if spoils else None

    def _note(self, *steps: Step) -> None:
        self.steps += steps
        self._spoiling = None

    def end(self, word: int) -> int:
        """Have the last kernel write the end of the call, and say where it finds that; else -1."""
        if self._spoiling is None:
            return -1
        Few.from_buffer(self.arguments, self._spoiling).word = word
        return self._spoiling + Few.number.offset

    # As NCCL's communicator

    def issue(self, calls: Sequence[Call], stream: int, *kept: object) -> None:
        """Note operations of NCCL."""
        self._note((_GROUP, 0, 0, len(calls), 0, 0), *map(_operation, calls))

    def in_progress(self) -> bool:
        """Return whether anything is under way here."""
        return False


def _operation(call: Call) -> Step:
    name, *rest = call
    if name == "ncclSend":
        return _SEND, rest[0], 0, *rest[1:]
    if name == "ncclRecv":
        return _RECEIVE, 0, *rest
    return _KINDS[name], *rest, *[0] * (5 - len(rest))


class _Launches(Kernels):
    """The kernels of a device, which are recorded."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.device, recorder.allocate)
        self._recorder = recorder

    def _launch(
        self,
        kernel: str,
        definitions: tuple[str, ...],
        blocks: int,
        argument: int,
        nbytes: int,
        stream: int,
    ) -> None:
        function = function_of(self._recorder.device, kernel, definitions)
        spoils = kernel == "fold_few"
        self._recorder.launch(function, blocks, ctypes.string_at(argument, nbytes), spoils=spoils)


class Part:
    """A part of a result that does not exist yet: of which target, its elements and its shape."""

    def __init__(self, target: int, shape: tuple[int, ...], elements: slice | None = None) -> None:
        self.target, self.shape, self._elements = target, shape, elements

    def __getitem__(self, elements: slice) -> Part:
        return Part(self.target, self.shape, elements)

    def reshape(self, shape: tuple[int, ...]) -> Part:
        return Part(self.target, shape, self._elements)

    def of(self, target: Any) -> Any:
        """Return it, once there is the target."""
        if self._elements is None:
            return target
        return target[self._elements].reshape(self.shape)


class Recording(DevicePlacement):
    """A call of `arrays` that is recorded; they are contiguous. With `in_place` out is the first.

    Attributes
    ----------
    targets : list of tuple
        The dtypes and shapes of the results.
    """

    link: NcclLink

    def __init__(
        self,
        group: Group,
        link: NcclLink,
        streams: Streams,
        memory: CudaMemory,
        arrays: int,
        *,
        in_place: bool = False,
    ) -> None:
        super().__init__(group, link, streams, memory.stream)
        self.recorder = Recorder(memory)
        self.memory = self.link.memory = self.recorder
        self.link.comm = self.recorder  # type: ignore[assignment]
        self.targets: list[tuple[DType, tuple[int, ...]]] = []
        self._arrays, self._viewed, self._in_place = arrays, 0, in_place

    def view(self, x: Any, name: str = "x") -> BufferView:
        self._viewed += 1
        return self._standing(super().view(x, name), _SCRATCH + self._viewed)

    def view_out(self, out: Any, shape: tuple[int, ...], dtype: DType) -> BufferView:
        target = self._add(dtype, shape)
        found = super().view_out(out, shape, dtype)
        return self._standing(found, _FIRST if self._in_place else target)

    def _standing(self, found: BufferView, number: int) -> BufferView:
        if found.device_buffer is None or found.copied:
            raise NotImplementedError
        found.device_buffer = self.recorder.lend(number, len(found.device_buffer), found.dtype)
        return found

    def _add(self, dtype: DType, shape: tuple[int, ...]) -> int:
        self.targets.append((dtype, shape))
        return _SCRATCH + self._arrays + len(self.targets)

    def empty(self, like: BufferView, shape: tuple[int, ...], dtype: DType) -> tuple[Any, Flat]:
        flat = self.recorder.lend(self._add(dtype, shape), math.prod(shape), dtype)
        return Result(flat, shape), flat

    def finish(self, made: Any, like: BufferView) -> Part:
        self.guard(made.device_buffer)
        return Part(len(self.targets) - 1, made.shape)

    def commit(self, out: BufferView, flat: Flat, *, direct: bool) -> Part:
        if not direct:
            raise NotImplementedError
        self.guard(flat)
        return Part(0, out.shape)


# Makes a call with a placement, and returns it with its movements, which return the result.
Make = Callable[[HostPlacement], tuple[Operation, Steps]]


def result_of(moving: Steps) -> Any:
    """Return the result of movements that are recorded."""
    try:
        while next(moving).done():
            pass
    except StopIteration as stop:
        return stop.value
    raise NotImplementedError


class Found(NamedTuple):
    """What puts a call on a stream, where its arrays are, and these with its results."""

    call: Any
    addresses: list[int]
    arrays: Sequence[Any]
    targets: list[Any]


class PreparedCall:
    """A collective of arrays of a framework, dtypes and shapes, called in the stream of a memory.

    Its request is in the memory's own stream.
    """

    def __init__(
        self, framework: Framework, link: NcclLink, memory: CudaMemory, nbytes: int
    ) -> None:
        self.nbytes = nbytes
        self._framework, self._link, self._memory = framework, link, memory
        self.stream, self.device = memory.stream, memory.device
        # In which the memory of requests is made.
        state = STATES[framework.name]
        assert state.of is not None
        self._own = memory.at(memory.own_stream)
        own = state.of(memory.own_stream, memory.device)
        self._beside = state.within(own, memory.device)
        self.event, self._before = memory.record(), memory.record()
        # Of requests that are gone.
        self._events: list[Any] = []
        # Those whose result goes elsewhere, and those in place.
        self._calls: dict[bool, Any] = {}
        self._targets: list[tuple[DType, tuple[int, ...]]] = []
        self._out_bytes = self.scratch_bytes = 0
        # That of this rank's header, if the call goes ahead of the check of it.
        self.digest: DeviceBuffer | None = None
        # Of the results, as the call returns them.
        self.parts: Sequence[Part] = ()
        # Calls in other streams, one after another.
        self.strays = 0

    def event_beside(self) -> Any:
        """Return an event for one call beside the others, which nobody waits for."""
        return self._events.pop() if self._events else self._memory.event()

    def add(self, recording: Recording, word: int, arrays: int, *, in_place: bool) -> bool:
        """Prepare calls as one was recorded, whose number goes to `word`; False if it is long."""
        found = recording.recorder
        if len(found.steps) > _MOST_STEPS:
            return False
        self.scratch_bytes = max(self.scratch_bytes, found.scratch_bytes)
        self._targets = recording.targets
        for dtype, shape in self._targets:
            self._out_bytes = math.prod(shape) * dtype.itemsize
        self._calls[in_place] = compiled.DeviceCall(
            functions=(*map(address_of, _OF_CUDA), *self._link.comm.functions()),
            stream=self.stream,
            before=self._before.handle,
            comm=self._link.comm.handle,
            number_at=found.end(word),
            steps=found.steps,
            places=found.places,
            arguments=found.arguments,
            memories=_FIRST + arrays + len(self._targets),
            word=word,
        )
        return True

    def look(self, arrays: Sequence[Any], out: Any, *, beside: bool) -> Found | None:
        """Look at the arrays of a call; None if anything about them, or the stream, is unusual.

        It may be beside what the caller does meanwhile.
        """
        # What is wrong with them is told by the full call.
        with forgiving:
            return self._look(arrays, out, beside)
        return None

    def _look(self, arrays: Sequence[Any], out: Any, beside: bool) -> Found | None:
        framework, device, call = self._framework, self._memory.device, self._calls[False]
        addresses: list[int] = []
        for x in arrays if out is None or not self._targets else (*arrays, out):
            address = framework.plain_address(x, device)
            if address is None or address % _ALIGNMENT:
                return None
            addresses.append(address)
        if framework.streams(device) != (self.stream,):
            self.strays += 1
            return None
        self.strays = 0
        if not call.ready():
            return None
        if out is None or not self._targets:
            made = self._empty(arrays[0], beside)
            addresses += [each.address for each in made]
            return Found(call, addresses, arrays, [each.owner for each in made])
        ((_, shape),), (x,), (source, target) = self._targets, arrays, addresses
        if type(out) is not type(x) or out.dtype != x.dtype or tuple(out.shape) != shape:
            return None
        if source == target:
            call = self._calls.get(True)
        elif source < target + self._out_bytes and target < source + self.nbytes:
            return None
        return call and Found(call, addresses, arrays, [out])

    def _empty(self, like: Any, beside: bool) -> list[DeviceBuffer]:
        empty, memory = self._framework.empty, self._memory
        with self._beside if beside else _HERE:
            return [empty(shape, dtype, like, memory) for dtype, shape in self._targets]

    def begin(
        self, found: Found, number: int, stream: int, event: int, scratch: int, show: Any
    ) -> bool:
        """Show the header, and put the call on a stream; False if NCCL is still at a part of it."""
        places = number, stream, event, scratch, *found.addresses
        return self._check(self._link.comm.run(found.call.begin, *places, show))

    def go_on(self, found: Found) -> bool:
        """Go on from there, and return the same."""
        return self._check(self._link.comm.run(found.call.go_on))

    def has_put(self) -> bool:
        """Return whether NCCL has put on the stream what it was given last."""
        return not self._link.comm.in_progress()

    def follow(self, found: Found, event: Any) -> Callable[[], None]:
        """Return what lets a thread use the result of a call beside, whose end is the event."""
        waiters = Waiters(self._own)
        waiters.add(found.arrays, (self.stream,))
        for target in found.targets:
            waiters.add(target)
        finalize(waiters, self._events.append, event)
        return partial(waiters.wait, event)

    def deliver(self, found: Found, out: Any) -> list[Any]:
        """Return the parts of a call's result."""
        if out is not None and found.targets:
            self._framework.changed(out)
        return [part.of(found.targets[part.target]) for part in self.parts]

    def _check(self, status: int) -> bool:
        if status >= _CUDA:
            check(status - _CUDA)
        elif status >= _NCCL:
            self._link.comm.check(status - _NCCL)
        return status != _UNFINISHED
