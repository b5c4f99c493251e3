"""Each call in the benchmark: what programs make again and again, beside mpi4py's buffer calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

import arraycomm
from arraycomm.cli.bench.cases import Calls, Field, pattern

SIZES: Final = (8, 64 << 10)
# The contenders of each row, by their keys.
OWN, OTHER = "fresh", "mpi4py"
_OBJECT: Final = {"a": 1, "b": "text"}

Call = Callable[[], Any]


class Row:
    """A call of arraycomm's, one of mpi4py's that does the same, and what a rank gets of that."""

    dtype_name: Final = "float32"

    def __init__(self, name: str, nbytes: int, own: Call, other: Call, gets: Any = None) -> None:
        self.name, self.nbytes = name, nbytes
        self._other, self._gets = other, gets
        answers = {OWN: own, OTHER: self._expected}
        self._calls = {key: (call, answers[key]) for key, call in ((OWN, own), (OTHER, other))}

    def way(self, key: str) -> Callable[..., Calls]:
        """Return the calls of a contender, as `enter` asks for them."""
        return lambda *_: self._calls[key]

    def verify(self, framework: str, answer: Call) -> str:
        """Return what is wrong with an answer on this rank; collective."""
        found, expected = answer(), self._expected()
        return "" if _same(found, expected) else f"the result is {found} in place of {expected}"

    def _expected(self) -> Any:
        self._other()
        return self._gets


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_same(found[k], expected[k]) for k in found)
    return np.array_equal(found, expected)


def rows(field: Field, nbytes: int) -> Iterator[Row]:
    """Yield the rows of arrays of some bytes, each with memory of its own; collective."""
    comm, mpi, rank, size = field.comm, field.mpi, field.rank, field.size
    n = max(1, nbytes // 4)
    x, y, z, w = (pattern(rank, n).astype(np.float32) for _ in range(4))
    part = pattern(rank, size * n).astype(np.float32).reshape(size, n)
    every = np.zeros_like(part)
    after, before, is_root = (rank + 1) % size, (rank - 1) % size, rank == 0
    row = partial(Row, nbytes=nbytes)
    yield row("barrier", own=comm.barrier, other=mpi.Barrier)
    yield row("bcast", own=partial(comm.bcast, x), other=partial(mpi.Bcast, z), gets=z)
    for name, other in (("allreduce", mpi.Allreduce), ("reduce", mpi.Reduce), ("scan", mpi.Scan)):
        gets = y if is_root or name != "reduce" else None
        yield row(name, own=partial(getattr(comm, name), x), other=partial(other, x, y), gets=gets)
    for name, gather in (("allgather", mpi.Allgather), ("gather", mpi.Gather)):
        gets = every if is_root or name != "gather" else None
        own = partial(getattr(comm, name), x)
        yield row(name, own=own, other=partial(gather, x, every), gets=gets)
    scatter = partial(comm.scatter, part if is_root else None)
    yield row("scatter", own=scatter, other=partial(mpi.Scatter, part, y), gets=y)
    alltoall, into = partial(comm.alltoall, part), partial(mpi.Alltoall, part, every)
    yield row("alltoall", own=alltoall, other=into, gets=every)
    reduce_scatter = partial(comm.reduce_scatter, part)
    into = partial(mpi.Reduce_scatter_block, part, y)
    yield row("reduce_scatter", own=reduce_scatter, other=into, gets=y)
    sendrecv = partial(comm.sendrecv, x, after, before)
    into = partial(mpi.Sendrecv, x, after, recvbuf=y, source=before)
    yield row("sendrecv", own=sendrecv, other=into, gets=y)
    yield row("isend and irecv", own=_exchange(field, x), other=_mpi_exchange(field, x, y), gets=y)
    yield _there_and_back(field, nbytes, x, y)
    waits = (lambda: comm.iallreduce(x).wait(), lambda: mpi.Iallreduce(x, y).Wait())
    yield row("iallreduce and wait", own=waits[0], other=waits[1], gets=y)
    tree = partial(arraycomm.allreduce_tree, {"a": x, "b": x}, "sum", comm=comm)
    leaves = partial(_both, partial(mpi.Allreduce, x, y), partial(mpi.Allreduce, x, w))
    yield row("allreduce_tree, two leaves", own=tree, other=leaves, gets={"a": y, "b": w})
    send = partial(comm.bcast_object, _OBJECT), partial(mpi.bcast, _OBJECT)
    yield row("bcast_object", own=send[0], other=send[1], gets=_OBJECT)


def _both(first: Call, second: Call) -> None:
    first()
    second()


def _exchange(field: Field, x: Any) -> Call:
    comm, after, before = field.comm, (field.rank + 1) % field.size, (field.rank - 1) % field.size

    def exchange() -> Any:
        receiving, sending = comm.irecv(before), comm.isend(x, after)
        sending.wait()
        return receiving.wait()

    return exchange


def _mpi_exchange(field: Field, x: Any, y: Any) -> Call:
    mpi, after, before = field.mpi, (field.rank + 1) % field.size, (field.rank - 1) % field.size

    def exchange() -> None:
        receiving, sending = mpi.Irecv(y, before), mpi.Isend(x, after)
        sending.Wait()
        receiving.Wait()

    return exchange


def _there_and_back(field: Field, nbytes: int, x: Any, y: Any) -> Row:
    """Return the row of a message to the rank beside this one, which sends one back."""
    comm, mpi, other = field.comm, field.mpi, field.rank ^ 1
    name = "send, and recv back"
    if other >= field.size:
        return Row(name, nbytes, lambda: None, lambda: None)
    send, receive = partial(mpi.Send, x, other), partial(mpi.Recv, y, other)
    if field.rank > other:

        def back() -> Any:
            received = comm.recv(other, like=x)
            comm.send(x, other)
            return received

        return Row(name, nbytes, back, partial(_both, receive, send), y)

    def there() -> Any:
        comm.send(x, other)
        return comm.recv(other, like=x)

    return Row(name, nbytes, there, partial(_both, send, receive), y)
