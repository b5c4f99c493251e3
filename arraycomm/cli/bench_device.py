"""The benchmark on CUDA devices: arrays that stay there, beside NCCL itself and a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final

import arraycomm
from arraycomm import Communicator
from arraycomm._cuda import device
from arraycomm._dtypes import BY_DTYPE
from arraycomm.cli.bench_contenders import (
    Array,
    Case,
    Contender,
    Field,
    UnsupportedError,
    installed,
)
from arraycomm.cli.bench_match import Entry, enter

FRAMEWORKS: Final = ("cupy", "torch")
# ncclSum, and cudaMemcpyDeviceToDevice.
_SUM: Final = 0
_ON_DEVICE: Final = 3
_OWN: Final = ("out", "fresh", "unchecked")


def refusal(names: Sequence[str], mode: str | None) -> str:
    """Say why devices cannot be timed here, and what would help; empty where they can."""
    strangers = [name for name in names if name not in FRAMEWORKS]
    if strangers:
        return f"with --device cuda the frameworks are {', '.join(FRAMEWORKS)}; got {strangers[0]}"
    if mode == "trees":
        return "trees are timed on the host only; leave out --device cuda"
    missing = device.missing()
    if missing is not None:
        return f"--device cuda: {missing}"
    return _no_torch() if "torch" in names else ""


def _no_torch() -> str:
    torch: Any = import_module("torch")
    if torch.cuda.is_available():
        return ""
    return f"this PyTorch ({torch.__version__}) has no CUDA; install one that has, or pass --frameworks cupy"


class DeviceField(Field):
    """What the contenders run over, with a device for each rank."""

    def __init__(self, comm: Communicator) -> None:
        import cupy

        super().__init__(comm)
        self.number = device.choose_device(comm.local_rank, None)
        cupy.cuda.Device(self.number).use()
        # The ranks choose the way of their arrays when the first of them comes.
        comm.allreduce(cupy.ones(1, "float32"))
        self._runtime = cupy.cuda.runtime
        self._nccl: Any = None
        self._no_nccl = ""

    def finish(self) -> None:
        """Wait for the device, which calls only give their work to."""
        self._runtime.deviceSynchronize()

    def about(self) -> dict[str, Any]:
        """Return which devices there are, and the way that arraycomm's arrays take."""
        name = self._runtime.getDeviceProperties(self.number)["name"].decode()
        devices = self.comm._devices
        way = "host memory" if devices.link is None else devices.link.name
        way = way if way == "nccl" else f"{way}: {devices.reason}"
        return {"device": {"name": name, "devices": len(set(self._uuids())), "way": way}}

    @property
    def nccl(self) -> Any:
        """A communicator of CuPy's, which waits for all ranks when it is made."""
        self.check_sharing()
        if self._nccl is None and not self._no_nccl:
            try:
                self._nccl = self._join_nccl()
            except Exception as error:
                self._no_nccl = f"CuPy's NCCL does not start: {error}"
            # All ranks, or none.
            self._no_nccl = max(self.mpi.allgather(self._no_nccl))
        if self._no_nccl:
            raise UnsupportedError(self._no_nccl)
        return self._nccl

    def _join_nccl(self) -> Any:
        from cupy.cuda import nccl

        name = self.mpi.bcast(nccl.get_unique_id() if self.rank == 0 else None)
        return nccl.NcclCommunicator(self.size, name, self.rank)

    def check_sharing(self) -> None:
        """Raise where NCCL would refuse these ranks, or wait for ever for some of them."""
        from arraycomm._cuda import libnccl
        from arraycomm._cuda.nccl_link import refuse_sharing

        missing = max(self.mpi.allgather(libnccl.missing() or ""))
        reason = missing or refuse_sharing(self._uuids(), libnccl.load().version())
        if reason:
            raise UnsupportedError(reason)

    def _uuids(self) -> list[str]:
        return list(self.mpi.allgather(device.uuid(self.number)))

    def close(self) -> None:
        """Release everything; collective."""
        if self._nccl is not None:
            self.finish()
            self._nccl.destroy()
        super().close()


class DeviceCase(Case):
    """One array to sum, and memory for the result, on the device: the same for all of a framework."""

    def __init__(self, dtype: str, nbytes: int, field: DeviceField) -> None:
        super().__init__(dtype, nbytes, field.rank, field.size)
        self._number = field.number
        self._there: dict[str, tuple[Any, Any]] = {}

    def arrays(self, framework: str) -> tuple[Any, Any]:
        """Return `x` and `y` as arrays of a framework."""
        if framework not in self._there:
            try:
                made = [self.moved(array, framework) for array in (self.x, self.y)]
            except (TypeError, ValueError, NotImplementedError) as error:
                raise UnsupportedError(f"{framework} has no {self.dtype_name}: {error}") from error
            self._there[framework] = made[0], made[1]
        return self._there[framework]

    def moved(self, array: Array, framework: str) -> Any:
        """Return a new array on the device."""
        made = arraycomm.exchange(array, framework, copy=True)
        return made.to(f"cuda:{self._number}") if framework == "torch" else made

    def clear(self, framework: str) -> None:
        """Take from `y` what the last contender has left there."""
        _, y = self.arrays(framework)
        if framework == "torch":
            y.zero_()
        else:
            import cupy

            # Of bytes: CuPy has no kernels for some dtypes.
            stream = cupy.cuda.get_current_stream().ptr
            cupy.cuda.runtime.memsetAsync(y.data.ptr, 0, self.nbytes, stream)


def entered(
    field: DeviceField, names: Sequence[str] | None, only: Sequence[str], dtype: str, nbytes: int
) -> tuple[DeviceCase, list[Entry]]:
    """Return an array to sum, and who takes part."""
    case = DeviceCase(dtype, nbytes, field)
    frameworks = _usual() if names is None else names
    wanted = [(f, key) for f in frameworks for key in keys_of(f) if key in only]
    return case, [enter(field, case, key, framework, _make) for framework, key in wanted]


def _usual() -> list[str]:
    return ["cupy", "torch"] if installed("torch") and not _no_torch() else ["cupy"]


def keys_of(framework: str) -> list[str]:
    """Return the contenders there are for a framework's arrays on a device."""
    return [*_OWN, "nccl" if framework == "cupy" else "torch-nccl", "copy"]


def _make(key: str, framework: str, case: DeviceCase, field: Field) -> Contender:
    """Return a contender, or raise `UnsupportedError`."""
    assert isinstance(field, DeviceField), "devices are timed there"
    if key in _OWN:
        return _own(key, framework, case, field)
    return _MAKERS[key](framework, case, field)


def _own(key: str, framework: str, case: DeviceCase, field: DeviceField) -> Contender:
    x, y = case.arrays(framework)
    comm = field.unchecked if key == "unchecked" else field.comm
    call = partial(comm.allreduce, x) if key == "fresh" else partial(comm.allreduce, x, out=y)

    def answer() -> Array:
        case.clear(framework)
        return _numpy(call())

    return Contender(key, framework, call, answer)


def _nccl(framework: str, case: DeviceCase, field: DeviceField) -> Contender:
    import cupy

    kind = BY_DTYPE[case.dtype].nccl
    if kind is None:
        raise UnsupportedError(f"NCCL has no {case.dtype_name}")
    x, y = case.arrays(framework)
    stream = cupy.cuda.get_current_stream().ptr
    addresses = (x.data.ptr, y.data.ptr)
    call = partial(field.nccl.allReduce, *addresses, case.count, kind, _SUM, stream)

    def answer() -> Array:
        case.clear(framework)
        call()
        return _numpy(y)

    return Contender("nccl", framework, call, answer)


def _torch_nccl(framework: str, case: DeviceCase, field: DeviceField) -> Contender:
    field.check_sharing()
    import_module("torch").cuda.set_device(field.number)
    x, _ = case.arrays(framework)
    buffer = case.moved(case.y, framework)
    call = partial(field.group("nccl").all_reduce, buffer)

    def answer() -> Array:
        buffer.copy_(x)
        call()
        result = _numpy(buffer)
        # It sums in place: anything but zeros would grow from call to call.
        buffer.zero_()
        return result

    return Contender("torch-nccl", framework, call, answer)


def _copy(framework: str, case: DeviceCase, field: DeviceField) -> Contender:
    """Copy the array on the device: what nobody can do better, and no sum."""
    x, y = case.arrays(framework)
    call: Callable[[], Any]
    if framework == "torch":
        call = partial(y.copy_, x)
    else:
        import cupy

        addresses, stream = (y.data.ptr, x.data.ptr), cupy.cuda.get_current_stream().ptr
        copy = cupy.cuda.runtime.memcpyAsync
        call = partial(copy, *addresses, case.nbytes, _ON_DEVICE, stream)

    def answer() -> Array:
        case.clear(framework)
        call()
        copied = _numpy(y)
        return case.expected if copied.tobytes() == case.x.tobytes() else copied

    return Contender("copy", framework, call, answer)


_MAKERS: Final[dict[str, Callable[[str, DeviceCase, DeviceField], Contender]]] = {
    "nccl": _nccl,
    "torch-nccl": _torch_nccl,
    "copy": _copy,
}


def _numpy(result: Any) -> Array:
    array: Array = arraycomm.exchange(result, "numpy")
    return array
