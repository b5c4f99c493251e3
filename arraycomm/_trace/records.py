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
    """One call or message of one rank. Times are nanoseconds of this rank's clock; 0 is never."""

    operation: str
    kind: str
    # The call with its op, dtype and shape.
    described: str
    # The communicator, by its number in `Part.groups`.
    group: int
    # The step of the control channel that was the call's first: the same on every rank.
    step: int
    started: int
    # When this rank showed its header, and when it saw that all ranks had shown theirs.
    posted: int
    agreed: int
    ended: int
    # Bytes of the array passed, or received by a message.
    nbytes: int
    # How the elements moved, the user's line, and the type of the exception that ended the call.
    algorithm: str
    site: str
    error: str
    # The other rank of a message in its communicator, and the tag; -1 if there is none.
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
    """One rank's part of a trace of `size` ranks."""

    rank: int
    size: int
    # The name of its machine.
    host: str
    # The same on all ranks, and in no other trace.
    run: str
    # What is known of its clock, in the order of time.
    clocks: list[Clock] = field(default_factory=list)
    # The communicators of the records, each with its ranks in the family's first group.
    groups: list[tuple[str, list[int]]] = field(default_factory=list)
    # In the order in which they ended.
    records: list[Record] = field(default_factory=list)
    # How many records were not kept.
    dropped: int = 0

    @classmethod
    def of(cls, stored: dict[str, Any]) -> Part:
        """Return a part from its attributes as JSON has them."""
        clocks = [Clock(*clock) for clock in stored["clocks"]]
        records = [Record(*record) for record in stored["records"]]
        return cls(**{**stored, "clocks": clocks, "records": records})
