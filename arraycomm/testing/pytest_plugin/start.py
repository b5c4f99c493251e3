"""Takes up the ranks of a job, if an MPI launcher has started this process with others."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import Any, Final

import pytest

from arraycomm import _launch
from arraycomm._errors import ArrayCommError
from arraycomm._protocol.mismatch import name_ranks
from arraycomm._start.meeting import ranks_here
from arraycomm.testing.pytest_plugin.selection import NOT_AGAIN

# Seconds in which ranks meet, also one that has failed; and those between two looks at them.
_MEETING: Final = 60.0
_LOOK: Final = 2.0


def take_up_ranks(config: pytest.Config, key: pytest.StashKey[Any]) -> None:
    """Let the ranks of this job run pytest in step; do nothing in a process that is alone."""
    launch = launch_of_this()
    if launch is None:
        return
    refuse_others(config)
    from arraycomm.testing.pytest_plugin.in_step import InStep
    from arraycomm.testing.pytest_plugin.job import Job

    begun = threading.Event()
    threading.Thread(target=_end_without, args=(begun,), daemon=True).start()
    try:
        job = Job(launch, max(config.getoption("ranks_timeout"), _MEETING))
    except ArrayCommError as error:
        raise pytest.UsageError(str(error)) from error
    finally:
        begun.set()
    config.stash[key] = ranks = InStep(config, job)
    config.pluginmanager.register(ranks, "arraycomm-ranks")


def launch_of_this() -> _launch.Launch | None:
    """Return what has started this process as a rank among others; None if it is alone."""
    launch = _launch.detect(os.environ)
    alone = launch is None or launch.size == 1 or _launch.claimed_by(os.environ, os.getpid())
    return None if alone else launch


def end_before_others() -> None:
    """Tell the other ranks that this one ends before its tests, so that they do so as well."""
    from arraycomm.testing.pytest_plugin.job import END_OF_RUN, EndOfRun, Job

    launch = launch_of_this()
    if launch is not None:
        with suppress(Exception):
            why = "it could not load its conftest.py, and has said why"
            end = EndOfRun(int(pytest.ExitCode.USAGE_ERROR), why, [])
            Job(launch, _MEETING).exchange(END_OF_RUN, end)


def _end_without(begun: threading.Event) -> None:
    """End this process if MPI cannot begin: a rank of this node is not there any more.

    Some launchers let the other ranks wait for it for ever.
    """
    local = os.environ.get("MPI_LOCALNRANKS", "")
    while local.isdigit() and not begun.wait(_LOOK):
        here = ranks_here()
        if len(here) < int(local) and not begun.wait(_LOOK):
            sys.stderr.write(
                f"arraycomm: {int(local) - len(here)} of the {local} ranks of this node ended "
                f"before MPI had begun; so {name_ranks(sorted(here))} ends too\n"
            )
            sys.stderr.flush()
            os._exit(int(pytest.ExitCode.USAGE_ERROR))


def refuse_others(config: pytest.Config) -> None:
    """Raise if another plugin is to run the tests: processes of no launcher, or not in step."""
    option = config.option
    for name in ("reruns", "retries", "force_flaky"):
        if getattr(option, name, None):
            raise pytest.UsageError(
                f"--{name.replace('_', '-')} cannot be used under mpiexec: {NOT_AGAIN}, or "
                "run on threads: --ranks N"
            )
    if getattr(option, "numprocesses", None) or getattr(option, "tx", None):
        raise pytest.UsageError(
            "pytest-xdist cannot be used under mpiexec: each rank would start workers of its own, "
            "which are no ranks; leave out -n, --dist and --tx, or mpiexec"
        )
