"""The transports of tests that run on the first ranks of a job, kept from one test to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arraycomm._communicator import Communicator
from arraycomm._protocol.mismatch import name_ranks
from arraycomm._transports.base import Transport
from arraycomm.testing._internals import free_transports, split_transport, take_up_rest


@dataclass
class Left:
    """How a rank has left the communicator of a test."""

    # Whether every rank ended well, in the same step, and whether nothing is outstanding.
    in_step: bool = True
    clean: bool = True
    # Messages sent minus messages received: unmatched ones would be received in later tests.
    unmatched: int = 0
    # Whether a request has not ended, and whether no error has closed the communicator.
    pending: bool = False
    is_open: bool = True
    # How many groups could be freed after `take_up_rest`; 0 if some could not.
    groups: int = 0
    # The error of a request that nobody has waited for.
    unseen: str = ""


def can_take_up(groups: Sequence[int]) -> bool:
    """Return whether the ranks have the same groups, of which all can be freed."""
    return len(set(groups)) == 1 and groups[0] > 0


def fault_of(left: Sequence[Left]) -> str:
    """Return what a test that has passed must not leave behind, and what to write; or nothing."""
    failed = [(rank, other.unseen) for rank, other in enumerate(left) if other.unseen]
    if failed:
        rank, text = failed[0]
        return (
            f"the test has passed, but a request of {name_ranks([rank])} has failed, and nobody "
            f"has waited for it: call wait() on each request.\n{text}"
        )
    if not all(other.is_open for other in left):
        # An error has ended the communicator, which the test expected.
        return ""
    pending = [rank for rank, other in enumerate(left) if other.pending]
    if pending:
        return (
            f"the test has passed, but a request of {name_ranks(pending)} has not ended: call "
            "wait() on what isend, irecv or another request returned, and send what it waits for"
        )
    lost = sum(other.unmatched for other in left)
    if lost <= 0:
        # Less than none if receives were given up.
        return ""
    what = f"{lost} messages that were sent" if lost > 1 else "a message that was sent"
    return f"the test has passed, but no rank has received {what}: call recv() for each send()"


class RankLinks:
    """The transports of the first ranks, by their number."""

    def __init__(self, control: Communicator) -> None:
        # Of all ranks; tests do not see it.
        self._control = control
        self._kept: dict[int, Transport | None] = {}

    def __contains__(self, size: int) -> bool:
        return size in self._kept

    def kept(self) -> list[Transport]:
        """Return the transports of this rank that a next test may use."""
        return [link for link in self._kept.values() if link is not None]

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
        if comm is None:
            return
        clean = matched and all(other.clean for other in left)
        groups = [other.groups for other in left[:size]]
        if clean or (can_take_up(groups) and take_up_rest(comm)):
            free_transports(comm, keep_own=in_step)
