"""The choice of a device link: every rank says what it can use, and all make the same choice."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from arraycomm._arrays.device_memory import DeviceMemory
from arraycomm._cuda import device, kernels, libnccl
from arraycomm._cuda.device import DeviceRequest
from arraycomm._cuda.gpu_aware import gpu_aware
from arraycomm._cuda.gpu_aware_link import GpuAwareMpiLink
from arraycomm._cuda.link import LoneLink
from arraycomm._cuda.nccl_link import NcclLink, let_share, lets_share, refuse_sharing
from arraycomm._cuda.staged_link import HostStagedLink
from arraycomm._protocol.details import Detail, Nothing, exchange_details
from arraycomm._protocol.group import Group
from arraycomm._transports.base import Steps


@dataclass(frozen=True, slots=True)
class DeviceCapabilities(Detail):
    """What one rank can use: why not a device or NCCL, its device's UUID, its NCCL's version.

    All that the choice depends on, so that every rank makes the same one.
    """

    device: str = ""
    nccl: str = ""
    uuid: str = ""
    version: Sequence[int] = ()
    gpu_aware: bool = False
    lets_share: bool = False


@dataclass(frozen=True, slots=True)
class NcclId(Detail):
    """NCCL's unique id, which rank 0 makes, in hexadecimal digits."""

    digits: str


def capabilities(group: Group, request: DeviceRequest) -> DeviceCapabilities:
    """Return what this rank can use; raises nothing, since the other ranks wait for the reply."""
    if group.backend == "threads":
        reason = "ranks within one process share arrays on devices by way of the host"
        return DeviceCapabilities(reason, reason)
    try:
        return _capabilities(group, request)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return DeviceCapabilities(reason, reason)


def _capabilities(group: Group, request: DeviceRequest) -> DeviceCapabilities:
    reason = device.missing() or kernels.missing() or ""
    local = DeviceCapabilities(reason)
    if not reason:
        addressed = group.backend in ("mpi", "nccl") and gpu_aware()
        local = replace(local, uuid=device.uuid(_number(group, request)), gpu_aware=addressed)
    if request.backend == "mpi":
        return replace(local, nccl='backend="mpi" was asked for')
    lacking = reason or libnccl.missing() or ""
    version = () if lacking else tuple(libnccl.load().version())
    return replace(local, nccl=lacking, version=version, lets_share=lets_share())


def _number(group: Group, request: DeviceRequest) -> int:
    return device.choose_device(group.transport.local_rank, request.device)


def choose(group: Group, request: DeviceRequest, replies: Sequence[Detail]) -> Steps:
    """Open the best link that every rank can use; return it, and why it is not NCCL's.

    The link is None if a rank has no device.
    """
    found = [reply for reply in replies if isinstance(reply, DeviceCapabilities)]
    reason = why_not_nccl(found)
    if group.size == 1 and request.backend != "nccl":
        reason = found[0].device or "one rank alone sends nothing"
    if not reason:
        let_share([rank.uuid for rank in found], tuple(found[0].version))
        return (yield from _open_nccl(group, request)), ""
    if any(rank.device for rank in found):
        return None, reason
    if group.size == 1:
        return LoneLink(memory_of(group, request)), reason
    shared = device.shared_devices([rank.uuid for rank in found])
    if shared and group.rank == 0:
        warnings.warn(
            f"{shared}: what they compute there takes turns", RuntimeWarning, stacklevel=2
        )
    link = GpuAwareMpiLink if all(rank.gpu_aware for rank in found) else HostStagedLink
    return link(group.transport, memory_of(group, request)), reason


def why_not_nccl(found: Sequence[DeviceCapabilities]) -> str:
    """Say why these ranks cannot use NCCL, naming the first that cannot; empty if they can."""
    for rank, local in enumerate(found):
        if local.nccl:
            return f"rank {rank}: {local.nccl}"
    versions = {tuple(local.version) for local in found}
    if len(versions) > 1:
        listed = ", ".join(".".join(map(str, version)) for version in sorted(versions))
        return f"ranks have different versions of NCCL: {listed}; install one on all"
    uuids, shares = [local.uuid for local in found], [local.lets_share for local in found]
    return refuse_sharing(uuids, shares) or ""


def memory_of(group: Group, request: DeviceRequest) -> DeviceMemory:
    """Return the memory of this rank's device."""
    return device.CudaMemory(_number(group, request))


def _open_nccl(group: Group, request: DeviceRequest) -> Steps:
    library = libnccl.load()
    local: Detail = NcclId(library.unique_id().hex()) if group.rank == 0 else Nothing()
    replies = yield from exchange_details(group.control, local, Nothing, NcclId)
    assert isinstance(replies[0], NcclId)
    return (
        yield from NcclLink.open(
            library,
            memory_of(group, request),
            group.rank,
            group.size,
            bytes.fromhex(replies[0].digits),
            reproducible=group.options.reproducible,
        )
    )
