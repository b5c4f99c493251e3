"""The ranks of an MPI job that run pytest in step, what they tell, and the test that they run.

They speak on a communicator that no test sees. A test's own communicator is made over a duplicate,
which the next test of as many ranks uses again if this one has left it in order.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from arraycomm._callsite import describe_exception
from arraycomm._communicator import Communicator
from arraycomm._errors import CommTimeoutError, PeerError
from arraycomm._launch import Launch
from arraycomm._launch.places import host, namespaces
from arraycomm._start.meeting import forget, meet, stay_away
from arraycomm._start.over_mpi import mpi_transport, refuse_other_launcher
from arraycomm._transports.base import Transport
from arraycomm.testing._failures import is_skip
from arraycomm.testing._internals import LastStep, communicator_over, has_world, leave_world
from arraycomm.testing._ranks.rank_links import RankLinks
from arraycomm.testing.pytest_plugin.outcomes import Outcome
from arraycomm.testing.pytest_plugin.warned import Recorded

# Seconds after which ranks that wait for one another have all timed out, if one has.
TOGETHER: Final = 1.0
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


@dataclass
class Running:
    """The test that runs, as far as its ranks are concerned."""

    item: Any
    # The number of ranks of its communicator; 0 if it takes none.
    size: int
    # What its communicator is made over, on the ranks that run it.
    link: Transport | None
    timeout: float
    job: Job
    comm: Communicator | None = None
    last: LastStep | None = None
    # The last step of the world, which a failure on this rank ends.
    world: LastStep | None = None
    reports: list[pytest.TestReport] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    # Subtests that have failed on this rank, as pytest serializes their reports.
    parts: list[Any] = field(default_factory=list)
    # Whether a wait or the test has taken too long on this rank.
    is_late: bool = False
    # Whether ranks that come to `init` are told that this one does not.
    is_away: bool = False

    def open(self) -> Communicator:
        """Make its communicator."""
        assert self.link is not None
        self.comm = communicator_over(self.link, self.timeout)
        return self.comm

    def end_communication(self, error: BaseException | None) -> None:
        """Let the other ranks know that this one makes no more calls."""
        # The rank whose error it was has told of it; and at the end of the run nobody would forget.
        others = (PeerError, KeyboardInterrupt, pytest.exit.Exception)
        if not (error is None or isinstance(error, others) or has_world() or self.is_away):
            self.is_away = True
            self.job.stay_away(f"raised {type(error).__name__}: {error}")
        if error is not None and self.world is None and not is_skip(error):
            self.world = leave_world(describe_exception(error))
        if self.last is not None or self.size == 0:
            return
        if self.comm is None and error is not None and self.link is not None:
            # The others wait for it in the test, to which this rank does not come.
            self.open()
        if self.comm is None:
            return
        if isinstance(error, CommTimeoutError):
            self.is_late = True
            # The other ranks that wait are to time out as well, and show where they wait.
            time.sleep(min(self.timeout, TOGETHER))
        self.last = LastStep(self.comm, "" if error is None else describe_exception(error))
