"""Tests that need a CUDA device. On a machine with one, this runs them, over NCCL where it can be had:

    mpiexec -n 2 python -m pytest tests/cuda/on_device

and this those with one rank, with ranks that are threads, and the programs that are launched:

    python -m pytest tests/cuda/on_device

CuPy has to be installed; PyTorch with CUDA, JAX with CUDA, mpi4py and Hypothesis for the tests of
each. Without a device everything here is skipped, with the reason, and one call of each test is enough
to say so.

With `PYTHONPATH=tests/support/device` both run over the device in software, where there is no other: the
tests of CuPy's arrays, but for those that say nothing about a device that is none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from arraycomm import _launch
from arraycomm._callsite import describe_exception
from arraycomm._communicator import Communicator
from arraycomm._cuda import device
from arraycomm._errors import BackendUnavailableError
from arraycomm.testing import run
from arraycomm.testing._arrays import frameworks as _frameworks
from arraycomm.testing._arrays.oracle import NARROW
from tests.support import internals

Array = np.ndarray[Any, Any]
OnRanks = Callable[[Callable[[Communicator], Any]], None]

TIMEOUT = 60.0
LAUNCH = _launch.detect(os.environ)
_SETTINGS = {
    # Several ranks may share one device.
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    # Else the first rank's JAX takes most of the device's memory.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
# On devices in software: ranks that a test launches share one, which programs take without being told.
_SOFTWARE_SETTINGS = {"CUDA_VISIBLE_DEVICES": "0"}
# What says nothing there, or takes long to say it.
_NOT_IN_SOFTWARE = (
    "test_leaks.py",
    "test_kernels_on_device.py",
    "test_reading_waits_for_the_current_stream",
    *("-314572800]", "-67108860]", "jax", "torch", "OfTorch", "managed_memory"),
    "test_exchange_stays_on_the_device",
    "test_a_request_may_be_waited_for_in_another_stream[threads",
)
# One rank shows little of NCCL, and of the laws; two show of the rest what one has shown.
_NOT_ON_ONE_RANK = (
    "test_nccl_collectives.py",
    "test_conformance_on_device.py",
    "[nccl-",
    "test_input_may_be_overwritten",
    "test_the_host_does_not_wait",
    "test_calls_in_several_streams",
)
# Laws of what is beside links or above them: those over NCCL say it.
_NOT_OVER_MPI = ("dup", "join", "metrics", "objects", "split", "synchronize", "ties")
_NOT_ON_RANKS = ("test_door.py", "test_failures_on_device.py")
SPIN = """
extern "C" __global__ void spin(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - start < nanoseconds);
}
"""


def pytest_configure(config: pytest.Config) -> None:
    if config.rootpath == Path(__file__).parent:
        # With settings of its own, this folder is the topmost one whose `conftest` pytest reads.
        config.pluginmanager.register(import_module("tests.conftest"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    own = [item for item in items if item.path.is_relative_to(here)]
    for item in own:
        # What libraries of CUDA's warn of is no failure of what is tested.
        item.add_marker(pytest.mark.filterwarnings("default"))
    if device.missing() is None:
        if _is_software():
            _choose_for_software(config, items)
        return
    first = {item.nodeid.partition("[")[0]: item for item in reversed(own)}.values()
    left_out = set(own).difference(first)
    config.hook.pytest_deselected(items=[item for item in own if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _is_software() -> bool:
    import cupy

    return str(cupy.__version__).endswith("+software")


def _choose_for_software(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = _NOT_IN_SOFTWARE + (_NOT_ON_ONE_RANK if LAUNCH is None else _NOT_ON_RANKS)
    chosen: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        left_out = names + (_NOT_OVER_MPI if "::TestMpi::" in item.nodeid else ())
        chosen[not any(name in item.nodeid for name in left_out)].append(item)
    config.hook.pytest_deselected(items=chosen[False])
    # Programs that mostly sleep begin first, on one half of the workers.
    items[:] = sorted(chosen[True], key=lambda item: "test_failures" not in item.nodeid)
    half = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) // 2
    if half > 1:
        items[:] = [item for first in range(half) for item in items[first::half]]
    for item in items:
        # PyTorch's arrays of the laws stay on the host.
        if "arrays_on_device" in getattr(item, "fixturenames", ()):
            item.fixturenames.remove("arrays_on_device")  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def memory_of_streams(device_number: int) -> Iterator[None]:
    """Give back what CuPy keeps for the streams of a test, which are gone: other processes need it."""
    import cupy

    yield
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.fixture(scope="package", autouse=True)
def device_number() -> Iterator[int]:
    """This rank's device, which is the current one of CuPy and of PyTorch."""
    reason = device.missing()
    if reason is not None:
        pytest.skip(reason)
    import cupy

    with pytest.MonkeyPatch.context() as patch:
        settings = _SETTINGS | (_SOFTWARE_SETTINGS if _is_software() else {})
        if _is_software():
            # By no file of a driver.
            patch.setattr(_frameworks, "_device_is_here", lambda: True)
            _frameworks.installed_frameworks.cache_clear()
        for name, value in settings.items():
            if name not in os.environ:
                patch.setenv(name, value)
        number = device.choose_device(_local_rank(), None)
        with cupy.cuda.Device(number):
            yield number


def _local_rank() -> int:
    if LAUNCH is None:
        return 0
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).rank)


# Frameworks -------------------------------------------------------------------------------------


class Framework(NamedTuple):
    """One framework: arrays on the device of NumPy's, and back.

    `side` is a context in which a stream is current that waits for no other by itself; it gives the
    stream's handle, None where the framework shows none.
    """

    name: str
    make: Callable[[Array], Any]
    back: Callable[[Any], Array]
    side: Callable[[], AbstractContextManager[Any]]


def _cupy(number: int) -> Framework:
    import cupy

    def make(array: Array) -> Any:
        there = cupy.asarray(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return cupy.ndarray(array.shape, array.dtype, there.data)

    def back(array: Any) -> Array:
        if array.dtype not in NARROW:
            return np.asarray(array.get())
        return np.asarray(array.view(f"u{array.dtype.itemsize}").get().view(array.dtype))

    return Framework("cupy", make, back, lambda: cupy.cuda.Stream(non_blocking=True))


def _torch(number: int) -> Framework:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    torch.cuda.set_device(number)
    build, elements_of = _by_hypothesis("torch")

    def make(array: Array) -> Any:
        return build(np.array(array)).to(f"cuda:{number}")

    return Framework(
        "torch",
        make,
        lambda tensor: elements_of(tensor.detach().cpu()),
        lambda: torch.cuda.stream(torch.cuda.Stream()),
    )


def _by_hypothesis(name: str) -> tuple[Callable[[Array], Any], Callable[[Any], Array]]:
    """Return what makes a framework's arrays on the host, of any dtype, and what reads them."""
    pytest.importorskip("hypothesis")
    from arraycomm.testing._arrays.frameworks import FRAMEWORKS, elements_of

    return FRAMEWORKS[name].build, elements_of


def _jax(number: int) -> Framework:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no CUDA")
    there = jax.local_devices()[number]
    build, _ = _by_hypothesis("jax")

    def make(array: Array) -> Any:
        with jax.enable_x64(True):
            return jax.device_put(build(array), there)

    return Framework("jax", make, np.asarray, nullcontext)


_FRAMEWORKS = {"cupy": _cupy, "torch": _torch, "jax": _jax}


@pytest.fixture(params=_FRAMEWORKS)
def framework(request: pytest.FixtureRequest, device_number: int) -> Framework:
    return _FRAMEWORKS[request.param](device_number)


@pytest.fixture(params=["cupy", "torch"])
def writable(request: pytest.FixtureRequest, device_number: int) -> Framework:
    """A framework whose arrays can be written, in streams that it shows."""
    return _FRAMEWORKS[request.param](device_number)


def stream_of(framework: Framework) -> int:
    """Return the framework's current stream."""
    if framework.name == "torch":
        import torch

        return int(torch.cuda.current_stream().cuda_stream)
    import cupy

    return int(cupy.cuda.get_current_stream().ptr)


def spin(stream: int, seconds: float = 0.1) -> None:
    """Keep a stream busy."""
    import cupy

    kernel = cupy.RawKernel(SPIN, "spin")
    kernel((1,), (1,), (np.int64(1e9 * seconds),), stream=SimpleNamespace(ptr=stream))


def is_busy(stream: int) -> bool:
    """Return whether the device is still to do something that was put on a stream."""
    import cupy

    return bool(cupy.cuda.runtime.streamQuery(stream) != 0)


# Ranks ------------------------------------------------------------------------------------------


class Job:
    """The ranks of this job, of which there is one without mpiexec.

    They keep their communicator from test to test, since it takes NCCL long to make one, until a
    test fails.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._comm: Communicator | None = None
        self._missing = ""

    def __call__(self, fn: Callable[[Communicator], Any]) -> None:
        from mpi4py import MPI

        world, error = MPI.COMM_WORLD, None
        world.Barrier()
        comm = self.comm
        try:
            fn(comm)
        except Exception as raised:
            error = raised
            internals.close(comm, error)
        said = world.allgather("" if error is None else describe_exception(error))
        failed = [f"on rank {rank}:\n{text}" for rank, text in enumerate(said) if text]
        if failed:
            self._comm = None
        if error is not None:
            raise error
        if failed:
            pytest.fail(failed[0], pytrace=False)

    @property
    def comm(self) -> Communicator:
        if self._missing:
            pytest.skip(self._missing)
        if self._comm is None:
            try:
                self._comm = self._open()
            except BackendUnavailableError as error:
                self._missing = str(error)
                pytest.skip(self._missing)
        return self._comm

    def _open(self) -> Communicator:
        from mpi4py import MPI

        comm = internals.mpi_communicator(MPI.COMM_WORLD.Dup(), timeout=TIMEOUT)
        internals.require_backend(comm, self._backend)
        return comm

    def free(self) -> None:
        if self._comm is not None:
            self._comm.free()


def _threads(fn: Callable[[Communicator], Any]) -> None:
    run(3, fn, timeout=TIMEOUT)


@pytest.fixture(scope="package")
def nccl_job(device_number: int) -> Iterator[Job]:
    """The ranks of this job, joined by NCCL."""
    yield from _job("nccl")


@pytest.fixture(scope="package")
def mpi_job(device_number: int) -> Iterator[Job]:
    """The ranks of this job, joined by MPI, that reads device memory or is handed copies."""
    yield from _job("mpi")


def _job(backend: str) -> Iterator[Job]:
    pytest.importorskip("mpi4py")
    job = Job(backend)
    yield job
    job.free()


@pytest.fixture(params=["nccl", "mpi", *([] if LAUNCH else ["threads"])])
def on_ranks(request: pytest.FixtureRequest) -> OnRanks:
    """Runs a function on all ranks: each of the ways in which their arrays may go."""
    if request.param == "threads":
        return _threads
    job: OnRanks = request.getfixturevalue(f"{request.param}_job")
    return job
