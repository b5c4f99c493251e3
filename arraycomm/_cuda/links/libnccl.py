"""NCCL by ctypes: its functions, its error texts, and the rules for using a communicator.

Communicators are nonblocking, so that a wait for ranks that never come can be given up. All
functions but ncclCommSplit exist since NCCL 2.14; ncclCommSplit is used if the library has it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from arraycomm._cuda import device
from arraycomm._cuda.driver import pointer
from arraycomm._errors import TransportError

_NAME: Final = "libnccl.so.2"
OLDEST: Final = (2, 14)
UNIQUE_ID_BYTES: Final = 128
# ncclDataType_t of plain bytes.
UINT8: Final = 1

# cudaStreamPerThread: NCCL issues operations in its own threads, where this is another stream.
_PER_THREAD: Final = 2

# ncclResult_t. In progress is no failure: NCCL accepted the call, and completes it by itself.
_SUCCESS: Final = 0
_IN_PROGRESS: Final = 7
_NO_COLOR: Final = -1
_UNDEFINED: Final = -(1 << 31)

# Seconds that an abort waits for another thread to leave NCCL, and the program's end for an abort.
_GRACE: Final = 5.0
_NAP: Final = 1e-3
# Seconds between two looks whether the communicator has ended, while another thread is in NCCL.
_LOOK: Final = 0.02

# The name of an NCCL function, and its arguments without the communicator and the stream.
Call = tuple[Any, ...]


class UniqueId(ctypes.Structure):
    """ncclUniqueId; passed by value."""

    _fields_ = (("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """ncclConfig_t as it was in 2.18.

    The struct only grows. A newer library reads the fields that `version` had, and an older one
    reads only the fields that it knows.
    """

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )

    @classmethod
    def nonblocking(cls) -> Config:
        """Return NCCL's defaults, with nonblocking calls."""
        undefined = [_UNDEFINED] * 3
        return cls(ctypes.sizeof(cls), 0xCAFEBEEF, 21800, 0, *undefined, None, _UNDEFINED)


_comm = _stream = _buffer = ctypes.c_void_p
_int, _count = ctypes.c_int, ctypes.c_size_t
_comm_out = ctypes.POINTER(ctypes.c_void_p)
_int_out = ctypes.POINTER(ctypes.c_int)
_config = ctypes.POINTER(Config)

# The arguments of each function, as nccl.h declares them. All return an ncclResult_t, but for the
# two that return text.
SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "ncclGetVersion": (_int_out,),
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclGetErrorString": (_int,),
    "ncclGetLastError": (_comm,),
    "ncclCommInitRankConfig": (_comm_out, _int, UniqueId, _int, _config),
    "ncclCommSplit": (_comm, _int, _int, _comm_out, _config),
    "ncclCommGetAsyncError": (_comm, _int_out),
    "ncclCommUserRank": (_comm, _int_out),
    "ncclCommCount": (_comm, _int_out),
    "ncclCommFinalize": (_comm,),
    "ncclCommDestroy": (_comm,),
    "ncclCommAbort": (_comm,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    # buffers, count, type, peer or root or operation, communicator, stream
    "ncclSend": (_buffer, _count, _int, _int, _comm, _stream),
    "ncclRecv": (_buffer, _count, _int, _int, _comm, _stream),
    "ncclBroadcast": (_buffer, _buffer, _count, _int, _int, _comm, _stream),
    "ncclAllGather": (_buffer, _buffer, _count, _int, _comm, _stream),
    "ncclAllReduce": (_buffer, _buffer, _count, _int, _int, _comm, _stream),
}
_TEXTS: Final = ("ncclGetErrorString", "ncclGetLastError")
_OPTIONAL: Final = ("ncclCommSplit",)
_IN_C: Final = (
    *("ncclGroupStart", "ncclGroupEnd", "ncclCommGetAsyncError", "ncclAllGather", "ncclAllReduce"),
    *("ncclBroadcast", "ncclSend", "ncclRecv"),
)


class Library:
    """One libnccl, or a stand-in for tests, with NCCL's functions by their names.

    `current(device)` is a context in which that device is the thread's current one.
    """

    def __init__(
        self,
        functions: Any,
        current: Callable[[int], AbstractContextManager[None]] = device.current,
    ) -> None:
        self.functions = functions
        self.current = current

    def version(self) -> tuple[int, int, int]:
        """Return major, minor and patch of the loaded library."""
        found = ctypes.c_int()
        self.check(self.functions.ncclGetVersion(ctypes.byref(found)))
        major, rest = divmod(found.value, 10_000)
        return major, rest // 100, rest % 100

    def unique_id(self) -> bytes:
        """Return the id of a new group; a thread of NCCL then waits for all ranks of the group.

        Call it on one rank, and only for a group that will be made.
        """
        found = UniqueId()
        self.check(self.functions.ncclGetUniqueId(ctypes.byref(found)))
        return bytes(found)

    def check(self, code: int) -> None:
        """Raise `TransportError` with NCCL's text, unless the code is success or in progress."""
        if code in (_SUCCESS, _IN_PROGRESS):
            return
        raise TransportError(f"NCCL reported: {self._text(code)}")

    def state(self, comm: ctypes.c_void_p) -> int:
        """Return the ncclResult_t of a communicator's operations, or raise; asks CUDA nothing."""
        state = ctypes.c_int()
        self.check(self.functions.ncclCommGetAsyncError(comm, ctypes.byref(state)))
        self.check(state.value)
        return state.value

    def _text(self, code: int) -> str:
        """Return the meaning of an ncclResult_t, and NCCL's last warning in this process."""
        meaning = self.functions.ncclGetErrorString(code) or b""
        # Without the communicator: NCCL ignores that argument, and it may be gone.
        last = self.functions.ncclGetLastError(None) or b""
        detail = last.decode(errors="replace").strip()
        return meaning.decode(errors="replace") + (
            f" ({detail})" if detail else "; NCCL_DEBUG=WARN in the environment tells more"
        )


class Comm:
    """One NCCL communicator.

    It takes one operation at a time. While that is in progress, only `in_progress` may be called.
    Afterwards the operation is on its stream, though the device may not have started it. Any thread
    may call; calls do not wait for other ranks.
    """

    def __init__(self, library: Library, number: int) -> None:
        self._library = library
        self._device = number
        # NCCL writes the handle here; for a split, it does so once all ranks have called.
        self._handle = ctypes.c_void_p()
        # Memory of operations that are not on the stream yet. If it were freed now, the pool would
        # give it to other work, which would be on the stream before them.
        self._kept: tuple[object, ...] = ()
        self._using = threading.Lock()
        self._ending = threading.Lock()
        self._end = ""

    @classmethod
    def begin(cls, library: Library, number: int, rank: int, size: int, unique_id: bytes) -> Comm:
        """Begin to make the communicator of `size` ranks; the result is in progress."""
        comm = cls(library, number)
        name, config = UniqueId.from_buffer_copy(unique_id), Config.nonblocking()
        with library.current(number):
            code = library.functions.ncclCommInitRankConfig(
                ctypes.byref(comm._handle), size, name, rank, ctypes.byref(config)
            )
        try:
            library.check(code)
        except TransportError:
            comm.abort()
            raise
        return comm

    def issue(self, calls: Sequence[Call], stream: int, *kept: object) -> None:
        """Begin calls as one operation; keep the memory that it uses until it is on the stream."""
        if stream == _PER_THREAD:
            raise TransportError("NCCL cannot work in the order of the per-thread default stream")
        with self._in_use() as functions:
            self._kept = kept
            code = functions.ncclGroupStart()
            try:
                for name, *arguments in calls:
                    if code in (_SUCCESS, _IN_PROGRESS):
                        code = getattr(functions, name)(*arguments, self._handle, stream)
            finally:
                # A group that stays open would hold back all later NCCL calls of this thread.
                end = functions.ncclGroupEnd()
            self._library.check(code)
            self._library.check(end)

    def split(self, color: int | None, key: int) -> Comm | None:
        """Begin to split; `self` is then in progress. None if this NCCL cannot split.

        The result can be used once `self` is no longer in progress, and never if `color` is None.
        """
        if not hasattr(self._library.functions, "ncclCommSplit"):
            return None
        child = Comm(self._library, self._device)
        number = _NO_COLOR if color is None else color
        with self._in_use() as functions:
            # Without a configuration, the child takes this communicator's.
            code = functions.ncclCommSplit(
                self._handle, number, key, ctypes.byref(child._handle), None
            )
            self._library.check(code)
        return child

    def place(self) -> tuple[int, int]:
        """Return this rank's number and the number of ranks."""
        rank, size = ctypes.c_int(), ctypes.c_int()
        with self._in_use() as functions:
            self._library.check(functions.ncclCommUserRank(self._handle, ctypes.byref(rank)))
            self._library.check(functions.ncclCommCount(self._handle, ctypes.byref(size)))
        return rank.value, size.value

    @property
    def handle(self) -> int:
        """The communicator, as NCCL has it."""
        return self._handle.value or 0

    def functions(self) -> list[int]:
        """Return where the functions are that `compiled.DeviceCall` calls."""
        return [pointer(getattr(self._library.functions, name)) for name in _IN_C]

    def run(self, put: Callable[..., int], *arguments: object) -> int:
        """Return what `put` returns, which calls NCCL by itself; the current device stays."""
        self._take()
        try:
            return put(*arguments)
        finally:
            self._using.release()

    def check(self, code: int) -> None:
        """Raise `TransportError` with NCCL's text for a code that `run` has returned."""
        self._library.check(code)

    def in_progress(self) -> bool:
        """Return whether the last operation is in progress; raise the error of any so far."""
        state = self.run(self._library.state, self._handle)
        if state == _SUCCESS:
            self._kept = ()
        return state == _IN_PROGRESS

    def error(self) -> TransportError | None:
        """Return the error of any operation so far; None also while another thread is in NCCL."""
        if self._end:
            return self._ended()
        if not self._using.acquire(blocking=False):
            return None
        try:
            self._library.state(self._handle)
        except TransportError as error:
            return error
        finally:
            self._using.release()
        return None

    def abort(self) -> None:
        """End the communicator and its work on the device, in a thread of its own.

        NCCL first tells the device to end the work, and then may wait for all else that the device
        does: also for other communicators, whose abort comes next. So nobody waits here. Any thread
        may call this, and more than once. The results of aborted operations are undefined. The
        other ranks have to abort theirs too.
        """
        if self._claim("was aborted"):
            thread = threading.Thread(target=self._abort, name="arraycomm-nccl-abort", daemon=True)
            thread.start()
            # At its end the program gives back memory, for which the device has to be idle.
            atexit.register(thread.join, _GRACE)

    def _abort(self) -> None:
        # Another thread may hang in NCCL until the abort: wait for it only for some time.
        held = self._using.acquire(timeout=_GRACE)
        try:
            if self._handle.value is not None:
                # Without a current device: to set one may wait, with the GIL, for a thread that
                # waits for the aborted work. NCCL ends that first, and then sets the device in its
                # own threads.
                self._library.functions.ncclCommAbort(self._handle)
            self._kept = ()
        finally:
            if held:
                self._using.release()

    def close(self) -> None:
        """End the communicator together with the other ranks; abort it if they do not come in time.

        Waits for the work on the device.
        """
        deadline = time.monotonic() + _GRACE
        try:
            self._settle(deadline)
            with self._in_use() as functions:
                self._library.check(functions.ncclCommFinalize(self._handle))
            self._settle(deadline)
        except (TransportError, TimeoutError):
            self.abort()
            return
        if self._claim("was closed"):
            with self._using, self._library.current(self._device):
                self._library.functions.ncclCommDestroy(self._handle)

    def _settle(self, deadline: float) -> None:
        while self.in_progress():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(_NAP)

    @contextmanager
    def _in_use(self) -> Iterator[Any]:
        """Lend NCCL's functions to one thread at a time; raise if the communicator has ended."""
        self._take()
        try:
            with self._library.current(self._device):
                yield self._library.functions
        finally:
            self._using.release()

    def _take(self) -> None:
        """Let no other thread into NCCL; raise if the communicator has ended."""
        # An abort may hold it for long.
        while not self._using.acquire(timeout=_LOOK):
            if self._end:
                raise self._ended()
        if self._end:
            self._using.release()
            raise self._ended()

    def _claim(self, end: str) -> bool:
        """Note how the communicator ends; True for the first caller only."""
        with self._ending:
            first, self._end = not self._end, self._end or end
        return first

    def _ended(self) -> TransportError:
        return TransportError(f"the NCCL communicator {self._end}")


@cache
def load() -> Library:
    """Return this process's NCCL: the copy that PyTorch or CuPy has loaded, if one of them has.

    Raises
    ------
    OSError
        There is no NCCL.
    """
    functions = _open()
    declare(functions)
    return Library(functions)


def declare(functions: Any) -> None:
    """Tell ctypes what NCCL's functions take and return."""
    for name, arguments in SIGNATURES.items():
        if name in _OPTIONAL and not hasattr(functions, name):
            continue
        function = getattr(functions, name)
        function.argtypes = arguments
        function.restype = ctypes.c_char_p if name in _TEXTS else ctypes.c_int


def _open() -> ctypes.CDLL:
    # A second copy in the process would not know the devices and connections of the first.
    with suppress(OSError):
        return ctypes.CDLL(_NAME, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    for path in _in_wheels():
        with suppress(OSError):
            return ctypes.CDLL(path)
    return ctypes.CDLL(_NAME)


def _in_wheels() -> list[str]:
    """Return where the package nvidia-nccl-cu12 or nvidia-nccl-cu13 has the library."""
    try:
        found = find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    places = found.submodule_search_locations if found else None
    return [str(Path(place) / "lib" / _NAME) for place in places or ()]


def missing() -> str | None:
    """Say why NCCL cannot be used here, and what to do about it; None if it can."""
    reason = device.missing()
    if reason is not None:
        return reason
    if os.environ.get("NCCL_COMM_BLOCKING") == "1":
        return (
            "NCCL_COMM_BLOCKING=1 in the environment makes NCCL wait for ever for ranks that do "
            "not come; unset it"
        )
    try:
        version = load().version()
    except OSError as error:
        return (
            f"NCCL cannot be loaded ({error}); install it, for CUDA 12 with: "
            "pip install nvidia-nccl-cu12"
        )
    except AttributeError as error:
        return f"this NCCL lacks a function ({error}); install 2.14 or newer"
    if version < OLDEST:
        return f"NCCL {'.'.join(map(str, version))} is too old; install 2.14 or newer"
    return None
