"""What arrays on devices go over: what each rank offers, and what all make of it."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from arraycomm._cuda import device, kernels, selection
from arraycomm._cuda.device import DeviceRequest
from arraycomm._cuda.links import libnccl
from arraycomm._cuda.links.gpu_aware import GpuAwareMpiLink
from arraycomm._cuda.links.link import LoneLink
from arraycomm._cuda.links.staged_link import HostStagedLink

AUTO, SECOND = DeviceRequest(), DeviceRequest(local_rank=1)
MEMORY = SimpleNamespace(device=0)


def _group(rank: int = 0, backend: str = "mpi", size: int = 2) -> Any:
    transport = SimpleNamespace(rank=rank, size=size, local_rank=rank)
    return SimpleNamespace(backend=backend, rank=rank, size=size, transport=transport)


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A rank that has everything; a test takes away from it."""
    library = SimpleNamespace(version=lambda: (2, 27, 3))
    for module, name, value in (
        (device, "missing", lambda: None),
        (kernels, "missing", lambda: None),
        (device, "uuid", lambda number: f"device {number}"),
        (device, "choose_device", lambda local_rank, wanted: local_rank),
        (libnccl, "missing", lambda: None),
        (libnccl, "load", lambda: library),
        (selection, "gpu_aware", lambda: True),
        (selection, "_open_nccl", lambda group, request: _returning(("the link of NCCL", ""))),
        (selection, "memory_of", lambda request: MEMORY),
    ):
        monkeypatch.setattr(module, name, value)
    return monkeypatch


def _returning(value: Any) -> Any:
    yield from ()
    return value


def _choose(
    offers: list[selection.DeviceCapabilities], rank: int = 0, request: DeviceRequest = AUTO
) -> tuple[Any, str]:
    steps = selection.choose(_group(rank, size=len(offers)), request, offers)
    with pytest.raises(StopIteration) as stop:
        next(steps)
    found: tuple[Any, str] = stop.value.value
    return found


def _offers(**changes: Any) -> list[selection.DeviceCapabilities]:
    """What two ranks offer that have everything, where the second is told otherwise."""
    first = selection.capabilities(_group(0), AUTO)
    second = replace(selection.capabilities(_group(1), SECOND), **changes)
    return [first, second]


class TestOffer:
    @pytest.mark.parametrize("module", [device, kernels])
    def test_without_a_device_there_is_no_nccl(self, capable, module) -> None:
        capable.setattr(module, "missing", lambda: "CuPy cannot be imported; install it")
        offer = selection.capabilities(_group(), AUTO)
        assert offer.device == offer.nccl == "CuPy cannot be imported; install it"
        assert (offer.uuid, offer.version, offer.gpu_aware) == ("", (), False)

    def test_wish_for_mpi_is_one_against_nccl(self, capable: pytest.MonkeyPatch) -> None:
        capable.setattr(libnccl, "load", lambda: pytest.fail("NCCL was loaded"))
        offer = selection.capabilities(_group(), DeviceRequest("mpi"))
        assert offer.nccl == 'backend="mpi" was asked for'

    def test_ranks_of_one_process_go_by_the_host(self, capable: pytest.MonkeyPatch) -> None:
        offer = selection.capabilities(_group(backend="threads"), AUTO)
        assert "ranks within one process" in offer.device
        assert offer.nccl == offer.device

    @pytest.mark.parametrize("backend", ["self", "processes"])
    def test_processes_without_mpi_have_no_mpi_that_reads_a_device(self, capable, backend) -> None:
        offer = selection.capabilities(_group(backend=backend), AUTO)
        assert (offer.device, offer.nccl, offer.gpu_aware) == ("", "", False)

    def test_what_fails_is_said_and_not_raised(self, capable: pytest.MonkeyPatch) -> None:
        """The other ranks wait for the offer."""
        capable.setattr(device, "uuid", lambda number: [][number])
        offer = selection.capabilities(_group(), AUTO)
        assert offer.device == offer.nccl == "IndexError: list index out of range"

    @pytest.mark.skipif(device.missing() is None, reason="there is a device")
    def test_without_cupy_nothing_is_raised(self) -> None:
        offer = selection.capabilities(_group(), AUTO)
        assert offer.device
        assert offer.nccl == offer.device
        if "cupy" not in sys.modules:
            assert "pip install cupy" in offer.device


class TestChoice:
    def test_one_rank_alone_needs_nccl_only_where_it_is_asked_for(self, capable) -> None:
        (first, _) = _offers()
        link, reason = _choose([first])
        assert (type(link), link.memory) == (LoneLink, MEMORY)
        assert reason == "one rank alone sends nothing"
        assert _choose([first], request=DeviceRequest("nccl")) == ("the link of NCCL", "")
        assert _choose([replace(first, device="no driver")]) == (None, "no driver")

    @pytest.mark.parametrize(("version", "hosts"), [((2, 29, 9), 1), ((2, 30, 0), 0)])
    def test_an_older_nccl_is_told_of_a_host_for_each_rank_of_a_device(
        self, capable, version, hosts
    ) -> None:
        capable.delenv("NCCL_HOSTID", raising=False)
        apart = [replace(offer, version=version, lets_share=True) for offer in _offers()]
        assert _choose(apart)[0] == "the link of NCCL"
        assert "NCCL_HOSTID" not in os.environ
        shared = [replace(offer, uuid="device 0") for offer in apart]
        with capable.context() as patch:
            patch.setenv("NCCL_HOSTID", "before")
            assert _choose(shared)[0] == "the link of NCCL"
            assert os.environ["NCCL_HOSTID"] == "before"
            patch.delenv("NCCL_HOSTID")
            assert _choose(shared)[0] == "the link of NCCL"
            first = os.environ.pop("NCCL_HOSTID", "")
            assert bool(first) == bool(hosts)
            # Ranks in PID namespaces of their own may have one number, and one host's name.
            assert _choose(shared)[0] == "the link of NCCL"
            assert os.environ.pop("NCCL_HOSTID", "") != first or not hosts

    def test_reason_names_a_rank_that_stands_in_the_way(self, capable: pytest.MonkeyPatch) -> None:
        link, reason = _choose(_offers(nccl="no libnccl.so.2"))
        assert isinstance(link, GpuAwareMpiLink)
        assert reason == "rank 1: no libnccl.so.2"

    def test_versions_of_nccl_must_be_one(self, capable: pytest.MonkeyPatch) -> None:
        _, reason = _choose(_offers(version=(2, 30, 1)))
        assert reason.startswith("ranks have different versions of NCCL: 2.27.3, 2.30.1; install")

    @pytest.mark.parametrize("rank", [0, 1])
    def test_one_device_for_two_ranks(self, capable: pytest.MonkeyPatch, rank: int) -> None:
        """NCCL refuses it; over MPI it is slow, which one rank says."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            link, reason = _choose(_offers(uuid="device 0"), rank)
        assert isinstance(link, GpuAwareMpiLink)
        assert "ranks 0, 1 share a CUDA device, and NCCL wants one for each" in reason
        warned = [str(warning.message) for warning in said]
        assert warned == ["ranks 0, 1 share a CUDA device: what they compute there takes turns"] * (
            rank == 0
        )

    @pytest.mark.parametrize("local", ["0", "1"])
    @pytest.mark.parametrize("shares", [(True, True), (True, False), (False, True)])
    @pytest.mark.filterwarnings("ignore:ranks 0, 1 share")
    def test_ranks_with_one_device_go_by_what_all_have_said(self, capable, local, shares) -> None:
        """Whatever this rank's own environment says, which another rank's may not."""
        both = [
            replace(offer, version=(2, 30, 1), lets_share=share)
            for offer, share in zip(_offers(uuid="device 0"), shares, strict=True)
        ]
        capable.setenv("NCCL_MULTI_RANK_GPU_ENABLE", local)
        assert selection.capabilities(_group(), AUTO).lets_share == (local == "1")
        link, reason = _choose(both)
        assert (link == "the link of NCCL") == all(shares)
        assert ("on every rank" in reason) != all(shares)

    def test_copies_where_the_mpi_of_one_rank_reads_no_device_memory(self, capable) -> None:
        link, reason = _choose(_offers(nccl="no libnccl.so.2", gpu_aware=False))
        assert isinstance(link, HostStagedLink)
        assert (link.memory, reason) == (MEMORY, "rank 1: no libnccl.so.2")

    def test_host_memory_where_a_rank_has_no_device(self, capable: pytest.MonkeyPatch) -> None:
        """Without a word of devices that are shared: they are not used."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = _choose(_offers(device="no driver", nccl="no driver", uuid="device 0"))
        assert found == (None, "rank 1: no driver")
