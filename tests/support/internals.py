"""What tests reach of a communicator's inside. No other file of the tests knows where it is kept."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from arraycomm._calls.placement import Placements
from arraycomm._calls.runner import Runner
from arraycomm._collectives import groups
from arraycomm._collectives.reductions import Allreduce
from arraycomm._communicator import Communicator, group_of, runner_of
from arraycomm._cuda.device import DeviceRequest
from arraycomm._cuda.devices import Devices
from arraycomm._exit import exit as process_exit
from arraycomm._native import compiled
from arraycomm._prepared import fast_path
from arraycomm._prepared.fast_paths import FastPaths
from arraycomm._protocol.group import Group, Options
from arraycomm._protocol.waits import clock, deadlock
from arraycomm._protocol.waits.deadlock import WaitReports, WaitStatus
from arraycomm._protocol.waits.progress import ProgressThread
from arraycomm._protocol.waits.waiting import wait_for
from arraycomm._reduce import blocks, chunks, selection
from arraycomm._reduce import segment as segments
from arraycomm._transports import control as channels
from arraycomm._transports.base import Blocks, Handle, Transport

if TYPE_CHECKING:
    # Programs on ranks do without it.
    import pytest

# Slots --------------------------------------------------------------------------------------------

# In shared memory, the bytes that a rank may read more of others' slots, and the most bytes of a slot; between nodes, the
# most bytes of all slots: as users have them.
SLOTS = channels._READ, channels._LARGEST, channels._MESSAGES


def slots() -> tuple[int, int, int]:
    """Return what `set_slots` takes, as communicators that are made now have it."""
    return channels._READ, channels._LARGEST, channels._MESSAGES


def set_slots(read: int, largest: int, messages: int) -> None:
    """Let as many bytes travel with the headers of communicators that are made from now on.

    If they are few, small arrays go the ways of large ones as well.
    """
    channels._READ, channels._LARGEST, channels._MESSAGES = read, largest, messages


# By module and name, what the block below changes, as it was before.
_usual: dict[tuple[Any, str], int] = {}


@contextlib.contextmanager
def small_limits(
    comm: Communicator, slots: tuple[int, int, int], chunk: int, movement: int = blocks.MAX_BYTES
) -> Iterator[None]:
    """Have small slots, chunks, pieces and movements in the block, which all ranks enter and leave together."""
    changed = dict(
        zip([(channels, n) for n in ("_READ", "_LARGEST", "_MESSAGES")], slots, strict=True)
    )
    changed |= {(segments, "_CHUNK_BYTES"): chunk, (selection, "CHUNK_BYTES"): chunk}
    changed |= {(chunks, "_FOLDED"): 1, (chunks, "_LEAST_CHUNK"): chunk}
    changed[blocks, "MAX_BYTES"] = movement
    if pieces := sys.modules.get("arraycomm._transports.mpi.pieces"):
        changed[pieces, "PIECE"] = chunk // 4
    # Ranks may be threads, which have them in common.
    before = {place: _usual.setdefault(place, getattr(*place)) for place in changed}
    comm.barrier()
    try:
        for place, value in changed.items():
            setattr(*place, value)
        yield
        comm.barrier()
    finally:
        for place, value in before.items():
            setattr(*place, value)


# A communicator of its own ---------------------------------------------------------------------


def communicator(transport: Transport, **options: Any) -> Communicator:
    """Make a communicator over a transport, without a world."""
    group = Group(transport, Options(**options))
    request = DeviceRequest(local_rank=group.transport.local_rank)
    return Communicator(Runner(group, Devices(group, request)))


def mpi_communicator(
    mpi_comm: Any, *, share: bool = True, nodes: list[int] | None = None, **options: Any
) -> Communicator:
    """Make one over MPI, whose control channel is in shared memory or goes by messages.

    By messages four ranks are on two pretended nodes in turn, and fewer ranks each on one of its own, if
    `nodes` does not give the first rank on the pretended node of each.
    """
    from arraycomm._transports.mpi.transport import MPITransport

    if nodes is None and mpi_comm.size == 4 and not share:
        nodes = [0, 1, 0, 1]
    return communicator(MPITransport(mpi_comm, share=share or bool(nodes), nodes=nodes), **options)


def is_shared(comm: Communicator) -> bool:
    """Return whether the ranks share memory."""
    return group_of(comm).control.shared


def refuse_shared_memory() -> None:
    """Have this process's control channels go by messages from now on, as between nodes."""
    from arraycomm._transports.mpi import control as mpi_control
    from arraycomm._transports.mpi import transport as mpi

    mpi.shared_memory = mpi_control.shared_memory = lambda *_: None  # type: ignore[assignment]


@contextlib.contextmanager
def unnamed_files_refused(*, here: bool) -> Iterator[None]:
    """Let this process open no file that has no name, if `here`, as between some containers."""
    from unittest import mock

    from arraycomm._transports import shared_files

    usual = shared_files.open_file

    def open_file(path: str, nbytes: int) -> Any:
        return None if here and path.startswith("/proc/") else usual(path, nbytes)

    try:
        with mock.patch.object(shared_files, "open_file", open_file):
            yield
    finally:
        shared_files._names_needed = False


@contextlib.contextmanager
def threads_refused(*, here: bool) -> Iterator[None]:
    """Let the system start no thread in this process, if `here`."""
    from unittest import mock

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with mock.patch.object(threading.Thread, "start", start) if here else contextlib.nullcontext():
        yield
    ProgressThread.refused = False


def now() -> float:
    """Return the time of the clock of waits."""
    return clock.now()


def restart_clock() -> None:
    """Have the clock of waits go on from the system's, which a test has set back."""
    clock._clock.begin_anew()


def shorten_deadlock_watch(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set how long ranks have to wait for one another before that is a deadlock."""
    monkeypatch.setattr(deadlock, "_SURE", seconds)


# A communicator, or what `related` returns of those made from it.
Member = Communicator | Group


# What it holds ---------------------------------------------------------------------------------


def transport(comm: Member) -> Any:
    return group(comm).transport


def control(comm: Member) -> Any:
    return group(comm).control


def engine(comm: Member) -> Any:
    return group(comm).engine


def options(comm: Member) -> Options:
    return group(comm).options


def set_timeout(comm: Member, seconds: float) -> None:
    group(comm).watchdog._timeout = seconds


def name(comm: Member) -> str:
    """Return what messages call the communicator."""
    return group(comm).name


def related(comm: Member) -> list[Group]:
    """Return the groups that end with this communicator's, itself among them."""
    return group(comm).related


def group(comm: Member) -> Group:
    """Return the state of a communicator, or of one made from it."""
    return comm if isinstance(comm, Group) else group_of(comm)


def steps(comm: Member) -> int:
    """Return how many headers the ranks have exchanged."""
    return int(group(comm).control.step)


def finish_in_another_thread(comm: Member, task: Any) -> Any:
    """Have another thread push a call on to its end; return its result, or raise its error."""

    def push() -> None:
        while not task.finished:
            engine(comm).advance()

    thread = threading.Thread(target=push)
    thread.start()
    thread.join()
    task.outcome.claim()
    return task.take()


def completed(comm: Member) -> int:
    """Return the step of the last call that this rank has completed, which others learn if it leaves."""
    return group(comm).control.completed


def finish(*handles: Handle) -> None:
    """Wait for movements, which may need one another."""

    def watch(waited: float) -> None:
        assert waited < 20, "the movement does not end"

    wait_for(lambda: not [handle for handle in handles if not handle.done()], 0, watch)


def spans(comm: Member) -> list[int]:
    """Return a list that gets the bytes that each movement of the transport reaches over."""
    found: list[int] = []
    for primitive in ("alltoall", "allgather", "gather", "scatter", "bcast"):
        setattr(transport(comm), primitive, _measured(getattr(transport(comm), primitive), found))
    return found


def _measured(move: Callable[..., Any], found: list[int]) -> Callable[..., Any]:
    def measured(*args: Any) -> Any:
        buffers = [arg.buffer if isinstance(arg, Blocks) else arg for arg in args]
        found.extend(buffer.nbytes for buffer in buffers if isinstance(buffer, np.ndarray))
        return move(*args)

    return measured


# Small payloads, plans and requests -----------------------------------------------------------


def inline_bytes(comm: Communicator) -> int:
    """Return how much a call may send with its header."""
    return group(comm).inline_bytes


def set_inline_bytes(comm: Communicator, nbytes: int) -> None:
    group(comm).inline_bytes = nbytes
    placements = runner_of(comm).placements
    placements.host.inline_bytes = placements.host_tree.inline_bytes = nbytes


def segment(comm: Communicator) -> Any:
    """Return the shared segment of the trees, or None."""
    transport = group_of(comm).transport
    return segments.opened(transport)


@contextlib.contextmanager
def forbid_segment(comm: Communicator) -> Iterator[None]:
    """Have trees and large arrays travel as messages in the block, as between nodes.

    Later tests get the same transport.
    """
    kept = group_of(comm).transport.kept
    before = kept.pop(segments.SharedSegment, ...)
    kept[segments.SharedSegment] = None
    try:
        yield
    finally:
        del kept[segments.SharedSegment]
        if before is not ...:
            kept[segments.SharedSegment] = before


def fusion(plan: Any) -> Any:
    return plan.fusion


def is_finished(request: Any) -> bool:
    """Return whether all is done for a request but to hand over its result."""
    return bool(request._task.finished)


def has_unseen_error(comm: Member) -> bool:
    """Return whether a request has failed that nobody has waited for."""
    return bool(engine(comm).outcomes.errors())


def waits_for_no_message(comm: Member) -> bool:
    """Return whether no message is outstanding that could still take what a peer sends."""
    return engine(comm).idle or all(task.finished for task in engine(comm).messages)


def forbid_progress_thread(comm: Member) -> None:
    """Have requests advance only within calls."""
    engine(comm).threaded = False


def call_instead_of_progress_thread(comm: Member, function: Callable[[], None]) -> None:
    engine(comm).progress.start = function


def fail_in_progress_thread(comm: Member, error: BaseException) -> None:
    """Have the thread that makes progress raise, as soon as it looks what to do."""
    thread = engine(comm).progress
    looked = thread._active

    def active() -> Any:
        if threading.current_thread().name == "arraycomm-progress":
            raise error
        return looked()

    thread._active = active


def forget_interruption(comm: Member) -> None:
    """Drop the exception that the engine keeps, and with it the requests in its traceback."""
    engine(comm).interrupted = None


def drop_first_task(comm: Member) -> None:
    """Do with the oldest task what the garbage collector does with a request that is thrown away."""
    engine(comm).queue.pop(0)._program.close()


def mpi_movements() -> Any:
    """Return the sends and receives that MPI has not finished, whoever waits for them."""
    from arraycomm._transports.mpi.under_way import KEPT_ALIVE, Movement, MpiRepeated

    return {kept for kept in KEPT_ALIVE if isinstance(kept, Movement | MpiRepeated)}


# Devices ---------------------------------------------------------------------------------------


def devices(comm: Communicator) -> Any:
    return runner_of(comm).placements


def device_link(comm: Communicator) -> Any:
    """Return the link for arrays on devices, None if they go by way of the host."""
    return devices(comm).link


def require_backend(comm: Communicator, backend: str) -> None:
    """Have arrays on devices go over a backend."""
    devices(comm).request = DeviceRequest(backend, None, comm.local_rank)
    if backend == "nccl":
        devices(comm).require()
        comm.backend = group(comm).backend = "nccl"


# Its end ---------------------------------------------------------------------------------------


def close(comm: Member, error: BaseException) -> None:
    group(comm).close(error)


def close_devices(comm: Member) -> None:
    """Complete what is outstanding, on devices as well, and close the link between them."""
    # Headers of calls that went ahead are pushed on by who looks after the link.
    group(comm).engine.drain()
    for hook in group(comm).on_free:
        hook()


def leave_by_error(comm: Member, error: BaseException) -> None:
    """Do what the end of a `with` block does."""
    process_exit.leave_by_error(group(comm), error)


def free(comm: Member) -> None:
    """Free a communicator; collective."""
    groups.free(Runner(group(comm), Placements(group(comm))))


def remember_allreduce(comm: Communicator, x: Any, op: str) -> None:
    """Take the fast path in the next `allreduce` like this, as if one had been made."""
    key = Allreduce, type(x), x.dtype, x.shape, (0, str), op
    fast_path.keep_allreduce(comm._runner, key, x, op)


def is_closed(comm: Member) -> bool:
    return group(comm).closed is not None


def announce_exit(comm: Member, state: int, reason: str = "") -> None:
    """Tell the other ranks that this one makes no further calls."""
    group(comm).control.notes.announce_exit(state, group(comm).control.completed, reason)


def watch_exit(comm: Member) -> None:
    """See to the communicator at the end of the program, as to those over MPI."""
    process_exit.watch_exit()
    process_exit.add_root(group(comm))


def unmatched(comm: Member) -> int:
    """Return how many more sends than receives were started."""
    return group(comm).unmatched


def is_at_rest(comm: Member) -> bool:
    """Return whether nothing of the communicator is under way."""
    return group(comm).at_rest()


@contextlib.contextmanager
def noted_waits() -> Iterator[Callable[[Communicator], list[str]]]:
    """Note what each communicator reports to others of its waits."""
    from unittest import mock

    noted: dict[int, list[str]] = {}
    report = WaitReports.report

    def note(reports: WaitReports, owner: Any, status: WaitStatus | None) -> None:
        said, texts = str(status or ""), noted.setdefault(id(owner), [])
        if texts[-1:] != [said]:
            texts.append(said)
        report(reports, owner, status)

    with mock.patch.object(WaitReports, "report", note):
        yield lambda comm: noted[id(group(comm))]


# Traces ----------------------------------------------------------------------------------------


def fast_paths(comm: Communicator) -> FastPaths:
    return runner_of(comm).fast_paths


def has_fast_paths(comm: Communicator, count: int) -> bool:
    """Return whether this many reductions have a fast path, as far as the native part makes any."""
    found = [key for key in fast_paths(comm)._paths if key[0] is not groups.Barrier]
    return compiled is None or len(found) == count


def is_traced(comm: Communicator) -> bool:
    """Return whether the communicator's calls are recorded."""
    return group_of(comm).tracer is not None
