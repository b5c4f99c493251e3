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

# On each MPI: what compiled programs, backward passes and exchanges leave under way.
_EACH: Final = {
    "numpy": (),
    "sklearn": ("test_joblib.py::TestOnProcesses",),
    "jax": (),
    "torch": (
        "test_shard.py::TestOnProcesses",
        "test_torch_training.py::TestProcesses",
        "test_torch_memory.py::TestProcesses",
        "test_torch_parameters.py::TestProcesses",
    ),
}
# Loops are the same over any transport: those of JAX train under one MPI.
_MPICH: Final = {
    "numpy": (),
    "sklearn": (),
    # Laws of compiled updates are compiled for a long time, and know nothing of the MPI.
    "jax": (
        "test_jax_adapter.py::TestCompiled",
        "test_accumulation.py::TestCompiled",
        "../training/test_compression.py::TestCompiled",
    ),
    "torch": (),
}
_OPEN_MPI: Final = {
    "numpy": (),
    "sklearn": (),
    "jax": ("test_jax_adapter.py::TestLoops",),
    "torch": ("test_torch_collectives.py::TestProcesses",),
}


@needs_mpiexec
@pytest.mark.each_mpi
def test_on_several_processes() -> None:
    # As everywhere, an even number of ranks under one MPI, and an odd one under the other.
    here, ranks = (_OPEN_MPI, 3) if is_open_mpi() else (_MPICH, 2)
    tests = [name for module in here if find_spec(module) for name in _EACH[module] + here[module]]
    if not tests:
        pytest.skip("needs torch or JAX")
    # Forward mode needs torch's compiler, which takes as long to import as all else.
    job = run_pytest(
        *(f"{Path(__file__).parent}/{name}" for name in tests), ranks=ranks, compiles=is_open_mpi()
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert " passed" in job.stdout
