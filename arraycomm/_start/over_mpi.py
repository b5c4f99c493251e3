"""How ranks over MPI start: they agree on the arguments, and on the link between devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final

from arraycomm._cuda.device import DeviceRequest
from arraycomm._errors import BackendUnavailableError
from arraycomm._exit.exit import refuse_forked_child, watch_exit
from arraycomm._launch import ADDRESS, SRUN, Launch, detect
from arraycomm._launch.library import MPICH, family_of
from arraycomm._launch.probe import hidden, in_short
from arraycomm._native.build import seen
from arraycomm._protocol.group import Options
from arraycomm._start.arguments import Arguments, agree, refuse_different, seconds_of
from arraycomm._start.before_mpi import about_memory, check_room, prepare_mpi, refuse_apart
from arraycomm._start.meeting import begin_mpi, finish, meet, ranks_here
from arraycomm._start.opened import Opened, open_root
from arraycomm._transports.base import Transport

_BACKENDS: Final = ("auto", "mpi", "nccl")


def mpi_transport(timeout: float) -> Callable[[Any], Transport]:
    """Return the class of transports over MPI; raise if MPI cannot be used or begins too late."""
    try:
        module = sys.modules.get("mpi4py.MPI")
        if module is None:
            check_room(os.environ, ranks_here)
        if module is None or not module.Is_initialized():
            prepare_mpi(os.environ)
            begin_mpi(timeout)
        from arraycomm._transports.mpi.transport import MPITransport
    except BackendUnavailableError:
        raise
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"init: no MPI could be loaded ({in_short(str(error))}{hidden()}); install one beside "
            "mpi4py, for example with: pip install "
            f"mpich{_under_srun(detect(os.environ), MPICH)}"
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


def refuse_other_launcher(launch: Launch | None) -> None:
    """Raise if the launcher has started another number of ranks than the loaded MPI sees."""
    from mpi4py import MPI

    if launch is not None and not launch.size:
        launch = launch._replace(size=max(len(ranks_here()), MPI.COMM_WORLD.size))
    if launch is not None and launch.size != MPI.COMM_WORLD.size:
        library, family = in_short(MPI.Get_library_version()), family_of(MPI.get_vendor()[0])
        raise BackendUnavailableError(
            f"init: {launch.launcher} started {launch.size} processes, but the MPI that was loaded "
            f"({library}) sees {MPI.COMM_WORLD.size}; start the program with: arraycomm run -n "
            f"{launch.size} …, which finds the mpiexec of that MPI, or install the MPI that "
            f"belongs to this launcher{_under_srun(launch, family)}"
        )


def _under_srun(launch: Launch | None, family: str) -> str:
    """Return what else connects the tasks of srun, as the end of a sentence."""
    if launch is None or launch.launcher != SRUN:
        return ""
    kind = "pmi2" if family == MPICH else "pmix"
    connects = f"srun --mpi={kind} connects its tasks by {family}"
    return f". {connects}, and on one node {ADDRESS} does without MPI"


def open_over_mpi(mpi_comm: Any, arguments: Arguments) -> Opened:
    """Open a group over a duplicate of an mpi4py communicator.

    If the arguments of a rank are wrong, it raises, and all others raise `PeerError`.
    """
    refuse_forked_child("init")
    timeout = seconds_of(arguments.timeout)
    make, sight = mpi_transport(timeout), seen()
    from mpi4py import MPI

    from arraycomm._transports.mpi.under_way import Movement

    _check_kind(mpi_comm)
    watch_exit()
    what = "init" if arguments.over_world else "from_mpi"
    meet(mpi_comm, what, timeout)
    duplicate = Movement(mpi_comm.Idup)
    finish(duplicate.done, what, timeout)
    own, _ = duplicate.begun

    def tell(_: str, text: str) -> list[str]:
        # Texts, which any version can read.
        found: list[str] = own.allgather(text)
        return found

    refuse_different(sight, tell)
    transport = make(own)
    if family_of(MPI.get_vendor()[0]) == MPICH:
        refuse_apart(own.allgather(about_memory(os.environ)), transport.nodes())
    try:
        options, request = agree(lambda: _checked(arguments, transport), tell)
    except Exception:
        transport.free()
        raise
    return open_root(transport, options, request)


def _checked(arguments: Arguments, transport: Transport) -> tuple[Options, DeviceRequest]:
    if arguments.backend not in _BACKENDS:
        raise ValueError(
            f"init: over MPI backend must be one of {', '.join(_BACKENDS)}; "
            f"got {arguments.backend!r}"
        )
    return arguments.checked(transport.local_rank, transport.local_size)


def _check_kind(mpi_comm: Any) -> None:
    from mpi4py import MPI

    if not isinstance(mpi_comm, MPI.Intracomm) or mpi_comm == MPI.COMM_NULL:
        kind = "COMM_NULL" if mpi_comm == MPI.COMM_NULL else type(mpi_comm).__name__
        raise TypeError(
            "from_mpi: mpi4py_comm must be an intracommunicator of mpi4py to which this rank "
            f"belongs; got {kind}"
            + ("; pass what its Merge returns" if isinstance(mpi_comm, MPI.Intercomm) else "")
        )
