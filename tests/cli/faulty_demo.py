"""The demonstration with one fault after the other, in one job; see `test_demo.py`.

Rank 0 prints the name of a fault, what the demonstration says, and with which status it ended on each
rank. The last fault ends the job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest

import arraycomm as ac
from arraycomm._training.gradients import Gradients
from arraycomm.cli import main
from arraycomm.cli.demo import data as demo_data

Fault = Callable[[pytest.MonkeyPatch], None]


def _unreduced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gradients, "add", lambda self, tree, *_: (True, tree))


def _unsynchronized(patch: pytest.MonkeyPatch) -> None:
    # Otherwise the first step raises.
    unaware = partial(ac.DistributedOptimizer, verify_every=0)
    patch.setattr(ac, "DistributedOptimizer", unaware)
    patch.setattr(ac, "synchronize", lambda tree, **_: tree)


def _incomplete(patch: pytest.MonkeyPatch) -> None:
    make = demo_data.batches
    patch.setattr(
        demo_data, "batches", lambda part, count, comm: make(part, count - (comm.size > 1), comm)
    )


def _raising(patch: pytest.MonkeyPatch) -> None:
    make = demo_data.batches

    def batches(part: Any, count: int, comm: ac.Communicator) -> Any:
        if comm.rank == 1:
            raise OSError("the disk of rank 1 is gone")
        return make(part, count, comm)

    patch.setattr(demo_data, "batches", batches)


# What can go wrong in a data-parallel program. The run in one process stays right.
FAULTS: Final[dict[str, Fault]] = {
    "the gradients are not reduced": _unreduced,
    "the parameters are not synchronized": _unsynchronized,
    "the last image of an epoch is left out": _incomplete,
}
NONE: Final = "nothing is wrong"
RAISES: Final = "a rank raises"


def show(name: str, fault: Fault, epochs: str) -> None:
    """Run the demonstration with a fault."""
    world = ac.init()
    if world.rank == 0:
        print(f"<{name}>", flush=True)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        status = main(
            ["demo", "--frameworks", "numpy", "--epochs", epochs, "--picture", os.devnull]
        )
    everyone = world.allgather_object(status)
    if world.rank == 0:
        print(f"<status {everyone}>", flush=True)


if __name__ == "__main__":
    show(NONE, lambda patch: None, sys.argv[1])
    for name, fault in FAULTS.items():
        show(name, fault, "2")
    show(RAISES, _raising, "2")
