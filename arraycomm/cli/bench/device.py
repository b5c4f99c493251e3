"""The benchmark on CUDA devices: arrays that stay there, beside NCCL itself and a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final

import arraycomm
from arraycomm import Communicator
from arraycomm._arrays.buffer import Array
from arraycomm._cuda import device, libnccl
from arraycomm._cuda.nccl_link import let_share, lets_share, refuse_sharing
from arraycomm._dtypes import BY_DTYPE
from arraycomm.cli.bench.contenders import (
    OWN,
    Case,
    Contender,
    Field,
    UnsupportedError,
    as_numpy,
    installed,
    into,
    own,
)
from arraycomm.cli.bench.lines import Entry, enter

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


class DeviceField(Field):
    """The communicators that contenders use, and the device of this rank."""

    def __init__(self, comm: Communicator) -> None:
        import cupy

        super().__init__(comm)
        self.number = device.choose_device(comm.local_rank, None)
        cupy.cuda.Device(self.number).use()
        # The ranks negotiate the placement of device arrays in the first call with one of them.
        self._probe = cupy.ones(1, "float32")
        comm.allreduce(self._probe)
        self._runtime = cupy.cuda.runtime

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
        return self._start("CuPy's NCCL", self._join_nccl)

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


class DeviceCase(Case):
    """One array to sum, and memory for the result, on the device; one pair for each framework."""

    def __init__(self, dtype: str, nbytes: int, field: DeviceField) -> None:
        super().__init__(dtype, nbytes, field.rank, field.size)
        self._number = field.number
        self._on_device: dict[str, tuple[Any, Any]] = {}

    def arrays(self, framework: str) -> tuple[Any, Any]:
        """Return `x` and `y` as arrays of a framework."""
        if framework not in self._on_device:
            try:
                made = [self.moved(array, framework) for array in (self.x, self.y)]
            except (TypeError, ValueError, NotImplementedError) as error:
                raise UnsupportedError(f"{framework} has no {self.dtype_name}: {error}") from error
            self._on_device[framework] = made[0], made[1]
        return self._on_device[framework]

    def moved(self, array: Array, framework: str) -> Any:
        """Return a new array on the device."""
        made = arraycomm.exchange(array, framework, copy=True)
        return made.to(f"cuda:{self._number}") if framework == "torch" else made

    def clear(self, framework: str) -> None:
        """Overwrite with zeros what the last contender of a framework left in `y`."""
        _, y = self.arrays(framework)
        if framework == "torch":
            y.zero_()
        else:
            import cupy

            # As bytes, since CuPy has no kernels for some dtypes.
            stream = cupy.cuda.get_current_stream().ptr
            cupy.cuda.runtime.memsetAsync(y.data.ptr, 0, self.nbytes, stream)


def enter_all(
    field: DeviceField, case: DeviceCase, names: Sequence[str] | None, only: Sequence[str]
) -> list[Entry]:
    """Return who takes part with an array."""
    frameworks = _usual() if names is None else names
    wanted = [(f, key) for f in frameworks for key in keys_of(f) if key in only]
    return [enter(field, case, key, framework, _make) for framework, key in wanted]


def _usual() -> list[str]:
    return ["cupy", "torch"] if installed("torch") and not _no_torch() else ["cupy"]


def keys_of(framework: str) -> list[str]:
    """Return the keys of the contenders for a framework's arrays on a device."""
    return [*OWN, "nccl" if framework == "cupy" else "torch-nccl", "copy"]


def _make(key: str, framework: str, case: DeviceCase, field: Field) -> Contender:
    """Return a contender, or raise `UnsupportedError`."""
    assert isinstance(field, DeviceField), "only a DeviceField has a device"
    return own(key, framework, case, field) if key in OWN else _MAKERS[key](framework, case, field)


def _nccl(framework: str, case: DeviceCase, field: DeviceField) -> Contender:
    import cupy

    kind = BY_DTYPE[case.dtype].nccl
    if kind is None:
        raise UnsupportedError(f"NCCL has no {case.dtype_name}")
    x, y = case.arrays(framework)
    stream = cupy.cuda.get_current_stream().ptr
    addresses = (x.data.ptr, y.data.ptr)
    call = partial(field.nccl.allReduce, *addresses, case.count, kind, _NCCL_SUM, stream)
    return into("nccl", framework, call, y)


def _torch_nccl(framework: str, case: DeviceCase, field: DeviceField) -> Contender:
    field.check_sharing()
    import_module("torch").cuda.set_device(field.number)
    x, _ = case.arrays(framework)
    buffer = case.moved(case.y, framework)
    call = partial(field.torch_distributed("nccl").all_reduce, buffer)

    def answer() -> Array:
        buffer.copy_(x)
        call()
        result = as_numpy(buffer)
        # torch sums in place: values other than zeros would grow from call to call.
        buffer.zero_()
        return result

    return Contender("torch-nccl", framework, call, answer)


def _copy(framework: str, case: DeviceCase, field: DeviceField) -> Contender:
    """Copy the array on the device: a lower bound for the time of any sum."""
    x, y = case.arrays(framework)
    call: Callable[[], Any]
    if framework == "torch":
        call = partial(y.copy_, x)
    else:
        import cupy

        addresses, stream = (y.data.ptr, x.data.ptr), cupy.cuda.get_current_stream().ptr
        copy = cupy.cuda.runtime.memcpyAsync
        call = partial(copy, *addresses, case.nbytes, _CUDA_MEMCPY_DEVICE_TO_DEVICE, stream)

    def answer() -> Array:
        call()
        copied = as_numpy(y)
        return case.expected if copied.tobytes() == case.x.tobytes() else copied

    return Contender("copy", framework, call, answer)


_MAKERS: Final[dict[str, Callable[[str, DeviceCase, DeviceField], Contender]]] = {
    "nccl": _nccl,
    "torch-nccl": _torch_nccl,
    "copy": _copy,
}
