"""The world, and frameworks of which tests are skipped where they are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import arraycomm as ac


@pytest.fixture(scope="module")
def world() -> Iterator[ac.Communicator]:
    """Return the world: one process, or those that mpiexec started."""
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
