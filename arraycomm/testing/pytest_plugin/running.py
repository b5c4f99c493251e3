"""The test that runs, as far as its ranks are concerned."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from arraycomm._callsite import describe_exception
from arraycomm._communicator import Communicator
from arraycomm._errors import CommTimeoutError, PeerError
from arraycomm._transports.base import Transport
from arraycomm.testing._failures import is_skip
from arraycomm.testing._internals import LastStep, communicator_over, has_world, leave_world
from arraycomm.testing.pytest_plugin.job import Job
from arraycomm.testing.pytest_plugin.outcomes import Outcome

# Seconds after which ranks that wait for one another have all timed out, if one has.
TOGETHER: Final = 1.0


@dataclass
class Running:
    """The state of one test on this rank."""

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
