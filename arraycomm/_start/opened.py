"""A group that has been opened over a transport, and what `init(verbose=True)` prints of it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from arraycomm._calls.operation import Context
from arraycomm._calls.runner import Runner
from arraycomm._collectives.groups import SmallExchange
from arraycomm._cuda.device import DeviceRequest
from arraycomm._cuda.devices import Devices
from arraycomm._exit.exit import add_root
from arraycomm._native import compiled
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.group import Group, Options
from arraycomm._protocol.mismatch import name_ranks, ranks_of
from arraycomm._start.arguments import Arguments
from arraycomm._transports.base import Transport
from arraycomm._transports.threads import SelfTransport

# Bytes of a device's name, as in "cuda:0".
_NAME: Final = 16


class Opened(NamedTuple):
    """A group that has been opened, and where each of its ranks makes arrays."""

    runner: Runner
    devices: list[str]

    def facts(self) -> list[str]:
        """Return a line for each fact about it."""
        group = self.runner.group
        nodes = len(set(group.transport.nodes()))
        options = group.options
        timeout = "none" if options.timeout is None else f"{options.timeout:g} s"
        return [
            f"backend: {group.backend}",
            f"ranks: {group.size} on {nodes} node{'s' if nodes > 1 else ''}",
            f"MPI: {self._mpi_library()}",
            f"devices: {self._grouped()}",
            f"check: {'on' if options.check else 'off'}",
            f"reproducible: {'on' if options.reproducible else 'off'}",
            f"timeout: {timeout}",
            f"native part: {'none' if compiled is None else compiled.levels()[-1]}",
        ]

    def _mpi_library(self) -> str:
        if self.runner.group.transport.mpi_comm is None:
            return "none"
        from mpi4py import MPI

        return MPI.Get_library_version().splitlines()[0].strip()

    def _grouped(self) -> str:
        """Name each device once, with its ranks if there are several devices."""
        ranks = ranks_of(enumerate(self.devices))
        if len(ranks) == 1:
            return self.devices[0]
        return "; ".join(f"{device} on {name_ranks(own)}" for device, own in ranks.items())


class Init(SmallExchange):
    """See `arraycomm.init`."""

    name, code = "init", 1

    def __init__(self, context: Context, options: Options, backend: str, device: str) -> None:
        super().__init__(context, f"{options!r}, {backend}", device.encode().ljust(_NAME))

    def result(self, agreement: Agreement) -> Any:
        return [name.decode().rstrip() for name in super().result(agreement)]


def open_alone(arguments: Arguments) -> Opened:
    """Open a group of this process alone."""
    options, request = arguments.checked(local_rank=0, local_size=1)
    group = Group(SelfTransport(), options)
    devices = Devices(group, request)
    return Opened(Runner(group, devices), [devices.device_name])


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
