"""The choice of a device link: every rank says what it can use, and all make the same choice."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from arraycomm._arrays.device_memory import DeviceMemory
from arraycomm._cuda import device, kernels
from arraycomm._cuda.device import DeviceRequest
from arraycomm._cuda.links import libnccl
from arraycomm._cuda.links.gpu_aware import GpuAwareMpiLink, gpu_aware
from arraycomm._cuda.links.link import LoneLink
from arraycomm._cuda.links.link import Nothing as Nowhere
from arraycomm._cuda.links.nccl_link import NcclLink, let_share, lets_share, refuse_sharing
from arraycomm._cuda.links.staged_link import HostStagedLink
from arraycomm._errors import BackendUnavailableError, TransportError, raise_interrupt
from arraycomm._protocol.details import Detail, Nothing, exchange_details
from arraycomm._protocol.group import Group
from arraycomm._protocol.waits import clock
from arraycomm._transports.base import Handle, Steps

# Seconds that NCCL may take to join the ranks, unless half of a call's timeout is less.
_LIMIT: Final = 60.0


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
    """NCCL's unique id, which rank 0 makes, in hexadecimal digits; or why it could not."""

    digits: str
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Opened(Detail):
    """Why NCCL has not joined a rank to the others; empty if it has."""

    failure: str


def capabilities(group: Group, request: DeviceRequest) -> DeviceCapabilities:
    """Return what this rank can use; raises nothing, since the other ranks wait for the reply."""
    if group.backend == "threads":
        reason = "ranks within one process share arrays on devices by way of the host"
        return DeviceCapabilities(reason, reason)
    try:
        return _capabilities(group, request)
    except Exception as error:
        raise_interrupt(error)
        reason = f"{type(error).__name__}: {error}"
        return DeviceCapabilities(reason, reason)


def _capabilities(group: Group, request: DeviceRequest) -> DeviceCapabilities:
    reason = device.missing() or kernels.missing() or ""
    local = DeviceCapabilities(reason)
    if not reason:
        addressed = group.backend in ("mpi", "nccl") and gpu_aware()
        local = replace(local, uuid=device.uuid(request.number()), gpu_aware=addressed)
    if request.backend == "mpi":
        return replace(local, nccl='backend="mpi" was asked for')
    lacking = reason or libnccl.missing() or ""
    version = () if lacking else tuple(libnccl.load().version())
    return replace(local, nccl=lacking, version=version, lets_share=lets_share())


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
        link, reason = yield from _open_nccl(group, request)
        if link is not None or request.backend == "nccl":
            return link, reason
    if any(rank.device for rank in found):
        return None, reason
    if group.size == 1:
        return LoneLink(memory_of(request)), reason
    shared = device.shared_devices([rank.uuid for rank in found])
    if shared and group.rank == 0:
        warnings.warn(
            f"{shared}: what they compute there takes turns", RuntimeWarning, stacklevel=2
        )
    link = GpuAwareMpiLink if all(rank.gpu_aware for rank in found) else HostStagedLink
    return link(group.transport, memory_of(request)), reason


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


def memory_of(request: DeviceRequest) -> DeviceMemory:
    """Return the memory of this rank's device."""
    return device.CudaMemory(request.number())


def _open_nccl(group: Group, request: DeviceRequest) -> Steps:
    """Join the ranks by NCCL; return the link, or None and why it has not joined them all.

    It has a limit of its own, after which the ranks can still choose another link.
    """
    library = libnccl.load()
    local: Detail = _make_id(library) if group.rank == 0 else Nothing()
    first, *_ = yield from exchange_details(group.control, local, Nothing, NcclId)
    assert isinstance(first, NcclId)
    link, failure = None, first.failure
    if not failure:
        limit = min(_LIMIT, (group.options.timeout or 2 * _LIMIT) / 2)
        trial = _Trial(_opening(library, group, request, first.digits), limit)
        try:
            yield trial
        finally:
            # What has not come to its end is aborted.
            trial.steps.close()
        link, failure = trial.link, trial.failure
    replies = yield from exchange_details(group.control, Opened(failure), Opened)
    failures = [(rank, reply.failure) for rank, reply in enumerate(replies) if reply.failure]
    if not failures:
        return link, ""
    if link is not None:
        link.abort()
    rank, failure = failures[0]
    return None, (
        f"rank {rank}: NCCL could not join the ranks: {failure}; NCCL_DEBUG=INFO in the "
        "environment shows what it tried, and NCCL_SOCKET_IFNAME names the network that it uses"
    )


def _make_id(library: libnccl.Library) -> NcclId:
    try:
        return NcclId(library.unique_id().hex())
    except TransportError as error:
        return NcclId("", str(error))


def _opening(
    library: libnccl.Library, group: Group, request: DeviceRequest, digits: str
) -> Generator[Handle, None, NcclLink]:
    """Open the link, load the kernels, and check the order in which NCCL gathers."""
    memory = memory_of(request)
    memory.load()
    link = yield from NcclLink.open(
        library,
        memory,
        group.rank,
        group.size,
        bytes.fromhex(digits),
        reproducible=group.options.reproducible,
    )
    try:
        yield from link.check_order()
    except BaseException:
        link.abort()
        raise
    return link


class _Trial:
    """An opening with a limit in seconds, which may fail: a link, or why there is none."""

    def __init__(self, steps: Generator[Handle, None, NcclLink], limit: float) -> None:
        self.steps, self._limit, self._deadline = steps, limit, clock.now() + limit
        self._waiting: Handle = Nowhere()
        self.link: NcclLink | None = None
        self.failure = ""

    def done(self) -> bool:
        try:
            while self._waiting.done():
                self._waiting = next(self.steps)
        except StopIteration as stop:
            self.link = stop.value
        except (TransportError, BackendUnavailableError) as error:
            self.failure = str(error)
        else:
            if clock.now() < self._deadline:
                return False
            self.failure = f"the ranks had not met after {self._limit:.0f} s"
        return True
