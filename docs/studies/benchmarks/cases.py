"""Arrays of any dtype and framework to sum over ranks, and the ways of summing them: arraycomm's own, and others'."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import starmap
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

import arraycomm
from arraycomm import Communicator
from arraycomm._arrays.buffer import Array
from arraycomm._dtypes import BY_NAME, DType
from arraycomm.cli.bench.rows import pattern
from arraycomm.cli.bench.timing import Ranks
from docs.studies.benchmarks import results
from docs.studies.benchmarks.results import Entry

FRAMEWORKS: Final = ("numpy", "torch", "jax")
_GLOO_DTYPES: Final = frozenset(
    ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
)
_TIMEOUT: Final = timedelta(seconds=120)


class UnsupportedError(Exception):
    """A contender cannot do this at all; the message says why."""


# What is timed, and what does the same once more and returns the results as NumPy arrays.
Calls = tuple[Callable[[], Any], Callable[[], Any]]
# A way of doing the work of a case with a framework's arrays; raises `UnsupportedError`.
Way = Callable[[Any, Any, str], Calls]


class Field(Ranks):
    """The ranks and their communicators, each made once, on first use.

    Making one is collective, so every rank has to use them in the same order.
    """

    # What contenders do, by their keys.
    ways: ClassVar[Mapping[str, Way]]

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        # What releases everything, the last made first.
        self._ends = ExitStack()
        self._ends.callback(super().close)
        # By name, and why a rank has none.
        self._started: dict[str, tuple[Any, str]] = {}

    def keys(self, framework: str, *, tree: bool) -> list[str]:
        """Return the keys of the contenders for a framework's arrays, or for trees of them."""
        # A JAX array cannot be written, so it can be neither `out` nor a buffer for MPI.
        writable = framework != "jax"
        keys = ["plan", "tree"] if tree else [*["out"] * writable, "fresh", "unchecked"]
        return [*keys, *["mpi4py"] * writable, *["gloo"] * (framework == "torch")]

    def place(self, values: Array, framework: str) -> Any:
        """Return an array of a framework with these values."""
        return values if framework == "numpy" else arraycomm.exchange(values, framework)

    def clear(self, array: Any, framework: str) -> None:
        """Overwrite an array with zeros, if it can be written."""
        if framework != "jax":
            as_numpy(array)[...] = 0

    @cached_property
    def unchecked(self) -> Communicator:
        """The communicator with `check=False`."""
        made = self.comm.dup(check=False)
        self._ends.callback(made.free)
        return made

    def torch_distributed(self, backend: str) -> Any:
        """Return `torch.distributed`, initialized with a backend, the same in every call."""
        return self.start(backend, partial(self._join, backend))

    def start(self, name: str, start: Callable[[], Any]) -> Any:
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
            # The last rank that closes the store removes it: the others would wait for a lost one.
            file, made = tempfile.mkstemp(prefix="arraycomm-bench-")
            os.close(file)
        # On one node the loopback device is enough, and works without a network.
        if self.comm.local_size == self.size and Path("/sys/class/net/lo").exists():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(self.mpi.bcast(made), self.size)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.size, timeout=_TIMEOUT
        )
        self._ends.callback(dist.destroy_process_group)
        return dist

    def about(self) -> dict[str, Any]:
        """Return what the results say of the devices; nothing if arrays are in host memory."""
        return {}

    def close(self) -> None:
        """Release everything; collective."""
        self._ends.close()


class Case:
    """Arrays to sum, one or the leaves of a tree, and memory for results, the same for all ways."""

    def __init__(self, dtype: str, shapes: Sequence[tuple[int, ...]], field: Field) -> None:
        self.dtype: DType = BY_NAME[dtype].dtype
        self.dtype_name = dtype
        # All sums of these integers are exact, and take little memory.
        self._sums = [self._summed(n, shape, range(field.size)) for n, shape in enumerate(shapes)]
        own = (self._summed(n, shape, [field.rank]) for n, shape in enumerate(shapes))
        self.x = [values.astype(self.dtype) for values in own]
        self.y = [np.zeros(shape, self.dtype) for shape in shapes]
        self.nbytes = sum(leaf.nbytes for leaf in self.x)
        self._field = field
        self._placed: dict[str, tuple[list[Any], list[Any]]] = {}

    @staticmethod
    def _summed(number: int, shape: tuple[int, ...], ranks: Sequence[int]) -> Array:
        """Return the sum of an array, or of a leaf with this number, over some ranks."""
        total: Array = np.zeros(prod(shape), np.min_scalar_type(6 * len(ranks)))
        for rank in ranks:
            total += pattern(rank, len(total)) + np.uint8(number % 5)
        return total.reshape(shape)

    def arrays(self, framework: str) -> tuple[list[Any], list[Any]]:
        """Return what is summed, and where the results go, as arrays of a framework."""
        if framework not in self._placed:
            try:
                x, y = (
                    [self._field.place(a, framework) for a in each] for each in (self.x, self.y)
                )
            except (TypeError, ValueError, NotImplementedError) as error:
                raise UnsupportedError(f"{framework} has no {self.dtype_name}: {error}") from error
            self._placed[framework] = x, y
        return self._placed[framework]

    def verify(self, framework: str, answer: Callable[[], list[Array]]) -> str:
        """Return what is wrong with an answer on this rank, or an empty string."""
        # The last contender has left the right results there.
        for y in self.arrays(framework)[1]:
            self._field.clear(y, framework)
        for number, found in zip(range(len(self.x)), answer(), strict=True):
            if reason := self._difference(number, found):
                return f"leaf {number}: {reason}" if len(self.x) > 1 else reason
        return ""

    def _difference(self, number: int, answer: Array) -> str:
        expected = self.expected(number)
        if answer.shape != expected.shape or answer.dtype != self.dtype:
            return f"the result is {answer.dtype} {answer.shape}"
        wrong = np.flatnonzero(answer != expected)
        if not len(wrong):
            return ""
        first = wrong[0]
        return (
            f"{len(wrong)} of {answer.size} elements are wrong; the first is "
            f"{answer.flat[first]} in place of {expected.flat[first]}"
        )

    def expected(self, number: int) -> Array:
        """Return the exact sum of an array, or a leaf, over all ranks."""
        exact: Array = self._sums[number].astype(self.dtype)
        return exact


def enter(field: Field, case: Any, key: str, framework: str, way: Way | None = None) -> Entry:
    """Return a contender, which takes part if its result is right on every rank; collective."""
    try:
        call, answer = (way or field.ways[key])(field, case, framework)
    except UnsupportedError as error:
        return Entry(key, framework, status="unsupported", reason=str(error))
    return results.enter(field, key, framework, call, partial(case.verify, framework, answer))


def installed(framework: str) -> bool:
    """Return whether a framework is installed, without importing it."""
    return find_spec(framework) is not None


def _out(field: Field, case: Case, framework: str) -> Calls:
    (x,), (y,) = case.arrays(framework)
    return _returning(partial(field.comm.allreduce, x, out=y))


def _fresh(field: Field, case: Case, framework: str) -> Calls:
    return _returning(partial(field.comm.allreduce, case.arrays(framework)[0][0]))


def _unchecked(field: Field, case: Case, framework: str) -> Calls:
    (x,), (y,) = case.arrays(framework)
    out = {} if framework == "jax" else {"out": y}
    return _returning(partial(field.unchecked.allreduce, x, **out))


def _returning(call: Callable[[], Any]) -> Calls:
    return call, lambda: [as_numpy(call())]


def _plan(field: Field, case: Case, framework: str) -> Calls:
    tree, _ = case.arrays(framework)
    return _keeping(partial(field.comm.plan(tree, "sum"), tree))


def _tree(field: Field, case: Case, framework: str) -> Calls:
    tree, _ = case.arrays(framework)
    return _keeping(partial(arraycomm.allreduce_tree, tree, "sum", comm=field.comm))


def _keeping(reduce: Callable[[], Any]) -> Calls:
    """Keep each result until the next one is there, as a training loop does."""
    last: list[Any] = [None]

    def call() -> Any:
        last[0] = reduce()
        return last[0]

    return call, lambda: [as_numpy(leaf) for leaf in call()]


def _mpi4py(field: Field, case: Case, framework: str) -> Calls:
    from mpi4py import MPI

    # Open MPI would sum bfloat16 as bytes.
    if case.dtype.isbuiltin != 1 or MPI.Datatype.fromcode(case.dtype.char) == MPI.DATATYPE_NULL:
        raise UnsupportedError(f"MPI has no {case.dtype_name}")
    x, y = case.arrays(framework)
    return into(_each(field.mpi.Allreduce, zip(x, y, strict=True)), y)


def _gloo(field: Field, case: Case, framework: str) -> Calls:
    if case.dtype_name not in _GLOO_DTYPES:
        raise UnsupportedError(f"gloo has no {case.dtype_name}")
    return in_place("gloo", field, case, framework)


def in_place(backend: str, field: Field, case: Case, framework: str) -> Calls:
    """Return the calls of torch.distributed, which sums in place."""
    x, _ = case.arrays(framework)
    # Zeros: other values would grow from call to call.
    buffers = [field.place(np.zeros_like(leaf), framework) for leaf in case.x]
    call = _each(field.torch_distributed(backend).all_reduce, ((buffer,) for buffer in buffers))

    def answer() -> list[Array]:
        for buffer, leaf in zip(buffers, x, strict=True):
            buffer.copy_(leaf)
        call()
        found = [as_numpy(buffer).copy() for buffer in buffers]
        for buffer in buffers:
            buffer.zero_()
        return found

    return call, answer


def into(call: Callable[[], Any], results: Iterable[Any]) -> Calls:
    """Return the calls of one whose results are in these arrays afterwards."""

    def answer() -> list[Array]:
        call()
        return [as_numpy(result) for result in results]

    return call, answer


def _each(function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> Callable[[], Any]:
    """Return a call of a function with each of these arguments, one after the other."""
    several = list(arguments)
    if len(several) == 1:
        return partial(function, *several[0])

    def call() -> None:
        for _ in starmap(function, several):
            pass

    return call


def as_numpy(result: Any) -> Array:
    """Return a result as a NumPy array."""
    array: Array = arraycomm.exchange(result, "numpy")
    return array


Field.ways = {
    "out": _out,
    "fresh": _fresh,
    "unchecked": _unchecked,
    "plan": _plan,
    "tree": _tree,
    "mpi4py": _mpi4py,
    "gloo": _gloo,
}
