"""What one rank has recorded: each call and message in a line, and the facts that explain them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

# Blocking calls, calls that were started and go on beside the program, and messages of both kinds;
# and the times for which the program was held up in `Request.wait`.
CALL, REQUEST, SEND, RECV, ISEND, IRECV = "call", "request", "send", "recv", "isend", "irecv"
WAIT: Final = "wait"
MESSAGES: Final = (SEND, RECV, ISEND, IRECV)
BLOCKING: Final = (CALL, SEND, RECV, WAIT)

# Records that a rank keeps; of further ones it keeps the number.
MAX_RECORDS: Final = 200_000


class Record(NamedTuple):
    """One call or message of one rank. Times are nanoseconds of this rank's clock; 0 is never.

    Attributes
    ----------
    operation, kind, described : str
        The operation; which kind of record; the call with its op, dtype and shape.
    group : int
        The communicator, by its number in `Part.groups`.
    step : int
        The step of the control channel that was the call's first: the same on every rank.
    started, posted, agreed, ended : int
        When the call was made, when this rank showed its header, when it saw that all ranks had
        shown theirs, and when it had the result.
    nbytes : int
        Bytes of the array passed, or received by a message.
    algorithm, site, error : str
        How the elements moved, the user's line, and the type of the exception that ended the call.
    peer, tag : int
        The other rank of a message in its communicator, and the tag; -1 if there is none.
    """

    operation: str
    kind: str
    described: str
    group: int
    step: int
    started: int
    posted: int
    agreed: int
    ended: int
    nbytes: int
    algorithm: str
    site: str
    error: str
    peer: int = -1
    tag: int = -1


class Clock(NamedTuple):
    """What to add to a rank's clock to get rank 0's, found at `at` on the rank's own.

    It is right to within `uncertainty`. All are nanoseconds.
    """

    at: int
    offset: int
    uncertainty: int


@dataclass
class Part:
    """One rank's part of a trace.

    Attributes
    ----------
    rank, size : int
        The rank in the communicator that is traced, and how many there are.
    host : str
        The name of its machine.
    run : str
        The same on all ranks, and in no other trace.
    clocks : list of Clock
        What is known of its clock, in the order of time.
    groups : list of (name, ranks)
        The communicators of the records, each with its ranks in the family's first group.
    records : list of Record
        In the order in which they ended.
    dropped : int
        Records that were not kept.
    """

    rank: int
    size: int
    host: str
    run: str
    clocks: list[Clock] = field(default_factory=list)
    groups: list[tuple[str, list[int]]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    dropped: int = 0

    def head(self) -> dict[str, Any]:
        """Return all but the records, as JSON has it."""
        return {
            name: getattr(self, name)
            for name in ("rank", "size", "host", "run", "clocks", "groups", "dropped")
        }

    @classmethod
    def of(cls, head: dict[str, Any], records: list[list[Any]]) -> Part:
        """Return a part from what `head` has returned, and from records as JSON has them."""
        made = cls(**head)
        made.clocks = [Clock(*clock) for clock in made.clocks]
        made.groups = [(name, list(ranks)) for name, ranks in made.groups]
        made.records = [Record(*record) for record in records]
        return made
