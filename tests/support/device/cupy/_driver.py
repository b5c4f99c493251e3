"""CUDA's driver library, and the kernels of arraycomm, which do with NumPy what they do on a device."""

from __future__ import annotations

import ctypes
import itertools
import json
import traceback
from collections.abc import Callable, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
from cupy._machine import INVALID_HANDLE, NO_CONTEXT, CudaError, machine

from arraycomm import _folds
from arraycomm._arrays.dlpack import array_at
from arraycomm._cuda.kernels import MAX_ROWS, PIECES, ROWS_BYTES, Few, Spoiled
from arraycomm._dtypes import BY_NAME

_BYTE: Final = np.dtype(np.uint8)


# What functions take that C calls by their addresses: of a library in software, ctypes calls the others.
_IN_C: Final = {
    "cuCtxGetCurrent": "p",
    "cuStreamIsCapturing": "pp",
    "cuStreamWriteValue32_v2": "ppii",
    "cuLaunchKernel": "piiiiiiippp",
    "cuEventRecord": "pp",
    "cuStreamWaitEvent": "ppi",
    "cuMemcpyDtoDAsync_v2": "pppp",
    "ncclGroupStart": "",
    "ncclGroupEnd": "",
    "ncclAllGather": "pppipp",
    "ncclAllReduce": "pppiipp",
    "ncclBroadcast": "pppiipp",
    "ncclSend": "ppiipp",
    "ncclRecv": "ppiipp",
    "ncclCommGetAsyncError": "pp",
}
_KINDS: Final = {"p": ctypes.c_size_t, "i": ctypes.c_uint}
# Where these get an address to write to, and where a communicator.
_OUT: Final = {"cuCtxGetCurrent": 0, "cuStreamIsCapturing": 1, "ncclCommGetAsyncError": 1}
_COMM: Final = {
    "ncclAllGather": 4,
    "ncclAllReduce": 5,
    "ncclBroadcast": 5,
    "ncclSend": 4,
    "ncclRecv": 4,
    "ncclCommGetAsyncError": 0,
}
_RAISED: Final = 999


class Function:
    """A function of a library, to be called from Python and from C."""

    def __init__(self, library: Library, name: str, function: Callable[..., Any]) -> None:
        self._library, self._name, self._function = library, name, function

    def __call__(self, *arguments: Any) -> Any:
        return self._library._call(self._name, self._function, *arguments)

    @cached_property
    def _as_parameter_(self) -> Any:
        types = [_KINDS[kind] for kind in _IN_C[self._name]]
        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(self._from_c)

    def _from_c(self, *arguments: Any) -> int:
        given = list(arguments)
        for places, of in ((_OUT, _written_at), (_COMM, ctypes.c_void_p)):
            if self._name in places:
                given[places[self._name]] = of(given[places[self._name]])
        try:
            return int(self(*given))
        except Exception:
            machine.fail(_RAISED, traceback.format_exc())
            return _RAISED


def _written_at(address: int) -> Any:
    """Return what `byref` would have of an int at an address, or of a handle, of which C looks at the beginning."""
    return SimpleNamespace(_obj=ctypes.c_int.from_address(address))


class Library:
    """A library as ctypes shows it: functions by name, whose types may be set. `calls` tells which were called.

    A function whose name is in `fails` returns that code, and does nothing.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}
        for name, function in functions.items():
            setattr(self, name, Function(self, name, function))

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        self.calls.append(name)
        return self.fails[name] if name in self.fails else function(*arguments)


class Driver(Library):
    """libcuda.so.1."""

    def __init__(self) -> None:
        super().__init__(
            {
                "cuInit": lambda _flags: 0,
                "cuDeviceGet": self._device_get,
                "cuDeviceGetUuid_v2": self._uuid,
                "cuDevicePrimaryCtxGetState": self._context_state,
                "cuThreadExchangeStreamCaptureMode": self._exchange_capture_mode,
                "cuCtxGetCurrent": self._current_context,
                "cuStreamIsCapturing": self._in_context(self._is_capturing),
                "cuEventRecord": self._in_context(self._record),
                "cuStreamWaitEvent": self._in_context(self._wait_event),
                "cuMemcpyDtoDAsync_v2": self._in_context(self._copy),
                "cuEventQuery": self._in_context(machine.query),
                "cuStreamWriteValue32_v2": self._in_context(self._write),
                "cuLaunchKernel": self._in_context(self._launch),
            }
        )
        # The modes of capture that threads have asked for.
        self.modes: list[int] = []

    @staticmethod
    def _in_context(function: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if not machine.here.bound:
                return NO_CONTEXT
            try:
                return function(*arguments)
            except CudaError as error:
                return error.status

        return call

    @staticmethod
    def _device_get(number: Any, device: int) -> int:
        number._obj.value = device
        return 0 if device < machine.count() else 101

    @staticmethod
    def _uuid(found: Any, number: Any) -> int:
        # With a zero, at which a text would end.
        found[:] = [0xC0, 0, *[number.value] * 14]
        return 0

    @staticmethod
    def _context_state(number: Any, _flags: Any, active: Any) -> int:
        active._obj.value = number.value in machine.contexts
        return 0

    @staticmethod
    def _current_context(found: Any) -> int:
        found._obj.value = machine.here.device + 1 if machine.here.bound else 0
        return 0

    @staticmethod
    def _is_capturing(stream: int, found: Any) -> int:
        found._obj.value = bool(machine.stream(stream).capturing)
        return 0

    @staticmethod
    def _record(event: int, stream: int) -> int:
        machine.record(event, stream)
        return 0

    @staticmethod
    def _wait_event(stream: int, event: int, _flags: int) -> int:
        machine.wait_event(stream, event)
        return 0

    @staticmethod
    def _copy(target: int, source: int, nbytes: int, stream: int) -> int:
        machine.copy(target, source, nbytes, 4, stream)
        return 0

    def _exchange_capture_mode(self, mode: Any) -> int:
        self.modes.append(mode._obj.value)
        machine.here.capture_mode, mode._obj.value = mode._obj.value, machine.here.capture_mode
        return 0

    @staticmethod
    def _write(stream: int, address: int, value: int, _flags: int) -> int:
        word = ctypes.c_uint32.from_address(address)
        machine.stream(stream).put("write", lambda: setattr(word, "value", value))
        return 0

    @staticmethod
    def _launch(handle: int, *rest: Any) -> int:
        found = _kernels.get(handle)
        if found is None:
            return INVALID_HANDLE
        stream, arguments = rest[7:9]
        # The launch copies the argument.
        argument = ctypes.c_void_p.from_address(arguments).value
        work = _LAUNCHES[found.name](found, argument)
        machine.stream(stream).put(found.name, work)
        return 0


# Kernels --------------------------------------------------------------------------------------------


class _Kernel(NamedTuple):
    name: str
    op: str
    dtype: Any


def _memory(address: int, count: int, dtype: Any) -> Any:
    return array_at(address, (count,), None, dtype, False, None, "memory of a kernel")


def _rows(kernel: _Kernel, argument: int) -> Callable[[], Any]:
    words = np.frombuffer(ctypes.string_at(argument, ROWS_BYTES), np.int64)
    many, before, more, _packed = words[-2:].view(np.int32)
    # Rows of several launches are for the tests of the kernels themselves.
    assert not before
    assert not more
    count = int(words[2 * MAX_ROWS + 1])
    rows = [_memory(int(address), count, kernel.dtype) for address in words[:many]]
    into = words[MAX_ROWS : MAX_ROWS + (1 if kernel.name == "fold" else many)]
    outs = [_memory(int(address), count, kernel.dtype) for address in into]
    if kernel.name == "fold":
        return lambda: _folds.fold(kernel.op, kernel.dtype, [row.copy() for row in rows], outs[0])
    return lambda: _folds.prefixes(kernel.op, kernel.dtype, [row.copy() for row in rows], outs)


def _pieces(_kernel: _Kernel, argument: int) -> Callable[[], None]:
    table = np.frombuffer(ctypes.string_at(argument, PIECES.itemsize), PIECES)[0]

    def copy() -> None:
        for source, target, nbytes, _ in table["at"][: table["count"]].tolist():
            if source:
                ctypes.memmove(target, source, nbytes)
            else:
                ctypes.memset(target, 0, nbytes)

    return copy


def _is_void(argument: Few | Spoiled) -> bool:
    word, shown = argument.given_up, argument.shown
    digests = _memory(shown.digests, shown.ranks, np.dtype(np.uint64)) if shown.digests else ()
    return len(set(digests)) > 1 or bool(word and ctypes.c_uint32.from_address(word).value)


def _few(kernel: _Kernel, argument: int) -> Callable[[], None]:
    few = Few.from_buffer_copy(ctypes.string_at(argument, ctypes.sizeof(Few)))
    rows = [_memory(row, few.elements, kernel.dtype) for row in few.rows[: few.count]]
    out = _memory(few.out, few.elements, kernel.dtype)

    def fold() -> None:
        if _is_void(few):
            ctypes.memset(few.out, 0xFF, out.nbytes)
        else:
            _folds.fold(kernel.op, kernel.dtype, [row.copy() for row in rows], out)
        if few.word:
            ctypes.c_uint32.from_address(few.word).value = few.number

    return fold


def _spoil(_kernel: _Kernel, argument: int) -> Callable[[], None]:
    spoiled = Spoiled.from_buffer_copy(ctypes.string_at(argument, ctypes.sizeof(Spoiled)))

    def spoil() -> None:
        if _is_void(spoiled):
            ctypes.memset(spoiled.target, 0xFF, spoiled.nbytes)

    return spoil


_LAUNCHES: Final = {
    "fold": _rows, "fold_few": _few, "prefixes": _rows, "copy_pieces": _pieces, "spoil": _spoil
}  # fmt: skip
# The kernels that were loaded, by their handles.
_kernels: Final[dict[int, _Kernel]] = {}
_handles = itertools.count(0x600000000000)


class Module:
    """Machine code that NVRTC has made, which says only how."""

    def load(self, code: bytes) -> None:
        machine.enter()
        machine.wait_for_all(machine.here.owner)
        assert code[:4] == b"\x7fELF"
        self._options: list[str] = json.loads(code[4:])

    def get_function(self, name: str) -> Any:
        chosen = dict(option[2:].split("=") for option in self._options if option[:2] == "-D")
        assert ("OP" in chosen) == (name in {"fold", "fold_few", "prefixes"})
        dtype = BY_NAME[chosen["DTYPE"].removeprefix("dtype_")].dtype if chosen else None
        handle = next(_handles)
        _kernels[handle] = _Kernel(name, chosen.get("OP", "").removeprefix("op_"), dtype)
        return SimpleNamespace(ptr=handle)


_programs: Final[dict[int, Any]] = {}


def _compile(program: int, options: tuple[str, ...]) -> None:
    assert {"--fmad=false", "--ftz=false", "--gpu-architecture=sm_90"} <= set(options)
    _programs[program] = options


nvrtc = SimpleNamespace(
    NVRTCError=type("NVRTCError", (RuntimeError,), {}),
    getVersion=lambda: (13, 0),
    getSupportedArchs=lambda: (80, 90, 100),
    createProgram=lambda *_: next(_handles),
    compileProgram=_compile,
    getCUBIN=lambda program: b"\x7fELF" + json.dumps(_programs[program]).encode(),
    getProgramLog=lambda _: "",
    destroyProgram=lambda program: _programs.pop(program, None),
)
