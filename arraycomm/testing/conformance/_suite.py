"""All laws, over a communicator that a subclass chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arraycomm._communicator import Communicator
from arraycomm._transports.base import Transport
from arraycomm._transports.threads import make_group
from arraycomm.testing._ranks.rank_groups import RankGroup, Threads, lockstep_over
from arraycomm.testing.conformance._failures import FailureLaws
from arraycomm.testing.conformance._groups import GroupLaws
from arraycomm.testing.conformance._movements import MovementLaws
from arraycomm.testing.conformance._reductions import ReductionLaws
from arraycomm.testing.conformance._trees import TreeLaws


class Conformance(ReductionLaws, MovementLaws, TreeLaws, GroupLaws, FailureLaws):
    """All laws, over the communicator that a subclass chooses.

    Override `world` if every rank is a process, or `links` if ranks are threads of this one.
    Override `subject` to see which laws another library keeps. By default, ranks are threads that
    communicate as those of `arraycomm.testing.run` do.

    Attributes
    ----------
    most_ranks : int
        The largest number of ranks of an example, if ranks are threads.

    Notes
    -----
    pytest collects a subclass whose name begins with Test. It shows the values of a failed
    assertion after `pytest.register_assert_rewrite("arraycomm.testing")` in `conftest.py`. To leave
    a law out, set it to None in the subclass.

    Examples
    --------
    Under `mpiexec -n 4 python -m pytest`:

    >>> import functools
    >>> import arraycomm
    >>> from arraycomm.testing.conformance import Conformance
    >>> @functools.cache
    ... def over_my_ranks():
    ...     from mpi4py import MPI
    ...
    ...     return arraycomm.Communicator.from_mpi(MPI.COMM_WORLD)
    >>> class TestMyCommunicator(Conformance):
    ...     def world(self):
    ...         return over_my_ranks()
    """

    most_ranks: int = 4

    def world(self) -> Communicator | None:
        """Return this process's communicator, whose ranks run the suite in step.

        Returns
        -------
        Communicator or None
            The same object at every call, since every law calls this. None, the default, if ranks
            are threads.
        """
        return None

    def links(self, size: int) -> Sequence[Transport]:
        """Return new transports for ranks that are threads of this process.

        Parameters
        ----------
        size : int
            The number of ranks, from 1 to `most_ranks`.

        Returns
        -------
        sequence of Transport
            One for each rank, in rank order.
        """
        return make_group(size)

    def subject(self, comm: Communicator) -> Any:
        """Return what the laws are to hold for, on the ranks of one example.

        Override it for another library: any object with some of the methods of `Communicator`. Laws
        that call a method it does not have are skipped; the reason names the method.

        Parameters
        ----------
        comm : Communicator
            This rank's communicator of the example. `comm.mpi_comm` is that of mpi4py underneath;
            take a duplicate of it for messages of your own.

        Returns
        -------
        object
            `comm` itself by default.
        """
        return comm

    def _group(self) -> RankGroup:
        """Return the ranks that `given` runs the laws on."""
        comm = self.world()
        if comm is not None:
            return lockstep_over(comm)
        group = Threads(self.links)
        group.size = group.usual = self.most_ranks
        return group
