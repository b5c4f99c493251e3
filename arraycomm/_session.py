"""The world: how it begins, and how this process leaves it."""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

from arraycomm import _launch
from arraycomm._callsite import describe_raise
from arraycomm._collectives.groups import tell_unmatched, warn_of_messages
from arraycomm._collectives.operation import agreement_only
from arraycomm._communicator import Communicator, Options
from arraycomm._cuda.devices import DeviceRequest
from arraycomm._errors import (
    BackendUnavailableError,
    CommunicatorClosedError,
    NotInitializedError,
    PeerError,
    TransportError,
)
from arraycomm._protocol.engine import wait_for
from arraycomm._protocol.header import all_left_well, leave_in_step, peer_error
from arraycomm._transports.control import FAILED, FINISHED, GONE

_UNSET: Final[Any] = type("_Unset", (), {"__repr__": lambda self: "unset"})()
# Told in place of a number of messages: one of the communicators was closed by an error.
_CLOSED: Final = -1 << 63
_BACKENDS: Final = ("auto", "self", "mpi", "nccl", "threads")
# Seconds that a rank which failed waits for the others to have seen it.
_GRACE: Final = 3.0
_NAP: Final = 1e-4
# Seconds in which a launcher has forwarded what ranks have printed, and in which ranks that raise at
# the same time, but cannot see one another, have printed it. The launcher ends all once one is gone.
_FORWARDING: Final = 0.2
_PRINTING: Final = 2.0


class _State:
    """What this process has begun."""

    world: Communicator | None = None
    arguments: dict[str, Any]
    # The first communicator of each family that lives over MPI; `world` is one of them.
    roots: list[Communicator]
    failure: str = ""
    # Whether a process of this job has died: MPI's own end may wait for it.
    peer_died: bool = False
    watching: bool = False


_state = _State()
_state.arguments = {}
_state.roots = []


def init(
    backend: str = "auto",
    *,
    device: str | None = _UNSET,
    check: bool = _UNSET,
    reproducible: bool = _UNSET,
    timeout: float | None = _UNSET,
) -> Communicator:
    """Begin to communicate; return the communicator of all ranks.

    Collective: every rank of the job calls it. A second call returns the same communicator, and
    compares only the arguments that it passes.

    Parameters
    ----------
    backend : str
        "auto" is "mpi" under an MPI launcher (`mpiexec`, `srun`) and "self" otherwise; "self" is
        one process alone, and needs no MPI. Arrays on devices go over NCCL where all ranks can, which
        they find out when one of them first passes such an array; "nccl" finds out at once, and
        raises where they cannot, and "mpi" never uses it.
    device : str, optional
        Where this rank makes arrays when no argument tells it: "cpu", "cuda" or "cuda:1". The ranks of
        a node take its devices in turn where none is named.
    check : bool, default True
        Compare what the ranks call before any data moves. Default from `ARRAYCOMM_CHECK`.
    reproducible : bool, default True
        Reduce in rank order. With False a transport may reduce in an order of its own.
    timeout : float or None, default 1800.0
        Seconds that a call may wait for other ranks; None for ever. Default from
        `ARRAYCOMM_TIMEOUT`.

    Returns
    -------
    Communicator
        Also to be had from `world()`.

    Raises
    ------
    BackendUnavailableError
        The backend cannot run here: the message says what is missing.
    ValueError
        A second call passes an argument that differs from the first.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"init: backend must be one of {', '.join(_BACKENDS)}; got {backend!r}")
    passed = {
        name: value
        for name, value in (
            ("device", device),
            ("check", check),
            ("reproducible", reproducible),
            ("timeout", timeout),
        )
        if value is not _UNSET
    }
    if _state.world is not None:
        _compare_with_first(_state.world, backend, passed)
        return _state.world
    if backend != "self" and (_launch.detect(os.environ) is not None or _mpi_has_peers()):
        # From here on an error of this rank alone ends the job, in which the others wait for it.
        _mpi_transport()
        _watch_exit()
    arguments = {**_defaults(), **passed}
    requested = device_request(backend, arguments["device"])
    options = Options(arguments["check"], arguments["reproducible"], arguments["timeout"])
    _state.world = _open_world(backend, options, requested)
    _state.arguments = arguments
    return _state.world


def world() -> Communicator:
    """Return the communicator of all ranks, which `init` made.

    Raises
    ------
    NotInitializedError
        `init` was not called yet, or `finalize` was.
    """
    if _state.world is None:
        raise NotInitializedError("world: there is none yet; call arraycomm.init() first")
    return _state.world


def is_initialized() -> bool:
    """Tell whether `init` was called (and `finalize` was not)."""
    return _state.world is not None


def finalize() -> None:
    """End communication; collective. Frees every communicator made from the world.

    Not needed at the end of a program. `init` may be called again afterwards.
    """
    comm = _state.world
    if comm is None:
        return
    _state.world = None
    _state.arguments = {}
    if comm._closed is not None:
        return
    for member in comm._related:
        _complete(member)
    closed = any(member._closed is not None for member in comm._related)
    unmatched = sum(member._unmatched for member in comm._related)
    said = tell_unmatched(comm, "finalize", _CLOSED if closed else unmatched)
    if _CLOSED in said:
        return
    if sum(said) > 0:
        warn_of_messages("finalize", sum(said))
        return
    for member in [*comm._related[1:], comm]:
        member._devices.close()
        member._forget_short()
        member._closed = NotInitializedError("arraycomm was finalized")
        member._link.free()
    comm._related.clear()
    if comm in _state.roots:
        _state.roots.remove(comm)


def _complete(comm: Communicator) -> None:
    """Complete the requests of a communicator that nobody waited for, and say so."""
    for task in comm._engine.drain():
        warnings.warn(
            f"the request made at {task.site} was never waited for; keep requests, and wait for "
            "each of them",
            RuntimeWarning,
            stacklevel=3,
        )


def open_mpi(mpi_comm: Any, look: Callable[[], tuple[Options, DeviceRequest]]) -> Communicator:
    """Return a communicator over a duplicate of an mpi4py communicator.

    `look` returns this rank's arguments; what it raises on one rank, all the others are told.
    """
    transport = _mpi_transport()
    _watch_exit()
    options, requested = _told_to_all(mpi_comm, look)
    comm = Communicator(transport(mpi_comm.Dup()), options)
    comm._devices.device_request = requested
    _state.roots.append(comm)
    comm._call("init", lambda _: agreement_only("init", f"{options!r}, {requested.backend}"))
    if requested.backend == "nccl":
        comm._devices.require()
        comm.backend = "nccl"
    return comm


def _told_to_all(
    mpi_comm: Any, look: Callable[[], tuple[Options, DeviceRequest]]
) -> tuple[Options, DeviceRequest]:
    """Return what `look` does, once it has on every rank."""
    try:
        found = look()
    except Exception as error:
        mpi_comm.allgather({"error": str(error), "traceback": describe_raise(error)})
        raise
    said: list[dict[str, str]] = mpi_comm.allgather({})
    if any(said):
        raise peer_error("init", said)
    return found


def replace_root(old: Communicator, new: Communicator) -> None:
    """Let a communicator of the ranks that live take the place of one with dead ones."""
    _state.roots = [root for root in _state.roots if old not in root._related]
    _state.roots.append(new)
    _state.peer_died = True
    if _state.world is not None and old in _state.world._related:
        _state.world = new


def _defaults() -> dict[str, Any]:
    timeout = os.environ.get("ARRAYCOMM_TIMEOUT", "1800")
    try:
        seconds = None if timeout.lower() == "none" else float(timeout)
    except ValueError:
        raise ValueError(
            f"init: ARRAYCOMM_TIMEOUT must be a number of seconds or none; got {timeout!r}"
        ) from None
    check = os.environ.get("ARRAYCOMM_CHECK", "1").lower()
    return {
        "device": None,
        "check": check not in ("0", "false", "no", "off"),
        "reproducible": True,
        "timeout": seconds,
    }


def _compare_with_first(comm: Communicator, backend: str, passed: dict[str, Any]) -> None:
    if backend not in ("auto", comm.backend):
        raise ValueError(f"init: was called with backend {comm.backend!r} before; got {backend!r}")
    for name, value in passed.items():
        first = _state.arguments[name]
        if value != first:
            raise ValueError(f"init: was called with {name}={first!r} before; got {value!r}")


def device_request(backend: str, device: str | None) -> DeviceRequest:
    """Return what is asked for of devices, or raise where no such thing can be had here."""
    if device in (None, "cpu") and backend != "nccl":
        return DeviceRequest(backend, device)
    from arraycomm._cuda.device import choose_device, missing

    if not isinstance(device, str | None):
        raise TypeError(f'init: device must be "cpu", "cuda" or "cuda:1"; got {device!r}')
    reason = missing()
    if reason is not None:
        wanted = f"device {device!r}" if backend != "nccl" else f"backend {backend!r}"
        raise BackendUnavailableError(f"init: {wanted} cannot be had: {reason}")
    if device != "cpu":
        choose_device(0, device)
    return DeviceRequest(backend, device)


def _open_world(backend: str, options: Options, device_request: DeviceRequest) -> Communicator:
    if backend == "auto":
        backend = _automatic()
    if backend in ("mpi", "nccl"):
        transport = _mpi_transport()
        return _open_mpi_world(transport, options, device_request)
    if backend == "threads":
        raise ValueError(
            "init: a world of threads is made by arraycomm.testing.run, which passes its "
            "communicator to your function"
        )
    from arraycomm._transports.threads import SelfTransport

    comm = Communicator(SelfTransport(), options)
    comm._devices.device_request = device_request
    return comm


def _automatic() -> str:
    if _launch.detect(os.environ) is not None or _mpi_has_peers():
        return "mpi"
    processes = _launch.torchrun_size(os.environ)
    if processes > 1:
        raise BackendUnavailableError(
            f"init: torchrun started {processes} processes, but arraycomm communicates over MPI; "
            f"start the program with: mpiexec -n {processes} python …"
        )
    return "self"


def _mpi_has_peers() -> bool:
    module = sys.modules.get("mpi4py.MPI")
    alive = module and module.Is_initialized() and not module.Is_finalized()
    return bool(alive and module and module.COMM_WORLD.size > 1)


def _mpi_transport() -> Callable[..., Any]:
    try:
        from arraycomm._transports.mpi import MPITransport
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"init: no MPI could be loaded ({error}); install one beside mpi4py, for example with: "
            "pip install mpich"
        ) from error
    from mpi4py import MPI

    if MPI.Is_finalized():
        raise BackendUnavailableError(
            "init: the program has finalized MPI, which cannot begin again; call init before"
        )
    if not MPI.Is_initialized():
        raise BackendUnavailableError(
            "init: MPI is not initialized, since mpi4py.rc.initialize is off; call "
            "MPI.Init_thread() before"
        )
    return MPITransport


def _open_mpi_world(
    transport: Callable[..., Any], options: Options, device_request: DeviceRequest
) -> Communicator:
    from mpi4py import MPI

    launch = _launch.detect(os.environ)
    if launch is not None and launch.size != MPI.COMM_WORLD.size:
        library = MPI.Get_library_version().splitlines()[0]
        raise BackendUnavailableError(
            f"init: {launch.launcher} started {launch.size} processes, but the MPI that was loaded "
            f"({library}) sees {MPI.COMM_WORLD.size}; start the program with the mpiexec of that "
            "MPI, or install the MPI that belongs to this launcher"
        )
    return open_mpi(MPI.COMM_WORLD, lambda: (options, device_request))


# The end of this process


def _watch_exit() -> None:
    """Learn how the program ends. Registered after mpi4py's own hook, so that it runs before it."""
    if _state.watching:
        return
    _state.watching = True
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _state.failure = "".join(traceback.format_exception(kind, error, trace))
        if previous is sys.__excepthook__ and not sys.stderr.isatty():
            _print_whole(_state.failure)
        else:
            previous(kind, error, trace)
        sys.stderr.flush()
        # Who fails because another rank did shows no traceback: the other's is the one to see.
        _leave_all(GONE, "" if isinstance(error, PeerError) else _state.failure)

    sys.excepthook = excepthook
    atexit.register(_at_exit)
    _watch_mpi()
    os.register_at_fork(after_in_child=_forget)


def _print_whole(text: str) -> None:
    """Write one rank's error in one piece, so that the launcher does not mix it with another's."""
    sys.stderr.write(text)
    sys.stderr.flush()


def _watch_mpi() -> None:
    """Learn where the program itself finalizes MPI: that deletes the attributes of MPI_COMM_SELF."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None:
        keyval = module.Comm.Create_keyval(delete_fn=lambda *_: _mpi_ends())
        module.COMM_SELF.Set_attr(keyval, True)


def _mpi_ends() -> None:
    """Complete what is outstanding, as `finalize` does, and close every communicator over MPI."""
    for comm in _communicators():
        _complete(comm)
    _leave_all(FINISHED)
    for comm in _communicators():
        comm._forget_short()
        comm._closed = CommunicatorClosedError("the program has finalized MPI")
    _state.roots.clear()


def _forget() -> None:
    """A forked child has no part in its parent's communication, nor in how that ends."""
    for comm in _communicators():
        comm._forget_short()
        comm._closed = RuntimeError(
            "a forked process cannot use the communicator of its parent; "
            "start processes with the spawn method, or communicate in the parent"
        )
    _state.roots.clear()
    _state.world = None


def _communicators() -> list[Communicator]:
    return [comm for root in _state.roots for comm in root._related]


def _leave_all(state: int, text: str = "") -> None:
    for comm in _communicators():
        comm._control.leave(state, comm._completed, text)


def _at_exit() -> None:
    """Let MPI finalize where everyone ended well; leave the hard way where somebody did not."""
    watched = [comm for root in _state.roots for comm in _representatives(root)]
    status = 1
    try:
        if _all_left(watched):
            if not _state.peer_died:
                return
            status = 0
    except Exception:
        # With MPI in this state, its own end might wait for ever.
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    _linger(watched)
    os._exit(status)


def _all_left(watched: list[Communicator]) -> bool:
    """Tell the other ranks how this one ends, wait for theirs, and tell whether all ended well."""
    clean = not _state.failure
    if clean:
        for comm in _communicators():
            with suppress(RuntimeWarning):
                _complete(comm)
            comm._devices.finish()
        clean = not any(comm._unfinished for comm in _communicators())
        for comm in _communicators():
            if comm._late is not None:
                # Of a call on a device that nothing followed.
                _print_whole("".join(traceback.format_exception(comm._late)))
                clean = False
    if clean:
        _leave_all(FINISHED)
    must_not_alias = [comm for comm in _communicators() if not comm._control.shared]
    everyone = [_everyone_left(comm, clean) for comm in watched if comm not in must_not_alias]
    everyone.append(_left_in_step(must_not_alias, watched, clean))
    return clean and all(everyone)


def _linger(watched: list[Communicator]) -> None:
    """Give the launcher time to forward what was printed, and other ranks to learn and print.

    A rank that learns by a message may need this one to push it on.
    """
    seconds = _FORWARDING if all(comm._control.shared for comm in watched) else _PRINTING
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for comm in watched:
            with suppress(Exception):
                comm._link.progress()
        time.sleep(_NAP)


def _representatives(root: Communicator) -> list[Communicator]:
    """The communicators whose ranks make up a family: its first, or all where that was freed."""
    return [root] if root in root._related else root._related


def _everyone_left(root: Communicator, clean: bool) -> bool:
    """Wait for the other ranks to leave as well, and tell whether all had finished.

    A rank that failed waits for the others only so long: they are to see its error, and to print
    theirs, before the launcher ends them.
    """
    deadline = None if clean else time.monotonic() + _GRACE
    waiting = list(root._control.peers)
    while waiting and (deadline is None or time.monotonic() < deadline):
        left = root._control.exit_notices()
        dead = root._link.failed() if root._link.outlives else []
        waiting = [
            p for p in waiting if p not in dead and (p not in left or left[p].state == FAILED)
        ]
        if deadline is None and any(exit_notice.state == GONE for exit_notice in left.values()):
            clean, deadline = False, time.monotonic() + _GRACE
        with suppress(Exception):
            root._link.progress()
        time.sleep(_NAP)
    return clean and not waiting


def _left_in_step(comms: list[Communicator], watched: list[Communicator], clean: bool) -> bool:
    """The same over control channels that travel: everyone's last step says how it left.

    Every rank takes part in a last step of all of them: MPI may not end with one under way.
    """
    text = "" if clean else (_state.failure.strip().splitlines() or ["it failed"])[-1]
    deadline = time.monotonic() + (float("inf") if clean else _GRACE)
    told = [comm for comm in comms if comm._at_rest() and not comm._control.ended]

    def watch(waited: float) -> None:
        for comm in comms:
            comm._control.attend()
        if time.monotonic() > deadline:
            raise TimeoutError

    try:
        for comm in told:
            next(leave_in_step(comm._control, text))
        for comm in comms:
            wait_for(comm._control.done, 0, watch)
    except (TimeoutError, TransportError):
        return False
    return clean and all(all_left_well(comm._control) for comm in told if comm in watched)
