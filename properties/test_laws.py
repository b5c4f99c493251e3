"""The laws of collectives, over every transport there is.

Those over threads run where pytest is alone, those over MPI where every rank of
`mpiexec -n 4 python -m pytest properties` runs them in step, and those over processes under `make test-processes`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import hypothesis

import arraycomm
from arraycomm import _launch
from arraycomm._communicator import Communicator
from arraycomm._transports.base import Transport
from arraycomm._transports.threads import SelfTransport
from arraycomm.testing import ArrayCase
from arraycomm.testing._arrays.rank_values import RankValues
from arraycomm.testing.conformance import Conformance
from arraycomm.testing.conformance._inputs import Arrays, Reduction, Sealed
from tests.support import internals

TIMEOUT = 60.0

# Keys in the other order and colors, all of which differ by hundreds, are seldom drawn.
for _colors, _keys in (((0, 0, 0), (300, 200, 100)), ((0, 100, 200), (0, 0, 0))):
    hypothesis.example(
        ranks=3,
        colors=Sealed(RankValues(*_colors)),
        outside=Sealed(RankValues(False, False, False)),
        keys=Sealed(RankValues(*_keys)),
        reduction=Reduction("sum", Arrays(RankValues(*[ArrayCase("int8", ())] * 3))),
    )(Conformance.test_split_partitions)

# Whether this is one of several processes that no MPI connects: see `make test-processes`.
NUMBERED = _launch.RANK in os.environ

if NUMBERED:

    class TestProcesses(Conformance):
        def world(self) -> Communicator:
            return arraycomm.init()

elif _launch.detect(os.environ) is None:

    class TestThreads(Conformance):
        most_ranks = 8

    class TestSelf(Conformance):
        most_ranks = 1

        def links(self, size: int) -> Sequence[Transport]:
            return [SelfTransport()]

else:

    @functools.cache
    def over_mpi(*, share: bool) -> Communicator:
        """Return a communicator whose board is in shared memory, or goes by messages."""
        from mpi4py import MPI

        return internals.mpi_communicator(MPI.COMM_WORLD.Dup(), share=share, timeout=TIMEOUT)

    class TestSharedMemory(Conformance):
        def world(self) -> Communicator:
            return over_mpi(share=True)

    class TestMessages(Conformance):
        def world(self) -> Communicator:
            return over_mpi(share=False)
