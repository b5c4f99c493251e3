"""The user's object: argument rules, then view, header, algorithm, result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakValueDictionary

import numpy as np

from arraycomm._arrays.views import view
from arraycomm._callsite import call_site, describe_exception, describe_raise
from arraycomm._collectives import messages, movements, objects, reductions
from arraycomm._collectives import operation as _calls
from arraycomm._collectives.custom_ops import Op
from arraycomm._collectives.fast_path import ShortReduction
from arraycomm._collectives.messages import Message
from arraycomm._collectives.operation import Call, UndeliveredError
from arraycomm._collectives.placement import HostPlacement, StagedTreePlacement
from arraycomm._cuda.arrays import on_cuda
from arraycomm._cuda.devices import Devices
from arraycomm._errors import (
    CommTimeoutError,
    CommunicatorClosedError,
    MismatchError,
    PeerError,
    TransportError,
)
from arraycomm._protocol.engine import Engine, Task
from arraycomm._protocol.header import (
    Agreement,
    Signature,
    Steps,
    agree,
    encode,
    fail_in_step,
    leave_in_step,
    operation_of,
)
from arraycomm._training.join import JOINABLE, refused
from arraycomm._transports.base import Handle, Transport
from arraycomm._transports.control import FAILED, FINISHED, ExitNotice

if TYPE_CHECKING:
    from arraycomm._training.gradients import Gradients
    from arraycomm._training.join import Join
    from arraycomm._trees.fusion import Fusion
    from arraycomm._trees.plan import Plan
    from arraycomm._trees.shared_memory import SharedSegment

_MAX_CACHED: Final = 1024
# Seconds of waiting after which a rank tells the others what it waits in, and the parts of the
# timeout after which it asks those that it cannot see.
_LONG_WAIT: Final = 0.1
_ASK_AT: Final = (0.5, 0.9)
# Seconds in which a message of a rank that has left still arrives.
_LAST_WORDS: Final = 0.5
# Seconds in which MPI learns of the death of a process, where others see that something is wrong.
_DEATH: Final = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """What holds for every call on a communicator; the same on every rank."""

    check: bool = True
    reproducible: bool = True
    timeout: float | None = 1800.0

    def __post_init__(self) -> None:
        for name in ("check", "reproducible"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False; got {getattr(self, name)!r}")
        if self.timeout is None:
            return
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)):
            raise TypeError(f"timeout must be a number of seconds or None; got {self.timeout!r}")
        if not self.timeout > 0:
            raise ValueError(f"timeout must be positive, or None; got {self.timeout!r}")
        object.__setattr__(self, "timeout", float(self.timeout))


class Request:
    """A collective or a message under way, started by one of the `i…` methods.

    All ranks start the same collectives in the same order; requests may be waited for in any order.
    """

    def __init__(self, comm: Communicator, task: Task, site: str) -> None:
        self._comm = comm
        self._task = task
        self._site = site

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for it to finish, and return what the blocking form returns.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; None for as long as the communicator's own timeout allows.

        Raises
        ------
        CommTimeoutError
            It is not finished after `timeout` seconds. It goes on: wait again.
        """
        try:
            with self._comm._turn():
                return self._comm._engine.finish(self._task, timeout)
        except TimeoutError:
            raise CommTimeoutError(
                f"the request made at {self._site} is not finished after {timeout} seconds"
            ) from None

    def test(self) -> bool:
        """Push it on without waiting, and tell whether it is finished."""
        self._comm._engine.advance()
        return self._task.finished

    def __repr__(self) -> str:
        state = "finished" if self._task.finished else "under way"
        return f"<Request made at {self._site}: {state}>"


def waitall(requests: Iterable[Request]) -> list[Any]:
    """Wait for all requests; return their results, in the order of the requests.

    Parameters
    ----------
    requests : iterable of Request
        Of any communicators, started in any order.

    Raises
    ------
    Exception
        The error of the first request that failed, once all have been waited for.
    """
    results, errors = [], []
    # All are started before the first is waited for, also where a generator starts them.
    for request in list(requests):
        try:
            results.append(request.wait())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


class _Turn:
    """One user's call at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine.take_turn()

    def __exit__(self, *_: object) -> None:
        self._engine.turn.release()


class Communicator:
    """A group of ranks that communicate.

    Made by `arraycomm.init`, `split`, `dup` and `from_mpi`. Every collective is called by all ranks
    of the group, in the same order, with the same operation, dtype, shape, op and root; each rank
    passes any array (NumPy, PyTorch, JAX, CuPy, or anything with DLPack, an array interface or a
    buffer) in any layout, and gets a result of its own framework and device. Where ranks disagree,
    every rank raises `MismatchError`; where one passes a wrong argument it raises the built-in
    error, and the others `PeerError`.

    Attributes
    ----------
    rank, size : int
        This rank's number, and how many there are.
    local_rank, local_size : int
        The same among the ranks of this node.
    backend : str
        "self", "threads", "mpi", or "nccl" where that was asked for.
    """

    def __init__(self, link: Transport, options: Options, name: str = "world") -> None:
        self._name = name
        self._link = link
        self._control = link.control
        self._options = options
        self._engine = Engine(link.spins, link.threaded, self._watch, self._push_others)
        # Memory that the ranks share for trees: None before it is asked for, False without any.
        self._segment: SharedSegment | bool | None = None
        # How leaves are fused, and memory for them: for plans while these are in use, and for the
        # gradients reduced last.
        self._fusions: WeakValueDictionary[Any, Fusion] = WeakValueDictionary()
        self._gradients: Fusion | None = None
        # The block of `join` that this rank is in, the optimizers that take part in one, and, on an
        # optimizer's own duplicate, the communicator whose blocks count.
        self._join: Join | None = None
        self._optimizers: WeakValueDictionary[int, Gradients] = WeakValueDictionary()
        self._made_optimizers = 0
        self._joins_with: Communicator | None = None
        self._inline = link.control.payload
        # The way of the arrays of the call that is being made, and which link those on devices take.
        self._placement = self._host_placement = HostPlacement(self)
        self._host_tree_placement = StagedTreePlacement(self)
        self._devices = Devices(self)
        # What is wrong with a call that had gone ahead of its header, until somebody is told.
        self._late: BaseException | None = None
        self._prefixes: dict[tuple[Signature, int, int, int], bytes] = {}
        self._short: dict[tuple[Any, ...], ShortReduction] = {}
        self._closed: BaseException | None = None
        # Whether a call was given up while data was moving: the transport still holds its buffers.
        self._unfinished = False
        # Messages that this rank has sent, less those that it has received.
        self._unmatched = 0
        # The call under way and where it was made, which is None for a call of this thread's; how
        # often the ranks that are missing were asked where they are.
        self._doing: tuple[str, str | None] = ("", None)
        self._asked = 0
        self._waiting_in = ""
        # When a rank was first seen to have left, of those that followed another.
        self._alone_since = 0.0
        # For each block of `raise_together` that is open: the step at which it began.
        self._together: list[int] = []
        self._completed = 0
        self._sent = 0
        self._stats: dict[str, list[float]] = {}
        # Duplicates do their work for this one; their figures count here.
        self._original: Communicator | None = None
        self._duplicates: list[Communicator] = []
        # How many communicators were made from this one, for their names.
        self._made = 0
        # This communicator and those made from it, in the order of their making.
        self._related: list[Communicator] = [self]
        self.rank, self.size = link.rank, link.size
        self.local_rank, self.local_size = link.local_rank, link.local_size
        self.backend = link.name

    # The life of a communicator

    @classmethod
    def from_mpi(
        cls,
        mpi4py_comm: Any,
        *,
        device: Any = None,
        check: bool = True,
        reproducible: bool = True,
        timeout: float | None = 1800.0,
    ) -> Communicator:
        """Return a communicator over the ranks of an mpi4py communicator.

        For programs that use MPI already. Collective over `mpi4py_comm`; works on a duplicate of
        it, frees only that, and leaves `world()` alone.

        Parameters
        ----------
        mpi4py_comm : mpi4py.MPI.Intracomm
            The communicator to work over.
        device, check, reproducible, timeout
            As for `arraycomm.init`.

        Raises
        ------
        TypeError, ValueError, BackendUnavailableError
            An argument is wrong, or cannot be had here; the other ranks raise `PeerError`.
        """
        from arraycomm._session import device_request, open_mpi

        return open_mpi(
            mpi4py_comm,
            lambda: (Options(check, reproducible, timeout), device_request("auto", device)),
        )

    @property
    def device(self) -> str:
        """Where this rank makes arrays when no argument tells it: "cpu", or a device as in "cuda:0"."""
        return self._devices.name

    @property
    def mpi_comm(self) -> Any:
        """The mpi4py communicator underneath, or None."""
        return self._link.mpi_comm

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Split the group: ranks that pass the same color form a new communicator.

        Parameters
        ----------
        color : int or None
            Which new group this rank joins; None for none, and then the result is None.
        key : int
            Ranks are numbered in the order of `key`, and of their old rank where keys are equal.

        Returns
        -------
        Communicator or None
            With the same options. Blocks until all ranks of this group have called.
        """
        from arraycomm._collectives.groups import split

        return split(self, color, key)

    def split_by_node(self) -> Communicator:
        """Return the communicator of the ranks on this rank's node."""
        from arraycomm._collectives.groups import split_by_node

        return split_by_node(self)

    def dup(self, **options: Any) -> Communicator:
        """Return a communicator of the same ranks, whose calls are independent of this one's.

        Parameters
        ----------
        **options
            `check`, `reproducible` and `timeout`, where they are to differ; the same on every rank.
        """
        from arraycomm._collectives.groups import dup

        return dup(self, options)

    def free(self) -> None:
        """Release the communicator; collective. Later calls raise `CommunicatorClosedError`.

        Waits for what is outstanding; requests may be waited for afterwards. Warns of messages that
        were sent and never received.
        """
        from arraycomm._collectives.groups import free

        free(self)

    def shrink(self) -> Communicator:
        """Return a communicator of the ranks that live; collective among those.

        For programs that go on after the death of a process: call it once a call has raised
        `PeerError` for that. This communicator ends, and with it those that were made from it; where
        it was `world()`, the new one is that from now on. Ranks keep their order.

        Raises
        ------
        BackendUnavailableError
            The death of a process ends the others here as well. Open MPI lets them live with
            `mpiexec --with-ft ulfm`.
        """
        from arraycomm._collectives.groups import shrink

        return shrink(self)

    def abort(self, code: int = 1) -> None:
        """End the whole job at once, as far as the transport reaches, with this exit status."""
        self._link.abort(code)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.free()
        else:
            at_rest = self._at_rest()
            self._close(error)
            if at_rest and not self._control.shared and not self._control.ended:
                # Nobody sees it leave but in its next step, which ends when the others take part.
                next(leave_in_step(self._control, repr(error)))

    def __repr__(self) -> str:
        state = "" if self._closed is None else ", closed"
        return f"<Communicator {self.backend}: rank {self.rank} of {self.size}{state}>"

    # Collectives

    def allreduce(self, x: Any, op: str | Op = "sum", *, out: Any = None) -> Any:
        """Reduce all ranks' arrays, elementwise and in rank order; every rank gets the result.

        Parameters
        ----------
        x : array, shape S
            This rank's array; shape and dtype are the same on every rank.
        op : str or Op
            "sum", "mean", "prod", "min", "max", "and", "or", "xor", or made by `arraycomm.op`. Floats
            of 16 and 8 bits are accumulated in float32 and rounded once; NaN on any rank makes min
            and max NaN.
        out : array, shape S, optional
            Where the result goes; may be `x` itself.

        Returns
        -------
        array, shape S
            A fresh array like `x`, with the same bits on every rank; or `out`.

        Raises
        ------
        TypeError
            The dtype does not have this reduction, or cannot be sent.
        ValueError, BufferError
            `out` has another shape, or cannot be written to.
        MismatchError, PeerError, CommTimeoutError
            See `arraycomm._errors`.

        Notes
        -----
        Blocks until every rank has called. Up to 32 KiB (128 bytes between nodes) all is done in
        one small step. Large arrays are sent in slices to the rank that folds them and gathered
        again: about twice the array's bytes a rank (Thakur, Rabenseifner, Gropp: Optimization of
        Collective Communication Operations in MPICH, 2005).
        """
        try:
            short = self._short.get((type(x), op, x.dtype, x.shape))
        except Exception:
            # What is wrong with x is found, and told to the other ranks, on the long way.
            short = None
        if short is not None and (result := short(x, out)) is not None:
            return result
        result = self._call("allreduce", reductions.allreduce, x, op, out)
        if short is None and isinstance(op, str):
            self._remember(x, op)
        return result

    def reduce(self, x: Any, op: str | Op = "sum", root: int = 0, *, out: Any = None) -> Any:
        """Reduce all ranks' arrays as `allreduce` does; only `root` gets the result.

        Parameters
        ----------
        x : array, shape S
            This rank's array, which stays as it is.
        op : str or Op
            As for `allreduce`.
        root : int
            The rank that gets the result.
        out : array, shape S, optional
            Where the result goes, on `root`.

        Returns
        -------
        array, shape S, or None
            Like `x` on `root`, None on the other ranks.
        """
        return self._call("reduce", reductions.reduce, x, op, root, out)

    def bcast(self, x: Any = None, root: int = 0, *, like: Any = None, out: Any = None) -> Any:
        """Give every rank the array of `root`.

        Parameters
        ----------
        x : array, shape S, or None
            On `root` the array to send, of any dtype without Python objects. The other ranks pass
            None, or an array of the same shape and dtype, which is only looked at for its kind.
        root : int
            The rank that sends.
        like : array, optional
            On ranks that pass no `x`: an array of the framework and device wanted. NumPy otherwise.
        out : array, shape S, optional
            Where the result goes.

        Returns
        -------
        array, shape S
            A fresh array on every rank, `root` included; or `out`.
        """
        return self._call("bcast", movements.bcast, x, root, like, out)

    def allgather(self, x: Any, *, out: Any = None) -> Any:
        """Stack all ranks' arrays; every rank gets the whole.

        Parameters
        ----------
        x : array, shape S
            This rank's array; shape and dtype are the same on every rank.
        out : array, shape (size, *S), optional
            Where the result goes.

        Returns
        -------
        array, shape (size, *S)
            Row r is the array of rank r. (A Python number gives a NumPy array.)
        """
        return self._call("allgather", movements.allgather, x, out)

    def allgatherv(self, x: Any, *, return_counts: bool = False, out: Any = None) -> Any:
        """Join all ranks' arrays along axis 0, whose length may differ; every rank gets the whole.

        Parameters
        ----------
        x : array, shape (n, *S)
            This rank's rows; `n` may differ between ranks and be 0, S and dtype may not.
        return_counts : bool
            Whether to return the ranks' row counts as well.
        out : array, shape (sum of n, *S), optional
            Where the result goes.

        Returns
        -------
        array, shape (sum of n, *S), or (array, list of int)
            The rows of rank 0, then those of rank 1, and so on.
        """
        return self._call("allgatherv", movements.allgatherv, x, return_counts, out)

    def gather(self, x: Any, root: int = 0, *, out: Any = None) -> Any:
        """Stack all ranks' arrays on `root`.

        Parameters
        ----------
        x : array, shape S
            This rank's array; shape and dtype are the same on every rank.
        root : int
            The rank that gets the result.
        out : array, shape (size, *S), optional
            Where the result goes, on `root`.

        Returns
        -------
        array, shape (size, *S), or None
            On `root`, row r is the array of rank r; None on the other ranks.
        """
        return self._call("gather", movements.gather, x, root, out)

    def gatherv(
        self, x: Any, root: int = 0, *, return_counts: bool = False, out: Any = None
    ) -> Any:
        """Join all ranks' arrays along axis 0, whose length may differ, on `root`.

        Parameters
        ----------
        x : array, shape (n, *S)
            This rank's rows; `n` may differ between ranks and be 0, S and dtype may not.
        root : int
            The rank that gets the result.
        return_counts : bool
            Whether `root` gets the ranks' row counts as well.
        out : array, shape (sum of n, *S), optional
            Where the result goes, on `root`.

        Returns
        -------
        array, shape (sum of n, *S), or (array, list of int), or None
            The rows of rank 0, then those of rank 1, and so on; None on the other ranks.
        """
        return self._call("gatherv", movements.gatherv, x, root, return_counts, out)

    def scatter(self, x: Any = None, root: int = 0, *, like: Any = None, out: Any = None) -> Any:
        """Give each rank its row of the array of `root`.

        Parameters
        ----------
        x : array, shape (size, *S), or None
            On `root` the array to share out; ignored on the other ranks.
        root : int
            The rank that sends.
        like : array, optional
            On the other ranks: an array of the framework and device wanted. NumPy otherwise.
        out : array, shape S, optional
            Where this rank's row goes.

        Returns
        -------
        array, shape S
            Row r of the array, on rank r.
        """
        return self._call("scatter", movements.scatter, x, root, like, out)

    def scatterv(
        self,
        x: Any = None,
        counts: Any = None,
        root: int = 0,
        *,
        like: Any = None,
        out: Any = None,
    ) -> Any:
        """Give each rank its share of the rows of the array of `root`.

        Parameters
        ----------
        x : array, shape (n, *S), or None
            On `root` the array to share out; ignored on the other ranks.
        counts : sequence of int, or None
            On `root` how many rows each rank gets, n in all; ignored on the other ranks.
        root : int
            The rank that sends.
        like : array, optional
            On the other ranks: an array of the framework and device wanted. NumPy otherwise.
        out : array, shape (counts[rank], *S), optional
            Where this rank's rows go.

        Returns
        -------
        array, shape (counts[rank], *S)
            The first counts[0] rows on rank 0, the next counts[1] on rank 1, and so on.
        """
        return self._call("scatterv", movements.scatterv, x, counts, root, like, out)

    def reduce_scatter(self, x: Any, op: str | Op = "sum", *, out: Any = None) -> Any:
        """Reduce all ranks' arrays; each rank gets its row of the result.

        Parameters
        ----------
        x : array, shape (size, *S)
            This rank's array; shape and dtype are the same on every rank.
        op : str or Op
            As for `allreduce`.
        out : array, shape S, optional
            Where the result goes.

        Returns
        -------
        array, shape S
            Row r of what `allreduce` would give, on rank r. Sends about the array's bytes a rank.
        """
        return self._call("reduce_scatter", reductions.reduce_scatter, x, op, out)

    def alltoall(self, x: Any, *, out: Any = None) -> Any:
        """Send row r to rank r, and get a row from each.

        Parameters
        ----------
        x : array, shape (size, *S)
            This rank's rows; shape and dtype are the same on every rank.
        out : array, shape (size, *S), optional
            Where the result goes; may be `x` itself.

        Returns
        -------
        array, shape (size, *S)
            Row r is what rank r had in the row of this rank.
        """
        return self._call("alltoall", movements.alltoall, x, out)

    def alltoallv(
        self, x: Any, counts: Any, *, return_counts: bool = False, out: Any = None
    ) -> Any:
        """Send each rank its share of the rows, and get a share of everyone's.

        Parameters
        ----------
        x : array, shape (n, *S)
            The rows for rank 0, then those for rank 1, and so on; n may differ between ranks.
        counts : sequence of int
            How many rows go to each rank, n in all.
        return_counts : bool
            Whether to return as well how many rows came from each rank.
        out : array, shape (m, *S), optional
            Where the result goes; m is what all ranks send to this one.

        Returns
        -------
        array, shape (m, *S), or (array, list of int)
            The rows from rank 0, then those from rank 1, and so on.
        """
        return self._call("alltoallv", movements.alltoallv, x, counts, return_counts, out)

    def scan(self, x: Any, op: str | Op = "sum", *, out: Any = None) -> Any:
        """Reduce the arrays of the ranks up to and with this one.

        Parameters
        ----------
        x : array, shape S
            This rank's array; shape and dtype are the same on every rank.
        op : str or Op
            As for `allreduce`; "mean" divides by the number of ranks that were reduced.
        out : array, shape S, optional
            Where the result goes; may be `x` itself.

        Returns
        -------
        array, shape S
            The fold of the arrays of ranks 0 to r, on rank r. Sends about twice the array's bytes.
        """
        return self._call("scan", reductions.scan, x, op, out)

    def exscan(self, x: Any, op: str | Op = "sum", *, out: Any = None) -> Any:
        """Reduce the arrays of the ranks before this one; None on rank 0.

        Parameters and result are those of `scan`, with the arrays of ranks 0 to r − 1 on rank r.
        """
        return self._call("exscan", reductions.exscan, x, op, out)

    def send(self, x: Any, dest: int, tag: int = 0) -> None:
        """Send an array to one rank, which calls `recv`.

        Parameters
        ----------
        x : array, shape S
            Any array, of any dtype without Python objects.
        dest : int
            The rank that receives; may be this one, where a request of its receives.
        tag : int
            From 0 to 1048575. Messages between two ranks with one tag arrive in the order of their
            sending; those with different tags go past one another.

        Notes
        -----
        Returns when `x` may be changed again: short messages may then still be under way, long
        ones have been received. Messages wait for no collective, and no collective for them.
        """
        self._await("send", self._post("send", messages.send, x, dest, tag, awaited=True))

    def recv(self, source: int, tag: int = 0, *, like: Any = None, out: Any = None) -> Any:
        """Receive an array from one rank, which calls `send`.

        Parameters
        ----------
        source : int
            The rank that sends.
        tag : int
            The tag that it sends with.
        like : array, optional
            An array of the framework and device wanted. NumPy otherwise.
        out : array, shape S, optional
            Where the elements go. Where it does not take them, or `like` is no array, the message
            is lost, and this raises.

        Returns
        -------
        array, shape S
            As it was sent; shape and dtype need not be known here.

        Raises
        ------
        PeerError
            The sender raised instead of sending, or has left.
        CommTimeoutError
            Nothing came within the communicator's timeout.
        """
        receiving = self._post("recv", messages.recv, source, tag, like, out, awaited=True)
        return self._await("recv", receiving)[0]

    def sendrecv(
        self,
        x: Any,
        dest: int,
        source: int,
        tag: int = 0,
        *,
        like: Any = None,
        out: Any = None,
    ) -> Any:
        """Send to one rank and receive from another at the same time; see `send` and `recv`."""
        sending = self._post("send", messages.send, x, dest, tag, awaited=True)
        try:
            receiving = self._post("recv", messages.recv, source, tag, like, out, awaited=True)
        except Exception:
            self._await("send", sending)
            raise
        return self._await("recv", receiving, sending)[0]

    def isend(self, x: Any, dest: int, tag: int = 0) -> Request:
        """Start `send`; leave `x` alone until the request is finished."""
        return self._post("send", messages.send, x, dest, tag)

    def irecv(self, source: int, tag: int = 0, *, like: Any = None, out: Any = None) -> Request:
        """Start `recv`; leave `out` alone until the request is finished."""
        return self._post("recv", messages.recv, source, tag, like, out)

    def barrier(self) -> None:
        """Wait until every rank has called."""
        self._call("barrier", _calls.barrier)

    def bcast_object(self, obj: Any = None, root: int = 0) -> Any:
        """Give every rank a copy of the Python object of `root`.

        The object travels as a pickle: the ranks of a job trust one another.

        Parameters
        ----------
        obj : object
            What `root` sends; ignored on the other ranks.
        root : int
            The rank that sends.
        """
        return self._call("bcast_object", objects.bcast_object, obj, root)

    def allgather_object(self, obj: Any) -> list[Any]:
        """Return the list of all ranks' Python objects, which travel as pickles.

        Parameters
        ----------
        obj : object
            Anything that pickles; it may differ between ranks in type and size.
        """
        gathered: list[Any] = self._call("allgather_object", objects.allgather_object, obj)
        return gathered

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Return the list of all ranks' Python objects on `root`, None on the other ranks.

        Parameters
        ----------
        obj : object
            Anything that pickles; it may differ between ranks in type and size.
        root : int
            The rank that gets the list.
        """
        gathered: list[Any] | None
        gathered = self._call("gather_object", objects.gather_object, obj, root)
        return gathered

    # Nonblocking forms

    def iallreduce(self, x: Any, op: str | Op = "sum", *, out: Any = None) -> Request:
        """Start `allreduce`; leave `x` and `out` alone until the request is finished."""
        return self._start("allreduce", reductions.allreduce, x, op, out)

    def ireduce(self, x: Any, op: str | Op = "sum", root: int = 0, *, out: Any = None) -> Request:
        """Start `reduce`; leave `x` and `out` alone until the request is finished."""
        return self._start("reduce", reductions.reduce, x, op, root, out)

    def ibcast(self, x: Any = None, root: int = 0, *, like: Any = None, out: Any = None) -> Request:
        """Start `bcast`; leave `x` and `out` alone until the request is finished."""
        return self._start("bcast", movements.bcast, x, root, like, out)

    def iallgather(self, x: Any, *, out: Any = None) -> Request:
        """Start `allgather`; leave `x` and `out` alone until the request is finished."""
        return self._start("allgather", movements.allgather, x, out)

    def iallgatherv(self, x: Any, *, return_counts: bool = False, out: Any = None) -> Request:
        """Start `allgatherv`; leave `x` and `out` alone until the request is finished."""
        return self._start("allgatherv", movements.allgatherv, x, return_counts, out)

    def igather(self, x: Any, root: int = 0, *, out: Any = None) -> Request:
        """Start `gather`; leave `x` and `out` alone until the request is finished."""
        return self._start("gather", movements.gather, x, root, out)

    def igatherv(
        self, x: Any, root: int = 0, *, return_counts: bool = False, out: Any = None
    ) -> Request:
        """Start `gatherv`; leave `x` and `out` alone until the request is finished."""
        return self._start("gatherv", movements.gatherv, x, root, return_counts, out)

    def iscatter(
        self, x: Any = None, root: int = 0, *, like: Any = None, out: Any = None
    ) -> Request:
        """Start `scatter`; leave `x` and `out` alone until the request is finished."""
        return self._start("scatter", movements.scatter, x, root, like, out)

    def iscatterv(
        self,
        x: Any = None,
        counts: Any = None,
        root: int = 0,
        *,
        like: Any = None,
        out: Any = None,
    ) -> Request:
        """Start `scatterv`; leave `x` and `out` alone until the request is finished."""
        return self._start("scatterv", movements.scatterv, x, counts, root, like, out)

    def ireduce_scatter(self, x: Any, op: str | Op = "sum", *, out: Any = None) -> Request:
        """Start `reduce_scatter`; leave `x` and `out` alone until the request is finished."""
        return self._start("reduce_scatter", reductions.reduce_scatter, x, op, out)

    def ialltoall(self, x: Any, *, out: Any = None) -> Request:
        """Start `alltoall`; leave `x` and `out` alone until the request is finished."""
        return self._start("alltoall", movements.alltoall, x, out)

    def ialltoallv(
        self, x: Any, counts: Any, *, return_counts: bool = False, out: Any = None
    ) -> Request:
        """Start `alltoallv`; leave `x` and `out` alone until the request is finished."""
        return self._start("alltoallv", movements.alltoallv, x, counts, return_counts, out)

    def iscan(self, x: Any, op: str | Op = "sum", *, out: Any = None) -> Request:
        """Start `scan`; leave `x` and `out` alone until the request is finished."""
        return self._start("scan", reductions.scan, x, op, out)

    def iexscan(self, x: Any, op: str | Op = "sum", *, out: Any = None) -> Request:
        """Start `exscan`; leave `x` and `out` alone until the request is finished."""
        return self._start("exscan", reductions.exscan, x, op, out)

    def ibarrier(self) -> Request:
        """Start `barrier`."""
        return self._start("barrier", _calls.barrier)

    def plan(self, tree: Any, op: str = "mean") -> Plan:
        """Work out beforehand how trees like this one are reduced, for use in every step.

        Parameters
        ----------
        tree : pytree of arrays and Python numbers
            The same structure, shapes and dtypes on every rank; only these count, not the values.
        op : str
            As for `allreduce`.

        Returns
        -------
        Plan
            `plan(tree)` returns what `allreduce_tree(tree, op)` does, bit for bit, and keeps its
            memory from call to call: see `arraycomm.Plan`.

        Raises
        ------
        MismatchError
            Trees differ between ranks; the message names the path of the first difference.
        TypeError
            A leaf cannot be reduced; the message names its path.

        Notes
        -----
        Collective; one exchange of a header, after which no call compares more than its digest.
        """
        from arraycomm._trees.plan import prepare

        made: Plan = self._call("plan", prepare, tree, op)
        return made

    def stats(self) -> dict[str, dict[str, float]]:
        """Return what this rank did so far, by operation; local.

        Returns
        -------
        dict
            For each operation `calls`, `bytes` (of the arrays passed), `copies` (made of arrays
            outside the transport) and `seconds` (inside blocking calls). Duplicates made from this
            communicator, such as those of distributed optimizers, are counted in.
        """
        return {
            name: dict(zip(("calls", "bytes", "copies", "seconds"), numbers, strict=True))
            for name, numbers in self._totals().items()
        }

    def _totals(self) -> dict[str, list[float]]:
        totals = {name: list(numbers) for name, numbers in self._stats.items()}
        for short in self._short.values():
            short.add_to(totals.setdefault("allreduce", [0, 0, 0, 0.0]))
        for duplicate in self._duplicates:
            _add(totals, duplicate._totals())
        return totals

    def _take_over_stats(self, freed: Communicator) -> None:
        if freed in self._duplicates:
            self._duplicates.remove(freed)
            _add(self._stats, freed._totals())

    # How calls are made

    def _call(self, operation: str, prepare: Callable[..., Call], *args: Any) -> Any:
        """Make a blocking call of `prepare(self, *args)`."""
        started = time.perf_counter()
        with self._turn():
            result = self._engine.run(self._program(operation, prepare, args, None))
        self._stats[operation][3] += time.perf_counter() - started
        return result

    def _start(self, operation: str, prepare: Callable[..., Call], *args: Any) -> Request:
        site = call_site()
        with self._turn():
            task = self._engine.submit(self._program(operation, prepare, args, site), site)
        return Request(self, task, site)

    def _post(
        self,
        operation: str,
        prepare: Callable[..., Message],
        *args: Any,
        awaited: bool = False,
    ) -> Request:
        """Start a message to or from another rank; the caller of an `awaited` one waits for it."""
        if self._closed is not None:
            raise self._closed_error(operation)
        site = call_site()
        with self._turn():
            message = prepare(self, *args)
            numbers = self._stats.setdefault(operation, [0, 0, 0, 0.0])
            for place, number in enumerate((1, message.nbytes, message.copies)):
                numbers[place] += number

            def watch(waited: float) -> None:
                self._watch_message(message, site, waited)

            self._unmatched += 1 if operation == "send" else -1
            steps = self._delivered(message.steps)
            task = self._engine.submit_message(steps, site, watch, awaited=awaited)
        return Request(self, task, site)

    def _await(self, operation: str, *requests: Request) -> list[Any]:
        """Wait for messages; what interrupts the wait ends them."""
        started = time.perf_counter()
        try:
            return waitall(requests)
        except Exception:
            raise
        except BaseException as error:
            for request in requests:
                self._engine.give_up(request._task, error)
            raise
        finally:
            self._stats[operation][3] += time.perf_counter() - started

    def _delivered(self, steps: Steps) -> Steps:
        """Close the communicator where a message fails in the middle of its steps."""
        try:
            return (yield from steps)
        except UndeliveredError as undelivered:
            raise undelivered.error from None
        except GeneratorExit:
            raise
        except BaseException as error:
            self._close(error)
            # Also where it was closed before: the transport may still hold this message's memory.
            self._unfinished = True
            raise

    def _next_message(self) -> int:
        """Return a number for the further pieces of a message, which none under way has."""
        self._sent = (self._sent + 1) % messages.TAGS
        return self._sent

    def _watch_message(self, message: Message, site: str, waited: float) -> None:
        """Raise where a message will not come any more, or not be taken."""
        exit_notice = self._control.exit_notices().get(message.peer)
        if exit_notice is not None and waited > _LAST_WORDS:
            raise self._peer_error(message.peer, exit_notice)
        if waited > _LONG_WAIT:
            self._watch_for_deaths()
        self._tell_or_ask(waited, message.doing, site, lambda: [message.peer])
        closed = self._closed
        if waited > _LAST_WORDS and not isinstance(closed, CommTimeoutError | None):
            # The other rank, which may be told no more than this, posts nothing any more either.
            raise self._closed_error(message.doing)
        timeout = self._options.timeout
        if timeout is not None and waited > timeout:
            raise CommTimeoutError(
                f"{message.doing} at {site}: waited {waited:.1f} s (timeout {timeout:g} s) on rank "
                f"{self.rank}; rank {message.peer} {self._last_seen(message.peer)}"
            )

    def _turn(self) -> _Turn:
        return _Turn(self._engine)

    def _program(
        self, operation: str, prepare: Callable[..., Call], args: tuple[Any, ...], site: str | None
    ) -> Steps:
        """Look at the arguments now; return the steps of the call, which may run later."""
        if self._closed is not None:
            return self._refused(operation)
        if self._joins_with is not None and self._joins_with._join is not None:
            # Ranks without data do not listen here; they hear of it when the block ends.
            refused(operation)
        try:
            allowed = self._join is None or operation in JOINABLE
            placement = self._devices.placement(args)
            call = self._prepared(prepare, args, placement) if allowed else refused(operation)
        except Exception as error:
            self._count(operation, None)
            if self._join is not None:
                self._join.told.append(error)
            return self._raising(operation, error, describe_raise(error))
        except BaseException as error:
            self._close(error)
            raise
        self._count(operation, call)
        return self._guarded(self._steps(call, site))

    def _prepared(
        self, prepare: Callable[..., Call], args: tuple[Any, ...], placement: HostPlacement
    ) -> Call:
        """Look at the arguments, with arrays going this way."""
        self._placement = placement
        try:
            call = prepare(self, *args)
        finally:
            self._placement = self._host_placement
        call.again = lambda other: self._prepared(prepare, args, other)
        return call

    def _steps(self, call: Call, site: str | None) -> Steps:
        if self._closed is not None:
            raise self._closed_error(call.signature.operation)
        self._doing = (call.signature.operation, site)
        placement = call.placement or self._host_placement
        if call.blind and call.payload is None and not self._options.check:
            # Counted as two steps, so that exit notices tell before from after.
            self._control.step += 2
            return (yield from placement.run(call.finish(None)))
        ahead = placement.ahead and (call.blind or call.ahead)
        if ahead:
            # The header is seen to later, in whichever thread.
            site = site or call_site()
        agreeing = agree(
            self._control,
            call.signature,
            self._prefix(call),
            call.payload,
            negotiable=call.negotiable,
            site=site,
        )
        if ahead:
            # What the device is to do waits there for the other ranks.
            posted = next(agreeing)
            self._engine.follow(self._verified(posted, agreeing), str(site))
            return (yield from placement.run(call.finish(None)))
        agreement = yield from agreeing
        return (yield from self._met(call, agreement, site))

    def _met(self, call: Call, agreement: Agreement, site: str | None) -> Steps:
        """Finish a call to which all ranks have come, wherever their arrays are."""
        placement, devices, again = (
            call.placement or self._host_placement,
            self._devices,
            call.again,
        )
        if again is not None and (agreement.mixed or placement.place):
            if not devices.negotiated:
                yield from devices.negotiate()
                return (yield from self._steps(again(devices.placement_after(placement)), site))
            if placement.tree and agreement.mixed:
                other = devices.placement_to_tree(agreement)
                call = again(other)
                if isinstance(other, StagedTreePlacement):
                    # All ranks see that, and show their trees once more as host memory.
                    return (yield from self._steps(call, site))
            elif placement.host and not placement.tree:
                call = again(devices.placement_of_host())
        return (yield from (call.placement or placement).run(call.finish(agreement)))

    def _met_after(self, settling: Steps, x: Any, op: Any) -> Steps:
        """Go on with a reduction whose header showed arrays in other places than this rank's."""

        def steps() -> Steps:
            agreement = yield from settling
            call = self._prepared(reductions.allreduce, (x, op, None), self._host_placement)
            return (yield from self._met(call, agreement, None))

        return self._guarded(steps())

    def _verified(self, posted: Handle, agreeing: Steps) -> Steps:
        """See to the header of a call that has gone ahead of it."""

        def steps() -> Steps:
            yield posted
            yield from agreeing

        try:
            yield from self._guarded(steps())
        except GeneratorExit:
            raise
        except BaseException as error:
            self._late = error
            # Also where the others have raised in step: what went ahead waits for them for ever.
            self._close(error)
            raise

    def _guarded(self, steps: Steps) -> Steps:
        """Close the communicator where steps fail in a way that leaves ranks out of step."""
        try:
            result = yield from steps
        except UndeliveredError as undelivered:
            self._completed = self._control.step
            raise undelivered.error from None
        except GeneratorExit:
            # Nobody is left who could have waited for it.
            raise
        except TransportError as error:
            self._close(error)
            self._tell_death(error)
            raise
        except BaseException as error:
            if not (isinstance(error, PeerError) and error.in_step):
                self._close(error)
            raise
        self._completed = self._control.step
        return result

    def _refused(self, operation: str) -> Steps:
        yield from ()
        raise self._closed_error(operation)

    def _raising(self, operation: str, error: Exception, traceback: str) -> Steps:
        if self._closed is not None:
            raise self._closed_error(operation) from error
        if not self._options.check:
            # Others may be in a call without a header, in which nothing can be told in step.
            self._close(error)
            raise error
        try:
            together = len(self._together) if operation == "raise_together" else 0
            in_step = yield from fail_in_step(self._control, operation, error, traceback, together)
        except BaseException as lost:
            self._close(lost)
            raise error from lost
        self._completed = self._control.step
        if not in_step:
            self._close(error)
        raise error

    def _prefix(self, call: Call) -> bytes:
        if call.prefix is not None:
            return call.prefix
        payload = -1 if call.payload is None else len(call.payload)
        place = 0 if call.placement is None else call.placement.place
        key = (call.signature, payload, call.length, place)
        prefix = self._prefixes.get(key)
        if prefix is None:
            if len(self._prefixes) >= _MAX_CACHED:
                self._prefixes.clear()
            prefix = encode(call.signature, payload, call.length, place=place)
            self._prefixes[key] = prefix
        return prefix

    def _remember(self, x: Any, op: str) -> None:
        """Keep the short way of a reduction that has just succeeded the long way."""
        # What is on a device would be copied from there to be looked at.
        if on_cuda(x):
            return
        # An array that cannot be looked at a second time has no short way.
        with suppress(Exception):
            key = (type(x), op, x.dtype, x.shape)
            source = view(x, "allreduce")
            if source.array.nbytes > self._inline or source.copied or self._closed is not None:
                return
            if len(self._short) >= _MAX_CACHED:
                self._forget_short()
            self._short[key] = ShortReduction(
                self, op, source.dtype, source.shape, numpy=type(x) is np.ndarray
            )

    def _forget_short(self) -> None:
        totals = self._stats.setdefault("allreduce", [0, 0, 0, 0.0])
        for short in self._short.values():
            short.add_to(totals)
        self._short.clear()

    def _count(self, operation: str, call: Call | None) -> None:
        numbers = self._stats.setdefault(operation, [0, 0, 0, 0.0])
        numbers[0] += 1
        if call is not None:
            numbers[1] += call.nbytes
            numbers[2] += call.copies

    def _slot_of(self, rank: int) -> int:
        """Where the words of a rank's slot begin."""
        return rank * self._control.stride

    # How calls end early

    def _push_others(self) -> None:
        """Push on what is outstanding on the other communicators of this rank."""
        for comm in self._related:
            if comm is not self and not comm._engine.idle:
                comm._engine.advance()

    def _watch(self, waited: float) -> None:
        """Raise where waiting on makes no sense: a rank has left, or does not come."""
        control = self._control
        left = control.exit_notices()
        gone = [rank for rank, exit_notice in left.items() if exit_notice.step < control.step]
        if gone:
            # A rank that has a traceback of its own, or none because it finished, is the cause;
            # the others followed it. Their letters may come before the step that tells it.
            causes = [r for r in gone if left[r].text or left[r].state == FINISHED]
            self._alone_since = self._alone_since or time.monotonic()
            if not causes:
                self._watch_for_deaths()
            patience = _DEATH if self._link.outlives else _LAST_WORDS
            if causes or time.monotonic() > self._alone_since + patience:
                cause = (causes or gone)[0]
                raise self._peer_error(cause, left[cause])
        if waited > _LONG_WAIT:
            self._watch_for_deaths()
        operation, site = self._doing
        self._tell_or_ask(waited, operation, site, control.missing)
        timeout = self._options.timeout
        if timeout is not None and waited > timeout:
            missing = control.missing()
            raise CommTimeoutError(
                f"waited {waited:.1f} s (timeout {timeout:g} s) in step {control.step} on rank "
                f"{self.rank}; "
                + ("; ".join(f"rank {r} is missing: it {self._last_seen(r)}" for r in missing))
                + ("" if missing else "every rank had begun the call, but its data did not come")
            )

    def _tell_death(self, error: TransportError) -> None:
        """Raise where MPI's error means that a rank has died, which it may learn a moment later."""
        self._raise_revoked(error)
        self._watch_for_deaths(_DEATH)

    def _raise_revoked(self, error: TransportError) -> None:
        if error.revoked:
            raise PeerError(
                "a rank has died, and another one has called shrink(): call it as well"
            ) from error

    def _watch_for_deaths(self, patience: float = 0.0) -> None:
        """Raise where the process of another rank has died, and this one was let live."""
        if not self._link.outlives:
            return
        deadline = time.monotonic() + patience
        try:
            while not (dead := self._link.failed()) and time.monotonic() < deadline:
                time.sleep(_LAST_WORDS / 50)
        except TransportError as error:
            self._raise_revoked(error)
            raise
        if dead:
            raise PeerError(
                f"rank {dead[0]} has died without a word; it {self._last_seen(dead[0])}. "
                "shrink() makes a communicator of the ranks that live",
                rank=dead[0],
            )

    def _peer_error(self, rank: int, exit_notice: ExitNotice) -> PeerError:
        finished = exit_notice.state == FINISHED
        how = "has reached the end of its program" if finished else "failed"
        return PeerError(
            f"rank {rank} {how} and takes part no more; it {self._last_seen(rank)}"
            + (f"; its traceback:\n{exit_notice.text}" if exit_notice.text else ""),
            rank=rank,
            traceback=exit_notice.text,
        )

    def _tell_or_ask(
        self,
        waited: float,
        operation: str,
        site: str | None,
        missing: Callable[[], list[int]],
    ) -> None:
        """Where a wait is long: tell the other ranks about it, and ask those that are missing."""
        if waited < _LONG_WAIT:
            self._asked = 0
            return
        if self._engine.on_return is None:
            where = site or call_site()
            self._waiting_in = (
                f"in {operation} at {where}, step {self._control.step} of {self._name}"
            )
            self._tell(f"is waiting {self._waiting_in}")
            self._engine.on_return = self._return
        for member in self._related:
            member._control.attend()
        timeout = self._options.timeout
        if timeout is not None and waited > timeout * _ASK_AT[min(self._asked, len(_ASK_AT) - 1)]:
            self._asked += 1
            if self._asked <= len(_ASK_AT):
                self._control.ask(missing())

    def _tell(self, doing: str) -> None:
        """Let the other ranks of this communicator and its relatives know what this one waits in."""
        for member in self._related:
            member._control.tell(doing)

    def _return(self, doing: str = "") -> None:
        """Replace what was told of a wait: it is over."""
        self._engine.on_return = None
        self._tell(doing)

    def _last_seen(self, rank: int) -> str:
        doing = self._control.told(rank)
        if doing:
            return doing
        previous = self._control.words[(self._control.step - 1) & 1]
        operation = operation_of(previous, self._slot_of(rank)) if self._control.step > 1 else ""
        return f"was last seen in {operation}" if operation else "was not seen in any call so far"

    def _at_rest(self) -> bool:
        """Tell whether this rank has nothing under way, so that the transport may be freed."""
        return self._engine.idle and self._control.done() and not self._unfinished

    def _close(self, error: BaseException) -> None:
        """After this no call is made: the ranks may be out of step."""
        if self._closed is not None:
            return
        self._closed = error
        self._devices.abort()
        if self._engine.on_return is not None:
            # The ranks that time out after this one are still to learn of it.
            vain = isinstance(error, CommTimeoutError)
            self._return(f"has waited in vain {self._waiting_in}" if vain else "")
        if isinstance(error, MismatchError):
            # All ranks learn of it in the same steps, which this one has taken to the end.
            self._completed = self._control.step
        waiting = self._engine.interrupted
        self._unfinished = waiting is not None and not (
            getattr(waiting, "control", waiting) is self._control and self._control.shared
        )
        self._forget_short()
        if not isinstance(error, CommTimeoutError):
            # After a timeout nothing is said: the others that wait are to time out themselves.
            followed = isinstance(error, PeerError) or (
                isinstance(error, TransportError) and self._link.outlives
            )
            text = "" if followed else describe_exception(error)
            self._control.leave(FAILED, self._completed, text)

    def _closed_error(self, operation: str) -> BaseException:
        if self._late is not None:
            late, self._late = self._late, None
            return late
        closed = CommunicatorClosedError(
            f"{operation}: the communicator is closed: "
            f"{type(self._closed).__name__}: {self._closed}".rstrip(": ")
        )
        closed.__cause__ = self._closed
        return closed


def _add(totals: dict[str, list[float]], others: dict[str, list[float]]) -> None:
    for name, numbers in others.items():
        mine = totals.setdefault(name, [0, 0, 0, 0.0])
        for place, number in enumerate(numbers):
            mine[place] += number
