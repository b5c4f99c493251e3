"""What the benchmark times: each call beside mpi4py's, large arrays, and trees; all of float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import Any, Final

import numpy as np

import arraycomm
from arraycomm.cli.bench.results import size_text
from arraycomm.cli.bench.timing import Call, Ranks

Shapes = tuple[tuple[int, ...], ...]

_OBJECT: Final = {"a": 1, "b": "text"}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the benchmark: a call of arraycomm's, and mpi4py's.

    What mpi4py's call leaves in `gets` is the right result on this rank. If `nbytes` are told, the
    bandwidth is of interest.
    """

    name: str
    own: Call
    other: Call
    gets: Any = None
    nbytes: int = 0

    def wrong(self, ranks: Ranks) -> str:
        """Return what is wrong with arraycomm's result, on the first such rank; collective."""
        found = self.own()
        self.other()
        said = "" if _same(found, self.gets) else f"the result is {found} in place of {self.gets}"
        replies = enumerate(ranks.mpi.allgather(said))
        return next((f"rank {rank}: {reply}" for rank, reply in replies if reply), "")


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_same(found[k], expected[k]) for k in found)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    return np.array_equal(found, expected)


def pattern(rank: int, count: int) -> Any:
    """Return small integers that differ between ranks, and whose sums are exact in every dtype."""
    return (np.arange(count, dtype=np.uint32) // (rank + 1) % 3).astype(np.uint8)


def _values(ranks: Ranks, *shape: int) -> Any:
    return pattern(ranks.rank, prod(shape)).astype(np.float32).reshape(shape)


def latency(ranks: Ranks, nbytes: int) -> Iterator[Row]:
    """Yield a row for each call with arrays of some bytes, each on the same memory; collective."""
    for name, own, other, gets in _calls(ranks, max(1, nbytes // 4)):
        yield Row(f"{name}, {size_text(nbytes)}", own, other, gets)


def _calls(ranks: Ranks, n: int) -> Iterator[tuple[str, Call, Call, Any]]:
    """Yield the calls with arrays of n elements: the name, arraycomm's, mpi4py's, what is right."""
    comm, mpi, is_root = ranks.comm, ranks.mpi, ranks.rank == 0
    x, y, z = (_values(ranks, n) for _ in range(3))
    part = _values(ranks, ranks.size, n)
    every = np.zeros_like(part)
    yield "barrier", comm.barrier, mpi.Barrier, None
    yield "bcast", partial(comm.bcast, x), partial(mpi.Bcast, z), z
    for name, other, sent, gets in (
        ("allreduce", mpi.Allreduce, x, y),
        ("reduce", mpi.Reduce, x, y if is_root else None),
        ("scan", mpi.Scan, x, y),
        ("allgather", mpi.Allgather, x, every),
        ("gather", mpi.Gather, x, every if is_root else None),
        ("alltoall", mpi.Alltoall, part, every),
        ("reduce_scatter", mpi.Reduce_scatter_block, part, y),
    ):
        yield name, partial(getattr(comm, name), sent), partial(other, sent, gets), gets
    scatter = partial(comm.scatter, part if is_root else None)
    yield "scatter", scatter, partial(mpi.Scatter, part, y), y
    yield from _messages(ranks, x, y)
    waited = (lambda: comm.iallreduce(x).wait()), (lambda: mpi.Iallreduce(x, y).Wait())
    yield "iallreduce and wait", *waited, y
    tree = partial(arraycomm.allreduce_tree, {"a": x, "b": x}, "sum", comm=comm)
    leaves = _each(partial(mpi.Allreduce, x, y), partial(mpi.Allreduce, x, z))
    yield "allreduce_tree, two leaves", tree, leaves, {"a": y, "b": z}
    objects = partial(comm.bcast_object, _OBJECT), partial(mpi.bcast, _OBJECT)
    yield "bcast_object", *objects, _OBJECT
    if find_spec("torch"):
        sent, got = (arraycomm.exchange(each, "torch") for each in (x, y))
        other = partial(mpi.Allreduce, sent, got)
        yield "allreduce of torch tensors", partial(comm.allreduce, sent), other, got


def _messages(ranks: Ranks, x: Any, y: Any) -> Iterator[tuple[str, Call, Call, Any]]:
    comm, mpi, rank, beside = ranks.comm, ranks.mpi, ranks.rank, ranks.rank ^ 1
    after, before = (rank + 1) % ranks.size, (rank - 1) % ranks.size

    def requests() -> Any:
        receiving, sending = comm.irecv(before), comm.isend(x, after)
        sending.wait()
        return receiving.wait()

    def mpi_requests() -> None:
        receiving, sending = mpi.Irecv(y, before), mpi.Isend(x, after)
        sending.Wait()
        receiving.Wait()

    def there() -> Any:
        comm.send(x, beside)
        return comm.recv(beside, like=x)

    def back() -> Any:
        received = comm.recv(beside, like=x)
        comm.send(x, beside)
        return received

    send, receive = partial(mpi.Send, x, beside), partial(mpi.Recv, y, beside)
    own, other, gets = (there, _each(send, receive), y)
    if rank > beside:
        own, other = back, _each(receive, send)
    elif beside == ranks.size:  # the last of an odd number of ranks is idle
        own, other, gets = list, list, []
    sendrecv = partial(mpi.Sendrecv, x, after, recvbuf=y, source=before)
    yield "sendrecv", partial(comm.sendrecv, x, after, before), sendrecv, y
    yield "isend and irecv", requests, mpi_requests, y
    yield "send, and recv back", own, other, gets


def _each(*calls: Call) -> Call:
    def made() -> None:
        for call in calls:
            call()

    return made


def bandwidth(ranks: Ranks, nbytes: int) -> Iterator[Row]:
    """Yield the rows of an `allreduce` of a larger array; collective."""
    (x, y, out) = (_values(ranks, max(1, nbytes // 4)) for _ in range(3))
    other = partial(ranks.mpi.Allreduce, x, y)
    for name, own in (
        ("allreduce, out=", partial(ranks.comm.allreduce, x, out=out)),
        ("allreduce", partial(ranks.comm.allreduce, x)),
    ):
        yield Row(f"{name}, {size_text(nbytes)}", own, other, y, nbytes)


def tree(ranks: Ranks, name: str, shapes: Shapes) -> Iterator[Row]:
    """Yield the rows of a tree, of which mpi4py reduces one array after the other; collective."""
    x, y = ([_values(ranks, *shape) for shape in shapes] for _ in range(2))
    calls = (partial(ranks.mpi.Allreduce, *leaves) for leaves in zip(x, y, strict=True))
    other = _each(*calls)
    for kind, own in (
        ("plan(tree)", partial(ranks.comm.plan(x, "sum"), x)),
        ("allreduce_tree", partial(arraycomm.allreduce_tree, x, "sum", comm=ranks.comm)),
    ):
        yield Row(f"{kind}, {name}", _keeping(own), other, y, nbytes_of(shapes))


def _keeping(reduce: Call) -> Call:
    """Keep each result until the next one is there, as a training loop does."""
    last: list[Any] = [None]

    def call() -> Any:
        last[0] = reduce()
        return last[0]

    return call


def nbytes_of(shapes: Shapes) -> int:
    """Return the bytes of a tree of float32 with these shapes."""
    return 4 * sum(map(prod, shapes))


TREES: Final = {
    "100 leaves of 1 MB": ((512, 512),) * 100,
    "1,000 leaves of 6 KB": tuple((1000 + leaf,) for leaf in range(1000)),
}
