"""Programs of collectives and messages on many communicators do on every rank what a model says.

Those over threads run where pytest is alone, those over MPI where every rank of
`mpiexec -n 4 python -m pytest properties` runs them in step.
"""

from __future__ import annotations

import os

import hypothesis
import pytest
from hypothesis import strategies as st

from arraycomm import Communicator, _launch
from arraycomm.testing import given, run
from arraycomm.testing._ranks.rank_groups import RankGroup, lockstep_over
from properties.programs import Player, Program, programs
from properties.test_laws import TIMEOUT

LAUNCHED = _launch.detect(os.environ) is not None
EXAMPLES = hypothesis.settings(max_examples=int(os.environ.get("EXAMPLES") or "60"))


class Machine:
    """Subclasses say over what."""

    @EXAMPLES
    @given(program=programs(), timeout=TIMEOUT)
    def test_every_rank_gets_what_the_model_says(
        self, comm: Communicator, program: Program
    ) -> None:
        Player(comm, program).play()


if LAUNCHED:
    from properties.test_laws import over_mpi

    class TestSharedMemory(Machine):
        def _group(self) -> RankGroup:
            return lockstep_over(over_mpi(share=True))

    class TestMessages(Machine):
        def _group(self) -> RankGroup:
            return lockstep_over(over_mpi(share=False))

else:

    class TestThreads(Machine):
        pass


@pytest.mark.skipif(LAUNCHED, reason="runs where pytest is alone")
@EXAMPLES
@hypothesis.given(program=st.integers(1, 4).flatmap(programs), seed=st.integers(0, 2**24 - 1))
def test_no_schedule_shows_in_what_ranks_get(program: Program, seed: int) -> None:
    run(program.size, lambda comm: Player(comm, program).play(), schedule=seed)
