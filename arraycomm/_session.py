"""The session: the world of this process, from `init` to `finalize`."""

from __future__ import annotations

import os
from typing import Any, Final

from arraycomm import _launch
from arraycomm._collectives.groups import ENDED_BY_ERROR, Finalize, warn_of_messages
from arraycomm._collectives.runner import Runner
from arraycomm._communicator import Communicator, latest, runner_of
from arraycomm._cuda.devices import DeviceRequest, Devices
from arraycomm._errors import BackendUnavailableError, NotInitializedError
from arraycomm._mpi_start import mpi_transport, open_over_mpi
from arraycomm._protocol.exit import (
    complete,
    forget_on_fork,
    mpi_has_peers,
    refuse_forked_child,
    remove_root,
    watch_exit,
)
from arraycomm._protocol.group import Group, Options
from arraycomm._transports.threads import SelfTransport

_UNSET: Final[Any] = type("_Unset", (), {"__repr__": lambda self: "unset"})()
_BACKENDS: Final = ("auto", "self", "mpi", "nccl", "threads")


class _Session:
    """The world that `init` has made in this process, and the arguments it was made with."""

    world: Communicator | None = None
    arguments: dict[str, Any]

    def end(self) -> None:
        """Forget the world; called in forked children as well."""
        self.world, self.arguments = None, {}


_session = _Session()
_session.end()
forget_on_fork(_session.end)


def init(
    backend: str = "auto",
    *,
    device: str | None = _UNSET,
    check: bool = _UNSET,
    reproducible: bool = _UNSET,
    timeout: float | None = _UNSET,
) -> Communicator:
    """Start communication; return the communicator of all ranks.

    Collective: every rank of the job calls it. A second call returns the same communicator, and
    compares only the arguments that are passed.

    Parameters
    ----------
    backend : str
        "auto" is "mpi" under an MPI launcher (`mpiexec`, `srun`) and "self" otherwise; "self" is
        one process alone, and needs no MPI. Arrays on devices use NCCL if all ranks can; the ranks
        find that out when one of them first passes such an array. With "nccl" they find out at
        once, and `init` raises if they cannot. With "mpi" they never use NCCL.
    device : str, optional
        Where this rank makes arrays if no argument says where: "cpu", "cuda" or "cuda:1". If no
        number is given, the ranks of a node take its devices in turn.
    check : bool, default True
        Compare what the ranks call before any data moves. Default from `ARRAYCOMM_CHECK`.
    reproducible : bool, default True
        Reduce in rank order. With False a transport may reduce in an order of its own.
    timeout : float or None, default 1800.0
        Seconds that a call may wait for other ranks, without those in which the job was stopped;
        None means for ever. Default from `ARRAYCOMM_TIMEOUT`.

    Returns
    -------
    Communicator
        `world()` returns it too.

    Raises
    ------
    BackendUnavailableError
        The backend cannot run here: the message says what is missing. Or a rank has started this
        process, which inherits the launcher's variables, but is no rank.
    CommunicatorClosedError
        This process was forked from a rank. With "self" it gets a world of its own.
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
    if _session.world is not None:
        _compare_with_first(_session.world, backend, passed)
        return world()
    if backend != "self":
        _refuse_children_of_ranks()
    if backend != "self" and (_launch.detect(os.environ) is not None or mpi_has_peers()):
        # From now on an uncaught error of this rank ends the job: other ranks may wait for it.
        mpi_transport()
        watch_exit()
    arguments = {**_defaults(), **passed}
    request = DeviceRequest.checked(backend, arguments["device"])
    options = Options(arguments["check"], arguments["reproducible"], arguments["timeout"])
    _session.world = _open_world(backend, options, request)
    _session.arguments = arguments
    return _session.world


def world() -> Communicator:
    """Return the communicator of all ranks, which `init` made.

    Raises
    ------
    NotInitializedError
        `init` was not called yet, or `finalize` was called.
    CommunicatorClosedError
        This process was forked from a rank.
    """
    if _session.world is None:
        refuse_forked_child("world")
        raise NotInitializedError("world: there is none yet; call arraycomm.init() first")
    return latest(_session.world)


def is_initialized() -> bool:
    """Tell whether `init` was called (and `finalize` was not)."""
    return _session.world is not None


def finalize() -> None:
    """End communication; collective. Frees every communicator made from the world.

    A program need not call it at its end. `init` may be called again afterwards.
    """
    if _session.world is None:
        return
    runner = runner_of(world())
    _session.end()
    root = runner.group
    if root.closed is not None:
        return
    for group in root.related:
        complete(group)
    closed = any(group.closed is not None for group in root.related)
    unmatched = sum(group.unmatched for group in root.related)
    replies = runner.call(Finalize, ENDED_BY_ERROR if closed else unmatched)
    if ENDED_BY_ERROR in replies:
        return
    if sum(replies) > 0:
        warn_of_messages("finalize", sum(replies))
        return
    for group in [*root.related[1:], root]:
        for hook in group.on_free:
            hook()
        group.end(NotInitializedError("arraycomm was finalized"))
        group.transport.free()
    root.related.clear()
    remove_root(root)


def _refuse_children_of_ranks() -> None:
    """Raise in a process that a rank has started: the launcher knows nothing of it."""
    refuse_forked_child("init")
    owner = _launch.claimed_by(os.environ, os.getpid())
    if owner:
        raise BackendUnavailableError(
            f"init: process {owner} is the rank that the launcher has started, and has started this "
            'process, which is none; call init only under if __name__ == "__main__", and communicate '
            "there, or call init(backend='self') here for a world of this process alone"
        )


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
        first = _session.arguments[name]
        if value != first:
            raise ValueError(f"init: was called with {name}={first!r} before; got {value!r}")


def _open_world(backend: str, options: Options, request: DeviceRequest) -> Communicator:
    if backend == "auto":
        backend = _automatic()
    if backend in ("mpi", "nccl"):
        return _open_mpi_world(options, request)
    if backend == "threads":
        raise ValueError(
            "init: a world of threads is made by arraycomm.testing.run, which passes its "
            "communicator to your function"
        )
    group = Group(SelfTransport(), options)
    return Communicator(Runner(group, Devices(group, request)))


def _automatic() -> str:
    if _launch.detect(os.environ) is not None or mpi_has_peers():
        return "mpi"
    processes = _launch.torchrun_size(os.environ)
    if processes > 1:
        raise BackendUnavailableError(
            f"init: torchrun started {processes} processes, but arraycomm communicates over MPI; "
            f"start the program with: mpiexec -n {processes} python …"
        )
    return "self"


def _open_mpi_world(options: Options, request: DeviceRequest) -> Communicator:
    mpi_transport()
    from mpi4py import MPI

    launch = _launch.detect(os.environ)
    if launch is not None and launch.size != MPI.COMM_WORLD.size:
        library = MPI.Get_library_version().splitlines()[0]
        raise BackendUnavailableError(
            f"init: {launch.launcher} started {launch.size} processes, but the MPI that was loaded "
            f"({library}) sees {MPI.COMM_WORLD.size}; start the program with the mpiexec of that "
            "MPI, or install the MPI that belongs to this launcher"
        )
    return Communicator(open_over_mpi(MPI.COMM_WORLD, lambda: (options, request)))
