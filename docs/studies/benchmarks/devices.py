"""The benchmark on CUDA devices: arrays that stay there, beside NCCL itself and a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final

import arraycomm
from arraycomm import Communicator
from arraycomm._arrays.buffer import Array
from arraycomm._cuda import device
from arraycomm._cuda.links import libnccl
from arraycomm._cuda.links.nccl_link import let_share, lets_share, refuse_sharing
from arraycomm._dtypes import BY_DTYPE
from docs.studies.benchmarks.cases import (
    Calls,
    Case,
    Field,
    UnsupportedError,
    as_numpy,
    in_place,
    installed,
    into,
)

FRAMEWORKS: Final = ("cupy", "torch")
_NCCL_SUM: Final = 0
_CUDA_MEMCPY_DEVICE_TO_DEVICE: Final = 3


def refusal(names: Sequence[str], mode: str | None) -> str:
    """Say why devices cannot be timed here, and what would help; empty if they can be timed."""
    unknown = [name for name in names if name not in FRAMEWORKS]
    if unknown:
        return f"with --device cuda the frameworks are {', '.join(FRAMEWORKS)}; got {unknown[0]}"
    if mode not in {None, "latency", "bandwidth"}:
        return f"{mode} is timed on the host only; leave out --device cuda"
    missing = device.missing()
    if missing is not None:
        return f"--device cuda: {missing}"
    return _no_torch() if "torch" in names else ""


def _no_torch() -> str:
    torch: Any = import_module("torch")
    if torch.cuda.is_available():
        return ""
    found = f"this PyTorch ({torch.__version__}) has no CUDA"
    return f"{found}; install one that has, or pass --frameworks cupy"


def usual() -> list[str]:
    """Return the frameworks that are measured if none is asked for."""
    return ["cupy", "torch"] if installed("torch") and not _no_torch() else ["cupy"]


class DeviceField(Field):
    """The ranks and their communicators, and the device of this rank."""

    def __init__(self, comm: Communicator) -> None:
        import cupy

        super().__init__(comm)
        self.number = device.choose_device(comm.local_rank, None)
        cupy.cuda.Device(self.number).use()
        # The ranks negotiate the placement of device arrays in the first call with one of them.
        self._probe = cupy.ones(1, "float32")
        comm.allreduce(self._probe)
        self._runtime = cupy.cuda.runtime

    def keys(self, framework: str, *, tree: bool) -> list[str]:
        """Return the keys of the contenders for a framework's arrays."""
        return [
            "out",
            "fresh",
            "unchecked",
            {"cupy": "nccl", "torch": "torch-nccl"}[framework],
            "copy",
        ]

    def place(self, values: Array, framework: str) -> Any:
        """Return a new array on the device."""
        made = arraycomm.exchange(values, framework, copy=True)
        return made.to(f"cuda:{self.number}") if framework == "torch" else made

    def clear(self, array: Any, framework: str) -> None:
        """Overwrite an array with zeros."""
        if framework == "torch":
            array.zero_()
        else:
            # As bytes, since CuPy has no kernels for some dtypes.
            self._runtime.memsetAsync(array.data.ptr, 0, array.nbytes, _stream())

    def finish(self) -> None:
        """Wait for the device: calls only enqueue work on it."""
        self._runtime.deviceSynchronize()

    def about(self) -> dict[str, Any]:
        """Return which devices there are, and what moves arraycomm's arrays on them."""
        name = self._runtime.getDeviceProperties(self.number)["name"].decode()
        explanation = arraycomm.explain(self._probe, comm=self.comm)
        placement = "; ".join([explanation.backend, *explanation.notes])
        devices = len(set(self._uuids()))
        return {"device": {"name": name, "devices": devices, "placement": placement}}

    @property
    def nccl(self) -> Any:
        """CuPy's NCCL communicator; making it waits for all ranks."""
        self.check_sharing()
        return self.start("CuPy's NCCL", self._join_nccl)

    def _join_nccl(self) -> Any:
        from cupy.cuda import nccl

        name = self.mpi.bcast(nccl.get_unique_id() if self.rank == 0 else None)
        made = nccl.NcclCommunicator(self.size, name, self.rank)
        self._ends.callback(made.destroy)
        self._ends.callback(self.finish)
        return made

    def check_sharing(self) -> None:
        """Raise if NCCL would refuse these ranks, or wait forever for some of them."""
        missing = max(self.mpi.allgather(libnccl.missing() or ""))
        shares = self.mpi.allgather(lets_share())
        reason = missing or refuse_sharing(self._uuids(), shares)
        if reason:
            raise UnsupportedError(reason)
        let_share(self._uuids(), libnccl.load().version())

    def _uuids(self) -> list[str]:
        return list(self.mpi.allgather(device.uuid(self.number)))


def _nccl(field: DeviceField, case: Case, framework: str) -> Calls:
    kind = BY_DTYPE[case.dtype].nccl
    if kind is None:
        raise UnsupportedError(f"NCCL has no {case.dtype_name}")
    (x,), (y,) = case.arrays(framework)
    addresses = (x.data.ptr, y.data.ptr)
    return into(
        partial(field.nccl.allReduce, *addresses, case.x[0].size, kind, _NCCL_SUM, _stream()), [y]
    )


def _torch_nccl(field: DeviceField, case: Case, framework: str) -> Calls:
    field.check_sharing()
    import_module("torch").cuda.set_device(field.number)
    return in_place("nccl", field, case, framework)


def _copy(field: DeviceField, case: Case, framework: str) -> Calls:
    """Copy the array on the device: a lower bound for the time of any sum."""
    (x,), (y,) = case.arrays(framework)
    call: Callable[[], Any]
    if framework == "torch":
        call = partial(y.copy_, x)
    else:
        import cupy

        addresses, copy = (y.data.ptr, x.data.ptr), cupy.cuda.runtime.memcpyAsync
        call = partial(copy, *addresses, case.nbytes, _CUDA_MEMCPY_DEVICE_TO_DEVICE, _stream())

    def answer() -> list[Array]:
        call()
        copied = as_numpy(y)
        return [case.expected(0) if copied.tobytes() == case.x[0].tobytes() else copied]

    return call, answer


def _stream() -> int:
    import cupy

    stream: int = cupy.cuda.get_current_stream().ptr
    return stream


DeviceField.ways = {**Field.ways, "nccl": _nccl, "torch-nccl": _torch_nccl, "copy": _copy}
