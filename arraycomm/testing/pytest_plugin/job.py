"""The ranks of an MPI job that run pytest in step, and what they tell one another.

They speak on a communicator that no test sees. A test's own communicator is made over a duplicate,
which the next test of as many ranks uses again if this one has left it in order.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any, Final

from arraycomm._communicator import Communicator
from arraycomm._errors import PeerError
from arraycomm._launch import Launch
from arraycomm._mpi_start import mpi_transport, refuse_other_launcher
from arraycomm._protocol.ends.meeting import meet
from arraycomm.testing._internals import LastStep, communicator_over
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


class RunEndedError(Exception):
    """Another rank has ended its run with this status, or cannot be reached any more."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class Job:
    """This process's part in the ranks that run pytest in step."""

    def __init__(self, launch: Launch, seconds: float) -> None:
        """Meet the other ranks; raise, or end this process, if one has not come in time."""
        mpi_transport(seconds)
        refuse_other_launcher(launch)
        from mpi4py import MPI

        meet(MPI.COMM_WORLD, "pytest", seconds)
        self._control = Communicator.from_mpi(MPI.COMM_WORLD, timeout=None)
        self.rank, self.size = self._control.rank, self._control.size
        # The processes of the ranks on the node of rank 0.
        places = self._control.allgather_object((socket.gethostname(), os.getpid()))
        self.near = {rank: pid for rank, (host, pid) in enumerate(places) if host == places[0][0]}
        # No more can be said: the run has ended on some rank.
        self.over = False
        # The transports of the tests.
        self.links = RankLinks(self._control)

    def exchange(self, kind: str, body: Any) -> list[Any]:
        """Tell all ranks something, and return what each told; all must be at the same `kind`."""
        if self.over:
            raise RunEndedError("the run has ended on another rank")
        try:
            replies = self._control.allgather_object((kind, body))
        except PeerError as error:
            self.over = True
            raise RunEndedError(str(error)) from error
        except BaseException:
            self.over = True
            raise
        differ = [(rank, reply) for rank, reply in enumerate(replies) if reply[0] != kind]
        if differ:
            self.over = True
            rank, (other, said) = differ[0]
            if other == END_OF_RUN:
                why = f": {said.why}" if said.why else ""
                raise RunEndedError(f"rank {rank} has ended it in {kind}{why}", said.status)
            raise RunEndedError(f"rank {rank} is at {other}, this rank at {kind}")
        return [said for _, said in replies]

    def abort(self) -> None:
        """End all processes of the job."""
        self._control.abort()

    def open(self, size: int, timeout: float) -> Communicator:
        """Return a new communicator of the first `size` ranks, on one of them."""
        link = self.links.of(size)
        assert link is not None, "only the first ranks run the test"
        return communicator_over(link, timeout)

    def leave(self, text: str) -> list[LastStep]:
        """Begin the last step of what a next test would wait on."""
        return [LastStep(communicator_over(link, 1.0), text) for link in self.links.kept()]
