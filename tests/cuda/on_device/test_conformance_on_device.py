"""The laws of collectives over arrays on a device: CuPy's, PyTorch's there, JAX's, and the host's.

`EXAMPLES=200 mpiexec -n 2 python -m pytest tests/cuda/on_device/test_conformance_on_device.py` tries more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

hypothesis = pytest.importorskip("hypothesis")
_before = hypothesis.settings.get_current_profile_name()
hypothesis.settings.register_profile(
    "device", max_examples=int(os.environ.get("EXAMPLES") or "15"), print_blob=True, database=None
)
# The laws take up the profile that is loaded when they are imported; other tests keep theirs.
hypothesis.settings.load_profile("device" if _before != "properties" else _before)

from arraycomm import Communicator  # noqa: E402
from arraycomm.testing._arrays import frameworks as _frameworks  # noqa: E402
from arraycomm.testing.conformance import Conformance  # noqa: E402
from tests.cuda.on_device.conftest import LAUNCH, Job  # noqa: E402

hypothesis.settings.load_profile(_before)

Array = np.ndarray[Any, Any]


def _torch_on_device(array: Array) -> Any:
    """Return a tensor on the device that lies there as the array lies in its memory."""
    import torch

    here = _frameworks._build_torch(array)
    memory: Any = array.base
    there = torch.from_numpy(memory).cuda().untyped_storage()
    start = (array.ctypes.data - memory.ctypes.data) // array.itemsize
    empty = torch.empty(0, dtype=here.dtype, device="cuda")
    return empty.set_(there, start, here.shape, here.stride())


@pytest.fixture(scope="module", autouse=True)
def arrays_on_device(device_number: int) -> Iterator[None]:
    """Have PyTorch's arrays made on the device, as CuPy's and JAX's are."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    torch.cuda.set_device(device_number)
    made = _frameworks.FRAMEWORKS["torch"]._replace(build=_torch_on_device)
    with mock.patch.dict(_frameworks.FRAMEWORKS, torch=made):
        yield


_jobs: dict[str, Job] = {}


class _OverJob(Conformance):
    backend = "nccl"

    @pytest.fixture(autouse=True, scope="class")
    def _job(self, request: pytest.FixtureRequest) -> None:
        _jobs[self.backend] = request.getfixturevalue(f"{self.backend}_job")
        # The ranks find out here whether they can, and not within an example.
        _ = _jobs[self.backend].comm

    def world(self) -> Communicator:
        return _jobs[self.backend].comm


class TestNccl(_OverJob):
    # NCCL demands the calls of all communicators in one order.
    in_any_order = False


class TestMpi(_OverJob):
    backend = "mpi"


if LAUNCH is None:

    class TestThreads(Conformance):
        most_ranks = 3
