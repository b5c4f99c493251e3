"""Deadlock: ranks that wait for one another on different communicators, so that none can go on.

While a rank waits long, its wait status says for whom it waits, and which waits of other ranks it
holds up: those that cannot end before its own does, since this rank has not made the call that they
wait in, and no other thread of its process could. Such a confirmed edge stays true as long as both
statuses stay. A rank from which confirmed edges lead into a circle waits in vain.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import inf
from typing import Any, Final, NamedTuple, NoReturn, Protocol

from arraycomm._errors import DeadlockError
from arraycomm._protocol.engine import Engine
from arraycomm._protocol.mismatch import name_ranks, ranks_of
from arraycomm._protocol.waits import clock
from arraycomm._transports.control import ControlChannel

# Seconds between two looks, and those for which a circle has to stay: a message may be on its way.
_LOOK_EVERY: Final = 0.1
_SURE: Final = 1.0
# The longest timeout, in seconds, with which a wait counts as one that ends by itself: other ranks
# learn late that it has ended, and would take it for part of a deadlock.
_SOON: Final = 5.0
# How many ranks a status names; it has to fit the notes of a control channel.
_NAMED: Final = 6
# Seconds of waiting after which ranks that are not seen directly are asked; doubled each time.
_ASK_FIRST: Final = 0.4
# Modules whose threads make no calls of their own.
_SILENT: Final = {
    *("IPython", "arraycomm", "ipykernel", "multiprocessing", "tensorboard", "tensorboardX"),
    *("torch", "tqdm", "wandb"),
}

# Messages with this tag are counted together with those that have larger ones.
MANY: Final = 63


class Counts(dict[tuple[int, int], list[int]]):
    """The number of messages, by the other rank and their tag."""

    def __missing__(self, key: tuple[int, int]) -> list[int]:
        return self.setdefault((key[0], min(key[1], MANY)), [0])


class Wait(NamedTuple):
    """A wait: the ranks that are missing, what and where it is, and its timeout.

    `certain` is whether it needs them: all of them in a collective, otherwise one. Of a message,
    `counted` is whether it is sent, its tag as it is counted, and how many such messages the rank
    has begun to send, or has received; empty if that does not say whether it will be matched.
    """

    missing: Callable[[], list[int]]
    doing: str
    site: str | None
    timeout: float | None
    certain: bool = True
    counted: tuple[int, ...] | None = ()


@dataclass(frozen=True)
class WaitStatus:
    """What a rank tells the others of a long wait; ranks are those of the family's first group."""

    # The operation, the call site, the step and the communicator.
    doing: str
    # Whether the wait was given up after a timeout.
    in_vain: bool = False
    # Names the call that it waits in: the same for all ranks in that call.
    call: str = ""
    # Counts the waits of this rank.
    number: int = 0
    # Some ranks without which the wait does not end; empty if that is not certain.
    missing: tuple[int, ...] = ()
    # Of a message; see `Wait`.
    counted: tuple[int, ...] = ()
    # Ranks, and numbers of waits of theirs that cannot end before this one does.
    held: tuple[tuple[int, int], ...] = ()
    # The calls in which ranks wait for one another, if this rank has found that.
    deadlocked: tuple[str, ...] = ()
    # Counts what the rank has told.
    version: int = 0

    def encode(self) -> str:
        """Return the status as text."""
        return f"{self.doing}\n{json.dumps(astuple(self)[1:], separators=(',', ':'))}"

    @classmethod
    def decode(cls, text: str) -> WaitStatus | None:
        """Return the status that a text encodes: only `doing` if cut off, None if it is empty."""
        doing, _, facts = text.partition("\n")
        if not doing:
            return None
        try:
            return cls(doing, *_tuples(json.loads(facts)))
        except (ValueError, TypeError):
            return cls(doing)

    def __str__(self) -> str:
        return f"has waited in vain {self.doing}" if self.in_vain else f"is waiting {self.doing}"


def _tuples(facts: Any) -> Any:
    return tuple(map(_tuples, facts)) if isinstance(facts, list) else facts


def find_deadlock(rank: int, waits: Mapping[int, WaitStatus]) -> list[int]:
    """Return, sorted, the ranks on the ways from `rank` into a circle of confirmed edges."""
    edges = {
        r: {
            m
            for m in wait.missing
            if m in waits and not waits[m].in_vain and (r, wait.number) in waits[m].held
        }
        for r, wait in waits.items()
        if not wait.in_vain
    }
    # Ranks that wait only for such as can go on can go on as well.
    while free := [r for r, to in edges.items() if not to & edges.keys()]:
        for r in free:
            del edges[r]
    found: set[int] = set()
    waiting = [rank] if rank in edges else []
    while waiting:
        r = waiting.pop()
        if r not in found:
            found.add(r)
            waiting += edges[r] & edges.keys()
    return sorted(found)


class Member(Protocol):
    """A group of this rank, as far as deadlocks are concerned."""

    name: str
    size: int
    control: ControlChannel
    engine: Engine
    closed: BaseException | None
    sent: Counts
    received: Counts
    related: list[Any]
    family_ranks: Sequence[int]


class WaitReports:
    """Tells the other ranks of a family what this one waits in: one wait at a time.

    It is told on the control channels of all `groups` of the family on this rank.
    """

    def __init__(self, groups: list[Any]) -> None:
        self.groups = groups
        # Held while a wait is begun, looked after or ended: a call may end beside the thread that
        # makes progress. A signal's handler may wait as well.
        self.changing = threading.RLock()
        # The group of the wait that was told last, if it goes on.
        self.owner: Member | None = None
        self._version = self._number = 0

    def count(self) -> int:
        """Return the number of a new wait of this rank."""
        self._number += 1
        return self._number

    def report(self, owner: Member, status: WaitStatus | None) -> None:
        """Tell of a wait in `owner`, or that it has ended."""
        if status is None and self.owner is not owner:
            return
        self.owner = None if status is None or status.in_vain else owner
        self._version += 1
        text = "" if status is None else replace(status, version=self._version).encode()
        for group in self.groups:
            group.control.notes.report_wait(text)

    def statuses(self, group: Member) -> dict[int, WaitStatus]:
        """Return the newest known status of each other rank, by its rank in the family."""
        found: dict[int, WaitStatus] = {}
        for member in self.seen_from(group):
            for r in member.control.peers:
                status = WaitStatus.decode(member.control.notes.wait_status(r))
                rank = member.family_ranks[r]
                if status and (rank not in found or found[rank].version < status.version):
                    found[rank] = status
        return found

    def seen_from(self, group: Member) -> list[Member]:
        """Return the groups that tell of the ranks that a wait in `group` may depend on."""
        largest: Member = max([*self.groups, group], key=lambda member: member.size)
        return [group] if largest is group else [group, largest]

    def ask(self, group: Member, ranks: Sequence[int]) -> None:
        """Ask for the statuses of some ranks of `group`, and of some of all ranks."""
        for member in self.seen_from(group):
            asked = ranks if member is group else member.control.peers
            member.control.notes.ask_wait_status(asked[:_NAMED])


class DeadlockWatch:
    """Finds out whether a wait in one group is part of a deadlock."""

    def __init__(self, group: Member, *, certain: bool, own_process: bool) -> None:
        self._group = group
        # Whether ranks that have not posted the current step are surely waited for.
        self._certain = certain
        # Whether the main thread could make calls of this rank as well.
        self._own_process = own_process
        # Those of the group's family.
        self.reports = WaitReports(group.related)
        # Of the wait that is going on, if it is a long one.
        self.status: WaitStatus | None = None
        self._looked = self._since = 0.0
        self._ask_after = _ASK_FIRST
        self._found: object = None

    @property
    def rank(self) -> int:
        """This rank in the family."""
        return self._group.family_ranks[self._group.control.rank]

    @property
    def blocked(self) -> bool:
        """Whether a thread waits in the group for as long as it takes."""
        return self._group.engine.blocked is not None

    def begin(self, doing: str) -> None:
        """Tell the other ranks of a wait that has just become long."""
        with self.reports.changing:
            self._looked, self._ask_after, self._found = 0.0, _ASK_FIRST, None
            self._report(WaitStatus(doing, number=self.reports.count()))

    def end(self, *, in_vain: bool) -> None:
        """Tell the other ranks that the wait is over, or given up."""
        with self.reports.changing:
            if self.status is not None:
                told = replace(self.status, in_vain=True) if in_vain else None
                self.reports.report(self._group, told)
                self.status = None

    def look(self, waited: float, wait: Wait, *, now: bool = False) -> None:
        """Raise if the wait is in vain; looks now and then, unless it has to `now`."""
        with self.reports.changing:
            self._look(waited, wait, now=now)

    def _look(self, waited: float, wait: Wait, *, now: bool) -> None:
        looked = clock.now()
        if self.status is None or (not now and looked < self._looked + _LOOK_EVERY):
            return
        self._looked = looked
        others = self.reports.statuses(self._group)
        self._update(wait, others)
        waits = {**others, self.rank: self.status}
        self._follow(waits)
        if waited > self._ask_after:
            self._ask_after = 2 * waited
            self.reports.ask(self._group, wait.missing())
        ranks = find_deadlock(self.rank, waits)
        found = [(r, waits[r].number) for r in ranks]
        if not found or found != self._found:
            self._found, self._since = found, looked
        elif looked > self._since + _SURE:
            self._raise(ranks, waits)

    def _report(self, status: WaitStatus) -> None:
        if status != self.status or self.reports.owner is not self._group:
            self.status = status
            self.reports.report(self._group, status)

    def _update(self, wait: Wait, others: Mapping[int, WaitStatus]) -> None:
        """Tell the other ranks for whom this one waits, and which of their waits that holds up."""
        assert self.status is not None
        status = replace(self.status, missing=(), counted=(), held=())
        message = wait.counted is not None
        certain = wait.certain and (message or self._certain) and (wait.timeout or inf) > _SOON
        if certain and self.blocked and not self._others_may_call():
            control, family = self._group.control, self._group.family_ranks
            place = f"message {self.rank}.{status.number}" if message else str(control.step)
            held = [(r, w.number) for r, w in others.items() if self._holds(r, w, wait)]
            status = replace(
                status,
                call=f"{self._group.name}:{place}",
                missing=tuple(family[r] for r in wait.missing()[:_NAMED]),
                counted=wait.counted or (),
                held=tuple(held[:_NAMED]),
            )
        self._report(status)

    def _holds(self, rank: int, there: WaitStatus, here: Wait) -> bool:
        """Return whether this rank takes part in what another waits for only after its own wait."""
        name, _, step = there.call.rpartition(":")
        found = (g for g in self.reports.groups if g.name == name and g.closed is None)
        group = next(found, None)
        if self.rank not in there.missing or group is None or not group.engine.idle:
            return False
        same, message = group is self._group, here.counted is not None
        if step.isdigit():
            # Of two collectives on one communicator, all ranks take the steps in one order.
            return (message or not same) and group.control.step < int(step)
        if not there.counted:
            return not message
        sends, tag, count = there.counted
        peer = list(group.family_ranks).index(rank)
        if not sends:
            # No message is under way.
            return bool(group.sent[peer, tag] == [count])
        # This rank may be about to receive it.
        takes = here.missing() == [peer] and (here.counted or (0, tag))[:2] == (0, tag)
        return group.received[peer, tag] < [count] and not (same and message and takes)

    def _others_may_call(self) -> bool:
        """Return whether another thread could make the calls of this rank that others wait for."""
        blocked = self._group.engine.blocked
        return any(self._may_call(t) for t in threading.enumerate() if t.ident != blocked)

    def _may_call(self, thread: threading.Thread) -> bool:
        if thread is threading.main_thread():
            return self._own_process
        target = getattr(thread, "_target", None)
        modules = (type(thread).__module__, getattr(target, "__module__", None) or "")
        return not any(module.partition(".")[0] in _SILENT for module in modules)

    def _follow(self, waits: Mapping[int, WaitStatus]) -> None:
        """Raise if another rank has found a deadlock that holds up this wait."""
        assert self.status is not None
        me = (self.rank, self.status.number)
        for wait in waits.values():
            if wait.deadlocked and (self.status.call in wait.deadlocked or me in wait.held):
                self._raise([r for r in waits if waits[r].call in wait.deadlocked], waits)

    def _raise(self, ranks: Sequence[int], waits: Mapping[int, WaitStatus]) -> NoReturn:
        assert self.status is not None
        calls = dict.fromkeys([*(waits[r].call for r in ranks), self.status.call])
        self._report(replace(self.status, deadlocked=tuple(calls)))
        self.reports.ask(self._group, self._group.control.peers)
        raise DeadlockError(_text(sorted({*ranks, self.rank}), waits))


def _text(ranks: Sequence[int], waits: Mapping[int, WaitStatus]) -> str:
    doing = ranks_of((r, waits[r].doing) for r in ranks)
    lines = [f"{name_ranks(found)} waiting {what}" for what, found in doing.items()]
    remedy = (
        "all ranks of a communicator have to make the same calls; if ranks have different "
        "numbers of batches, see join() and DistributedDataContainer.batches()"
    )
    if all(waits[r].counted for r in ranks):
        remedy = "ranks that send to one another call sendrecv, or begin with isend or irecv"
    head = "these ranks wait for one another, so that none of them can go on:"
    return "\n  ".join([head, *lines]) + f"\n{remedy}"
