"""The library's own calls on simulated ranks, beside what the model says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Final

import numpy as np

from arraycomm import Communicator, Request
from arraycomm._collectives.selection import Algorithm, select
from docs.studies.scaling import model
from docs.studies.scaling.model import Machine, Movement
from docs.studies.scaling.network import Network
from docs.studies.scaling.simulated import communicators, transports

# Ranks, by the number of them on a node.
RANKS: Final = {1: (2, 3, 8, 100, 1000, 1024), 64: (8, 64, 256, 1024)}
# Bytes of float32: a header's, and what each of the other algorithms is chosen for. The last are several chunks.
BYTES: Final = (8, 1 << 10, 64 << 10, 512 << 10, 1 << 20, 8 << 20)
# Of the array that the other collectives move; of two ranks, all of that comes with the header.
COLLECTIVE_BYTES: Final = 1 << 20
# Algorithms without a formula: those that send no messages of the library's, those of the user's, and one that
# no group of hosts takes.
NOT_MODELLED: Final = {
    Algorithm.LOCAL: "one rank",
    Algorithm.GATHER: "devices only: on hosts, arrays so small are shown in slots",
    Algorithm.SEGMENT: "memory that the ranks of a node share",
    Algorithm.SHARED: "arrays in memory that the ranks of a node share",
    Algorithm.NATIVE: "a device's own reduction",
    Algorithm.FUNCTION: "a function of the user's",
    Algorithm.FUNCTION_BY_SLICES: "a function of the user's",
}
# Elements move, and results are compared, if all ranks together have at most so many bytes.
_MOVED: Final = 64 << 20
_DTYPE: Final = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Simulated:
    """One allreduce, header included: what a rank has sent at most, and when the last one was done."""

    ranks: int
    per_node: int
    algorithm: str
    nbytes: int
    messages: int
    leaving: int
    sent: int
    seconds: float

    def movement(self) -> Movement:
        """Return the messages that the model has for this call."""
        shared = self.ranks <= self.per_node
        payload = self.nbytes if self.algorithm == Algorithm.HEADER else 0
        return [
            *model.header_movement(self.ranks, shared, self.per_node, payload),
            *model.MOVEMENTS[self.algorithm](self.ranks, self.nbytes, self.per_node),
        ]

    def predicted(self, machine: Machine) -> float:
        """Return the seconds that the model has for this call, without what Python does."""
        bare, shared = without_python(machine), self.ranks <= self.per_node
        # The library folds what came with the header itself, and not by its transport.
        bare = replace(bare, fold_byte=0.0) if self.algorithm == Algorithm.HEADER else bare
        algorithm = model.ALGORITHMS[self.algorithm]
        return model.header(self.ranks, bare, shared) + algorithm(
            self.ranks, self.nbytes, bare, shared
        )


@dataclass(frozen=True, slots=True)
class Sent:
    """One call of another collective, header included: the messages of the rank that sends most."""

    collective: str
    ranks: int
    messages: int

    def formula(self) -> int:
        """Return the messages that the model has for this call."""
        moved = model.COLLECTIVES[self.collective](self.ranks, COLLECTIVE_BYTES)
        return model.messages([*model.header_movement(self.ranks, shared=False), *moved])


def without_python(machine: Machine) -> Machine:
    """Return a machine on which only messages between ranks and folds take time."""
    return replace(
        machine,
        **dict.fromkeys(("call", "step", "begin", "message", "slot", "row", "part"), 0.0),
        **dict.fromkeys(
            ("turn", "lane", "share", "entry", "piece", "copy_byte", "seen", "seen_byte"), 0.0
        ),
    )


def cases(size: int, machine: Machine) -> Iterator[tuple[Algorithm, int]]:
    """Yield what the library chooses on so many ranks, and for how many bytes.

    Where a slice would have no element, the last ranks would send less than the model says.
    """
    (link,) = transports(Network(size, machine), [0])
    for nbytes in BYTES:
        algorithm = select(link, "sum", _DTYPE, nbytes)
        if algorithm in {Algorithm.HEADER, Algorithm.STEPS} or nbytes >= _DTYPE.itemsize * size:
            yield algorithm, nbytes


def simulated(size: int, machine: Machine, algorithm: str, nbytes: int) -> Simulated:
    """Let the library reduce on simulated ranks; return what was sent.

    Raises
    ------
    AssertionError
        The result of a rank is not the sum in rank order, to the bit.
    """
    moves = size * nbytes <= _MOVED
    network = Network(size, machine, moves_data=moves)
    comms = communicators(network)
    if moves:
        arrays = np.random.default_rng(size).normal(size=(size, nbytes // 4)).astype(_DTYPE)
        calls = [partial(comm.iallreduce, x) for comm, x in zip(comms, arrays, strict=True)]
        *_, expected = accumulate(arrays)
        assert all(np.array_equal(result, expected) for result in network.run(calls))
    else:
        x, out = np.zeros((2, nbytes // 4), _DTYPE)
        network.run([partial(comm.iallreduce, x, out=out) for comm in comms])
    return Simulated(
        ranks=size,
        per_node=machine.per_node,
        algorithm=str(algorithm),
        nbytes=nbytes,
        messages=int(network.messages.max()),
        leaving=int(network.leaving.max()),
        sent=int(network.nbytes.max()),
        seconds=float(network.clock.max()),
    )


def sent(collective: str, size: int, machine: Machine) -> Sent:
    """Let the library make a call on simulated ranks, one a node; return what was sent.

    `x` and the result have `COLLECTIVE_BYTES`, or one of them as many from each rank.
    """
    network = Network(size, machine, moves_data=False)
    count = COLLECTIVE_BYTES // _DTYPE.itemsize
    large = np.zeros((32 << 20) // _DTYPE.itemsize, _DTYPE)
    x, rows = np.zeros(count, _DTYPE), np.zeros((size, count // size), _DTYPE)
    gathered = np.zeros((size, count), _DTYPE)
    starts: dict[str, Callable[[Communicator], Request]] = {
        "barrier": lambda comm: comm.ibarrier(),
        "bcast": lambda comm: comm.ibcast(x),
        "bcast of 32 MiB": lambda comm: comm.ibcast(large),
        "allgather": lambda comm: comm.iallgather(x, out=gathered),
        "gather": lambda comm: comm.igather(x, out=None if comm.rank else gathered),
        "scatter": lambda comm: comm.iscatter(None if comm.rank else rows),
        "alltoall": lambda comm: comm.ialltoall(rows, out=np.empty_like(rows)),
        "reduce": lambda comm: comm.ireduce(x),
        "reduce_scatter": lambda comm: comm.ireduce_scatter(rows),
        "scan": lambda comm: comm.iscan(x),
    }
    network.run([partial(starts[collective], comm) for comm in communicators(network)])
    return Sent(collective, size, int(network.messages.max()))


def simulate(machine: Machine) -> dict[str, list[dict[str, Any]]]:
    """Simulate every case on up to 1,024 ranks, in some minutes."""
    reductions = [
        asdict(simulated(size, on, algorithm, nbytes))
        for per_node, ranks in RANKS.items()
        for size in ranks
        for on in [replace(machine, per_node=per_node)]
        for algorithm, nbytes in cases(size, on)
    ]
    others = [
        asdict(sent(name, size, machine)) for name in model.COLLECTIVES for size in RANKS[1][1:]
    ]
    return {"allreduce": reductions, "others": others}
