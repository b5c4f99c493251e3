"""Calls between devices through NCCL, prepared: what `compiled.DeviceCall` puts on a stream.

The full call of the same collective puts the same operation of NCCL on the device: some ranks may
make it in full.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from arraycomm._arrays.device_memory import DeviceBuffer
from arraycomm._cuda.driver import address_of, check
from arraycomm._cuda.frameworks import Framework
from arraycomm._cuda.kernels import (
    THREADS,
    Few,
    Shown,
    Spoiled,
    definitions_of,
    few_of,
    function_of,
)
from arraycomm._cuda.kernels import spoiling_blocks as blocks_of_spoil
from arraycomm._cuda.nccl_link import NcclLink, Operation
from arraycomm._native import compiled

# Of arrays: the kernel takes packs of them.
_ALIGNMENT: Final = 16
# What DeviceCall returns: NCCL is not done, or an error of NCCL's or of CUDA's from these numbers.
_UNFINISHED, _NCCL, _CUDA = 1, 1 << 12, 1 << 16
_OF_CUDA: Final = (
    *("cuCtxGetCurrent", "cuStreamIsCapturing", "cuStreamWriteValue32_v2", "cuLaunchKernel"),
    "cuEventRecord",
)


class Found(NamedTuple):
    """What a call reads, where its result goes, and the array of that."""

    source: int
    target: int
    result: Any


class PreparedCall:
    """One collective of arrays of a framework, dtype and shape, in the stream of a link's memory.

    `scratch` has room for the elements of all ranks. `digests` are that of this rank's header and
    where all ranks' are gathered, and `words` the addresses of a call's number and of whether calls
    are given up.
    """

    def __init__(
        self,
        framework: Framework,
        operation: Operation,
        shape: tuple[int, ...],
        link: NcclLink,
        scratch: DeviceBuffer,
        digests: tuple[DeviceBuffer, DeviceBuffer],
        words: tuple[int, int],
    ) -> None:
        self.dtype, self.shape, self.nbytes = operation.dtype, shape, operation.nbytes
        self._framework, self._operation = framework, operation
        self._gathers = operation.op < 0 and not operation.folds
        self._result_shape = (link.size, *shape) if self._gathers else shape
        self._link, self._memory = link, link.memory
        self.stream = link.memory.stream
        event: Any = link.memory.record()
        self.event = event
        self._scratch, self._digests = scratch, digests
        number, given_up = words
        argument: Any
        if operation.folds:
            row, dtype = operation.nbytes, operation.dtype
            rows = [scratch.address + rank * row for rank in range(link.size)]
            argument, blocks = few_of(dtype, rows, scratch.address, row // dtype.itemsize)
            argument.given_up, argument.word = given_up, number
            name, definitions = "fold_few", definitions_of(operation.op_name, dtype)
            at = Few.out.offset, Few.number.offset
        else:
            nbytes = operation.nbytes * (link.size if self._gathers else 1)
            argument = Spoiled(0, nbytes, given_up)
            blocks, name, definitions = blocks_of_spoil(argument.nbytes), "spoil", ()
            at = Spoiled.target.offset, -1
        argument.shown = Shown.of(digests[1])
        self._call = compiled.DeviceCall(
            functions=(*map(address_of, _OF_CUDA), *link.comm.functions()),
            stream=self.stream,
            event=event.handle,
            comm=link.comm.handle,
            operation=(operation.elements, operation.type, operation.op),
            digests=(digests[0].address, digests[1].address),
            scratch=scratch.address if operation.folds else 0,
            kernel=function_of(link.memory.device, name, definitions),
            grid=(blocks, THREADS),
            argument=argument,
            at=at,
            word=number,
        )

    def look(self, x: Any, out: Any) -> Found | None:
        """Look at the arrays of a call; None if anything about them, or the stream, is unusual."""
        # What is wrong with them is told by the full call.
        with suppress(Exception):
            return self._look(x, out)
        return None

    def _look(self, x: Any, out: Any) -> Found | None:
        framework, device = self._framework, self._memory.device
        source = framework.plain_address(x, device)
        if source is None or source % _ALIGNMENT or framework.streams(device) != (self.stream,):
            return None
        if not self._call.ready():
            return None
        if out is None:
            made = framework.empty(self._result_shape, self.dtype, x, self._memory)
            return Found(source, made.address, made.owner)
        same_kind = type(out) is type(x) and out.dtype == x.dtype
        if not same_kind or tuple(out.shape) != self._result_shape:
            return None
        target = framework.plain_address(out, device)
        if target is None or target % _ALIGNMENT or self._overlap(source, target):
            return None
        return Found(source, target, out)

    def _overlap(self, source: int, target: int) -> bool:
        """Return whether the arrays of a call overlap, and are not the same."""
        if source == target and not self._gathers:
            return False
        end = target + self.nbytes * (self._link.size if self._gathers else 1)
        return source < end and target < source + self.nbytes

    def begin(self, found: Found, number: int, show: Callable[[None], None]) -> bool:
        """Show the header, and put the operation on the stream; False if NCCL is still at it."""
        status = self._link.comm.run(self._call.begin, found.source, found.target, number, show)
        if status != _UNFINISHED:
            self._check(status)
        return status != _UNFINISHED

    def has_begun(self) -> bool:
        """Return whether NCCL has put the operation on the stream."""
        return not self._link.comm.in_progress()

    def end(self) -> None:
        """Put what comes after the operation on the stream."""
        self._check(self._call.end())
        self.event.renew()

    def deliver(self, found: Found, out: Any) -> Any:
        """Return the result of a call."""
        if out is not None:
            self._framework.changed(out)
        return found.result

    def _check(self, status: int) -> None:
        if status >= _CUDA:
            check(status - _CUDA)
        elif status >= _NCCL:
            self._link.comm.check(status - _NCCL)
