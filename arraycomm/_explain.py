"""Which way an array would take through a reduction, said in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.views import view
from arraycomm._collectives.algorithms import choose
from arraycomm._collectives.custom_ops import Op
from arraycomm._communicator import Communicator
from arraycomm._cuda.arrays import device_view, on_cuda
from arraycomm._dtypes import check_movable, check_op, check_reducible, name_of
from arraycomm._session import world
from arraycomm._transports.base import DeviceLink

_WAYS: Final = {
    "local": "one rank alone: nothing is sent",
    "header": "one step: the elements travel with the header, and every rank folds them",
    "steps": "a slot of shared memory after another: every rank folds what all show",
    "gather": "every rank gathers all ranks' elements, and folds them",
    "slices": "chunk by chunk: each rank folds a slice of all ranks' elements, then slices are gathered",
    "function": "one rank gathers all ranks' elements, folds them by the function, and sends the result",
    "function by slices": "each rank folds a slice of all ranks' elements by the function, then slices "
    "are gathered",
    "native": "the transport reduces by its own means, in an order that does not show",
}


@dataclass(frozen=True)
class Explanation:
    """What `allreduce` of an array would do; printed, it says so in words.

    Attributes
    ----------
    array : str
        The array's dtype, shape and namespace.
    op : str
        The reduction.
    backend : str
        What moves the elements: "self", "threads", "mpi", "nccl", or "staged": MPI, over copies in
        pinned memory.
    way : str
        "local", "header", "steps", "gather", "slices", "native", "function" or "function by slices".
    copies : int
        Copies that are made of the array before it is sent: 0 where its own memory can be used.
    sent : int
        Bytes that this rank sends to others.
    notes : tuple of str
        What else there is to know.
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
            f"  {_WAYS[self.algorithm]}",
            f"  {copies} of the array before it is sent; {self.sent} bytes sent by this rank",
        ]
        return "\n".join(lines + [f"  {note}" for note in self.notes])


def explain(x: Any, op: str | Op = "sum", *, comm: Communicator | None = None) -> Explanation:
    """Say which way an array would take through `allreduce`, and what copies that makes; local.

    Parameters
    ----------
    x : array
        Any array; it is looked at, not sent.
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
    comm = world() if comm is None else comm
    link = None if isinstance(op, Op) or not on_cuda(x) else comm._devices.link
    source = view(x, "explain") if link is None else _on_device(x, link)
    check_movable(source.dtype, "explain")
    if not isinstance(op, Op):
        check_op(op, "explain")
        check_reducible(source.dtype, op, "explain")
    nbytes = math.prod(source.shape) * source.dtype.itemsize
    algorithm = _algorithm(nbytes, source, op, comm, link)
    strided = nbytes > 0 and link is None and not source.array.flags.c_contiguous
    return Explanation(
        array=f"{name_of(source.dtype)} {source.shape} ({type(x).__module__.partition('.')[0]})",
        op=op.name if isinstance(op, Op) else op,
        backend=comm.backend if link is None else link.name,
        algorithm=algorithm,
        copies=int(strided) + int(source.copied) + int(_staged(link)),
        sent=_sent(algorithm, nbytes, comm.size),
        notes=tuple(_notes(comm, algorithm, x, link)),
    )


def _staged(link: DeviceLink | None) -> bool:
    return link is not None and link.name == "staged"


def _on_device(x: Any, link: DeviceLink) -> BufferView:
    return device_view(x, "explain", "x", link.memory)


def _algorithm(
    nbytes: int, source: BufferView, op: str | Op, comm: Communicator, link: DeviceLink | None
) -> str:
    if link is not None and isinstance(op, str) and comm.size > 1 and not _staged(link):
        if link.native(op, source.dtype):
            return "native"
        return choose(nbytes, comm.size, *link.slot)
    algorithm = choose(nbytes, comm.size, *comm._link.slot)
    if isinstance(op, Op) and comm.size > 1:
        sliced = op.elementwise and algorithm != "header"
        algorithm = "function by slices" if sliced else "function"
    return algorithm


def _sent(algorithm: str, nbytes: int, size: int) -> int:
    if algorithm == "local":
        return 0
    if algorithm in ("slices", "function by slices", "native"):
        return 2 * nbytes * (size - 1) // size
    return nbytes


def _notes(comm: Communicator, algorithm: str, x: Any, link: DeviceLink | None) -> list[str]:
    notes = []
    if on_cuda(x) and link is None:
        notes.append(f"by way of host memory, with a copy each way: {comm._devices.reason}")
    if _staged(link):
        notes.append(f"by way of pinned memory, chunk by chunk: {comm._devices.reason}")
    if not comm._link.threaded:
        notes.append(
            "requests progress only while this rank calls, tests or waits: the MPI was not started "
            "with MPI_THREAD_MULTIPLE"
        )
    if not comm._options.check and algorithm not in ("local", "header"):
        notes.append("check=False: what the ranks call is not compared")
    if not comm._options.reproducible:
        own = "the transport's own" if algorithm == "native" else "that of the ranks all the same"
        notes.append(f"reproducible=False: the order is {own}")
    return notes
