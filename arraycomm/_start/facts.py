"""What `init(verbose=True)` prints: how the ranks of this job communicate, a line for each fact."""

from __future__ import annotations

from collections.abc import Sequence

from arraycomm._calls.runner import Runner
from arraycomm._native import compiled


def facts(runner: Runner, devices: Sequence[str]) -> list[str]:
    """Return a line for each fact about a new world; `devices` are the ranks', in their order."""
    group = runner.group
    nodes = len(set(group.transport.nodes()))
    options = group.options
    timeout = "none" if options.timeout is None else f"{options.timeout:g} s"
    return [
        f"backend: {group.backend}",
        f"ranks: {group.size} on {nodes} node{'s' if nodes > 1 else ''}",
        f"MPI: {_mpi_library(runner)}",
        f"devices: {_grouped(devices)}",
        f"check: {'on' if options.check else 'off'}",
        f"reproducible: {'on' if options.reproducible else 'off'}",
        f"timeout: {timeout}",
        f"native part: {'none' if compiled is None else compiled.levels()[-1]}",
    ]


def _mpi_library(runner: Runner) -> str:
    if runner.group.transport.mpi_comm is None:
        return "none"
    from mpi4py import MPI

    return MPI.Get_library_version().splitlines()[0].strip()


def _grouped(devices: Sequence[str]) -> str:
    """Name each device once, with its ranks if there are several devices."""
    ranks: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(device, []).append(rank)
    if len(ranks) == 1:
        return devices[0]
    return "; ".join(
        f"{device} on rank{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}"
        for device, own in ranks.items()
    )
