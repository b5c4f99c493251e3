"""Devices in software, for tests that know no other: `software_device` puts them in place for a while.

Where this folder is on PYTHONPATH, a program finds them as it finds CuPy: the tests in `tests/cuda/on_device`
run over them so. What CuPy, CUDA and NCCL themselves do, no test over them knows.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from arraycomm._arrays.device_memory import DeviceBuffer
from arraycomm._cuda import selection

# The modules of the CuPy in software, once they are imported.
_modules: dict[str, Any] = {}


def _is_cupy(name: str) -> bool:
    return name.partition(".")[0] == "cupy"


@contextmanager
def software_device(devices: int = 1) -> Iterator[Any]:
    """Let this process find this many devices, and none afterwards; give the machine, which tells what was asked."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_cupy(name)}
    sys.modules.update(_modules)
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    try:
        import cupy
        from cupy import _libraries
        from cupy._machine import machine

        _modules.update((name, found) for name, found in sys.modules.items() if _is_cupy(name))
        machine.restart(devices)
        _libraries.install()
        try:
            cupy.cuda.Stream.null.use()
            yield machine
            assert not machine.tracebacks, machine.tracebacks[0]
        finally:
            _libraries.uninstall()
            machine.restart(devices)
    finally:
        sys.path.remove(folder)
        for name in [name for name in sys.modules if _is_cupy(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def library(name: str = "libnccl.so.2") -> Any:
    """Return a library in software."""
    from cupy._libraries import libraries

    return libraries[name]


# What ranks of a test say that they can use, though they are threads, or processes that share a device.
LINKS: dict[str, dict[str, Any]] = {
    "nccl": {},
    "staged": {"nccl": "no NCCL"},
    "mpi": {"nccl": "no NCCL", "gpu_aware": True},
    # Of the first rank alone.
    "first none": {"device": "no device", "nccl": "no device"},
}


@contextmanager
def linked_devices(link: str = "nccl", devices: int = 1) -> Iterator[Any]:
    """Have the ranks of this process's tests use a link between their devices, threads as well; the process sees this many."""

    def capabilities(group: Any, request: Any) -> selection.DeviceCapabilities:
        found = selection._capabilities(group, request)
        changes = LINKS[link] if link != "first none" or group.rank == 0 else {}
        # Each as if it had a device of its own.
        return replace(found, uuid=f"{group.rank}", **changes)

    def memory_of(request: Any) -> Any:
        # Whichever thread makes it.
        with rank_of_threads(request.local_rank):
            return usual(request)

    usual = selection.memory_of
    with (
        software_device(devices) as machine,
        mock.patch.object(selection, "capabilities", capabilities),
        mock.patch.object(selection, "memory_of", memory_of),
    ):
        yield machine


@contextmanager
def rank_of_threads(rank: int) -> Iterator[None]:
    """Let what this thread makes on a device belong to one of several ranks, as if each had a device of its own."""
    from cupy._machine import machine

    before, machine.here.owner = machine.here.owner, rank
    try:
        yield
    finally:
        machine.here.owner = before


def in_own_stream(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Have each rank work in a stream of its own: ranks that are threads would share the default stream."""

    def within(comm: Any, *arguments: Any) -> Any:
        import cupy

        with rank_of_threads(comm.rank), cupy.cuda.Stream(non_blocking=True) as stream:
            result = fn(comm, *arguments)
            stream.synchronize()
            return result

    return within


def elements(device_buffer: DeviceBuffer) -> Any:
    """Return what is in a device buffer now, without a copy and without a wait."""
    if not device_buffer.nbytes:
        return np.empty(0, device_buffer.dtype)
    raw: Any = (ctypes.c_ubyte * device_buffer.nbytes).from_address(device_buffer.address)
    return np.frombuffer(raw, np.uint8).view(device_buffer.dtype)
