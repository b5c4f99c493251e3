"""mpi4py, as its manual uses it: buffers and their MPI dtypes found by mpi4py, objects as pickles."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from mpi4py import MPI

from arraycomm._calls.custom_ops import Op
from arraycomm._errors import CommunicatorClosedError
from arraycomm._messages.matching import ANY_SOURCE, ANY_TAG
from docs.studies.peers.wrapper import Call, NotOfferedError

_OPS = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "and": MPI.BAND,
    "or": MPI.BOR,
    "xor": MPI.BXOR,
}
_LOGICAL = {"and": MPI.LAND, "or": MPI.LOR, "xor": MPI.LXOR, "min": MPI.LAND, "max": MPI.LOR}

# What MPI may still read and write, if an example ends before its requests do.
_BEGUN: list[Any] = []


class Mpi4py:
    """One rank's part."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.counts: Any = None

    def _call(self, name: str, result: Any, later: bool, *args: Any) -> Call:
        if not later:
            getattr(self.comm, name)(*args)
            return Call(result)
        request = getattr(self.comm, f"I{name.lower()}")(*args)
        _BEGUN.append((request, args))
        return Call(result, request.Wait, request.Test)

    # Reductions

    def _reduction(self, name: str, x: Any, op: Any, result: Any, later: bool, *args: Any) -> Call:
        sent = MPI.IN_PLACE if result is not None and np.shares_memory(x, result) else x
        return self._call(name, result, later, sent, result, *args, _op(op, x.dtype))

    def allreduce(self, x: Any, op: Any = "sum", *, later: bool, out: Any = None) -> Call:
        result = np.empty_like(x) if out is None else out
        return self._reduction("Allreduce", x, op, result, later)

    def reduce(
        self, x: Any, op: Any = "sum", root: int = 0, *, later: bool, out: Any = None
    ) -> Call:
        result = np.empty_like(x) if out is None else out
        result = result if self.rank == root else None
        return self._call("Reduce", result, later, x, result, _op(op, x.dtype), root)

    def reduce_scatter(
        self, x: Any, op: Any = "sum", *, counts: Any = None, later: bool, out: Any = None
    ) -> Call:
        if counts is None:
            result = np.empty(x.shape[1:], x.dtype)
            return self._reduction("Reduce_scatter_block", x, op, result, later)
        result = np.empty((counts[self.rank], *x.shape[1:]), x.dtype)
        width = int(np.prod(x.shape[1:]))
        elements = [count * width for count in counts]
        return self._reduction("Reduce_scatter", x, op, result, later, elements)

    def scan(self, x: Any, op: Any = "sum", *, later: bool, out: Any = None) -> Call:
        return self._reduction("Scan", x, op, np.empty_like(x), later)

    def exscan(self, x: Any, op: Any = "sum", *, later: bool, out: Any = None) -> Call:
        call = self._reduction("Exscan", x, op, np.empty_like(x), later)
        if self.rank == 0:
            call.result = None
        return call

    # Movements

    def bcast(self, x: Any, root: int = 0, *, later: bool, out: Any = None) -> Call:
        result = self._at_root(x, root, out)
        return self._call("Bcast", result, later, result, root)

    def _at_root(self, x: Any, root: int, out: Any = None) -> Any:
        """Return memory for what the root sends, whose shape and dtype the others do not know."""
        shape, dtype = self.comm.bcast(None if x is None else (x.shape, x.dtype), root)
        if out is not None:
            if self.rank == root:
                out[...] = x
            return out
        return x.copy() if self.rank == root else np.empty(shape, dtype)

    def allgather(self, x: Any, *, later: bool, out: Any = None) -> Call:
        result = np.empty((self.size, *x.shape), x.dtype) if out is None else out
        return self._call("Allgather", result, later, x, result)

    def gather(self, x: Any, root: int = 0, *, later: bool, out: Any = None) -> Call:
        result = np.empty((self.size, *x.shape), x.dtype) if self.rank == root else None
        return self._call("Gather", result, later, x, result, root)

    def scatter(self, x: Any, root: int = 0, *, later: bool, out: Any = None) -> Call:
        shape, dtype = self.comm.bcast(None if x is None else (x.shape, x.dtype), root)
        result = np.empty(shape[1:], dtype)
        return self._call("Scatter", result, later, x if self.rank == root else None, result, root)

    def alltoall(self, x: Any, *, later: bool, out: Any = None) -> Call:
        result = np.empty_like(x)
        return self._call("Alltoall", result, later, x, result)

    def allgatherv(self, x: Any, *, later: bool, out: Any = None) -> Call:
        self.counts = self.comm.allgather(len(x))
        result = np.empty((sum(self.counts), *x.shape[1:]), x.dtype)
        received = [result, _elements(self.counts, x)]
        return self._call("Allgatherv", result, later, x, received)

    def gatherv(self, x: Any, root: int = 0, *, later: bool, out: Any = None) -> Call:
        counts = self.comm.gather(len(x), root)
        if counts is None:
            return self._call("Gatherv", None, later, x, None, root)
        result = np.empty((sum(counts), *x.shape[1:]), x.dtype)
        return self._call("Gatherv", result, later, x, [result, _elements(counts, x)], root)

    def scatterv(self, x: Any, counts: Any, root: int = 0, *, later: bool, out: Any = None) -> Call:
        result = np.empty((counts[self.rank], *x.shape[1:]), x.dtype)
        sent = [x, _elements(counts, x)] if self.rank == root else None
        return self._call("Scatterv", result, later, sent, result, root)

    def alltoallv(self, x: Any, counts: Any, *, later: bool, out: Any = None) -> Call:
        self.counts = self.comm.alltoall(list(counts))
        result = np.empty((sum(self.counts), *x.shape[1:]), x.dtype)
        received = [result, _elements(self.counts, x)]
        return self._call("Alltoallv", result, later, [x, _elements(counts, x)], received)

    # Objects and messages

    def bcast_object(self, value: Any = None, root: int = 0) -> Any:
        return self.comm.bcast(value, root)

    def allgather_object(self, value: Any) -> Any:
        return self.comm.allgather(value)

    def gather_object(self, value: Any, root: int = 0) -> Any:
        return self.comm.gather(value, root)

    def sendrecv(self, x: Any, dest: int, source: int) -> Any:
        return self.comm.sendrecv(x, dest, source=source)

    def isend(self, x: Any, dest: int, tag: int = 0) -> Any:
        return _Pickled(self.comm.isend(x, dest, tag))

    def irecv(self, source: int, tag: int = 0) -> Any:
        return _Pickled(self.comm.irecv(source=source, tag=tag))

    def recv(self, source: Any, tag: Any = 0, *, status: Any = None) -> Any:
        source = MPI.ANY_SOURCE if source is ANY_SOURCE else source
        told = MPI.Status()
        got = self.comm.recv(source=source, tag=MPI.ANY_TAG if tag is ANY_TAG else tag, status=told)
        if status is not None:
            status.source, status.tag = told.source, told.tag
            status.dtype, status.shape, status.nbytes = got.dtype, got.shape, got.nbytes
        return got

    # Groups

    def barrier(self) -> None:
        if self.comm == MPI.COMM_NULL:
            raise CommunicatorClosedError("the communicator has been freed")
        self.comm.Barrier()

    def split(self, color: int | None, key: int) -> Mpi4py | None:
        made = self.comm.Split(MPI.UNDEFINED if color is None else color, key)
        return None if made == MPI.COMM_NULL else Mpi4py(made)

    def dup(self) -> Mpi4py:
        return Mpi4py(self.comm.Dup())

    def free(self) -> None:
        self.comm.Free()


class _Pickled:
    """A request of mpi4py that carries a pickle: its `test` hands the object over once."""

    def __init__(self, request: Any) -> None:
        self._request, self._done, self._value = request, False, None

    def test(self) -> bool:
        if not self._done:
            self._done, self._value = self._request.test()
        return self._done

    def wait(self, timeout: float | None = None) -> Any:
        if not self._done:
            self._done, self._value = True, self._request.wait()
        return self._value


def _op(op: Any, dtype: Any) -> Any:
    if isinstance(op, Op):
        return _op_of(op.fn, dtype)
    if op == "mean":
        raise NotOfferedError("MPI has no mean")
    return (_LOGICAL if dtype.kind == "b" else _OPS)[op]


@functools.cache
def _op_of(function: Any, dtype: Any) -> Any:
    """Return an operation; mpi4py has a small number of them."""
    return MPI.Op.Create(_on_memory(function, dtype), commute=False)


def _on_memory(function: Any, dtype: Any) -> Any:
    def fold(sent: Any, kept: Any, datatype: Any) -> None:
        own, others = np.frombuffer(kept, dtype), np.frombuffer(sent, dtype)
        own[...] = function(others, own)

    return fold


def _elements(counts: Any, x: Any) -> list[int]:
    width = int(np.prod(x.shape[1:]))
    return [count * width for count in counts]
