"""How ranks over MPI start: they agree on the arguments, and on the link between devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from arraycomm._callsite import describe_raise
from arraycomm._collectives.operation import Context, SmallExchange
from arraycomm._collectives.runner import Runner
from arraycomm._cuda.devices import DeviceRequest, Devices
from arraycomm._errors import BackendUnavailableError, text_of
from arraycomm._protocol.details import Detail, Failure, Nothing
from arraycomm._protocol.exit import add_root, watch_exit
from arraycomm._protocol.group import Group, Options
from arraycomm._protocol.mismatch import peer_error
from arraycomm._transports.base import Transport


class Init(SmallExchange):
    """See `arraycomm.init`."""

    name, code = "init", 1

    def __init__(self, context: Context, options: Options, backend: str) -> None:
        super().__init__(context, f"{options!r}, {backend}")


def mpi_transport() -> Callable[[Any], Transport]:
    """Return the class of transports over MPI, or raise if MPI cannot be used."""
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


def open_over_mpi(mpi_comm: Any, arguments: Callable[[], tuple[Options, DeviceRequest]]) -> Runner:
    """Return the runner of a group over a duplicate of an mpi4py communicator.

    `arguments` returns this rank's arguments. If it raises on a rank, all others raise `PeerError`.
    """
    transport = mpi_transport()
    watch_exit()
    options, request = _checked_by_all(mpi_comm, arguments)
    group = Group(transport(mpi_comm.Dup()), options)
    devices = Devices(group, request)
    runner = Runner(group, devices)
    add_root(group)
    runner.call(Init, options, request.backend)
    if request.backend == "nccl":
        devices.require()
        group.backend = "nccl"
    return runner


def _checked_by_all(
    mpi_comm: Any, arguments: Callable[[], tuple[Options, DeviceRequest]]
) -> tuple[Options, DeviceRequest]:
    """Return this rank's arguments, once every rank has found its own to be right."""
    try:
        found = arguments()
    except Exception as error:
        mpi_comm.allgather(Failure(text_of(error), describe_raise(error)))
        raise
    replies: list[Detail] = mpi_comm.allgather(Nothing())
    if any(isinstance(reply, Failure) for reply in replies):
        raise peer_error("init", replies)
    return found
