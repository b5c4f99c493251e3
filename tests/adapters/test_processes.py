"""The adapters on ranks that are processes: everything that needs them, of every framework, in one program.

Importing the frameworks takes longer than all of these tests together.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from tests.support.launched import run_pytest
from tests.support.launcher import is_open_mpi, needs_mpiexec

_NUMPY: Final = ("test_numpy_adapter.py::TestContract", "test_shard.py::TestOnProcesses")
_JAX: Final = (
    "test_jax_adapter.py::TestContract",
    "test_jax_adapter.py::TestCompiled",
    "test_accumulation.py::TestCompiled",
    "../training/test_compression.py::TestCompiled",
)
_TORCH: Final = (
    "test_torch_adapter.py::TestContract",
    "test_torch_training.py::TestProcesses",
    "../training/test_compression.py::TestTorchProcesses",
    "test_torch_collectives.py::TestProcesses",
    "test_torch_collectives.py::test_gradient_is_that_of_the_sum_of_all_losses",
    "test_torch_batchnorm.py::test_training_is_that_of_one_process_with_the_whole_batch",
)


@needs_mpiexec
@pytest.mark.each_mpi
def test_on_three_processes() -> None:
    # The laws of compiled updates are compiled for a long time, and know nothing of the MPI.
    here = {"jax": _JAX[is_open_mpi() :], "torch": _TORCH}
    tests = [*_NUMPY, *(name for module in here if find_spec(module) for name in here[module])]
    job = run_pytest(*(f"{Path(__file__).parent}/{name}" for name in tests), ranks=3)
    assert job.returncode == 0, job.stdout + job.stderr
    assert " passed" in job.stdout
