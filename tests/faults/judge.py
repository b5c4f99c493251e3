"""Whether what came of a program on each rank is what the contract says.

Nothing is taken on trust: an error must have a reason in what the ranks have done, and that reason
must itself be the deviation or follow from it. What may come of each kind of deviation stands in
`MAY_END`, and the reasons in `_Judge`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tests.faults.deviations import DISAGREEING
from tests.faults.oracle import agreed
from tests.faults.play import Event, Trace
from tests.faults.programs import COLLECTIVE, ENDING, MESSAGES, Action, Program
from tests.faults.simulation import awaited, counterpart
from tests.faults.values import ON_PURPOSE

MISMATCH, PEER, TIMEOUT = "MismatchError", "PeerError", "CommTimeoutError"
DEADLOCK: Final = "DeadlockError"
CLOSED: Final = "CommunicatorClosedError"
RETURNED, OWN, ASLEEP, CUT = "returned", "own", "asleep", "cut"

# Seconds in which all ranks of a call have its MismatchError, from the last one's arrival.
MISMATCH_LIMIT: Final = 1.0
# Seconds beyond the timeout, where there is one to wait for, in which a program has ended.
LIMIT: Final = 5.0

# How ranks may end, by the kind of deviation. CommTimeoutError comes only where a program stops for
# ever (see `stuck`): where somebody sleeps, where ranks wait for one another on two communicators,
# or for a message that nobody sends. Where a deviation is none, all return.
_WAITING: Final = frozenset({TIMEOUT, DEADLOCK})
_DISAGREED: Final = frozenset({RETURNED, MISMATCH, PEER}) | _WAITING
MAY_END: Final[dict[str, frozenset[str]]] = {
    "none": frozenset({RETURNED}),
    "slow": frozenset({RETURNED}),
    **dict.fromkeys(DISAGREEING, _DISAGREED),
    # Ranks find that they wait for one another before any of them times out.
    "crossed": _DISAGREED - {TIMEOUT},
    # Raised, and told, inside the call: all go on.
    "argument": frozenset({RETURNED}),
    **dict.fromkeys(("raise", "interrupt", "exit"), frozenset({RETURNED, OWN, PEER})),
    "leave": frozenset({RETURNED, OWN, PEER}) | _WAITING,
    # Who gives up is a rank that leaves, for those that have not waited as long.
    "sleep": frozenset({RETURNED, ASLEEP, PEER}) | _WAITING,
    **dict.fromkeys(("kill", "die"), frozenset({RETURNED, OWN, PEER, CUT})),
    # At the end the rank that has not waited for its request tells of its error.
    "lost error": frozenset({RETURNED}),
    # The rank has room enough, or ends by its own error.
    "sigint": frozenset({RETURNED, OWN, PEER}),
    **dict.fromkeys(("memory", "files"), frozenset({RETURNED, OWN, PEER, MISMATCH})),
    **dict.fromkeys(("stop", "suspend", "fork"), frozenset({RETURNED})),
    # Only that all end soon is promised.
    "launcher": frozenset({RETURNED, OWN, PEER, CUT}) | _WAITING,
}
# The errors with which a rank ends that has too little memory or is interrupted, by the kind.
_OWN_ERRORS: Final = {
    "memory": ("MemoryError", "OSError", "TransportError"),
    "files": ("MemoryError", "OSError", "TransportError"),
    "sigint": ("KeyboardInterrupt",),
}


@dataclass
class Verdict:
    """What came of a program: how each rank ended, and what is wrong with that."""

    program: Program
    ends: list[str]
    wrong: list[str] = field(default_factory=list)
    wrong_numbers: int = 0
    hangs: int = 0
    left_processes: int = 0
    left_files: int = 0
    seconds: float = 0.0
    mismatch_seconds: float = 0.0
    argument: bool = False
    # Over MPI, whether the job was shared with other programs.
    part: str = ""

    @property
    def outcome(self) -> str:
        """The worst that came of it, as one word for a table."""
        for kind in (MISMATCH, PEER, DEADLOCK, TIMEOUT, CUT, OWN):
            if kind in self.ends:
                return {CUT: "job ended", OWN: "left alone"}.get(kind, kind)
        return "argument error" if self.argument else "right"


def judge(
    program: Program,
    traces: list[Trace],
    waits: set[int],
    *,
    own_job: bool = False,
    tells_return: bool = True,
) -> Verdict:
    """Judge what came of a program on each rank.

    `waits` are the ranks that would wait for ever. `own_job` says that the program was a whole job:
    a rank that gives up waiting ends its process, and the launcher all others where one was killed.
    `tells_return` says that the others learn of a rank that has reached the end.
    """
    return _Judge(program, traces, waits, own_job, tells_return).verdict()


@dataclass
class _Judge:
    _program: Program
    _traces: list[Trace]
    _stuck: set[int]
    _own_job: bool
    _tells_return: bool

    def __post_init__(self) -> None:
        self._ends = [self._end(rank) for rank in range(self._program.size)]
        self._wrong: list[str] = []

    def verdict(self) -> Verdict:
        verdict = Verdict(self._program, self._ends)
        for rank in range(self._program.size):
            for event in self._traces[rank].events:
                self._judge_event(rank, event, verdict)
        legitimate = self._legitimate()
        for rank, end in enumerate(self._ends):
            if rank not in legitimate:
                self._wrong.append(
                    f"rank {rank} has no reason to end so: {end}, {self._said(rank)}"
                )
            if end not in MAY_END[self._program.kind]:
                self._wrong.append(f"{self._program.kind}: no rank may end so: {end}")
        verdict.mismatch_seconds = self._mismatch_seconds()
        if verdict.mismatch_seconds > MISMATCH_LIMIT:
            self._wrong.append(f"MismatchError came after {verdict.mismatch_seconds:.2f} s")
        verdict.wrong = self._wrong
        return verdict

    def _said(self, rank: int) -> str:
        trace = self._traces[rank]
        last = trace.events[-1] if trace.events else None
        said = f"{last.error} (of rank {last.rank}, from {last.cause}): {last.text}" if last else ""
        return f"at {trace.place}: {said}"

    # How a rank ended

    def _end(self, rank: int) -> str:
        trace = self._traces[rank]
        if trace.returned:
            return RETURNED
        actions = self._program.actions[rank]
        following = actions[trace.place + 1] if trace.place + 1 < len(actions) else None
        last = trace.events[-1] if trace.events else None
        if last is not None and last.kind == "error" and last.place == trace.place:
            if last.error == "ReleasedError":
                return ASLEEP
            if actions[trace.place].kind in ENDING or self._is_own(rank, last):
                return OWN
            return self._cause(last)
        if following is not None and following.kind == "leave":
            return OWN
        if trace.place >= 0 and actions[trace.place].kind in ("kill", "die"):
            return OWN
        if trace.place >= 0 and actions[trace.place].kind == "sleep":
            return ASLEEP
        return CUT

    def _is_own(self, rank: int, event: Event) -> bool:
        own = _OWN_ERRORS.get(self._program.kind, ())
        return rank == self._program.rank and self._cause(event) in own

    def _cause(self, event: Event) -> str:
        """What is behind an error: a communicator was closed by one."""
        return event.cause if event.error == CLOSED else event.error

    def _told(self, rank: int) -> bool:
        """Return whether the others learn that a rank has ended."""
        end = self._ends[rank]
        if end == RETURNED or (end == OWN and self._program.kind == "leave"):
            return self._tells_return
        return end not in (ASLEEP, CUT)

    # Where a rank was

    def _waits_for(self, rank: int) -> tuple[int, Action]:
        """Return the call or message in which a rank ended, and its place."""
        place = self._traces[rank].place
        action = self._program.actions[rank][place]
        if action.kind == "wait":
            place = self._program.started(rank, action.request)
        return place, self._program.actions[rank][place]

    def _issued(self, rank: int, comm: int) -> int:
        """How many calls on a communicator a rank has begun."""
        last = self._traces[rank].place
        return sum(place <= last for place, _ in self._program.calls.get((rank, comm), []))

    def _seen(self, rank: int, comm: int) -> int:
        """How many calls on a communicator a rank has seen to their end."""
        seen = 0
        for event in self._traces[rank].events:
            action = self._program.actions[rank][event.place]
            if event.kind == "error" or action.comm != comm or action.kind == "start":
                continue
            if action.kind == "wait":
                started = self._program.started(rank, action.request)
                if self._program.actions[rank][started].kind != "start":
                    continue
            elif action.kind not in COLLECTIVE:
                continue
            seen = max(seen, self._program.index(rank, event.place) + 1)
        return seen

    def _first_mismatch(self, rank: int, comm: int) -> int | None:
        """Return the first call of a communicator in which the ranks that came differ."""
        for index in range(len(self._program.calls.get((rank, comm), []))):
            together = self._program.together(comm, rank, index)
            if together is None:
                return None
            if not agreed(together):
                return index
        return None

    # Reasons

    def _judge_event(self, rank: int, event: Event, verdict: Verdict) -> None:
        if event.kind == "wrong":
            verdict.wrong_numbers += 1
            self._wrong.append(f"rank {rank} at {event.place}: {event.text}")
        if event.kind not in ("argument", "peer"):
            return
        verdict.argument = True
        culprits = self._wrong_ranks(rank, event.place)
        if event.kind == "argument":
            reason = rank in culprits
        else:
            reason = rank not in culprits and self._rank_of(rank, event) in culprits
        if not reason:
            self._wrong.append(f"rank {rank} at {event.place}: {event.error}: {event.text}")

    def _rank_of(self, rank: int, event: Event) -> int:
        """Return the rank that an error names, as a rank of the program."""
        action = self._program.actions[rank][event.place]
        members = self._program.members(action.comm, rank)
        return members[event.rank] if 0 <= event.rank < len(members) else -1

    def _wrong_ranks(self, rank: int, place: int) -> list[int]:
        """Return the ranks that pass a wrong argument to a call or message."""
        action = self._program.actions[rank][place]
        if action.kind not in (*COLLECTIVE, *MESSAGES, "wait"):
            return []
        if action.kind == "wait":
            place = self._program.started(rank, action.request)
            action = self._program.actions[rank][place]
        if action.kind in MESSAGES:
            ends = [(rank, place), counterpart(self._program, rank, place)]
            found = [(r, self._program.actions[r][at].call) for r, at in ends if at is not None]
            return [r for r, call in found if call is not None and call.wrong]
        index = self._program.index(rank, place)
        calls = self._program.together(action.comm, rank, index) or []
        members = self._program.members(action.comm, rank)
        return [m for m, call in zip(members, calls, strict=False) if call.wrong]

    def _legitimate(self) -> set[int]:
        """Return the ranks whose end has a reason: each must go back to what needs none."""
        known: set[int] = set()
        while True:
            more = {r for r in range(self._program.size) if r not in known and self._has(r, known)}
            if not more:
                return known
            known |= more

    def _has(self, rank: int, known: set[int]) -> bool:
        end = self._ends[rank]
        if end in (RETURNED, OWN):
            return True
        if end == CUT:
            return self._own_job and self._program.kind in ("kill", "die", "launcher")
        if end == ASLEEP:
            return self._program.kind == "sleep"
        if end == MISMATCH:
            # A rank that could not take part in a call any more may be seen in another one.
            return self._program.kind in ("memory", "files") or self._mismatched(rank)
        if self._program.kind == "launcher":
            return True
        if end in _WAITING:
            missing = set(self._missing(rank))
            return rank in self._stuck and any(m in self._stuck or self._silent(m) for m in missing)
        if end == PEER:
            return any(
                m in known and self._told(m) and self._names(rank, m) for m in self._missing(rank)
            )
        return False

    def _mismatched(self, rank: int) -> bool:
        _, action = self._waits_for(rank)
        first = self._first_mismatch(rank, action.comm)
        members = self._program.members(action.comm, rank)
        return first is not None and all(self._issued(m, action.comm) > first for m in members)

    def _silent(self, rank: int) -> bool:
        return self._ends[rank] in (*_WAITING, ASLEEP) or (
            not self._told(rank) and self._ends[rank] in (RETURNED, OWN)
        )

    def _missing(self, rank: int) -> Iterator[int]:
        """Return the ranks without which the one that ended could not go on."""
        place, action = self._waits_for(rank)
        if action.kind in MESSAGES:
            peer, other = counterpart(self._program, rank, place)
            # What was sent arrives, also from a rank that has left since.
            sent = any(e.place == other and e.kind != "error" for e in self._traces[peer].events)
            if not (sent and action.kind in ("recv", "irecv") and not awaited(action)):
                yield peer
            # Its communicator may have been closed by a collective meanwhile.
            if self._traces[rank].events[-1].error != CLOSED:
                return
        if action.kind not in COLLECTIVE:
            index = self._issued(rank, action.comm) - 1
        else:
            index = self._program.index(rank, place)
        for member in self._program.members(action.comm, rank):
            if member == rank or self._seen(member, action.comm) > index:
                continue
            # Who raises MismatchError here has taken part.
            if self._ends[member] == MISMATCH and self._waits_for(member)[1].comm == action.comm:
                continue
            yield member

    def _names(self, rank: int, culprit: int) -> bool:
        """Return whether the error of a rank names the culprit, and shows its traceback."""
        event = self._traces[rank].events[-1]
        if event.error == CLOSED:
            # The error is that of an earlier call.
            return True
        if self._rank_of(rank, event) != culprit:
            return False
        raised = self._ends[culprit] == OWN and self._program.kind in ("raise", "interrupt")
        return not raised or ON_PURPOSE in event.traceback

    def _mismatch_seconds(self) -> float:
        """From the moment in which the last rank came to a call to that of its last error."""
        longest = 0.0
        for rank, end in enumerate(self._ends):
            event = self._traces[rank].events[-1] if self._traces[rank].events else None
            if end != MISMATCH or event is None or not self._mismatched(rank):
                continue
            comm = self._waits_for(rank)[1].comm
            first = self._first_mismatch(rank, comm)
            assert first is not None
            arrivals = [event.began]
            for member in self._program.members(comm, rank):
                place = self._program.calls[member, comm][first][0]
                arrivals += [e.began for e in self._traces[member].events if e.place == place]
            longest = max(longest, event.ended - max(arrivals))
        return longest
