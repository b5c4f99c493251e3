"""The transports of tests that run on the first ranks of a job, kept from one test to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arraycomm._communicator import Communicator
from arraycomm._transports.base import Transport
from arraycomm.testing._internals import free_transports, split_transport


@dataclass
class Left:
    """How a rank has left the communicator of a test."""

    # Whether every rank ended well, in the same step, and whether nothing is outstanding.
    in_step: bool = True
    clean: bool = True
    # Messages sent minus messages received: unmatched ones would be received in later tests.
    unmatched: int = 0


class RankLinks:
    """The transports of the first ranks, by their number.

    Parameters
    ----------
    control : Communicator
        All ranks, on a communicator that tests do not see.
    """

    def __init__(self, control: Communicator) -> None:
        self._control = control
        self._kept: dict[int, Transport | None] = {}

    def __contains__(self, size: int) -> bool:
        return size in self._kept

    def of(self, size: int) -> Transport | None:
        """Return the transport of the first `size` ranks, None on the others; collective."""
        if size not in self._kept:
            color = 0 if self._control.rank < size else None
            self._kept[size] = split_transport(self._control, color, range(size))
        return self._kept[size]

    def let_go(self, comm: Communicator | None, size: int, left: Sequence[Left]) -> None:
        """Keep the transport for the next test if all ranks left it in step; free what is free."""
        matched = sum(other.unmatched for other in left) == 0
        in_step = matched and all(other.in_step for other in left)
        if not in_step:
            del self._kept[size]
        if comm is not None and matched and all(other.clean for other in left):
            free_transports(comm, keep_own=in_step)
