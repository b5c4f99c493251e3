"""How ranks over MPI start: they agree on the arguments, and on the link between devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from arraycomm._calls.operation import Context
from arraycomm._calls.runner import Runner
from arraycomm._callsite import describe_raise
from arraycomm._collectives.groups import SmallExchange
from arraycomm._cuda.device import DeviceRequest
from arraycomm._cuda.devices import Devices
from arraycomm._errors import BackendUnavailableError, MismatchError, text_of
from arraycomm._exit.exit import add_root, refuse_forked_child, watch_exit
from arraycomm._launch import ADDRESS, SRUN, Launch, detect
from arraycomm._launch.library import MPICH, family_of
from arraycomm._launch.probe import hidden, in_short
from arraycomm._native.build import build, seen
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.details import Detail, Failure, Nothing
from arraycomm._protocol.group import Group, Options
from arraycomm._protocol.mismatch import by_ranks, peer_error
from arraycomm._start.containers import about_memory, prepare_mpi, refuse_apart
from arraycomm._start.meeting import begin_mpi, finish, meet, ranks_here, seconds_of
from arraycomm._transports.base import Transport
from arraycomm._transports.mpi.files import check_room

_BACKENDS: Final = ("auto", "mpi", "nccl")
# Bytes of a device's name, as in "cuda:0".
_NAME: Final = 16


@dataclass(frozen=True)
class Arguments:
    """What this rank passed to `init` or `from_mpi`, before it is checked."""

    backend: Any
    device: Any
    check: Any
    reproducible: Any
    timeout: Any
    # Another argument or a variable of the environment is wrong: `checked` raises it, and so tells
    # the others.
    wrong: Exception | None = None
    # Whether they are those of `init`.
    over_world: bool = True

    def checked(self, local_rank: int, local_size: int) -> tuple[Options, DeviceRequest]:
        """Return the options and the request of this rank, or raise what is wrong with them."""
        if self.wrong is not None:
            raise self.wrong
        options = Options(self.check, self.reproducible, self.timeout)
        return options, DeviceRequest.checked(
            self.backend, self._own_device(local_rank, local_size)
        )

    def _own_device(self, local_rank: int, local_size: int) -> Any:
        devices = self.device
        if not isinstance(devices, list | tuple):
            return devices
        if len(devices) < local_size:
            raise ValueError(
                "init: a list of devices must have one for each rank of a node, by local rank; got "
                f"{len(devices)} for {local_size} ranks: {devices!r}"
            )
        return devices[local_rank]


class Opened(NamedTuple):
    """A group that has been opened, and where each of its ranks makes arrays."""

    runner: Runner
    devices: list[str]


class Init(SmallExchange):
    """See `arraycomm.init`."""

    name, code = "init", 1

    def __init__(self, context: Context, options: Options, backend: str, device: str) -> None:
        super().__init__(context, f"{options!r}, {backend}", device.encode().ljust(_NAME))

    def result(self, agreement: Agreement) -> Any:
        return [name.decode().rstrip() for name in super().result(agreement)]


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
    # Texts, which any version can read.
    refuse_different(sight, lambda _, text: own.allgather(text))
    transport = make(own)
    if family_of(MPI.get_vendor()[0]) == MPICH:
        refuse_apart(own.allgather(about_memory(os.environ)), transport.nodes())
    try:
        options, request = _checked_by_all(own, arguments, transport)
    except Exception:
        transport.free()
        raise
    return open_root(transport, options, request)


def open_root(transport: Transport, options: Options, request: DeviceRequest) -> Opened:
    """Open the group of a transport's ranks; collective."""
    group = Group(transport, options)
    devices = Devices(group, request)
    runner = Runner(group, devices)
    add_root(group)
    names = runner.call(Init, options, request.backend, devices.device_name)
    if request.backend == "nccl":
        devices.require()
        group.backend = "nccl"
    return Opened(runner, names)


def _check_kind(mpi_comm: Any) -> None:
    from mpi4py import MPI

    if not isinstance(mpi_comm, MPI.Intracomm) or mpi_comm == MPI.COMM_NULL:
        kind = "COMM_NULL" if mpi_comm == MPI.COMM_NULL else type(mpi_comm).__name__
        raise TypeError(
            "from_mpi: mpi4py_comm must be an intracommunicator of mpi4py to which this rank "
            f"belongs; got {kind}"
            + ("; pass what its Merge returns" if isinstance(mpi_comm, MPI.Intercomm) else "")
        )


def refuse_different(sight: str, tell: Callable[[str, str], Sequence[str]]) -> None:
    """Raise on every rank if their builds differ: they would misread one another's headers.

    `sight` is what this rank has seen of its own. `tell(name, text)` returns the texts of this name
    of all ranks.
    """
    if len(set(tell("version", sight))) == 1 and len(set(sight.split()[1:])) < 2:
        return
    # What another version says has one line.
    said = tell("build", "\n".join(build()))
    builds = [(*text.split("\n"), "", "", "")[:4] for text in said]
    natives = {digest for _, _, *digests in builds for digest in digests if digest}
    if len({code for _, code, *_ in builds}) > 1 or len(natives) > 1:
        raise MismatchError(
            "init: ranks run different versions of arraycomm, or a C part of other sources: "
            f"{by_ranks([_said(*one) for one in builds])}; install the same version for all ranks, "
            "build the C part again (pip install -e .) or set ARRAYCOMM_NATIVE=0, and start the "
            "program again"
        )


def _said(place: str, code: str, built_from: str, sources: str) -> str:
    here = f", whose sources there are {sources}" if sources not in ("", built_from) else ""
    return f"{place} (code {code}, C part {built_from or 'none'}{here})"


def _checked_by_all(
    mpi_comm: Any, arguments: Arguments, transport: Transport
) -> tuple[Options, DeviceRequest]:
    """Return this rank's arguments, once every rank has found its own to be right."""
    try:
        if arguments.backend not in _BACKENDS:
            raise ValueError(
                f"init: over MPI backend must be one of {', '.join(_BACKENDS)}; "
                f"got {arguments.backend!r}"
            )
        options, request = arguments.checked(transport.local_rank, transport.local_size)
    except Exception as error:
        mpi_comm.allgather(Failure(text_of(error), describe_raise(error)))
        raise
    replies: list[Detail] = mpi_comm.allgather(Nothing())
    if any(isinstance(reply, Failure) for reply in replies):
        raise peer_error("init", replies)
    return options, request
