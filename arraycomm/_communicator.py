"""The user's object: each method's signature and docstring, and one line that makes the call."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, cast, overload

import numpy as np

from arraycomm._arrays.typing import ArrayT, DTypeT, NewShape, ReceivedT, Rows, T
from arraycomm._calls.custom_ops import Op
from arraycomm._calls.pickles import Pickled
from arraycomm._calls.runner import Runner
from arraycomm._callsite import trim
from arraycomm._collectives import groups
from arraycomm._collectives.grid import GridCalls, Layout, MakeGrid, layout_of
from arraycomm._collectives.groups import Barrier
from arraycomm._collectives.movements import (
    Allgather,
    Alltoall,
    Bcast,
    Gather,
    Maxloc,
    Minloc,
    Scatter,
)
from arraycomm._collectives.nonblocking import NonblockingCalls
from arraycomm._collectives.objects import AllgatherObject, BcastObject, GatherObject
from arraycomm._collectives.reductions import Allreduce, Reduce, ReduceScatter
from arraycomm._collectives.scans import Exscan, Scan
from arraycomm._collectives.uneven_calls import UnevenCalls
from arraycomm._dtypes import OpName
from arraycomm._entries import entries, entry, hide_from_torch, refuse_removed
from arraycomm._exit.exit import leave_by_error, replace_root
from arraycomm._messages.calls import MessageCalls
from arraycomm._messages.messages import Messenger
from arraycomm._prepared import fast_path
from arraycomm._prepared.packed_calls import PackedCall
from arraycomm._protocol.group import Group
from arraycomm._start.arguments import Arguments
from arraycomm._start.over_mpi import open_over_mpi
from arraycomm._trace.trace import Traceable
from arraycomm._trees.fusion import TreeMemory
from arraycomm._trees.plan import MakePlan, Plan


# What calls the runner costs nothing more: it trims errors itself.
@entries(trimmed=True)
class Communicator(NonblockingCalls, UnevenCalls, MessageCalls, Traceable):
    """A group of ranks that communicate.

    Made by `arraycomm.init`, `split`, `dup` and `from_mpi`. All ranks of the group call every
    collective, in the same order, with the same operation, dtype, shape, op and root. Each rank
    passes any array (NumPy, PyTorch, JAX, CuPy, or anything with DLPack, an array interface or a
    buffer) in any layout, and gets a result of its own framework and device. If ranks disagree,
    every rank raises `MismatchError`. If a rank passes a wrong argument, it raises the built-in
    error, and the other ranks raise `PeerError`.

    Attributes
    ----------
    rank, size : int
        This rank's number, and the number of ranks.
    local_rank, local_size : int
        The same among the ranks of this node.
    backend : str
        "self", "threads", "mpi", "nccl" if asked for, or "processes" (without MPI).

    Notes
    -----
    Every blocking call takes `timeout`, on this rank and for this call in place of the
    communicator's: the seconds that it may wait for other ranks (`math.inf` is for ever). If time
    is up, it raises `CommTimeoutError`, and the communicator is closed.

    A copy of a communicator, also one by `copy.deepcopy` of what holds it, is the communicator
    itself; `dup` makes another one. It cannot be pickled.
    """

    _instead = "call arraycomm.init() or world() in each process"

    def __init__(self, runner: Runner) -> None:
        hide_from_torch()
        group = runner.group
        self._runner = runner
        self._messenger = Messenger(runner)
        self._again = runner.fast_paths.again
        self._trees = TreeMemory(group)
        self.rank, self.size = group.rank, group.size
        self.local_rank = group.transport.local_rank
        self.local_size = group.transport.local_size
        self.backend = group.backend

    if not TYPE_CHECKING:  # which would take any name to be an attribute
        __getattr__ = refuse_removed

    # The life of a communicator

    @classmethod
    def from_mpi(
        cls,
        mpi4py_comm: Any,
        *,
        backend: str = "auto",
        device: Any = None,
        check: bool = True,
        reproducible: bool = True,
        timeout: float | None = 1800.0,
    ) -> Self:
        """Return a communicator over the ranks of an mpi4py communicator.

        For programs that use MPI already. Collective over `mpi4py_comm`. The new communicator works
        on a duplicate of it, and frees only that; `world()` is not affected.

        Parameters
        ----------
        mpi4py_comm : mpi4py.MPI.Intracomm
            The communicator to work over. Over a `Cartcomm` the result is a `GridCommunicator` with
            the same coordinates.
        backend : str
            "auto", "mpi" or "nccl", which mean what they mean for `arraycomm.init`.
        device, check, reproducible, timeout
            As for `arraycomm.init`.

        Raises
        ------
        TypeError, ValueError, BackendUnavailableError
            An argument is wrong, or not possible here; the other ranks raise `PeerError`. A rank
            without an intracommunicator cannot tell the others, and raises alone: they wait for it.
        """
        arguments = Arguments(backend, device, check, reproducible, timeout, over_world=False)
        runner, layout = open_over_mpi(mpi4py_comm, arguments).runner, layout_of(mpi4py_comm)
        made: Any = cls(runner) if layout is None else GridCommunicator(runner, layout)
        return cast("Self", made)

    @property
    def device(self) -> str:
        """Where this rank makes arrays if no argument says where: "cpu", or as in "cuda:0"."""
        return self._runner.placements.device_name

    @property
    def mpi_comm(self) -> Any:
        """The mpi4py communicator underneath, or None."""
        return self._runner.group.transport.mpi_comm

    @overload
    def split(self, color: int, key: int = 0) -> Communicator: ...
    @overload
    def split(self, color: None, key: int = 0) -> None: ...
    @entry
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Split the group: ranks that pass the same color form a new communicator.

        Parameters
        ----------
        color : int or None
            Which new group this rank joins. With None it joins none, and the result is None.
        key : int
            Ranks are numbered in the order of `key`, and of their old rank if keys are equal.

        Returns
        -------
        Communicator or None
            It has the same options. Blocks until all ranks of this group have called.
        """
        made = groups.split(self._runner, color, key)
        return None if made is None else Communicator(made)

    @entry
    def split_by_node(self) -> Communicator:
        """Return the communicator of the ranks on this rank's node."""
        return Communicator(groups.split_by_node(self._runner))

    @entry
    def dup(self, **options: Any) -> Self:
        """Return a communicator of the same ranks, whose calls are independent of this one's.

        Parameters
        ----------
        **options
            `check`, `reproducible` and `timeout`, if they are to differ; the same on every rank.
        """
        return type(self)(groups.dup(self._runner, options))

    @entry
    def grid(
        self, dims: int | Sequence[int], periods: bool | Sequence[bool] | None = None
    ) -> GridCommunicator:
        """Return a communicator of the same ranks, as the cells of a grid; collective.

        Parameters
        ----------
        dims : int or sequence of int
            The number of dimensions, or the number of ranks along each, of which those that are 0
            are chosen, as equal as possible. Their product is the number of ranks.
        periods : bool or sequence of bool, optional
            Whether all dimensions, or each, are periodic; none by default.
        """
        layout = self._runner.call(MakeGrid, dims, periods)
        return GridCommunicator(groups.dup(self._runner, {}), layout)

    @entry
    def free(self) -> None:
        """Release the communicator; collective. Later calls raise `CommunicatorClosedError`.

        Waits for outstanding calls; their requests may be waited for afterwards. Warns if messages
        were sent and never received.
        """
        groups.free(self._runner)

    @entry
    def shrink(self) -> Communicator:
        """Return a communicator of the ranks that live; collective among those.

        For programs that continue after the death of a process: call it after a call has raised
        `PeerError` for that. This communicator ends, and those made from it end with it. If it was
        `world()`, `world()` returns the new one from now on. Ranks keep their order.

        Raises
        ------
        BackendUnavailableError
            Here the death of a process ends the others too. With Open MPI they survive it under
            `mpiexec --with-ft ulfm`.
        """
        made = Communicator(groups.shrink(self._runner))
        old, new = self._runner.group, made._runner.group
        for group in old.related:
            group.kept[_SUCCESSOR] = made
        replace_root(old, new)
        return made

    @entry
    def abort(self, code: int = 1) -> None:
        """End the whole job at once, as far as the transport reaches, with this exit status."""
        self._runner.group.transport.abort(code)

    def __enter__(self) -> Self:
        return self

    @entry
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.free()
        else:
            leave_by_error(self._runner.group, error)

    def __repr__(self) -> str:
        state = "" if self._runner.group.closed is None else ", closed"
        return f"<Communicator {self.backend}: rank {self.rank} of {self.size}{state}>"

    # Collectives

    def allreduce(
        self,
        x: ArrayT,
        op: OpName | Op = "sum",
        *,
        out: ArrayT | None = None,
        timeout: float | None = None,
    ) -> ArrayT:
        """Reduce all ranks' arrays, elementwise and in rank order; every rank gets the result.

        Parameters
        ----------
        x : array, shape S
            This rank's array; shape and dtype are the same on every rank.
        op : str or Op
            "sum", "mean", "prod", "min", "max", "and", "or", "xor", "fsum" (the exact sum of
            floats, rounded once), or made by `arraycomm.op`. Floats of 16 and 8 bits are
            accumulated in float32 and rounded once; NaN on any rank makes min and max NaN.
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
            Ranks call different things, another rank raises, or a rank does not come in time.

        Notes
        -----
        Blocks until every rank has called. An array of up to 1 MiB (less with more than 3 ranks;
        between nodes 1 MiB between two ranks, and 1 MiB / p between p) takes one small step. A
        larger one is cut into slices. Each rank folds one slice of all ranks' arrays, then the
        slices are gathered: each rank sends about twice the array's bytes (Thakur, Rabenseifner,
        Gropp: Optimization of Collective Communication Operations in MPICH, 2005).
        """
        again = self._again if timeout is None else None
        try:
            if again is not None and (result := again(x, op, out)) is not None:
                return result
        except BaseException as error:
            trim(error)
            raise
        return fast_path.call(self._runner, timeout, Allreduce, x, (op,), out)

    def reduce(
        self,
        x: ArrayT,
        op: OpName | Op = "sum",
        root: int = 0,
        *,
        out: ArrayT | None = None,
        timeout: float | None = None,
    ) -> ArrayT | None:
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
            An array like `x` on `root`, None on the other ranks.
        """
        return fast_path.call(self._runner, timeout, Reduce, x, (op, root), out)

    def bcast(
        self,
        x: ArrayT | None = None,
        root: int = 0,
        *,
        like: ArrayT | None = None,
        out: ArrayT | None = None,
        timeout: float | None = None,
    ) -> ArrayT:
        """Give every rank the array of `root`.

        Parameters
        ----------
        x : array, shape S, or None
            On `root` the array to send, of any dtype without Python objects. The other ranks pass
            None, or an array of the same shape and dtype, whose framework the result has.
        root : int
            The rank that sends.
        like : array, optional
            On ranks that pass no `x`: an array of the framework and device wanted.
        out : array, shape S, optional
            Where the result goes.

        Returns
        -------
        array, shape S
            A fresh array on every rank, `root` included; or `out`. A rank that passes neither `x`
            nor `like` gets one of the framework of `root`, on the host, if that framework is loaded
            there, has the dtype, and the array of `root` is on the host; else NumPy's.
        """
        return fast_path.call(self._runner, timeout, Bcast, x, (root, like), out)

    @overload
    def allgather(
        self, x: Rows[DTypeT], *, out: Any = None, timeout: float | None = None
    ) -> NewShape[DTypeT]: ...
    @overload
    def allgather(
        self, x: ArrayT, *, out: ArrayT | None = None, timeout: float | None = None
    ) -> ArrayT: ...
    def allgather(self, x: Any, *, out: Any = None, timeout: float | None = None) -> Any:
        """Stack all ranks' arrays; every rank gets the result.

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
        return fast_path.call(self._runner, timeout, Allgather, x, (), out)

    @overload
    def gather(
        self, x: Rows[DTypeT], root: int = 0, *, out: Any = None, timeout: float | None = None
    ) -> NewShape[DTypeT] | None: ...
    @overload
    def gather(
        self, x: ArrayT, root: int = 0, *, out: ArrayT | None = None, timeout: float | None = None
    ) -> ArrayT | None: ...
    def gather(
        self, x: Any, root: int = 0, *, out: Any = None, timeout: float | None = None
    ) -> Any:
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
        return fast_path.call(self._runner, timeout, Gather, x, (root,), out)

    @overload
    def scatter(
        self,
        x: np.ndarray[Any, DTypeT] | None = None,
        root: int = 0,
        *,
        like: None = None,
        out: None = None,
        timeout: float | None = None,
    ) -> NewShape[DTypeT]: ...
    @overload
    def scatter(
        self,
        x: ReceivedT | None = None,
        root: int = 0,
        *,
        like: ReceivedT | None = None,
        out: ReceivedT | None = None,
        timeout: float | None = None,
    ) -> ReceivedT: ...
    def scatter(
        self,
        x: Any = None,
        root: int = 0,
        *,
        like: Any = None,
        out: Any = None,
        timeout: float | None = None,
    ) -> Any:
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
        return fast_path.call(self._runner, timeout, Scatter, x, (root, like), out)

    @overload
    def reduce_scatter(
        self,
        x: np.ndarray[Any, DTypeT],
        op: OpName | Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: None = None,
        timeout: float | None = None,
    ) -> NewShape[DTypeT]: ...
    @overload
    def reduce_scatter(
        self,
        x: ArrayT,
        op: OpName | Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: ArrayT | None = None,
        timeout: float | None = None,
    ) -> ArrayT: ...
    def reduce_scatter(
        self,
        x: Any,
        op: OpName | Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Reduce all ranks' arrays; each rank gets its row of the result, or its share of the rows.

        Parameters
        ----------
        x : array, shape (size, *S), or (n, *S) with `counts`
            This rank's array; shape and dtype are the same on every rank.
        op : str or Op
            As for `allreduce`.
        counts : sequence of int, optional
            How many rows each rank gets, n in all; the same on every rank.
        out : array, shape S, or (counts[rank], *S) with `counts`, optional
            Where the result goes.

        Returns
        -------
        array, shape S, or (counts[rank], *S) with `counts`
            Row r of what `allreduce` would give, on rank r; with `counts`, the first counts[0] rows
            on rank 0, the next counts[1] on rank 1, and so on. Sends about the array's bytes a
            rank.
        """
        return fast_path.call(self._runner, timeout, ReduceScatter, x, (op, counts), out)

    def alltoall(
        self, x: ArrayT, *, out: ArrayT | None = None, timeout: float | None = None
    ) -> ArrayT:
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
        return fast_path.call(self._runner, timeout, Alltoall, x, (), out)

    def scan(
        self,
        x: ArrayT,
        op: OpName | Op = "sum",
        *,
        out: ArrayT | None = None,
        timeout: float | None = None,
    ) -> ArrayT:
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
        return fast_path.call(self._runner, timeout, Scan, x, (op,), out)

    def exscan(
        self,
        x: ArrayT,
        op: OpName | Op = "sum",
        *,
        out: ArrayT | None = None,
        timeout: float | None = None,
    ) -> ArrayT | None:
        """Reduce the arrays of the ranks before this one; None on rank 0.

        Parameters and result are those of `scan`, with the arrays of ranks 0 to r − 1 on rank r.
        """
        return fast_path.call(self._runner, timeout, Exscan, x, (op,), out)

    def maxloc(self, x: ArrayT, *, timeout: float | None = None) -> tuple[ArrayT, ArrayT]:
        """Return the largest elements of all ranks' arrays, and on which ranks they are.

        Parameters
        ----------
        x : array, shape S
            This rank's array; shape and dtype are the same on every rank.

        Returns
        -------
        values, ranks : arrays, shape S
            What `allreduce(x, "max")` returns, and for each element the first rank that has it, as
            int32. Both are like `x`. NaN counts as the largest. Sends the array's bytes to every
            rank.
        """
        return self._runner.call_within(timeout, Maxloc, x)

    def minloc(self, x: ArrayT, *, timeout: float | None = None) -> tuple[ArrayT, ArrayT]:
        """Return the smallest elements of all ranks' arrays, and their ranks: see `maxloc`."""
        return self._runner.call_within(timeout, Minloc, x)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until every rank has called."""
        fast_path.call(self._runner, timeout, Barrier)

    def bcast_object(
        self, obj: T | None = None, root: int = 0, *, timeout: float | None = None
    ) -> T:
        """Give every rank a copy of the Python object of `root`.

        The object is sent as a pickle: the ranks of a job trust one another.

        Parameters
        ----------
        obj : object
            What `root` sends; ignored on the other ranks.
        root : int
            The rank that sends.
        """
        return fast_path.call(
            self._runner, timeout, BcastObject, Pickled(obj), (root,), kind=PackedCall
        )

    def allgather_object(self, obj: T, *, timeout: float | None = None) -> list[T]:
        """Return the list of all ranks' Python objects, which are sent as pickles.

        Parameters
        ----------
        obj : object
            Anything that pickles; it may differ between ranks in type and size.
        """
        return fast_path.call(self._runner, timeout, AllgatherObject, Pickled(obj), kind=PackedCall)

    def gather_object(
        self, obj: T, root: int = 0, *, timeout: float | None = None
    ) -> list[T] | None:
        """Return the list of all ranks' Python objects on `root`, None on the other ranks.

        Parameters
        ----------
        obj : object
            Anything that pickles; it may differ between ranks in type and size.
        root : int
            The rank that gets the list.
        """
        return fast_path.call(
            self._runner, timeout, GatherObject, Pickled(obj), (root,), kind=PackedCall
        )

    def plan(self, tree: Any, op: OpName = "mean", *, timeout: float | None = None) -> Plan:
        """Prepare the reduction of trees like this one, to be used in every step.

        Parameters
        ----------
        tree : pytree of arrays and Python numbers
            The same structure, shapes and dtypes on every rank; the values do not matter.
        op : str
            As for `allreduce`.

        Returns
        -------
        Plan
            `plan(tree)` returns what `allreduce_tree(tree, op)` returns, bit for bit, and keeps its
            memory from call to call: see `arraycomm.Plan`.

        Raises
        ------
        MismatchError
            Trees differ between ranks; the message names the path of the first difference.
        TypeError
            A leaf cannot be reduced; the message names its path.

        Notes
        -----
        Collective; costs one exchange of a header. Calls of the plan compare only a digest.
        """
        made: Plan = self._runner.call_within(
            timeout, MakePlan, self._runner, self._trees, tree, op
        )
        return made

    @entry
    def stats(self) -> dict[str, dict[str, float]]:
        """Return counts of this rank's calls so far, by operation; local.

        Returns
        -------
        dict
            For each operation `calls`, `bytes` (of the arrays passed), `copies` (made of arrays
            outside the transport) and `seconds` (inside blocking calls). Calls on duplicates of
            this communicator, such as those of distributed optimizers, count too.
        """
        return self._runner.statistics.by_name()


class GridCommunicator(GridCalls, Communicator):
    """A communicator whose ranks are the cells of a grid; made by `Communicator.grid`.

    Rank 0 has the coordinates 0, …, 0, and those of the last dimension change first. Beside `sub`,
    `neighbor_alltoall` and its nonblocking form, its calls are those of a communicator, or local.

    Attributes
    ----------
    dims : tuple of int
        Ranks along each dimension.
    periods : tuple of bool
        Whether the last rank of a dimension is the neighbour of its first.
    coords : tuple of int
        Of this rank.
    """

    def __init__(self, runner: Runner, layout: Layout) -> None:
        super().__init__(runner)
        self.dims, self.periods = layout
        self.coords = self.coords_of(self.rank)

    @entry
    def dup(self, **options: Any) -> Self:
        """Return a grid of the same ranks; see `Communicator.dup`."""
        return type(self)(groups.dup(self._runner, options), (self.dims, self.periods))

    @entry
    def sub(self, keep: Sequence[bool]) -> GridCommunicator:
        """Return the grid of the ranks that share the coordinates of the other dimensions.

        Parameters
        ----------
        keep : sequence of bool
            For each dimension whether the new grid has it; the same on every rank.
        """
        color, layout = self._layout_of(keep)
        made = groups.split(self._runner, color, self.rank)
        assert made is not None
        return GridCommunicator(made, layout)


# What a group with dead ranks keeps: the communicator that replaces it, see `shrink`.
_SUCCESSOR: Final = "successor"


def latest(comm: Communicator) -> Communicator:
    """Return the communicator by which `shrink` has replaced this one, or this one."""
    while (successor := group_of(comm).kept.get(_SUCCESSOR)) is not None:
        comm = successor
    return comm


def runner_of(comm: Communicator) -> Runner:
    """Return the runner of a communicator, which makes its calls."""
    return comm._runner


def group_of(comm: Communicator) -> Group:
    """Return the state of a communicator on this rank."""
    return comm._runner.group


def trees_of(comm: Communicator) -> TreeMemory:
    """Return the memory through which trees are reduced on a communicator."""
    return comm._trees
