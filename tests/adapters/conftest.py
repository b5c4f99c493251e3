"""The world, and frameworks of which tests are skipped where they are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import arraycomm as ac
from tests.support.on_ranks import LAUNCH


@pytest.fixture(scope="module")
def world() -> Iterator[ac.Communicator]:
    """Return the world: the processes that mpiexec started, as `test_processes` does."""
    if LAUNCH is None:
        pytest.skip("one process alone shows little of what several show")
    yield ac.init()
    ac.finalize()


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


@pytest.fixture
def optax() -> Any:
    return pytest.importorskip("optax")
