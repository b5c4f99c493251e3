"""mpi4py, as its manual uses it: buffers and their MPI dtypes found by mpi4py, objects as pickles."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI

from arraycomm._calls.custom_ops import Op
from arraycomm._errors import CommunicatorClosedError
from arraycomm._messages.matching import ANY_SOURCE, ANY_TAG
from docs.studies.peers.wrapper import Call, NotOfferedError

_OPS = {name: getattr(MPI, name.upper()) for name in ("sum", "prod", "min", "max")}
_OPS |= {name: getattr(MPI, f"B{name.upper()}") for name in ("and", "or", "xor")}
_LOGICAL = {"and": MPI.LAND, "or": MPI.LOR, "xor": MPI.LXOR, "min": MPI.LAND, "max": MPI.LOR}

# What MPI has with the rank, by the letter of NumPy's dtype.
_PAIRS = {"h": MPI.SHORT_INT, "i": MPI.INT_INT, "l": MPI.LONG_INT}
_PAIRS |= {"f": MPI.FLOAT_INT, "d": MPI.DOUBLE_INT}

# What MPI may still read and write, if an example ends before its requests do.
_BEGUN: list[Any] = []


class Mpi4py:
    """One rank's part."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size

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
        result = _room(out, x.shape, x)
        return self._reduction("Allreduce", x, op, result, later)

    def reduce(
        self, x: Any, op: Any = "sum", root: int = 0, *, later: bool, out: Any = None
    ) -> Call:
        result = _room(out, x.shape, x)
        result = result if self.rank == root else None
        return self._call("Reduce", result, later, x, result, _op(op, x.dtype), root)

    def reduce_scatter(
        self, x: Any, op: Any = "sum", *, counts: Any = None, later: bool, out: Any = None
    ) -> Call:
        if counts is None:
            result = _room(out, x.shape[1:], x)
            return self._reduction("Reduce_scatter_block", x, op, result, later)
        result = _room(out, (counts[self.rank], *x.shape[1:]), x)
        width = int(np.prod(x.shape[1:]))
        elements = [count * width for count in counts]
        return self._reduction("Reduce_scatter", x, op, result, later, elements)

    def scan(self, x: Any, op: Any = "sum", *, later: bool, out: Any = None) -> Call:
        return self._reduction("Scan", x, op, _room(out, x.shape, x), later)

    def exscan(self, x: Any, op: Any = "sum", *, later: bool, out: Any = None) -> Call:
        call = self._reduction("Exscan", x, op, _room(out, x.shape, x), later)
        if self.rank == 0:
            call.result = None
        return call

    def maxloc(self, x: Any, op: Any = MPI.MAXLOC) -> tuple[Any, Any]:
        if x.dtype.char not in _PAIRS:
            raise NotOfferedError(f"MPI has no pairs of {x.dtype} and a rank")
        pairs = np.empty(x.shape, np.dtype([("value", x.dtype), ("rank", "i4")], align=True))
        pairs["value"], pairs["rank"] = x, self.rank
        self.comm.Allreduce(MPI.IN_PLACE, [pairs, x.size, _PAIRS[x.dtype.char]], op)
        return pairs["value"].copy(), pairs["rank"].copy()

    minloc = functools.partialmethod(maxloc, op=MPI.MINLOC)

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
        result = _room(out, (self.size, *x.shape), x)
        return self._call("Allgather", result, later, x, result)

    def gather(self, x: Any, root: int = 0, *, later: bool, out: Any = None) -> Call:
        result = _room(out, (self.size, *x.shape), x) if self.rank == root else None
        return self._call("Gather", result, later, x, result, root)

    def scatter(self, x: Any, root: int = 0, *, later: bool, out: Any = None) -> Call:
        shape, dtype = self.comm.bcast(None if x is None else (x.shape, x.dtype), root)
        result = np.empty(shape[1:], dtype) if out is None else out
        return self._call("Scatter", result, later, x if self.rank == root else None, result, root)

    def alltoall(self, x: Any, *, later: bool, out: Any = None) -> Call:
        result = _room(out, x.shape, x)
        sent = MPI.IN_PLACE if np.shares_memory(x, result) else x
        return self._call("Alltoall", result, later, sent, result)

    def allgatherv(self, x: Any, *, later: bool, out: Any = None) -> Call:
        counts = self.comm.allgather(len(x))
        result = _room(out, (sum(counts), *x.shape[1:]), x)
        received = [result, _elements(counts, x)]
        return replace(self._call("Allgatherv", result, later, x, received), counts=counts)

    def gatherv(self, x: Any, root: int = 0, *, later: bool, out: Any = None) -> Call:
        counts = self.comm.gather(len(x), root)
        if counts is None:
            return self._call("Gatherv", None, later, x, None, root)
        result = _room(out, (sum(counts), *x.shape[1:]), x)
        received = [result, _elements(counts, x)]
        return replace(self._call("Gatherv", result, later, x, received, root), counts=counts)

    def scatterv(self, x: Any, counts: Any, root: int = 0, *, later: bool, out: Any = None) -> Call:
        told = (counts, x.shape[1:], x.dtype) if self.rank == root else None
        counts, shape, dtype = self.comm.bcast(told, root)
        result = np.empty((counts[self.rank], *shape), dtype) if out is None else out
        sent = [x, _elements(counts, x)] if self.rank == root else None
        return self._call("Scatterv", result, later, sent, result, root)

    def alltoallv(self, x: Any, counts: Any, *, later: bool, out: Any = None) -> Call:
        come, sent = self.comm.alltoall(list(counts)), [x, _elements(counts, x)]
        result = _room(out, (sum(come), *x.shape[1:]), x)
        received = [result, _elements(come, x)]
        return replace(self._call("Alltoallv", result, later, sent, received), counts=come)

    # Objects and messages

    def bcast_object(self, value: Any = None, root: int = 0) -> Any:
        return self.comm.bcast(value, root)

    def allgather_object(self, value: Any) -> Any:
        return self.comm.allgather(value)

    def gather_object(self, value: Any, root: int = 0) -> Any:
        return self.comm.gather(value, root)

    def sendrecv(self, x: Any, dest: int, source: int, tag: int = 0, *, status: Any = None) -> Any:
        told = MPI.Status()
        got = self.comm.sendrecv(x, dest, tag, source=source, recvtag=tag, status=told)
        return _told(got, told, status)

    def send(self, x: Any, dest: int, tag: int = 0) -> None:
        self.comm.send(x, dest, tag)

    def isend(self, x: Any, dest: int, tag: int = 0) -> Any:
        return _Pickled(self.comm.isend(x, dest, tag))

    def irecv(self, source: Any, tag: Any = 0, *, status: Any = None) -> Any:
        return _Pickled(self.comm.irecv(None, *_from(source, tag)), status)

    def recv(self, source: Any, tag: Any = 0, *, status: Any = None) -> Any:
        told = MPI.Status()
        return _told(self.comm.recv(None, *_from(source, tag), told), told, status)

    # Arrays are pickled as well.
    send_object, isend_object, recv_object, irecv_object = send, isend, recv, irecv

    def probe(self, source: Any, tag: Any = 0, name: str = "probe") -> Any:
        told = MPI.Status()
        return told if getattr(self.comm, name)(*_from(source, tag), told) else None

    iprobe = functools.partialmethod(probe, name="iprobe")

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

    def __init__(self, request: Any, status: Any = None) -> None:
        self._request, self._done, self._value = request, False, None
        self._told, self._status = MPI.Status(), status

    def test(self) -> bool:
        if not self._done:
            self._done, self._value = self._request.test(self._told)
        return self._done

    def wait(self, timeout: float | None = None) -> Any:
        if not self._done:
            self._done, self._value = True, self._request.wait(self._told)
        return _told(self._value, self._told, self._status)


def _from(source: Any, tag: Any) -> list[Any]:
    known = {ANY_SOURCE: MPI.ANY_SOURCE, ANY_TAG: MPI.ANY_TAG}
    return [known.get(given, given) for given in (source, tag)]


def _told(got: Any, told: Any, status: Any) -> Any:
    """Return what was received, once it is said what it is."""
    if status is not None:
        status.source, status.tag = told.source, told.tag
        if isinstance(got, np.ndarray):
            status.dtype, status.shape, status.nbytes = got.dtype, got.shape, got.nbytes
    return got


def _room(out: Any, shape: Any, like: Any) -> Any:
    return np.empty(shape, like.dtype) if out is None else out


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
