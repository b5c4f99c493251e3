"""What the benchmark times: each call beside mpi4py's, large arrays, and trees; all of float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import Any, Final

import numpy as np

import arraycomm
from arraycomm.cli.bench.results import OTHER
from arraycomm.cli.bench.timing import Ranks

Call = Callable[[], Any]
Shapes = tuple[tuple[int, ...], ...]

_OBJECT: Final = {"a": 1, "b": "text"}


# Under which word the results store the name of a row.
_NAMED: Final = {"calls": "call", "trees": "tree"}


class Row:
    """One line of the benchmark: its contenders' calls by their keys, and what a rank gets.

    `other` is mpi4py's call. What it leaves in `gets` is the right result of all others.
    """

    dtype_name: Final = "float32"

    def __init__(
        self, mode: str, name: str, nbytes: int, *, other: Call, gets: Any = None, **own: Call
    ) -> None:
        self.mode, self.nbytes = mode, nbytes
        self.named = {_NAMED[mode]: name} if mode in _NAMED else {}
        self.framework = "torch" if "torch" in name else "numpy"
        self.contenders = {**own, OTHER: other}
        self._other, self._gets = other, gets

    def verify(self, key: str) -> str:
        """Return what is wrong with a contender's result on this rank; collective."""
        found, expected = self.contenders[key](), self._expected()
        if key == OTHER or _same(found, expected):
            return ""
        return f"the result is {found} in place of {expected}"

    def _expected(self) -> Any:
        self._other()
        return self._gets


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
    comm, mpi, is_root = ranks.comm, ranks.mpi, ranks.rank == 0
    n = max(1, nbytes // 4)
    x, y, z = (_values(ranks, n) for _ in range(3))
    part = _values(ranks, ranks.size, n)
    every = np.zeros_like(part)
    row = partial(Row, "calls", nbytes=nbytes)
    yield row("barrier", other=mpi.Barrier, fresh=comm.barrier)
    yield row("bcast", other=partial(mpi.Bcast, z), gets=z, fresh=partial(comm.bcast, x))
    for name, other, sent, gets in (
        ("allreduce", mpi.Allreduce, x, y),
        ("reduce", mpi.Reduce, x, y if is_root else None),
        ("scan", mpi.Scan, x, y),
        ("allgather", mpi.Allgather, x, every),
        ("gather", mpi.Gather, x, every if is_root else None),
        ("alltoall", mpi.Alltoall, part, every),
        ("reduce_scatter", mpi.Reduce_scatter_block, part, y),
    ):
        call = partial(getattr(comm, name), sent)
        yield row(name, other=partial(other, sent, gets), gets=gets, fresh=call)
    scatter = partial(comm.scatter, part if is_root else None)
    yield row("scatter", other=partial(mpi.Scatter, part, y), gets=y, fresh=scatter)
    yield from _messages(ranks, nbytes, x, y)
    waited = (lambda: mpi.Iallreduce(x, y).Wait()), (lambda: comm.iallreduce(x).wait())
    yield row("iallreduce and wait", other=waited[0], gets=y, fresh=waited[1])
    tree = partial(arraycomm.allreduce_tree, {"a": x, "b": x}, "sum", comm=comm)
    leaves = _each(partial(mpi.Allreduce, x, y), partial(mpi.Allreduce, x, z))
    yield row("allreduce_tree, two leaves", other=leaves, gets={"a": y, "b": z}, fresh=tree)
    call = partial(comm.bcast_object, _OBJECT)
    yield row("bcast_object", other=partial(mpi.bcast, _OBJECT), gets=_OBJECT, fresh=call)
    if find_spec("torch"):
        sent, got = (arraycomm.exchange(each, "torch") for each in (x, y))
        call = partial(comm.allreduce, sent)
        other = partial(mpi.Allreduce, sent, got)
        yield row("allreduce of torch tensors", other=other, gets=got, fresh=call)


def _messages(ranks: Ranks, nbytes: int, x: Any, y: Any) -> Iterator[Row]:
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
    row = partial(Row, "calls", nbytes=nbytes)
    sendrecv = partial(mpi.Sendrecv, x, after, recvbuf=y, source=before)
    yield row("sendrecv", other=sendrecv, gets=y, fresh=partial(comm.sendrecv, x, after, before))
    yield row("isend and irecv", other=mpi_requests, gets=y, fresh=requests)
    yield row("send, and recv back", other=other, gets=gets, fresh=own)


def _each(*calls: Call) -> Call:
    def made() -> None:
        for call in calls:
            call()

    return made


def bandwidth(ranks: Ranks, nbytes: int) -> Row:
    """Return the row of an `allreduce` of a larger array; collective."""
    (x, y, out) = (_values(ranks, max(1, nbytes // 4)) for _ in range(3))
    allreduce = partial(ranks.comm.allreduce, x)
    other = partial(ranks.mpi.Allreduce, x, y)
    into = partial(allreduce, out=out)
    return Row("bandwidth", "", nbytes, other=other, gets=y, out=into, fresh=allreduce)


def tree(ranks: Ranks, name: str, shapes: Shapes) -> Row:
    """Return the row of a tree, of which mpi4py reduces one array after the other; collective."""
    x, y = ([_values(ranks, *shape) for shape in shapes] for _ in range(2))
    calls = (partial(ranks.mpi.Allreduce, *leaves) for leaves in zip(x, y, strict=True))
    plan = partial(ranks.comm.plan(x, "sum"), x)
    whole = partial(arraycomm.allreduce_tree, x, "sum", comm=ranks.comm)
    own = {"plan": _keeping(plan), "tree": _keeping(whole)}
    return Row("trees", name, nbytes_of(shapes), other=_each(*calls), gets=y, **own)


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


def _resnet50() -> Shapes:
    """Parameters of ResNet-50 (He, Zhang, Ren, Sun, 2016), in torchvision's order."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            shapes += [(width, inputs, 1, 1), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            shapes += [(outputs, width, 1, 1), (outputs,), (outputs,)]
            if block == 0:
                shapes += [(outputs, inputs, 1, 1), (outputs,), (outputs,)]
            inputs = outputs
    return (*shapes, (1000, 2048), (1000,))


def _gpt2() -> Shapes:
    """Parameters of the small GPT-2 (Radford and others, 2019): 12 blocks of width 768."""
    width = 768
    shapes: list[tuple[int, ...]] = [(50257, width), (1024, width)]
    for _ in range(12):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,)]
        shapes += [(width, width), (width,), (width,), (width,)]
        shapes += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return (*shapes, (width,), (width,))


TREES: Final = {
    "ResNet-50": _resnet50(),
    "GPT-2": _gpt2(),
    "1,000 leaves": tuple((1000 + leaf,) for leaf in range(1000)),
}
