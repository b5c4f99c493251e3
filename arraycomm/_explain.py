"""Which algorithm a reduction of an array would use, described in words."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Final

from arraycomm._arrays.views import view
from arraycomm._calls.custom_ops import Op
from arraycomm._communicator import Communicator, runner_of
from arraycomm._cuda.arrays import device_view, on_cuda
from arraycomm._cuda.devices import Devices
from arraycomm._cuda.links.link import DeviceLink
from arraycomm._dtypes import DType, OpName, check_op, check_reducible, name_of
from arraycomm._entries import entry
from arraycomm._errors import naming
from arraycomm._folds import total_dtype
from arraycomm._native import compiled
from arraycomm._protocol.group import Group
from arraycomm._reduce.selection import Algorithm, select, without_segment
from arraycomm._session import world

_IN_WORDS: Final = {
    Algorithm.LOCAL: "one rank alone: nothing is sent",
    Algorithm.HEADER: "one step: the elements travel with the header, and every rank folds them",
    Algorithm.GATHER: "every device gathers all ranks' elements, and folds them",
    Algorithm.SLICES: "chunk by chunk: each rank folds a slice of all ranks' elements, "
    "then slices are gathered",
    Algorithm.CHAIN: "chunk by chunk from node to node: each folds its ranks' elements onto the "
    "total of those before, and the result goes back",
    Algorithm.SEGMENT: "chunk by chunk through memory that the ranks share, from where they fold "
    "them",
    Algorithm.FUNCTION: "one rank gathers all ranks' elements, folds them by the function, "
    "and sends the result; of large arrays each rank folds a slice if the function is elementwise",
    Algorithm.NATIVE: "the transport reduces by its own means, in an order that does not show",
}


@dataclass(frozen=True)
class Explanation:
    """What `allreduce` of an array would do; `print` describes it in words.

    Attributes
    ----------
    array : str
        The array's dtype, shape and namespace.
    op : str
        The reduction.
    backend : str
        What moves the elements: "self", "threads", "mpi", "nccl", or "staged": MPI, over copies in
        pinned memory.
    algorithm : str
        "local", "header", "gather", "slices", "chain", "segment", "native" or "function".
    copies : int
        Copies that are made of the array before it is sent: 0 if its own memory can be used.
    sent : int
        Bytes that this rank sends to others.
    notes : tuple of str
        Further facts, such as why NCCL is not used.
    """

    array: str
    op: str
    backend: str
    algorithm: str
    copies: int
    sent: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        copies = {0: "no copy", 1: "1 copy"}.get(self.copies, f"{self.copies} copies")
        lines = [
            f"allreduce({self.op}) of {self.array} over {self.backend}",
            f"  {_IN_WORDS[Algorithm(self.algorithm)]}",
            f"  {copies} of the array before it is sent; {self.sent} bytes sent by this rank",
        ]
        return "\n".join(lines + [f"  {note}" for note in self.notes])


@entry
def explain(x: Any, op: OpName | Op = "sum", *, comm: Communicator | None = None) -> Explanation:
    """Say which algorithm `allreduce` would use for an array, and how many copies it makes; local.

    Parameters
    ----------
    x : array
        Any array; it is inspected, not sent.
    op : str or Op
        As for `Communicator.allreduce`.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    Explanation
        Print it, or look at its attributes.

    Raises
    ------
    TypeError, ValueError
        `allreduce` would raise it for this array and op.
    """
    with naming("explain"):
        return _explanation(comm or world(), x, op)


def _explanation(comm: Communicator, x: Any, op: OpName | Op) -> Explanation:
    group, placements = runner_of(comm).group, runner_of(comm).placements
    assert isinstance(placements, Devices)
    device_link = None if isinstance(op, Op) or not on_cuda(x) else placements.link
    source = view(x) if device_link is None else device_view(x, "x", device_link.memory)
    if not isinstance(op, Op):
        check_op(op)
        check_reducible(source.dtype, op)
    nbytes = source.dtype.itemsize * prod(source.shape)
    staged = device_link is not None and device_link.name == "staged"
    # Arrays that are staged are reduced by the host's algorithms.
    link = group.transport if device_link is None or staged else device_link
    algorithm = select(link, op, source.dtype, nbytes)
    if algorithm is Algorithm.SEGMENT and compiled is None:
        algorithm = without_segment(link, nbytes)
    strided = nbytes > 0 and device_link is None and not source.array.flags.c_contiguous
    return Explanation(
        array=f"{name_of(source.dtype)} {source.shape} ({type(x).__module__.partition('.')[0]})",
        op=op.name if isinstance(op, Op) else op,
        backend=comm.backend if device_link is None else device_link.name,
        algorithm=algorithm.value,
        copies=int(strided) + int(source.copied) + int(staged),
        sent=_sent(algorithm, nbytes, source.dtype, group),
        notes=tuple(_notes(group, algorithm, x, device_link, placements.reason)),
    )


def _sent(algorithm: Algorithm, nbytes: int, dtype: DType, group: Group) -> int:
    """Return how many bytes a rank sends to others."""
    size, chain = group.size, group.transport.chain
    match algorithm:
        case Algorithm.CHAIN if chain is not None:
            wide = total_dtype(dtype).itemsize // dtype.itemsize
            return nbytes // chain.lanes * ((chain.after >= 0) * wide + (chain.before >= 0))
        case Algorithm.LOCAL:
            return 0
        case Algorithm.SLICES | Algorithm.NATIVE:
            return 2 * nbytes * (size - 1) // size
        case _:
            return nbytes


def _notes(
    group: Group, algorithm: Algorithm, x: Any, link: DeviceLink | None, reason: str
) -> list[str]:
    notes = list[str]()
    if on_cuda(x) and link is None:
        notes.append(f"by way of host memory, with a copy each way: {reason}")
    if link is not None and link.name == "staged":
        notes.append(f"by way of pinned memory, chunk by chunk: {reason}")
    if not group.transport.threaded:
        notes.append(
            "requests progress only while this rank calls, tests or waits: the MPI was not started "
            "with MPI_THREAD_MULTIPLE"
        )
    if not group.options.check and algorithm not in (Algorithm.LOCAL, Algorithm.HEADER):
        notes.append("check=False: what the ranks call is not compared")
    if not group.options.reproducible:
        native = algorithm is Algorithm.NATIVE
        own = "the transport's own" if native else "that of the ranks all the same"
        notes.append(f"reproducible=False: the order is {own}")
    return notes
