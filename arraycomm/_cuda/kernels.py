"""The kernels of `folds.cu`: compiled on first use, and launched.

NVRTC is called directly, because CuPy's `RawKernel` flushes subnormal float32 numbers to zero,
whatever the options. Compiled kernels stay in memory as long as the process runs.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from arraycomm._arrays.device_memory import DeviceBuffer
from arraycomm._cuda.driver import call
from arraycomm._dtypes import DType, name_of
from arraycomm._errors import BackendUnavailableError
from arraycomm._folds.by_numpy import goes_on, total_dtype
from arraycomm._folds.exact import WORD, words_of

Array = np.ndarray[Any, Any]

SOURCE: Final = Path(__file__).with_name("folds.cu")
# No fused multiply-add, and subnormal numbers are kept: results have the bits of the host's folds.
OPTIONS: Final = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true")

# As in folds.cu, with addresses as integers. More rows or pieces than these take several launches.
MAX_ROWS: Final = 240
MAX_PIECES: Final = 120
CHUNK_BYTES: Final = 16 << 10
PACK_BYTES: Final = 16
# Rows, outs, carry and elements, of 64 bits each; then count, before, more and packed of 32.
ROWS_BYTES: Final = (2 * MAX_ROWS + 4) * 8
PIECE: Final = np.dtype(
    [("source", np.int64), ("target", np.int64), ("nbytes", np.int64), ("end", np.int64)],
    align=True,
)
PIECES: Final = np.dtype([("at", PIECE, MAX_PIECES), ("count", np.int32)], align=True)
FEW_ROWS: Final = 16


class Shown(ctypes.Structure):
    """Where the digests of the ranks' headers are, and how many; the default is none."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("digests", "ranks"))

    @classmethod
    def of(cls, digests: DeviceBuffer | None) -> Shown:
        """Return what a kernel is to compare."""
        return cls() if digests is None else cls(digests.address, len(digests))


class Few(ctypes.Structure):
    """The argument of a fold of a few rows; with addresses of words, it also ends a call."""

    _fields_ = (
        ("rows", ctypes.c_int64 * FEW_ROWS),
        *((name, ctypes.c_int64) for name in ("out", "carry", "elements")),
        *((name, ctypes.c_int32) for name in ("count", "before", "more", "packed")),
        *((name, ctypes.c_int64) for name in ("given_up", "word")),
        ("number", ctypes.c_uint32),
        ("shown", Shown),
    )


class Spoiled(ctypes.Structure):
    """The argument of `spoil`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("target", "nbytes", "given_up")),
        ("shown", Shown),
    )


THREADS: Final = 256
# Enough to fill any device several times over; each thread of a larger array takes more elements.
MAX_BLOCKS: Final = 4096
# Of those that spoil, which mostly do nothing but look whether they have to.
LOOKING_BLOCKS: Final = 8


class Kernels:
    """The kernels on one device; they take addresses.

    For more than `MAX_ROWS` rows `allocate` returns device memory of a number of bytes, for use in
    the order of the stream that the kernel is launched on.
    """

    def __init__(self, device: int, allocate: Callable[[int], DeviceBuffer]) -> None:
        self._device = device
        self._allocate = allocate

    def load(self, op: str | None = None, dtype: DType | None = None) -> None:
        """Load the kernels of an operation and a dtype, or those of none."""
        if op is None or dtype is None:
            _module(self._device, ())
        else:
            _module(self._device, definitions_of(op, dtype))

    def gather_pieces(
        self, pieces: Sequence[tuple[int, int, int]], target: int, stream: int
    ) -> None:
        """Copy pieces, each an address (0 for zeros), an offset in `target`, and a byte count."""
        whole = np.array([piece for piece in pieces if piece[2]], np.int64).reshape(-1, 3)
        for start in range(0, len(whole), MAX_PIECES):
            sources, offsets, sizes = whole[start : start + MAX_PIECES].T
            argument = np.zeros((), PIECES)
            argument["count"] = len(sources)
            table = argument["at"][: len(sources)]
            table["source"] = sources
            table["target"] = offsets + target
            table["nbytes"] = sizes
            table["end"] = np.cumsum(-(-sizes // CHUNK_BYTES))
            blocks, at = int(table["end"][-1]), argument.ctypes.data
            self._launch("copy_pieces", (), blocks, at, PIECES.itemsize, stream)

    def spoil(self, target: int, nbytes: int, given_up: int, shown: Shown, stream: int) -> None:
        """Set all bits of the target if the uint32 at `given_up` is not 0, or digests differ."""
        argument = Spoiled(target, nbytes, given_up, shown)
        # Each of these blocks reads the host's memory, which takes a microsecond.
        blocks = min(-(-nbytes // CHUNK_BYTES), LOOKING_BLOCKS)
        at, size = ctypes.addressof(argument), ctypes.sizeof(argument)
        self._launch("spoil", (), blocks, at, size, stream)

    def reduce(
        self,
        kernel: str,
        op: str,
        dtype: DType,
        rows: Sequence[int],
        outs: Sequence[int],
        count: int,
        stream: int,
    ) -> None:
        """Fold rows of `count` elements as the function of `arraycomm._folds` named `kernel` does.

        "fold" has one address in `outs`, which may be that of the first row.
        """
        if not count:
            return
        definitions = definitions_of(op, dtype)
        if kernel == "fold" and len(rows) <= FEW_ROWS:
            few, blocks = few_of(dtype, rows, outs[0], count)
            at, size = ctypes.addressof(few), ctypes.sizeof(few)
            self._launch("fold_few", definitions, blocks, at, size, stream)
            return
        argument = np.zeros(ROWS_BYTES // 8, np.int64)
        narrow = argument[-2:].view(np.int32)
        packed = _packed(dtype, [*rows, *outs])
        carried = total_dtype(dtype).itemsize if goes_on(op) else words_of(dtype) * WORD.itemsize
        carry = self._allocate(count * carried) if len(rows) > MAX_ROWS else None
        argument[2 * MAX_ROWS :] = 0 if carry is None else carry.address, count, 0, 0
        blocks = blocks_of(dtype, count, packed=packed)
        for before in range(0, len(rows), MAX_ROWS):
            here = rows[before : before + MAX_ROWS]
            into = outs if kernel == "fold" else outs[before : before + MAX_ROWS]
            argument[: len(here)] = here
            argument[MAX_ROWS : MAX_ROWS + len(into)] = into
            narrow[:] = len(here), before, before + len(here) < len(rows), packed
            self._launch(kernel, definitions, blocks, argument.ctypes.data, ROWS_BYTES, stream)

    def _launch(
        self,
        kernel: str,
        definitions: tuple[str, ...],
        blocks: int,
        argument: int,
        nbytes: int,
        stream: int,
    ) -> None:
        """Put a kernel on the stream; the launch copies its argument, bytes at an address."""
        function = function_of(self._device, kernel, definitions)
        arguments = ctypes.c_void_p(argument)
        call(
            self._device, "cuLaunchKernel", function, blocks, 1, 1, THREADS, 1, 1, 0, stream,
            ctypes.addressof(arguments), None,
        )  # fmt: skip


@functools.cache
def definitions_of(op: str, dtype: DType) -> tuple[str, ...]:
    """Return what chooses the kernels of an operation and a dtype."""
    return f"-DOP=op_{op}", f"-DDTYPE=dtype_{name_of(dtype)}"


def blocks_of(dtype: DType, count: int, *, packed: bool) -> int:
    """Return the number of blocks of threads for `count` elements."""
    at_once = PACK_BYTES // dtype.itemsize if packed else 1
    return min(-(-count // (at_once * THREADS)), MAX_BLOCKS)


def few_of(dtype: DType, rows: Sequence[int], out: int, elements: int) -> tuple[Few, int]:
    """Return the argument for rows at these addresses, and the number of blocks."""
    packed = _packed(dtype, [*rows, out])
    table = (ctypes.c_int64 * FEW_ROWS)(*rows)
    few = Few(table, out, 0, elements, len(rows), 0, 0, packed)
    return few, blocks_of(dtype, elements, packed=packed)


def _packed(dtype: DType, addresses: Sequence[int]) -> bool:
    """Return whether all memory is aligned for packs; raise if it is not aligned for elements.

    A kernel that touches misaligned memory makes every later CUDA call of the process fail.
    """
    bits = functools.reduce(operator.or_, addresses)
    if bits % dtype.alignment:
        raise ValueError(
            f"arrays of {name_of(dtype)} on a device must be aligned to {dtype.alignment} bytes; "
            "pass a copy"
        )
    return bits % PACK_BYTES == 0


_modules: dict[tuple[int, tuple[str, ...]], Any] = {}
_compiling = threading.Lock()


@functools.cache
def function_of(device: int, kernel: str, definitions: tuple[str, ...]) -> int:
    """Return a kernel of the current device, as the driver has it."""
    return int(_module(device, definitions).get_function(kernel).ptr)


def _module(device: int, definitions: tuple[str, ...]) -> Any:
    """Return the kernels with these definitions, compiled by the first thread that asks for them.

    To load them may wait for the device, which may wait for another rank: no lock is held.
    """
    key = (device, definitions)
    if key not in _modules:
        _modules.setdefault(key, _load(device, definitions))
    return _modules[key]


def _load(device: int, definitions: tuple[str, ...]) -> Any:
    import cupy

    architecture = int(cupy.cuda.Device(device).compute_capability)
    with _compiling:
        code = compiled(architecture, definitions)
    module = cupy.cuda.function.Module()
    module.load(code)
    return module


def missing() -> str | None:
    """Say why CuPy cannot compile kernels here, and what to do about it; None if it can."""
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except RuntimeError as error:  # raised by CuPy, or by the package that finds its libraries
        reason = str(error).strip()
        return f"CuPy cannot load NVRTC ({reason}); install cupy-cuda12x[ctk] or cupy-cuda13x[ctk]"
    return None


@functools.cache
def compiled(architecture: int, definitions: tuple[str, ...]) -> bytes:
    """Compile `folds.cu` for a compute capability such as 90.

    The result is machine code, or PTX for the driver to compile if NVRTC is older than the device.
    Without definitions it has `copy_pieces` and `spoil`; with OP and DTYPE it has `fold`,
    `fold_few` and `prefixes`.
    """
    from cupy.cuda import nvrtc

    if reason := missing():
        raise BackendUnavailableError(reason)
    known = nvrtc.getSupportedArchs()
    exact = architecture in known
    target = architecture if exact else max((a for a in known if a < architecture), default=0)
    flag = f"--gpu-architecture={'sm' if exact else 'compute'}_{target}"
    program = nvrtc.createProgram(SOURCE.read_text(encoding="utf-8"), SOURCE.name, (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, flag, *definitions))
        return bytes(nvrtc.getCUBIN(program) if exact else nvrtc.getPTX(program))
    except nvrtc.NVRTCError as error:
        raise BackendUnavailableError(
            f"NVRTC {nvrtc.getVersion()} cannot compile arraycomm's kernels for a device of "
            f"compute capability {architecture} ({error}): {nvrtc.getProgramLog(program).strip()}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)
