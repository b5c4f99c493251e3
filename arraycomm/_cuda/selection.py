"""What the arrays on devices of a communicator go over: every rank says what it can, all choose alike."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from arraycomm._cuda import device, kernels
from arraycomm._cuda.gpu_aware_link import GpuAwareMpiLink
from arraycomm._cuda.staged_link import HostStagedLink
from arraycomm._protocol.header import Steps, exchange_details

if TYPE_CHECKING:
    from arraycomm._arrays.device_memory import DeviceMemory
    from arraycomm._communicator import Communicator
    from arraycomm._cuda.devices import DeviceRequest


class DeviceCapabilities(TypedDict):
    """What one rank can: why it has no device or no NCCL, which device it has, its NCCL's version."""

    device: str
    nccl: str
    uuid: str
    version: list[int]
    aware: bool


def offer(comm: Communicator, device_request: DeviceRequest) -> DeviceCapabilities:
    """Say what this rank can; raises nothing, since the others wait for it."""
    mine = DeviceCapabilities(device="", nccl="", uuid="", version=[], aware=False)
    if comm.backend not in ("mpi", "nccl"):
        mine["device"] = mine["nccl"] = (
            "ranks within one process share arrays on devices by way of the host"
        )
        return mine
    try:
        mine["device"] = device.missing() or kernels.missing() or ""
        if not mine["device"]:
            mine["uuid"] = device.uuid(_number(comm, device_request))
        _offer_nccl(mine, device_request)
        mine["aware"] = not mine["device"] and _gpu_aware()
    except Exception as error:
        mine["device"] = mine["nccl"] = f"{type(error).__name__}: {error}"
    return mine


def _offer_nccl(mine: DeviceCapabilities, device_request: DeviceRequest) -> None:
    from arraycomm._cuda import libnccl

    if device_request.backend == "mpi":
        mine["nccl"] = 'backend="mpi" was asked for'
        return
    mine["nccl"] = mine["device"] or libnccl.missing() or ""
    if not mine["nccl"]:
        mine["version"] = list(libnccl.load().version())


def _gpu_aware() -> bool:
    from arraycomm._cuda.gpu_aware import gpu_aware

    return gpu_aware()


def _number(comm: Communicator, device_request: DeviceRequest) -> int:
    return device.choose_device(comm.local_rank, device_request.device)


def choose(
    comm: Communicator, device_request: DeviceRequest, offers: Sequence[DeviceCapabilities]
) -> Steps:
    """Open what every rank can; return the link, and why it is not NCCL's.

    There is no link, but None, where a rank has no device.
    """
    reason = why_not_nccl(offers)
    if not reason:
        return (yield from _open_nccl(comm, device_request)), ""
    if any(mine["device"] for mine in offers):
        return None, reason
    shared = device.shared_devices([mine["uuid"] for mine in offers])
    if shared and comm.rank == 0:
        warnings.warn(
            f"{shared}: what they compute there takes turns", RuntimeWarning, stacklevel=2
        )
    link = GpuAwareMpiLink if all(mine["aware"] for mine in offers) else HostStagedLink
    return link(comm._link, memory_of(comm, device_request)), reason


def why_not_nccl(offers: Sequence[DeviceCapabilities]) -> str:
    """Say why these ranks cannot use NCCL, naming one that stands in the way; empty where they can."""
    from arraycomm._cuda.nccl_link import refuse_sharing

    for rank, mine in enumerate(offers):
        if mine["nccl"]:
            return f"rank {rank}: {mine['nccl']}"
    versions = {tuple(mine["version"]) for mine in offers}
    if len(versions) > 1:
        said = ", ".join(".".join(map(str, version)) for version in sorted(versions))
        return f"ranks have different versions of NCCL: {said}; install one on all"
    return refuse_sharing([mine["uuid"] for mine in offers], *versions) or ""


def memory_of(comm: Communicator, device_request: DeviceRequest) -> DeviceMemory:
    """Return the memory of this rank's device."""
    return device.CudaMemory(_number(comm, device_request))


def _open_nccl(comm: Communicator, device_request: DeviceRequest) -> Steps:
    from arraycomm._cuda import libnccl
    from arraycomm._cuda.nccl_link import NcclLink

    library = libnccl.load()
    mine = {"id": library.unique_id().hex()} if comm.rank == 0 else {}
    said = yield from exchange_details(comm._control, mine)
    link = yield from NcclLink.open(
        library,
        memory_of(comm, device_request),
        comm.rank,
        comm.size,
        bytes.fromhex(said[0]["id"]),
        reproducible=comm._options.reproducible,
    )
    return link
