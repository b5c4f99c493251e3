"""Which ranks of a program wait for ever, by what the contract says, without time."""

from __future__ import annotations

from typing import Final

from tests.faults.oracle import agreed
from tests.faults.programs import DISTURBING, ENDING, HUGE, LARGE, MESSAGES, Action, Program, harms

# Seconds: the timeout of a program in which ranks are to find a deadlock first, and of one whose ranks
# are stopped for longer than that.
CROSSED: Final = 15.0
SUSPENDED: Final = 3.0


def stuck(program: Program, *, tells_return: bool = True) -> set[int]:
    """Return the ranks that wait for ever in this program, were it not for the timeout."""
    return _Simulation(program, tells_return).run()


class _Simulation:
    """The program as the contract says it goes, without time."""

    def __init__(self, program: Program, tells_return: bool) -> None:
        self._program = program
        self._tells_return = tells_return
        self._place = [0] * program.size
        self._begun: set[tuple[int, int]] = set()
        self._left: set[int] = set()

    def run(self) -> set[int]:
        while any(self._advance(rank) for rank in range(self._program.size)):
            pass
        # Who sleeps waits for nobody.
        return {
            rank
            for rank, actions in enumerate(self._program.actions)
            if rank not in self._left
            and any(action.kind != "sleep" for action in actions[self._place[rank] :][:1])
        }

    def _advance(self, rank: int) -> bool:
        actions, moved = self._program.actions[rank], False
        while rank not in self._left:
            place = self._place[rank]
            if place == len(actions):
                if self._tells_return:
                    self._left.add(rank)
                return moved or self._tells_return
            self._begun.add((rank, place))
            done = self._done(rank, place, actions[place])
            if done is None:
                return moved
            moved = True
            if done:
                self._place[rank] += 1
            else:
                self._left.add(rank)
        return moved

    def _done(self, rank: int, place: int, action: Action) -> bool | None:
        """Return whether an action ends well, or with the rank (False), or not yet (None)."""
        if action.kind == "sleep":
            return None
        if action.kind in ENDING:
            return False
        if action.kind in (*DISTURBING, "start", "isend", "irecv"):
            return True
        if action.kind == "wait":
            place = self._program.started(rank, action.request)
            action = self._program.actions[rank][place]
        if action.kind in MESSAGES:
            return self._message_done(rank, place, action)
        return self._call_done(rank, place, action)

    def _message_done(self, rank: int, place: int, action: Action) -> bool | None:
        if action.kind in ("send", "isend") and not awaited(action):
            return True
        peer, other = counterpart(self._program, rank, place)
        if other is not None and (peer, other) in self._begun:
            return True
        return False if peer in self._left else None

    def _call_done(self, rank: int, place: int, action: Action) -> bool | None:
        members = self._program.members(action.comm, rank)
        for index in range(self._program.index(rank, place) + 1):
            calls = [self._program.calls.get((m, action.comm), []) for m in members]
            missing = [
                m
                for m, own in zip(members, calls, strict=True)
                if index >= len(own) or (m, own[index][0]) not in self._begun
            ]
            if missing:
                return False if any(m in self._left for m in missing) else None
            together = self._program.together(action.comm, rank, index)
            if together is None or not agreed(together):
                return False
        return True


def awaited(action: Action) -> bool:
    """Return whether a send ends only when it is received."""
    return action.call is not None and action.call.shape in (LARGE, HUGE) and not harms(action.call)


def counterpart(program: Program, rank: int, place: int) -> tuple[int, int | None]:
    """Return who is at the other end of a message, and the place there, if there is one."""
    action = program.actions[rank][place]
    members = program.members(action.comm, rank)
    sends = action.kind in ("send", "isend")
    ours, theirs = (("send", "isend"), ("recv", "irecv"))[:: 1 if sends else -1]
    number = program.mail(ours, rank, place)
    peer = members[action.peer]
    return peer, program.nth(theirs, peer, action, members.index(rank), number)


def timeout_of(program: Program, waits: set[int], short: float, long: float) -> float:
    """Return the timeout to play a program with: `long` shows who should not have waited."""
    if program.kind == "suspend":
        return SUSPENDED
    if not waits:
        return long
    return CROSSED if program.kind == "crossed" else short
