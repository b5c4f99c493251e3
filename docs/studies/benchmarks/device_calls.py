"""What a call with an array on a device costs the host, by part: CuPy, PyTorch, CUDA and NCCL do nothing here.

python -m docs.studies.benchmarks.device_calls [--calls 300] [--rounds 25] [--parts] [--full]

No device is needed. One thread is rank 0; the slot of rank 1 says the same in every step, so that nothing is waited
for. The time is that of the thread, of the quickest round. `--parts` says in which part of the library it is spent:
of a profile, scaled to the time without one. With `--full` no call is prepared.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import functools
import itertools
import math
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np

_ANY: Final = itertools.count(0x7F0000000000, 512)
# What begins with one of these is in that part.
PARTS: Final = {
    "a call: its paths, runner, results": ("_communicator", "_collectives", "_calls", "_entries"),
    "engine and header": ("_protocol", "_transports", "_callsite"),
    "arrays and their frameworks": (
        *("_cuda/arrays", "_cuda/frameworks", "_cuda/layouts", "_arrays", "_dtypes"),
    ),
    "current devices and streams": ("_arrays/current_device", "_cuda/callers", "_cuda/streams"),
    "movements": ("_reduce", "_cuda/links", "_folds"),
    "kernels": ("_cuda/kernels", "_cuda/driver"),
    "order of the work, words and events": ("_cuda",),
}


class Functions:
    """A library, of which every function returns 0 and does nothing else."""

    def __getitem__(self, name: str) -> Any:
        return ctypes.CDLL(None)["pthread_mutexattr_destroy"]

    def __getattr__(self, name: str) -> Any:
        function = self[name]
        vars(self)[name] = function
        return function


class _Stream:
    ptr = 0

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _Event:
    ptr = 0x1000

    def __init__(self, *, disable_timing: bool = False) -> None: ...


def _nothing(*_: Any) -> None: ...


def _cupy() -> Any:
    """Return a CuPy that does nothing."""
    stream, memory = _Stream(), SimpleNamespace(ptr=next(_ANY))

    class ndarray:  # noqa: N801 - the name that CuPy has
        device, flags = SimpleNamespace(id=0), SimpleNamespace(c_contiguous=True)

        def __init__(
            self, shape: Any, dtype: Any = float, memptr: Any = memory, strides: Any = None
        ) -> None:
            self.shape, self.dtype, self.data = shape, np.dtype(dtype), memptr
            self.size = math.prod(shape)
            self.nbytes = self.size * self.dtype.itemsize

        @property
        def strides(self) -> Any:
            return np.empty(self.shape, self.dtype).strides

        def __getitem__(self, _: Any) -> Any:
            return self

        def reshape(self, _: Any) -> Any:
            return self

    ndarray.__module__ = "cupy"
    runtime = SimpleNamespace(
        getDevice=lambda: 0,
        setDevice=_nothing,
        eventRecord=_nothing,
        eventSynchronize=_nothing,
        streamWaitEvent=_nothing,
        memcpyAsync=_nothing,
        CUDARuntimeError=RuntimeError,
        hostAllocPortable=1,
    )
    module = SimpleNamespace(load=_nothing, get_function=lambda _: SimpleNamespace(ptr=0x2000))
    cuda = SimpleNamespace(
        alloc=lambda _: memory,
        Event=_Event,
        Stream=lambda **_: SimpleNamespace(ptr=0x3000),
        ExternalStream=lambda *_: stream,
        Device=lambda _: SimpleNamespace(use=_nothing, compute_capability="90"),
        get_current_stream=lambda _=0: stream,
        runtime=runtime,
        driver=SimpleNamespace(CUDADriverError=RuntimeError),
        function=SimpleNamespace(Module=lambda: module),
    )
    return SimpleNamespace(ndarray=ndarray, cuda=cuda)


def _torch() -> Any:
    """Return a PyTorch that does nothing."""

    class Tensor:
        is_cuda, is_cpu, requires_grad, itemsize = True, False, False, 4
        is_nested = is_quantized = is_meta = False
        layout, dtype, shape = "strided", "torch.float32", (2,)
        device = SimpleNamespace(index=0, type="cuda")
        __torch_dispatch__ = None

        def __init__(self) -> None:
            self._address = next(_ANY)

        def record_stream(self, _: Any) -> None: ...

    def giving(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    methods = {
        "get_device": 0,
        "numel": 2,
        "storage_offset": 0,
        "is_contiguous": True,
        "stride": (1,),
    }
    methods |= {"is_conj": False, "is_neg": False}
    for name, value in methods.items():
        setattr(Tensor, name, giving(value))
    for name in ("detach", "resolve_conj", "resolve_neg", "__getitem__", "reshape"):
        setattr(Tensor, name, lambda self, *_: self)
    Tensor.data_ptr = lambda self: self._address  # type: ignore[attr-defined]
    Tensor.untyped_storage = giving(SimpleNamespace(nbytes=lambda: 8))  # type: ignore[attr-defined]
    Tensor.__module__ = "torch"

    class Device:
        """A context, as `torch.cuda.device`."""

        def __init__(self, _: int) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    cuda = SimpleNamespace(
        is_initialized=giving(True),
        current_stream=lambda _=0: SimpleNamespace(cuda_stream=0),
        ExternalStream=lambda *_, **__: SimpleNamespace(cuda_stream=0),
        stream=lambda _: Device(0),
        device=Device,
        is_current_stream_capturing=giving(False),
    )
    made = Tensor()
    functorch = SimpleNamespace(is_functorch_wrapped_tensor=giving(False))
    return SimpleNamespace(
        Tensor=Tensor,
        cuda=cuda,
        dtype=str,
        float32="torch.float32",
        strided="strided",
        empty=giving(made),
        is_grad_enabled=giving(False),
        autograd=SimpleNamespace(
            forward_ad=SimpleNamespace(_current_level=-1),
            graph=SimpleNamespace(increment_version=_nothing),
        ),
        _C=SimpleNamespace(_functorch=functorch, _cuda_getCurrentRawStream=giving(0)),
    )


def _module(name: str, members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(vars(members))
    return module


_MODULES: Final = {"cupy": _module("cupy", _cupy()), "torch": _module("torch", _torch())}


def _array(framework: str) -> Any:
    """Put a framework in place, with CuPy, which arraycomm needs; return an array of it."""
    for name, module in _MODULES.items():
        sys.modules.pop(name, None)
        if name in ("cupy", framework):
            sys.modules[name] = module
    return sys.modules["torch"].Tensor() if framework == "torch" else _cupy_array()


def _cupy_array() -> Any:
    return vars(_MODULES["cupy"])["ndarray"]((2,), np.float32)


def _communicator(size: int, library: Functions, link: str, *, full: bool) -> Any:
    """Return rank 0's communicator, and the words of its slots and of the others'."""
    from arraycomm._arrays import current_device, pinned
    from arraycomm._calls.runner import Runner
    from arraycomm._communicator import Communicator
    from arraycomm._cuda import device, kernels
    from arraycomm._cuda.devices import Devices
    from arraycomm._cuda.links import libnccl
    from arraycomm._cuda.links.link import LoneLink
    from arraycomm._cuda.links.nccl_link import NcclLink
    from arraycomm._protocol.group import Group, Options
    from arraycomm._transports.threads import make_group

    current_device.driver = device.driver = lambda: library
    # Those that have it by name.
    from arraycomm._cuda import driver

    driver.driver = current_device.driver
    device.pinned = lambda _: pinned.Staging(lambda nbytes: np.zeros(nbytes, np.uint8))
    kernels.compiled = lambda *_: b""
    libnccl.declare(library)
    transport = make_group(size)[0]
    group = Group(transport, Options())
    placements = Devices(group, device.DeviceRequest())
    if full:
        placements.prepare = _nothing  # type: ignore[method-assign]
    memory = device.CudaMemory(0)
    placements.negotiated = True
    if link == "self":
        placements.link = LoneLink(memory)
    else:
        comm = libnccl.Comm.begin(libnccl.Library(library), 0, 0, size, bytes(128))
        placements.link = NcclLink(comm, memory, 0, size)
    return Communicator(Runner(group, placements)), transport.control


def _agree(control: Any, call: Callable[[], Any]) -> None:
    """Make a call in which all other ranks show what this one shows, as they do in every step from then on."""
    post = control.post

    def post_for_all(nbytes: int | None = None) -> None:
        post(nbytes)
        shown = control.rows[control.step & 1][0].copy()
        shown[:8].view(np.int64)[0] = 1 << 62
        for rows in control.rows:
            rows[1:] = shown

    control.post = post_for_all
    call()
    del control.post


def _quickest(call: Callable[[], Any], calls: int, rounds: int) -> float:
    """Return the microseconds of a call, of the quickest round."""
    found = []
    for _ in range(rounds):
        started = time.thread_time_ns()
        for _ in range(calls):
            call()
        found.append((time.thread_time_ns() - started) / calls / 1000)
    return min(found)


def _part_of(file: str) -> str:
    inside = file.rpartition("arraycomm/")[2]
    fitting = [
        (len(start), part)
        for part, starts in PARTS.items()
        for start in starts
        if inside != file and inside.startswith(start)
    ]
    return max(fitting)[1] if fitting else "what stands in for the libraries"


def _by_part(call: Callable[[], Any], calls: int) -> tuple[Counter[str], float]:
    """Return the profiled seconds of each part, and the functions that a call enters."""
    profile = cProfile.Profile(builtins=False)
    profile.enable()
    for _ in range(calls):
        call()
    profile.disable()
    seconds: Counter[str] = Counter()
    entered = 0
    for (file, *_), (_, count, own, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        seconds[_part_of(file)] += own
        entered += count
    return seconds, entered / calls


def _allreduce_tree(comm: Any, x: Any) -> Any:
    from arraycomm import allreduce_tree

    return allreduce_tree([x, _other(type(x))], "sum", comm=comm)


@functools.cache
def _other(kind: Any) -> Any:
    """Return one array more of a framework."""
    return _cupy_array() if kind.__module__ == "cupy" else kind()


@functools.cache
def _six(kind: Any) -> dict[int, Any]:
    """Return six arrays of a framework."""
    return {n: _cupy_array() if kind.__module__ == "cupy" else kind() for n in range(6)}


def _gradients(comm: Any, x: Any) -> Any:
    from arraycomm import allreduce_gradients

    return allreduce_gradients(_six(type(x)), comm=comm)


@functools.cache
def _rounds(comm: Any) -> tuple[Any, Any, Any]:
    """Return the rounds of an optimizer, and what makes a rank's part in one."""
    from arraycomm._training.rounds import Bucket, Part, Place, Rounds

    options = {"bucket_bytes": 25 << 20, "compression": None}
    part = functools.partial(Part, Bucket(1, range(6)), place=Place(), may_overwrite=True)
    return Rounds(comm, "mean", options), part


def _bucket(comm: Any, x: Any) -> Any:
    rounds, part = _rounds(comm)
    return rounds.reduce(part(make=lambda: _six(type(x))))


def _bucket_request(comm: Any, x: Any) -> Any:
    rounds, part = _rounds(comm)
    return rounds.start(part(make=lambda: _six(type(x)))).wait()


CALLS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "allreduce, out": lambda comm, x: comm.allreduce(x, out=x),
    "iallreduce().wait()": lambda comm, x: comm.iallreduce(x).wait(),
    "allgather": lambda comm, x: comm.allgather(x),
    "bcast": lambda comm, x: comm.bcast(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "alltoall": lambda comm, x: comm.alltoall(x),
    "tree of two leaves": _allreduce_tree,
    "gradients, 6 leaves": _gradients,
    "bucket of 6": _bucket,
    "bucket, request": _bucket_request,
}
LINKS: Final = {
    "one rank alone": (1, "self"),
    "NCCL, one rank": (1, "nccl"),
    "NCCL, two ranks": (2, "nccl"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--parts", action="store_true", help="say where an allreduce's time goes")
    parser.add_argument("--full", action="store_true", help="prepare no call")
    options = parser.parse_args()
    library = Functions()
    print("float32[2]; microseconds of the host a call, and functions of Python that it enters\n")
    for framework in _MODULES:
        x = _array(framework)
        for link, (size, kind) in LINKS.items():
            for name, collective in CALLS.items():
                if size == 1 and name != "allreduce":
                    continue
                comm, control = _communicator(size, library, kind, full=options.full)

                def call(comm: Any = comm, x: Any = x, collective: Any = collective) -> Any:
                    return collective(comm, x)

                _agree(control, call)
                micros = _quickest(call, options.calls, options.rounds)
                parts, entered = _by_part(call, options.calls)
                print(f"{framework:6} {link:16} {name:20} {micros:7.1f} {entered:7.0f}")
                if options.parts and name == "allreduce":
                    scale = micros / parts.total()
                    for part, own in parts.most_common():
                        print(f"{'':25}{part:40} {scale * own:7.1f}")


if __name__ == "__main__":
    main()
