"""Takes up the ranks of a job, if an MPI launcher has started this process with others."""

from __future__ import annotations

import os
from typing import Any

import pytest

from arraycomm import _launch
from arraycomm._errors import ArrayCommError


def take_up_ranks(config: pytest.Config, key: pytest.StashKey[Any]) -> None:
    """Let the ranks of this job run pytest in step; do nothing in a process that is alone."""
    launch = _launch.detect(os.environ)
    if launch is None or launch.size == 1 or _launch.claimed_by(os.environ, os.getpid()):
        return
    _refuse_xdist(config)
    from arraycomm.testing.pytest_plugin.in_step import InStep
    from arraycomm.testing.pytest_plugin.job import Job

    try:
        job = Job(launch)
    except ArrayCommError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[key] = ranks = InStep(config, job)
    config.pluginmanager.register(ranks, "arraycomm-ranks")


def _refuse_xdist(config: pytest.Config) -> None:
    """Raise if pytest-xdist is to start processes, of which no launcher knows."""
    option = config.option
    if getattr(option, "numprocesses", None) or getattr(option, "tx", None):
        raise pytest.UsageError(
            "pytest-xdist cannot be used under mpiexec: each rank would start workers of its own, "
            "which are no ranks; leave out -n, --dist and --tx, or mpiexec"
        )
