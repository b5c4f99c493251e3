"""The ranks of an MPI job that run pytest in step, and what they tell one another.

They speak on a communicator that no test sees. A test's own communicator is made over a duplicate,
which the next test of as many ranks uses again if this one has left it in order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

import pytest

from arraycomm._communicator import Communicator
from arraycomm._errors import PeerError
from arraycomm._launch import Launch
from arraycomm._launch.places import host, namespaces
from arraycomm._start.meeting import forget, meet, stay_away
from arraycomm._start.over_mpi import mpi_transport, refuse_other_launcher
from arraycomm.testing._ranks.rank_links import RankLinks
from arraycomm.testing.pytest_plugin.warned import Recorded

# What a rank tells that ends its run, with an `EndOfRun`.
END_OF_RUN: Final = "the end of the run"


@dataclass
class EndOfRun:
    """What a rank tells at the end of its run."""

    status: int
    # Why it has ended before its time, if it has.
    why: str
    warnings: list[Recorded]


class Job:
    """This process's part in the ranks that run pytest in step."""

    def __init__(self, launch: Launch, seconds: float) -> None:
        """Meet the other ranks; raise, or end this process, if one has not come in time."""
        mpi_transport(seconds)
        refuse_other_launcher(launch)
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        meet(self._world, "pytest", seconds)
        self._control = Communicator.from_mpi(self._world, timeout=None)
        self.rank, self.size = self._control.rank, self._control.size
        # The processes that rank 0 sees, and that see its files.
        places = self._control.allgather_object(((host(), namespaces()), os.getpid()))
        self.near = {rank: pid for rank, (place, pid) in enumerate(places) if place == places[0][0]}
        # No more can be said: the run has ended on some rank.
        self.over = False
        # The transports of the tests.
        self.links = RankLinks(self._control)

    def exchange(self, kind: str, body: Any) -> list[Any]:
        """Tell all ranks something, and return what each told.

        All must be at the same `kind`. End the run if another rank has ended it, or cannot be
        reached any more.
        """
        if self.over:
            pytest.exit("the run ends: the run has ended on another rank", 1)
        self.over = True
        try:
            replies = self._control.allgather_object((kind, body))
        except PeerError as error:
            pytest.exit(f"the run ends: {error}", 1)
        for rank, (other, said) in enumerate(replies):
            if other == END_OF_RUN != kind:
                why = f": {said.why}" if said.why else ""
                pytest.exit(f"the run ends: rank {rank} has ended it in {kind}{why}", said.status)
            if other != kind:
                pytest.exit(f"the run ends: rank {rank} is at {other}, this rank at {kind}", 1)
        self.over = False
        return [said for _, said in replies]

    def stay_away(self, why: str) -> None:
        """Let ranks that are in `init`, or come to it, know that this one does not in this test."""
        stay_away(self._world, f"rank {self.rank} does not come, as it {why}")

    def come_again(self) -> None:
        """Forget who has stayed away; collective."""
        forget(self._world)

    def abort(self) -> None:
        """End all processes of the job."""
        self._control.abort()
