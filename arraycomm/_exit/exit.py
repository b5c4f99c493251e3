"""How this process leaves its groups: announced, in step with others, never with MPI pending."""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NoReturn

from arraycomm import _launch
from arraycomm._callsite import trim
from arraycomm._errors import CommunicatorClosedError, MismatchError, PeerError
from arraycomm._exit import process_watch
from arraycomm._exit.ending import Between, wait_for_ends
from arraycomm._native import compiled
from arraycomm._protocol.agreement import leave_in_step
from arraycomm._protocol.group import Group
from arraycomm._protocol.waits import clock
from arraycomm._protocol.waits.waiting import looks
from arraycomm._transports.notes import ENDED, FINALIZED, GONE

# Seconds in which the thread of a group's requests ends, and those in which MPI, or Python, does.
_GRACE: Final = 3.0
_STUCK: Final = 10
_SHORT: Final = 3
_NAP: Final = 1e-4
# Seconds in which a launcher has forwarded what ranks have printed, and in which ranks that raise
# at the same time, but cannot see one another, have printed it. The launcher ends all once one is
# gone.
_FORWARDING: Final = 0.2
_PRINTING: Final = 2.0
# Seconds for which a rank waits for each lower one to print the error of them all.
_TURN: Final = 0.25
# What a shell reports of a program that Ctrl-C has ended.
_INTERRUPTED: Final = 128 + signal.SIGINT
# The functions that Python runs a program by, and the files of what is typed at its prompt.
_OUTERMOST: Final = ("<module>", "_run_module_as_main")
_TYPED: Final = ("<stdin>", "<console>", "<python-input")
# Where the C library tells no handler the status of the process, or without the part in C: None.
_at_c_exit: Final = getattr(compiled, "at_exit", None)
_FORKED: Final = (
    "a forked process cannot use the communicator of its parent; communicate in the parent, or "
    "call arraycomm.init(backend='self') here for a world of this process alone"
)


class _Process:
    """What this process has to leave."""

    def __init__(self) -> None:
        # The first group of each family over MPI.
        self.roots: list[Group] = []
        # The traceback of the exception that ends the program, or whether Ctrl-C does.
        self.failure = ""
        self.failed_at = 0.0
        self.interrupted = False
        # Whether a process of this job has died: MPI's own end may wait for it.
        self.peer_died = False
        self.watching = False
        # Whether this process is a forked child of one that communicates over MPI.
        self.forked = False
        # Whether nothing is outstanding any more at the end, but what daemon threads have.
        self.completed = False
        # Whether mpi4py leaves the end of MPI to this module; the beginning of that end, and
        # whether MPI has something under way then.
        self.ends_mpi = self.leaves = self.pending = False
        # What was passed to `sys.exit` last, where nothing else tells the status.
        self.status: object = None
        # Called in a forked child.
        self.on_fork: list[Callable[[], None]] = []
        # Called when every rank has ended well.
        self.on_left: list[Callable[[], None]] = []

    def groups(self) -> list[Group]:
        """Return all groups that have not been freed."""
        return [group for root in self.roots for group in root.related]


_process = _Process()


def add_root(group: Group) -> None:
    """See to a group and those made from it when the process ends."""
    _process.roots.append(group)


def remove_root(group: Group) -> None:
    """Forget a group that has been freed with all that were made from it."""
    if group in _process.roots:
        _process.roots.remove(group)


def replace_root(old: Group, new: Group) -> None:
    """Let a group of the ranks that live take the place of one with dead ranks."""
    _process.roots = [root for root in _process.roots if old not in root.related]
    _process.roots.append(new)
    _process.peer_died = True


def complete(group: Group, *, at_end: bool = False) -> bool:
    """Complete the requests of a group, and return whether none failed without anybody seeing it.

    Errors that nobody has seen are printed, and there is a warning if nobody waited for a request.
    """
    group.engine.drain(at_end=at_end)
    return group.engine.outcomes.report()


def leave_by_error(group: Group, error: BaseException) -> None:
    """Close a group whose `with` block ended by an error."""
    at_rest = group.at_rest()
    group.close(error)
    if at_rest and not group.control.shared and not group.control.ended:
        # Nobody sees it leave but in its next step, which ends when the others take part.
        next(leave_in_step(group.control, repr(error)))


def forget_on_fork(forget: Callable[[], None]) -> None:
    """Call `forget` in forked children of a process that communicates over MPI."""
    _process.on_fork.append(forget)


def when_all_left(hook: Callable[[], None]) -> None:
    """Call `hook` at the end of a program over MPI once every rank has ended well."""
    _process.on_left.append(hook)


def refuse_forked_child(operation: str) -> None:
    """Raise in a forked child of a process that communicates over MPI."""
    if _process.forked:
        raise CommunicatorClosedError(f"{operation}: {_FORKED}")


def take_over_the_end() -> None:
    """Have mpi4py, which is about to be imported, leave the end of MPI to this module.

    Then the process may also end without it, as a rank does that others no longer wait for, and a
    forked child.
    """
    import mpi4py

    said = mpi4py.rc.finalize is not None or "MPI4PY_RC_FINALIZE" in os.environ
    if not said and not _process.ends_mpi:
        mpi4py.rc.finalize, _process.ends_mpi = False, True


def watch_exit() -> None:
    """Learn how the program ends. Registered after mpi4py's own hook, so that it runs before it."""
    if _process.watching:
        return
    _process.watching = True
    _print_in_turn()
    with suppress(RuntimeError):
        # Unless the program is over. It is called before Python waits for threads of the program,
        # and before that module does.
        import concurrent.futures.thread  # noqa: F401

        getattr(threading, "_register_atexit", atexit.register)(_see_failure)
    if _at_c_exit is None or _mpi4py_ends_mpi():
        _note_status()
    atexit.register(_at_exit)
    looks.append(_end_waits)
    _watch_mpi()
    _launch.claim(os.environ, os.getpid())
    process_watch.start(over_mpi=mpi_has_peers())


def _print_in_turn() -> None:
    """Print what ends the program: without the library's frames, apart from other ranks' prints."""
    previous = sys.excepthook

    def excepthook(kind: Any, error: BaseException, trace: TracebackType | None) -> None:
        typed = _is_typed(trace)
        if not typed:
            _ignore_interrupts()
        trim(error)
        by_default = previous is sys.__excepthook__
        try:
            if by_default and (printed := _printed_elsewhere(error)):
                _print_whole(printed)
            elif by_default and not sys.stderr.isatty():
                _print_whole("".join(traceback.format_exception(error)))
            else:
                previous(kind, error, error.__traceback__)
            sys.stderr.flush()
        finally:
            if not typed:
                _fail(error)

    sys.excepthook = excepthook
    before_prompt = getattr(sys, "__interactivehook__", None)

    def see_failure_before_prompt() -> None:
        _see_failure()
        if before_prompt is not None:
            before_prompt()

    sys.__interactivehook__ = see_failure_before_prompt


def _see_failure() -> None:
    """Tell the other ranks if an exception has ended the program, whichever hook has printed it."""
    error = getattr(sys, "last_value", None)
    trace = error.__traceback__ if isinstance(error, BaseException) else None
    # Others than Python's own end leave their errors there too: prompts, debuggers, pytest.
    if error is not None and trace is not None and not _is_typed(trace):
        frame = trace.tb_frame
        if frame.f_back is None and frame.f_code.co_name in _OUTERMOST:
            _fail(error)


def _is_typed(trace: TracebackType | None) -> bool:
    """Return whether an exception is that of a line at Python's prompt, which goes on."""
    file = "" if trace is None else trace.tb_frame.f_code.co_filename
    return hasattr(sys, "ps1") and file.startswith(_TYPED)


def _fail(error: BaseException) -> None:
    """Tell the other ranks of the exception that ends this one."""
    if _process.failure:
        return
    _ignore_interrupts()
    _process.interrupted = isinstance(error, KeyboardInterrupt)
    _process.failure = "".join(traceback.format_exception(error))
    _process.failed_at = clock.now()
    # A rank that fails because another did shows no traceback: the other's is the one to see.
    _announce_exit(GONE, "" if isinstance(error, PeerError) else _process.failure)


def _printed_elsewhere(error: BaseException) -> str:
    """Wait a moment for a lower rank to print a mismatch; return the line that refers to it.

    All ranks raise the same mismatch, but some may handle it: the lowest of the others prints it.
    """
    group = next((group for group in _process.groups() if group.closed is error), None)
    if group is None or not isinstance(error, MismatchError):
        return ""
    deadline = time.monotonic() + min(_TURN * group.rank, _PRINTING)
    while time.monotonic() < deadline:
        if _gone_below(group):
            # Read once more: whoever left before a rank that was seen is seen now.
            return (
                f"rank {group.rank} of {group.name}: arraycomm.{type(error).__name__}, "
                f"as printed by rank {_gone_below(group)[0]}\n"
            )
        time.sleep(_NAP)
    return ""


def _gone_below(group: Group) -> list[int]:
    """Return the lower ranks that have ended by an exception, or by leaving."""
    left = group.control.notes.exit_notices()
    return [rank for rank in range(group.rank) if rank in left and left[rank].state == GONE]


def _ignore_interrupts() -> None:
    """Let no Ctrl-C end the steps by which this process leaves: MPI's own end would crash."""
    with suppress(ValueError):
        # Only the main thread may; it is the one that leaves.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _print_whole(text: str) -> None:
    """Write one rank's error in one piece, so that the launcher does not mix it with another's."""
    sys.stderr.write(text)
    sys.stderr.flush()


def _watch_mpi() -> None:
    """Learn if the program itself finalizes MPI: that deletes the attributes of MPI_COMM_SELF."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None:
        keyval = module.Comm.Create_keyval(delete_fn=lambda *_: _mpi_ends())
        module.COMM_SELF.Set_attr(keyval, True)


def _mpi_ends() -> None:
    """Complete what is outstanding, as `finalize` does, and close every group over MPI."""
    if _process.leaves:
        return
    groups = _process.groups()
    for group in groups:
        complete(group, at_end=True)
    _announce_exit(FINALIZED)
    error, own = CommunicatorClosedError("the program has finalized MPI"), threading.get_ident()

    def stop() -> None:
        if threading.get_ident() != own:
            raise error

    looks.append(stop)
    for group in groups:
        group.end(error)
        group.engine.give_up_all(error)
    end = time.monotonic() + _GRACE
    while any(group.engine.turn.locked() for group in groups) and time.monotonic() < end:
        time.sleep(_NAP)
    for group in groups:
        group.engine.progress.join(_GRACE)
    looks.remove(stop)
    _process.roots.clear()


def _forget() -> None:
    """Close every group in a forked child, which has no part in its parent's communication."""
    if not (_process.watching or mpi_has_peers()):
        return
    _process.forked = True
    for group in _process.groups():
        group.refuse(_FORKED)
    _process.roots.clear()
    for hook in _process.on_fork:
        hook()


def _note_status() -> None:
    """Take note of what is passed to `sys.exit`, if the process cannot wait for its status."""
    leave = sys.exit

    def noting(status: Any = None, /) -> NoReturn:
        _process.status = status
        leave(status)

    sys.exit = noting


def mpi_has_peers() -> bool:
    """Return whether the program itself communicates over MPI."""
    return _mpi_is_active() and sys.modules["mpi4py.MPI"].COMM_WORLD.size > 1


os.register_at_fork(after_in_child=_forget)


def _announce_exit(state: int, text: str = "") -> None:
    for group in _process.groups():
        group.control.notes.announce_exit(state, group.control.completed, text)


def _status_of_program() -> int:
    """Return the status with which Python would end."""
    status = 1 if _process.failure else _process.status
    return status & 0xFF if isinstance(status, int) else int(status is not None)


def _at_exit() -> None:
    """Let MPI end if every rank has ended well; leave without it if one has not."""
    _process.leaves = True
    if _process.forked:
        if _mpi4py_ends_mpi():
            # MPI's own end would wait for other ranks here, or end their job.
            _do_the_rest()
            os._exit(_status_of_program())
        return
    _see_failure()
    ended_well = missed = False
    try:
        ended_well, missed = _all_ended_well()
    except KeyboardInterrupt:
        _process.interrupted = True
    except Exception:
        with suppress(Exception):
            traceback.print_exc()
    if ended_well and not _process.peer_died:
        for hook in _process.on_left:
            hook()
        _end_mpi()
    elif _mpi_is_active() or missed or _process.interrupted:
        # Otherwise nothing keeps Python from ending as it does.
        _leave_without_mpi(0 if ended_well else 1)


def _mpi_is_active() -> bool:
    module = sys.modules.get("mpi4py.MPI")
    return bool(module and module.Is_initialized() and not module.Is_finalized())


def _mpi4py_ends_mpi() -> bool:
    """Return whether Python's own end is that of MPI as well, which may wait for other ranks."""
    if not _mpi_is_active():
        return False
    rc = sys.modules["mpi4py"].rc
    return (rc.initialize if rc.finalize is None else rc.finalize) not in (False, "no")


def mpi_function(name: str) -> Any:
    """Return a function of the MPI that mpi4py has loaded, for ctypes; None if it cannot be had."""
    try:
        return getattr(ctypes.CDLL(sys.modules["mpi4py.MPI"].__file__), name)
    except (OSError, AttributeError):
        return None


def _end_mpi() -> None:
    """Have MPI end after Python, whose threads then call it no more.

    If it has something pending that nobody awaits, its end may never come.
    """
    if not _mpi_is_active() or not (_process.ends_mpi or _process.pending):
        return
    if _process.pending:
        _do_the_rest()
    address = _address_of_finalize() if _process.ends_mpi else 0
    if _at_c_exit is not None and mpi_has_peers():
        _at_c_exit(address, -1, _STUCK, _process.pending, _process.roots)
        return
    if address:
        ctypes.pythonapi.Py_AtExit(ctypes.c_void_p(address))
    if _process.pending:
        signal.alarm(_STUCK)


def _address_of_finalize() -> int:
    """Return where MPI_Finalize is; end MPI at once, and return 0, if it cannot be found."""
    function = mpi_function("MPI_Finalize")
    if function is None:
        sys.modules["mpi4py.MPI"].Finalize()
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _leave_without_mpi(least: int) -> None:
    """Leave Python, and then the process, as soon as others have what this rank has to say."""
    _ignore_interrupts()
    _do_the_rest()
    if _process.interrupted:
        with suppress(Exception):
            _announce_exit(GONE, _process.failure or "KeyboardInterrupt at the end of the program")
    watched = _watched()
    _linger(watched)
    if not any(group.transport.shrinks for group in watched):
        process_watch.remove_mpi_files()
    if _process.interrupted:
        os._exit(_INTERRUPTED)
    if _at_c_exit is None:
        os._exit(_status_of_program() or least)
    # If mpi4py ends MPI, that may wait for ranks that do not come.
    _at_c_exit(0, least, _SHORT if _mpi4py_ends_mpi() else _STUCK, True, _process.roots)


def _do_the_rest() -> None:
    """Do what Python does at its end, if a process leaves before: atexit's calls, open files.

    What was registered with atexit since `_at_exit`, Python has called before.
    """
    atexit.register(_do_the_rest)
    atexit.unregister(Between(_at_exit, _do_the_rest))
    with suppress(BaseException):
        atexit._run_exitfuncs()
    _flush()


def _flush() -> None:
    """Write what is still in Python's memory of the files that it has open."""
    # What was frozen is not found otherwise.
    gc.unfreeze()
    files = [found for found in gc.get_objects() if issubclass(type(found), io.IOBase)]
    # Text first: it goes on to the memory of bytes below it.
    for file in sorted(files, key=lambda found: not issubclass(type(found), io.TextIOBase)):
        with suppress(Exception):
            if not file.closed and file.writable():
                file.flush()


def _watched() -> list[Group]:
    """Return the groups that hold each family's ranks: the first, or all if that was freed."""
    return [
        group
        for root in _process.roots
        for group in ([root] if root in root.related else root.related)
    ]


def _all_ended_well() -> tuple[bool, bool]:
    """Tell how this rank ends; return whether all are well, and whether an error was missed."""
    completed = _completed()
    if not completed:
        _process.failure = _process.failure or "a request failed"
    # Before it is said that this rank has ended: a launcher may end it once the others have left.
    if _process.failure or _knows_of_failure():
        _do_the_rest()
    elif any(group.closed is not None for group in _process.groups()):
        # What an error was raised in may be held by a thread, and with it files of the program.
        _flush()
    _announce_exit(GONE if _process.failure else ENDED, _process.failure)
    ends = wait_for_ends(_process.groups(), _watched(), _process.failure, _do_the_rest)
    well, died, missed = ends
    _process.peer_died |= died
    return well, missed or not completed


def _knows_of_failure() -> bool:
    notices = [group.control.notes.exit_notices() for group in _process.groups()]
    return any(said.state == GONE for found in notices for said in found.values())


def _completed() -> bool:
    """Complete what is outstanding on this rank; return whether no error has stayed unseen."""
    seen = True
    for group in _process.groups():
        with suppress(RuntimeWarning, CommunicatorClosedError):
            seen &= complete(group, at_end=True)
        for hook in group.on_exit:
            hook()
        if group.engine.idle:
            # MPI may take the memory away in which the thread looks for ranks.
            group.engine.progress.join(_GRACE)
    _process.completed = True
    for group in _process.groups():
        _process.pending |= group.unfinished or not group.control.done()
        if group.deferred_error is not None:
            # Of a call on a device that no call followed.
            _print_whole("".join(traceback.format_exception(group.deferred_error)))
            seen = False
    return seen


def _end_waits() -> None:
    """End this thread's wait, if it is one that the program leaves behind."""
    if threading.current_thread().daemon:
        if _process.completed:
            # Python stops it a moment later: no error of its own is one of the program.
            threading.Event().wait()
    elif _process.failure and (not _process.leaves or clock.now() > _process.failed_at + _GRACE):
        # Others have been told that this rank makes no further call, and may not make it either.
        raise CommunicatorClosedError("the program of this rank has failed")


def _linger(watched: list[Group]) -> None:
    """Give the launcher time to forward what was printed, and other ranks to learn and print.

    A rank that learns by a message may need this one to push it on.
    """
    seconds = _FORWARDING if all(group.control.shared for group in watched) else _PRINTING
    end = clock.now() + seconds
    while clock.now() < end:
        for group in watched:
            with suppress(Exception):
                group.transport.progress()
        time.sleep(_NAP)
