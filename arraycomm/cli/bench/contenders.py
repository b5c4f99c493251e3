"""The benchmark's contenders: each does one allreduce (sum) of one array in a way of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import arraycomm
from arraycomm import Communicator
from arraycomm._arrays.buffer import Array
from arraycomm._dtypes import BY_NAME, DType, check_reducible

if TYPE_CHECKING:
    from mpi4py import MPI


TITLES: Final = {
    "out": "arraycomm, out=",
    "fresh": "arraycomm",
    "shared": "arraycomm, in shared memory",
    "unchecked": "arraycomm, check=False",
    "plan": "arraycomm, plan(tree)",
    "tree": "arraycomm, allreduce_tree",
    "step": "arraycomm, DistributedOptimizer",
    "local": "no communication",
    "jit": "arraycomm, jit",
    "jit-donated": "arraycomm, jit of a donated x",
    "optax": "arraycomm, optax",
    "mpi4py": "mpi4py Allreduce",
    "gloo": "gloo",
    "ddp": "DistributedDataParallel, gloo",
    "nccl": "CuPy's NCCL",
    "torch-nccl": "torch's NCCL",
    "copy": "copy on the device",
    "mpi4jax": "mpi4jax",
}
# What arraycomm is compared with; all other contenders are arraycomm itself.
REFERENCES: Final = ("mpi4py", "gloo", "ddp", "nccl", "torch-nccl", "copy", "mpi4jax")
FRAMEWORKS: Final = ("numpy", "torch", "jax")
OWN: Final = ("out", "fresh", "unchecked")

_GLOO_DTYPES: Final = frozenset(
    ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
)
# torch stores these dtypes, but has little arithmetic for them.
_NOT_IN_TORCH: Final = frozenset(("uint16", "uint32", "uint64"))
# JAX truncates these to 32 bits by default.
_NOT_IN_JAX: Final = frozenset(("int64", "uint64", "float64", "complex128"))
_LARGE: Final = 64 << 10
_TIMEOUT: Final = timedelta(seconds=120)


class UnsupportedError(Exception):
    """A contender cannot do this at all; the message says why."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to sum `x` over the ranks.

    `call` is timed. `answer` does the same once more; of an array it returns the result as a NumPy
    array.
    """

    key: str
    framework: str
    call: Callable[[], Any]
    answer: Callable[[], Any]


class Field:
    """The communicators that contenders use, each made once, on first use.

    Making one is collective, so every rank has to use them in the same order.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.mpi: MPI.Intracomm = comm.mpi_comm.Dup()
        # What releases everything, the last made first.
        self._ends = ExitStack()
        self._ends.callback(self.mpi.Free)
        # By name, and why a rank has none.
        self._started: dict[str, tuple[Any, str]] = {}

    @cached_property
    def unchecked(self) -> Communicator:
        """The communicator with `check=False`."""
        made = self.comm.dup(check=False)
        self._ends.callback(made.free)
        return made

    def torch_distributed(self, backend: str) -> Any:
        """Return `torch.distributed`, initialized for all ranks with a backend.

        A process can initialize it once, so the backend is the same in every call.
        """
        return self._start(backend, partial(self._join, backend))

    def _start(self, name: str, start: Callable[[], Any]) -> Any:
        """Return what `start` has returned at first; no rank uses it if one has failed."""
        if name not in self._started:
            made, failure = None, ""
            try:
                made = start()
            except Exception as error:
                failure = f"{name} does not start: {error}"
            self._started[name] = made, max(self.mpi.allgather(failure))
        made, failure = self._started[name]
        if failure:
            raise UnsupportedError(failure)
        return made

    def _join(self, backend: str) -> Any:
        dist: Any = import_module("torch.distributed")
        made = ""
        if self.rank == 0:
            made = tempfile.mkdtemp(prefix="arraycomm-bench-")
            self._ends.callback(shutil.rmtree, made, ignore_errors=True)
        path = Path(self.mpi.bcast(made)) / "store"
        # On one node the loopback device is enough, and works without a network.
        if self.comm.local_size == self.size and Path("/sys/class/net/lo").exists():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(path), self.size),
            rank=self.rank,
            world_size=self.size,
            timeout=_TIMEOUT,
        )
        self._ends.callback(dist.destroy_process_group)
        return dist

    def about(self) -> dict[str, Any]:
        """Return what the results say of the devices; nothing if arrays are in host memory."""
        return {}

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.mpi.Barrier()

    def finish(self) -> None:
        """Wait for the work that calls have started; host calls are complete when they return."""

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return, element by element, the largest of all ranks' numbers."""
        rows = self.mpi.allgather(list(seconds))
        return [max(column) for column in zip(*rows, strict=True)]

    def close(self) -> None:
        """Release everything; collective."""
        self._ends.close()


class Case:
    """One array to sum, and memory for the result; all contenders use the same memory."""

    def __init__(self, dtype_name: str, nbytes: int, rank: int, size: int) -> None:
        self.dtype: DType = BY_NAME[dtype_name].dtype
        self.dtype_name = dtype_name
        self.count = max(1, nbytes // self.dtype.itemsize)
        self.nbytes = self.count * self.dtype.itemsize
        self.x = pattern(rank, self.count).astype(self.dtype)
        self.y = np.zeros(self.count, self.dtype)
        total = sum((pattern(r, self.count) for r in range(size)), np.zeros(self.count, np.uint8))
        self.expected: Array = total.astype(self.dtype)

    def arrays(self, framework: str) -> tuple[Any, Any]:
        """Return `x` and `y` as arrays of a framework."""
        return as_array(self.x, framework), as_array(self.y, framework)

    def clear(self, framework: str) -> None:
        """Overwrite with zeros what the last contender of a framework left in `y`."""
        self.y[...] = 0

    def verify(self, contender: Contender) -> str:
        """Return what is wrong with a contender's answer on this rank, or an empty string."""
        self.clear(contender.framework)
        answer = contender.answer()
        if answer.shape != self.expected.shape or answer.dtype != self.dtype:
            return f"the result is {answer.dtype} {answer.shape}"
        wrong = np.flatnonzero(answer != self.expected)
        if not len(wrong):
            return ""
        first = int(wrong[0])
        return (
            f"{len(wrong)} of {self.count} elements are wrong; the first is "
            f"{answer[first]} in place of {self.expected[first]}"
        )


def pattern(rank: int, count: int) -> Array:
    """Return small integers that differ between ranks, and whose sums are exact in every dtype."""
    values: Array = (np.arange(count, dtype=np.uint32) // (rank + 1) % 3).astype(np.uint8)
    return values


def parse_dtype(name: str) -> str:
    """Return the name of a dtype that can be summed, or raise."""
    if name not in BY_NAME:
        raise ValueError(f"unknown dtype {name!r}; known are {', '.join(BY_NAME)}")
    check_reducible(BY_NAME[name].dtype, "sum")
    return name


def installed(framework: str) -> bool:
    """Return whether a framework is installed, without importing it."""
    return find_spec(framework) is not None


def keys_of(framework: str, nbytes: int) -> list[str]:
    """Return the keys of the contenders for a framework's arrays of so many bytes."""
    # Arrays that travel with the header lie in ordinary memory.
    shared = ["shared"] if nbytes >= _LARGE else []
    keys = ["out", *shared, "fresh", "unchecked", "mpi4py"]
    if framework == "torch":
        return [*keys, "gloo"]
    # A JAX array cannot be written, so it can be neither `out` nor a buffer for MPI.
    return ["fresh", "unchecked"] if framework == "jax" else keys


def make(key: str, framework: str, case: Case, field: Field) -> Contender:
    """Return a contender, or raise `UnsupportedError`."""
    if framework == "torch" and case.dtype_name in _NOT_IN_TORCH:
        raise UnsupportedError(f"torch does not compute with {case.dtype_name}")
    if framework == "jax" and case.dtype_name in _NOT_IN_JAX:
        raise UnsupportedError(f"JAX has {case.dtype_name} only in its 64-bit mode")
    return own(key, framework, case, field) if key in OWN else _MAKERS[key](framework, case, field)


def own(key: str, framework: str, case: Case, field: Field) -> Contender:
    """Return a contender that is arraycomm's own."""
    comm = field.unchecked if key == "unchecked" else field.comm
    x, y = case.arrays(framework)
    fresh = key == "fresh" or framework == "jax"
    call = partial(comm.allreduce, x) if fresh else partial(comm.allreduce, x, out=y)
    return Contender(key, framework, call, lambda: as_numpy(call()))


def into(key: str, framework: str, call: Callable[[], Any], y: Any) -> Contender:
    """Return a contender whose result is in `y` after the call."""

    def answer() -> Array:
        call()
        return as_numpy(y)

    return Contender(key, framework, call, answer)


def _shared(framework: str, case: Case, field: Field) -> Contender:
    like = as_array(case.y[:0], framework)
    x, y = (field.comm.empty(case.count, case.dtype, like) for _ in range(2))
    as_numpy(x)[...] = case.x
    call = partial(field.comm.allreduce, x, out=y)
    return Contender("shared", framework, call, lambda: as_numpy(call()))


def _mpi4py(framework: str, case: Case, field: Field) -> Contender:
    from mpi4py import MPI

    # Open MPI would sum bfloat16 as bytes.
    if case.dtype.isbuiltin != 1 or MPI.Datatype.fromcode(case.dtype.char) == MPI.DATATYPE_NULL:
        raise UnsupportedError(f"MPI has no {case.dtype_name}")
    x, y = case.arrays(framework)
    return into("mpi4py", framework, partial(field.mpi.Allreduce, x, y), y)


def _gloo(framework: str, case: Case, field: Field) -> Contender:
    if case.dtype_name not in _GLOO_DTYPES:
        raise UnsupportedError(f"gloo has no {case.dtype_name}")
    x, memory = as_array(case.x, framework), np.zeros(case.count, case.dtype)
    buffer = as_array(memory, framework)
    call = partial(field.torch_distributed("gloo").all_reduce, buffer)

    def answer() -> Array:
        buffer.copy_(x)
        call()
        result = memory.copy()
        # gloo sums in place: values other than zeros would grow from call to call.
        buffer.zero_()
        return result

    return Contender("gloo", framework, call, answer)


_MAKERS: Final[dict[str, Callable[[str, Case, Field], Contender]]] = {
    "shared": _shared,
    "mpi4py": _mpi4py,
    "gloo": _gloo,
}


def as_array(values: Array, framework: str) -> Any:
    """Return an array of a framework with these values."""
    return values if framework == "numpy" else arraycomm.exchange(values, framework)


def as_numpy(result: Any) -> Array:
    """Return a result as a NumPy array."""
    array: Array = arraycomm.exchange(result, "numpy")
    return array
