"""The session: the world of this process, from `init` to `finalize`."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from arraycomm import _launch
from arraycomm._calls.runner import Runner
from arraycomm._collectives.groups import ENDED_BY_ERROR, Finalize, warn_of_messages
from arraycomm._communicator import Communicator, latest, runner_of
from arraycomm._entries import entries, entry
from arraycomm._errors import BackendUnavailableError, NotInitializedError, PeerError
from arraycomm._exit.exit import (
    complete,
    forget_on_fork,
    refuse_forked_child,
    remove_root,
    watch_exit,
)
from arraycomm._folds import use_threads
from arraycomm._launch.places import threads_for
from arraycomm._protocol.waits import still_waiting
from arraycomm._start import arguments as asked
from arraycomm._start.arguments import Arguments, Default, default, seconds_of
from arraycomm._start.choice import Start, choose_start, open_world, refuse_other_ranks
from arraycomm._start.opened import Opened, open_alone
from arraycomm._start.over_mpi import mpi_transport
from arraycomm._trace.trace import begin_world, end_world
from arraycomm._transports.notes import FAILED, GAVE_UP
from arraycomm._writing import write


class _Session:
    """The world that `init` has made in this process, and the arguments it was made with."""

    world: Communicator | None
    arguments: dict[str, Any]
    # What `init` has opened; it says how the ranks communicate.
    opened: Opened | None
    # Whether it is of this process alone, and nobody has asked for that.
    is_one: bool

    def show(self, verbose: bool) -> None:
        """Print on rank 0 how the ranks communicate, if that was asked for."""
        if verbose and self.opened is not None and self.opened.runner.group.rank == 0:
            write("".join(f"arraycomm: {fact}\n" for fact in self.opened.facts()))

    def end(self) -> None:
        """Forget the world; called in forked children as well."""
        self.world, self.arguments, self.opened, self.is_one = None, {}, None, False


_session = _Session()
_session.end()
forget_on_fork(_session.end)


@entry
def init(
    backend: str = "auto",
    *,
    device: str | Sequence[str | None] | None = default(None),
    check: bool = default(True),
    reproducible: bool = default(True),
    timeout: float | None = default(1800.0),
    verbose: bool = False,
    report_after: float | None = default(still_waiting.DEFAULT),
) -> Communicator:
    """Start communication; return the communicator of all ranks.

    Collective: every rank of the job calls it. A second call returns the same communicator, and
    compares only the arguments that are passed.

    Parameters
    ----------
    backend : str
        "auto" is "mpi" under an MPI launcher (`mpiexec`, `srun`), "processes" if torchrun or
        variables of the environment number the processes of one node, and "self" otherwise.
        "processes" and "self" need no MPI; "self" is one process alone. Arrays on devices use NCCL
        if all ranks can; the ranks find that out when one of them first passes such an array. With
        "nccl" they find out at once, and `init` raises if they cannot. With "mpi" they never use
        NCCL.
    device : str or list of str, optional
        Where this rank makes arrays if no argument says where: "cpu", "cuda" or "cuda:1". If no
        number is given, the ranks of a node take its devices in turn. A list has a device for each
        rank of a node, by `local_rank`.
    check : bool, default True
        Compare what the ranks call before any data moves. Default from `ARRAYCOMM_CHECK`: 1, true,
        yes or on; 0, false, no or off.
    reproducible : bool, default True
        Reduce in rank order. With False a transport may reduce in an order of its own.
    timeout : float or None, default 1800.0
        Seconds that a call may wait for other ranks, without those in which the job was stopped;
        None means for ever. Default from `ARRAYCOMM_TIMEOUT`.
    verbose : bool, default False
        Whether rank 0 prints how the ranks communicate, a line for each fact: backend, ranks and
        nodes, the MPI library, devices, the options, and whether the part in C is used. Only rank
        0 has to pass it.
    report_after : float or None, default 10.0
        Seconds of waiting in one call after which rank 0 prints a line, once: for which ranks it
        waits, and where those are. None means never. Default from `ARRAYCOMM_REPORT_AFTER`. It
        holds for this process; ranks need not agree.

    Returns
    -------
    Communicator
        `world()` returns it too.

    Raises
    ------
    BackendUnavailableError
        The backend cannot run here: the message says what is missing, also of the variables that
        number processes, and where two launchers contradict each other. Or a rank has started this
        process, which inherits the launcher's variables, but is no rank. Or it would be a world of
        its own, but is one of several to others, such as torch.distributed.
    CommTimeoutError
        Processes that the environment numbers did not all come in time.
    CommunicatorClosedError
        This process was forked from a rank. With "self" it gets a world of its own.
    MismatchError
        Ranks pass different arguments, or run different versions of arraycomm.
    ValueError
        A second call passes an argument that differs from the first, an environment variable has a
        value that does not exist or names a wrong file, or a list of devices is shorter than the
        number of ranks on a node.
    """
    named: dict[str, Any] = {
        "device": device,
        "check": check,
        "reproducible": reproducible,
        "timeout": timeout,
    }
    passed = {name: value for name, value in named.items() if not isinstance(value, Default)}
    _refuse_threads_as_ranks()
    if _session.world is not None:
        asked.check(backend, verbose, report_after, first=False)
        _compare_with_first(_session.world, backend, passed)
        _session.show(verbose)
        return world()
    if backend != "self":
        _refuse_children_of_ranks()
    wrong = None
    try:
        asked.check(backend, verbose, report_after, first=True)
        arguments = {**asked.defaults(), **passed}
    except (TypeError, ValueError) as error:
        # Raised once the other ranks are told of it, if there are others.
        wrong, backend, arguments = error, "auto", {**asked.CONSTANTS, **passed}
    given = Arguments(backend=backend, **arguments, wrong=wrong)
    start = choose_start(backend)
    if start.backend in ("mpi", "nccl") and start.launched:
        # From now on an uncaught error of this rank ends the job: other ranks may wait for it.
        try:
            mpi_transport(seconds_of(given.timeout))
            watch_exit()
        except BackendUnavailableError:
            if not start.alone:
                raise
            start = Start("self")
    elif start.numbering is None:
        # Raises what is wrong with them before MPI is loaded, since no other rank has to be told.
        given.checked(local_rank=0, local_size=1)
    opened = open_world(start, given)
    use_threads(threads_for(opened.runner.group.transport.local_size, os.environ))
    _session.world, _session.arguments = Communicator(opened.runner), arguments
    _session.opened = opened
    _session.is_one = backend == "auto" and _session.world.size == 1
    begin_world(opened.runner)
    _session.show(verbose)
    return world()


@entry
def world() -> Communicator:
    """Return the communicator of all ranks, which `init` made.

    Raises
    ------
    BackendUnavailableError
        By default `init` made a world of this process alone; since then a library, such as
        torch.distributed, has begun with several.
    NotInitializedError
        `init` was not called yet, or `finalize` was called. Or ranks are threads, in
        `arraycomm.testing`: each is given its communicator.
    CommunicatorClosedError
        This process was forked from a rank.
    """
    if _session.is_one:
        # Libraries may have met since.
        refuse_other_ranks("world", {})
    return _current()


def _current() -> Communicator:
    _refuse_threads_as_ranks()
    if _session.world is None:
        refuse_forked_child("world")
        raise NotInitializedError("world: there is none yet; call arraycomm.init() first")
    return latest(_session.world)


@entry
def is_initialized() -> bool:
    """Return whether `init` was called (and `finalize` was not)."""
    return _session.world is not None and not _is_thread_of_ranks()


@entries()
class borrow:  # noqa: N801 - used as a function, like contextlib.suppress
    """Context manager: the communicator that a caller of a library has passed, if any.

    For libraries that communicate. Gives a `Communicator`, and ends only what it has made.

    Parameters
    ----------
    comm : Communicator, mpi4py.MPI.Intracomm, or None
        A `Communicator` is given as it is. A communicator of mpi4py is duplicated for the block by
        `Communicator.from_mpi`, which is collective. With None it is `world()` if the program has
        called `init`, and otherwise, or in a thread of `testing.run`, one of this process alone.

    Raises
    ------
    NotInitializedError
        `comm` is None, and this process is one of several that a launcher has started, but the
        program has not called `init`.
    TypeError
        `comm` is none of these.

    Notes
    -----
    An exception in the block ends a duplicate: the other ranks raise `PeerError`. A `Communicator`
    that the caller has passed stays as it is.

    Examples
    --------
    >>> import numpy as np
    >>> import arraycomm as ac
    >>> def mean(x, *, comm=None):
    ...     with ac.borrow(comm) as ranks:
    ...         return ranks.allreduce(x.sum()) / ranks.allreduce(x.size)
    >>> float(mean(np.arange(4.0)))
    1.5
    """

    def __init__(self, comm: Any = None) -> None:
        self._passed = comm
        self._made: Communicator | None = None

    def __enter__(self) -> Communicator:
        if isinstance(self._passed, Communicator):
            return self._passed
        if self._passed is None and is_initialized():
            return world()
        self._made = _alone() if self._passed is None else _over_mpi(self._passed)
        return self._made

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        made, self._made = self._made, None
        if made is not None:
            made.__exit__(kind, error, trace)


def _is_thread_of_ranks() -> bool:
    return getattr(threading.current_thread(), "is_rank", False)


def _refuse_threads_as_ranks() -> None:
    if _is_thread_of_ranks():
        raise NotInitializedError(
            "ranks are threads here, without a world; pass comm, which the function was given"
        )


def _alone() -> Communicator:
    refuse_forked_child("borrow")
    if choose_start("auto").backend != "self":
        raise NotInitializedError(
            "borrow: this process is one of several, and each would compute by itself; call "
            "arraycomm.init() in the program, or pass a communicator"
        )
    return Communicator(open_alone(Arguments(backend="self", **asked.defaults())).runner)


def _over_mpi(comm: Any) -> Communicator:
    if not any(kind.__module__.partition(".")[0] == "mpi4py" for kind in type(comm).__mro__):
        raise TypeError(
            "borrow: comm must be an arraycomm.Communicator, an mpi4py.MPI.Intracomm or None; got "
            f"{type(comm).__name__}"
        )
    return Communicator.from_mpi(comm)


def renew() -> None:
    """Make the world anew, as `init` was called first, whatever has become of it; collective."""
    if _session.world is None:
        return
    old = latest(_session.world)
    backend = old.backend
    arguments = {**_session.arguments, "report_after": still_waiting.report_after()}
    _session.end()
    made = init(backend if backend in asked.BACKENDS else "auto", **arguments)
    # Whoever holds the old one, as a module of tests may, holds the new one.
    Communicator.__init__(old, runner_of(made))
    _session.world = old


@entry
def finalize() -> None:
    """End communication; collective. Frees every communicator made from the world.

    A program need not call it at its end. `init` may be called again afterwards, also if an error
    has ended communication on some ranks or on all.
    """
    if _session.world is None:
        return
    runner = runner_of(_current())
    _session.end()
    root = runner.group
    empty = root.closed is None and _is_nothing_left(runner)
    for group in [*root.related[1:], root]:
        if empty:
            for hook in group.on_free:
                hook()
        if group.closed is None:
            group.end(NotInitializedError("arraycomm was finalized"))
        # In the memory of the others something may still arrive. They leave with the process.
        if empty:
            group.transport.free()
    if empty:
        root.related.clear()
        remove_root(root)


def _is_nothing_left(runner: Runner) -> bool:
    """Complete what is outstanding; return whether nothing can arrive any more, on any rank."""
    root = runner.group
    for group in root.related:
        complete(group)
    if root.closed is not None:
        return False
    closed = any(group.closed is not None for group in root.related)
    unmatched = sum(group.unmatched for group in root.related)
    try:
        end_world()
        replies = runner.call(Finalize, ENDED_BY_ERROR if closed else unmatched)
    except PeerError as error:
        # Ranks on which an error has ended the world do not come, but may call `init` again.
        notice = root.control.notes.exit_notices().get(error.rank)
        if notice is None or notice.state not in (FAILED, GAVE_UP):
            raise
        return False
    if ENDED_BY_ERROR in replies:
        return False
    left: int = sum(replies)
    if left > 0:
        warn_of_messages("finalize", left)
    return left == 0


def _refuse_children_of_ranks() -> None:
    """Raise in a process that a rank has started: the launcher knows nothing of it."""
    refuse_forked_child("init")
    owner = _launch.claimed_by(os.environ, os.getpid())
    if owner:
        raise BackendUnavailableError(
            f"init: process {owner} is the rank that the launcher has started, and has started "
            'this process, which is none; call init only under if __name__ == "__main__", and '
            "communicate there, or call init(backend='self') here for a world of this process alone"
        )


def _compare_with_first(comm: Communicator, backend: str, passed: dict[str, Any]) -> None:
    if backend not in ("auto", comm.backend):
        raise ValueError(f"init: was called with backend {comm.backend!r} before; got {backend!r}")
    for name, value in passed.items():
        first = _session.arguments[name]
        if value != first:
            raise ValueError(f"init: was called with {name}={first!r} before; got {value!r}")
