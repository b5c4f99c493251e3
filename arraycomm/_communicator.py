"""The user's object: each method's signature and docstring, and one line that makes the call."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final, Self

from arraycomm._calls.custom_ops import Op
from arraycomm._calls.runner import Runner
from arraycomm._callsite import trim
from arraycomm._collectives import groups
from arraycomm._collectives.fast_path import remember
from arraycomm._collectives.groups import Barrier
from arraycomm._collectives.movements import Allgather, Alltoall, Bcast, Gather, Scatter
from arraycomm._collectives.nonblocking import NonblockingCalls
from arraycomm._collectives.objects import AllgatherObject, BcastObject, GatherObject
from arraycomm._collectives.reductions import Allreduce, Reduce, ReduceScatter
from arraycomm._collectives.scans import Exscan, Scan
from arraycomm._collectives.shared_arrays import MakesSharedArrays
from arraycomm._collectives.uneven import Allgatherv, Alltoallv, Gatherv, Scatterv
from arraycomm._entries import entries, entry, hide_from_torch
from arraycomm._messages.matching import Status, Wildcard
from arraycomm._messages.messages import Messenger
from arraycomm._mpi_start import Arguments, open_over_mpi
from arraycomm._protocol.ends.exit import leave_by_error, replace_root
from arraycomm._protocol.group import Group
from arraycomm._trace.trace import Traceable
from arraycomm._trees.fusion import TreeMemory
from arraycomm._trees.plan import MakePlan, Plan


# What calls the runner costs nothing more: it trims errors itself.
@entries(trimmed=True)
class Communicator(NonblockingCalls, Traceable, MakesSharedArrays):
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
        self._find, self._again = runner.fast_paths.find, runner.fast_paths.again
        self._trees = TreeMemory(group)
        self.rank, self.size = group.rank, group.size
        self.local_rank = group.transport.local_rank
        self.local_size = group.transport.local_size
        self.backend = group.backend

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
    ) -> Communicator:
        """Return a communicator over the ranks of an mpi4py communicator.

        For programs that use MPI already. Collective over `mpi4py_comm`. The new communicator works
        on a duplicate of it, and frees only that; `world()` is not affected.

        Parameters
        ----------
        mpi4py_comm : mpi4py.MPI.Intracomm
            The communicator to work over.
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
        return cls(open_over_mpi(mpi4py_comm, arguments).runner)

    @property
    def device(self) -> str:
        """Where this rank makes arrays if no argument says where: "cpu", or as in "cuda:0"."""
        return self._runner.placements.device_name

    @property
    def mpi_comm(self) -> Any:
        """The mpi4py communicator underneath, or None."""
        return self._runner.group.transport.mpi_comm

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
        return None if made is None else type(self)(made)

    @entry
    def split_by_node(self) -> Communicator:
        """Return the communicator of the ranks on this rank's node."""
        return type(self)(groups.split_by_node(self._runner))

    @entry
    def dup(self, **options: Any) -> Communicator:
        """Return a communicator of the same ranks, whose calls are independent of this one's.

        Parameters
        ----------
        **options
            `check`, `reproducible` and `timeout`, if they are to differ; the same on every rank.
        """
        return type(self)(groups.dup(self._runner, options))

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
        made = type(self)(groups.shrink(self._runner))
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
        self, x: Any, op: str | Op = "sum", *, out: Any = None, timeout: float | None = None
    ) -> Any:
        """Reduce all ranks' arrays, elementwise and in rank order; every rank gets the result.

        Parameters
        ----------
        x : array, shape S
            This rank's array; shape and dtype are the same on every rank.
        op : str or Op
            "sum", "mean", "prod", "min", "max", "and", "or", "xor", or made by `arraycomm.op`.
            Floats of 16 and 8 bits are accumulated in float32 and rounded once; NaN on any rank
            makes min and max NaN.
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
        try:
            # A fast path waits as long as the communicator's timeout says.
            key = (type(x), op, x.dtype, x.shape)
            fast = self._find(key) if timeout is None else None
        except Exception:
            # The full call checks x, and lets the other ranks know of an error.
            fast = None
        try:
            if fast is not None and (result := fast(x, out)) is not None:
                return result
        except BaseException as error:
            trim(error)
            raise
        result = self._runner.call_within(timeout, Allreduce, x, op, out)
        if fast is None and isinstance(op, str):
            remember(self._runner, x, op)
        return result

    def reduce(
        self,
        x: Any,
        op: str | Op = "sum",
        root: int = 0,
        *,
        out: Any = None,
        timeout: float | None = None,
    ) -> Any:
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
        return self._runner.call_within(timeout, Reduce, x, op, root, out)

    def bcast(
        self,
        x: Any = None,
        root: int = 0,
        *,
        like: Any = None,
        out: Any = None,
        timeout: float | None = None,
    ) -> Any:
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
        return self._runner.call_within(timeout, Bcast, x, root, like, out)

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
        return self._runner.call_within(timeout, Allgather, x, out)

    def allgatherv(
        self, x: Any, *, return_counts: bool = False, out: Any = None, timeout: float | None = None
    ) -> Any:
        """Join all ranks' arrays along axis 0, whose length may differ; every rank gets the result.

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
        return self._runner.call_within(timeout, Allgatherv, x, return_counts, out)

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
        return self._runner.call_within(timeout, Gather, x, root, out)

    def gatherv(
        self,
        x: Any,
        root: int = 0,
        *,
        return_counts: bool = False,
        out: Any = None,
        timeout: float | None = None,
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
        return self._runner.call_within(timeout, Gatherv, x, root, return_counts, out)

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
        return self._runner.call_within(timeout, Scatter, x, root, like, out)

    def scatterv(
        self,
        x: Any = None,
        counts: Any = None,
        root: int = 0,
        *,
        like: Any = None,
        out: Any = None,
        timeout: float | None = None,
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
        return self._runner.call_within(timeout, Scatterv, x, counts, root, like, out)

    def reduce_scatter(
        self,
        x: Any,
        op: str | Op = "sum",
        *,
        counts: Any = None,
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
        return self._runner.call_within(timeout, ReduceScatter, x, op, counts, out)

    def alltoall(self, x: Any, *, out: Any = None, timeout: float | None = None) -> Any:
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
        return self._runner.call_within(timeout, Alltoall, x, out)

    def alltoallv(
        self,
        x: Any,
        counts: Any,
        *,
        return_counts: bool = False,
        out: Any = None,
        timeout: float | None = None,
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
        return self._runner.call_within(timeout, Alltoallv, x, counts, return_counts, out)

    def scan(
        self, x: Any, op: str | Op = "sum", *, out: Any = None, timeout: float | None = None
    ) -> Any:
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
        return self._runner.call_within(timeout, Scan, x, op, out)

    def exscan(
        self, x: Any, op: str | Op = "sum", *, out: Any = None, timeout: float | None = None
    ) -> Any:
        """Reduce the arrays of the ranks before this one; None on rank 0.

        Parameters and result are those of `scan`, with the arrays of ranks 0 to r − 1 on rank r.
        """
        return self._runner.call_within(timeout, Exscan, x, op, out)

    @entry
    def send(self, x: Any, dest: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send an array to one rank, which calls `recv`.

        Parameters
        ----------
        x : array, shape S
            Any array, of any dtype without Python objects.
        dest : int
            The rank that receives. It may be this rank, if that has called `irecv` for it.
        tag : int
            From 0 to 1048575. Messages between two ranks with one tag arrive in the order of their
            sending; those with different tags may overtake one another.

        Notes
        -----
        Returns when `x` may be changed again: a short message may then still be under way, a long
        one has been received. Messages wait for no collective, and no collective waits for them.
        """
        self._messenger.send(x, dest, tag, timeout=timeout)

    @entry
    def recv(
        self,
        source: int | Wildcard,
        tag: int | Wildcard = 0,
        *,
        like: Any = None,
        out: Any = None,
        status: Status | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Receive an array from one rank, which calls `send`.

        Parameters
        ----------
        source : int or ANY_SOURCE
            The rank that sends; with `arraycomm.ANY_SOURCE` any rank.
        tag : int or ANY_TAG
            The tag that it sends with; with `arraycomm.ANY_TAG` any tag.
        like : array, optional
            An array of the framework and device wanted. NumPy otherwise.
        out : array, shape S, optional
            Where the elements go. If it cannot take them, or `like` is no array, the call raises
            and the message is lost.
        status : Status, optional
            Is told the rank and tag of the message, and its dtype, shape and bytes.

        Returns
        -------
        array, shape S
            The array as it was sent; its shape and dtype need not be known here.

        Raises
        ------
        PeerError
            The sender raised instead of sending, or left; with ANY_SOURCE, all others have left.
        CommTimeoutError
            Nothing came within the timeout.

        Notes
        -----
        Messages go to receives in the order of the calls: each to the first receive that takes it.
        Those of one rank arrive in the order of their sending, also with ANY_SOURCE. With several
        ranks' messages to choose from, those that have come first are taken first, as far as the
        transport knows.
        """
        return self._messenger.recv(source, tag, like, out, status, timeout=timeout)

    @entry
    def sendrecv(
        self,
        x: Any,
        dest: int,
        source: int | Wildcard,
        tag: int = 0,
        *,
        like: Any = None,
        out: Any = None,
        status: Status | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Send to one rank and receive from another at the same time; see `send` and `recv`.

        `out` may be memory of `x`.
        """
        return self._messenger.sendrecv(x, dest, source, tag, like, out, status, timeout=timeout)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until every rank has called."""
        self._runner.call_within(timeout, Barrier)

    def bcast_object(self, obj: Any = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """Give every rank a copy of the Python object of `root`.

        The object is sent as a pickle: the ranks of a job trust one another.

        Parameters
        ----------
        obj : object
            What `root` sends; ignored on the other ranks.
        root : int
            The rank that sends.
        """
        return self._runner.call_within(timeout, BcastObject, obj, root)

    def allgather_object(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        """Return the list of all ranks' Python objects, which are sent as pickles.

        Parameters
        ----------
        obj : object
            Anything that pickles; it may differ between ranks in type and size.
        """
        gathered: list[Any] = self._runner.call_within(timeout, AllgatherObject, obj)
        return gathered

    def gather_object(
        self, obj: Any, root: int = 0, *, timeout: float | None = None
    ) -> list[Any] | None:
        """Return the list of all ranks' Python objects on `root`, None on the other ranks.

        Parameters
        ----------
        obj : object
            Anything that pickles; it may differ between ranks in type and size.
        root : int
            The rank that gets the list.
        """
        gathered: list[Any] | None
        gathered = self._runner.call_within(timeout, GatherObject, obj, root)
        return gathered

    def plan(self, tree: Any, op: str = "mean", *, timeout: float | None = None) -> Plan:
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
