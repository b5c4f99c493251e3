# ruff: noqa: RUF002 - formulas have Greek letters
"""Ranks that are simulated: a clock for each, messages that take time, and what each has sent.

The calls of the ranks are coroutines: a rank runs, in no time but that of its folds, up to what it waits
for, and goes on when its clock has come there. Events are played in the order of their times.

The movements of a transport are schedules, and take what `rounds.py` says. A message between two ranks
takes α + n β, whether or not its receiver waits for it already. A rank sends one message at a time, and
receives one meanwhile. Ranks of a node share its link.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from docs.studies.scaling.model import Machine
from docs.studies.scaling.rounds import NOBODY, Ranks, Step, nodes_of, played

_NEVER: Final = float("inf")
# Sender, receiver and tag.
_Key = tuple[int, int, int]


class Call(Protocol):
    """A call under way on one rank: what the library calls a request."""

    def test(self) -> bool:
        """Go on as far as possible, and tell whether it is finished."""

    def wait(self) -> Any:
        """Return the result of a call that is finished."""


class Network:
    """The ranks, their clocks, and what they have sent.

    Parameters
    ----------
    size : int
        The number of ranks.
    machine : Machine
        What messages and folds take, and how many ranks are on a node.
    moves_data : bool
        Whether elements are copied and folded. If not, ranks may share their arrays, whose contents stay
        as they are: then no memory is needed for each rank's elements.

    Attributes
    ----------
    node : array of int
        The node of each rank.
    clock : array of float
        The time of each rank, in seconds.
    time : float
        That of the event that happens.
    messages, leaving, nbytes : array of int
        What each rank has sent: messages, those of them to other nodes, and bytes.
    """

    def __init__(self, size: int, machine: Machine, *, moves_data: bool = True) -> None:
        self.size, self.machine, self.moves_data = size, machine, moves_data
        self.node = nodes_of(size, machine)
        self.clock = np.zeros(size)
        self.messages, self.leaving, self.nbytes = np.zeros((3, size), np.int64)
        # When each rank can send and receive again, and when a message can leave each node.
        self._sending, self._receiving = np.zeros((2, size))
        self._link = np.zeros(self.node[-1] + 1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self.time = 0.0
        self._calls: list[Call | None] = [None] * size

    def run(self, starts: Sequence[Callable[[], Call]]) -> list[Any]:
        """Start a call on every rank, at its clock; return the results once all are finished."""
        results: list[Any] = [None] * self.size

        def begin(rank: int) -> None:
            self._calls[rank] = starts[rank]()
            self._go_on(rank, results)

        for rank in range(self.size):
            self.at(self.clock[rank], partial(begin, rank))
        self._results = results
        while self._events:
            self.time, _, happen = heapq.heappop(self._events)
            happen()
        waiting = [rank for rank, call in enumerate(self._calls) if call is not None]
        if waiting:
            raise RuntimeError(f"ranks {waiting} wait, and nothing more will happen")
        return results

    def at(self, time: float, happen: Callable[[], None]) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._events, (time, next(self._number), happen))

    def wake(self, rank: int, time: float) -> None:
        """Let a rank look, at a time, whether it can go on."""

        def look() -> None:
            self.clock[rank] = max(self.clock[rank], time)
            self._go_on(rank, self._results)

        self.at(time, look)

    def _go_on(self, rank: int, results: list[Any]) -> None:
        call = self._calls[rank]
        if call is not None and call.test():
            results[rank], self._calls[rank] = call.wait(), None

    # What takes time

    def play(self, schedule: Iterable[Step], members: Ranks, begun: Ranks) -> Ranks:
        """Play a movement of some ranks, that begin at their times; return when each is done."""
        free = np.maximum(self._sending[members], self._receiving[members])
        steps = self._counted(schedule, members)
        done = played(steps, np.maximum(begun, free), self.node[members], self.machine)
        self._sending[members] = self._receiving[members] = done
        return done

    def _counted(self, schedule: Iterable[Step], members: Ranks) -> Iterator[Step]:
        for step in schedule:
            source = np.flatnonzero(step.to != NOBODY)
            self._count(members[source], members[step.to[source]], step.nbytes[source])
            yield step

    def _count(self, sender: Any, receiver: Any, nbytes: Any) -> None:
        self.messages[sender] += 1
        self.leaving[sender] += self.node[sender] != self.node[receiver]
        self.nbytes[sender] += nbytes

    def send(self, source: int, target: int, nbytes: int, time: float) -> tuple[float, float]:
        """Send a message; return when the sender is free, and when the receiver can have it."""
        machine, node = self.machine, self.node[source]
        begun = max(time, float(self._sending[source]))
        took = machine.near_latency + nbytes * machine.near_byte
        if node != self.node[target]:
            begun = max(begun, float(self._link[node]))
            took = machine.latency + nbytes * machine.per_byte
            self._link[node] = begun + nbytes * machine.per_byte
        arrival = max(begun, float(self._receiving[target])) + took
        self._sending[source], self._receiving[target] = begun + took, arrival
        self._count(source, target, nbytes)
        return begun + took, arrival

    def can_send(self, rank: int) -> float:
        """Return when a rank has sent what it has begun to send."""
        return float(self._sending[rank])

    def fold(self, rank: int, nbytes: int) -> None:
        """Let a rank add so many bytes to others."""
        self.clock[rank] += nbytes * self.machine.fold_byte


class Movement:
    """One rank's part in a movement, a step of the control channel or a message."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank
        self._finished = _NEVER

    def finish(self, time: float) -> None:
        """Be done at a time."""
        self._finished = time
        self._network.wake(self._rank, time)

    def done(self) -> bool:
        """Tell whether the rank's clock has come to the end of it."""
        return bool(self._finished <= self._network.clock[self._rank])


class Plan(NamedTuple):
    """What a movement is, once all ranks have come to it.

    `schedule` has its messages; it is None if the ranks only wait for one another. `deliver` brings the
    data to the ranks; it is `needed` if they read it although elements do not move. `by_nodes` is whether the
    ranks of a node begin and end it together.
    """

    schedule: Iterable[Step] | None
    deliver: Callable[[], None]
    needed: bool = False
    by_nodes: bool = False


# Makes a plan of what the ranks have passed, in rank order.
Planner = Callable[[Sequence[Any]], Plan]


class _Meeting:
    """One movement of all ranks of a group, which begins when the last of them has come."""

    def __init__(self, size: int) -> None:
        self.parts: dict[int, Any] = {}
        self.begun = np.zeros(size)
        self.movements: dict[int, Movement] = {}
        self.planners: set[Planner] = set()


class Group:
    """Some of the ranks, that move data among themselves.

    Attributes
    ----------
    network : Network
        Of all ranks.
    members : array of int
        The ranks of the network that are the ranks of this group.
    together : bool
        Whether all of them are on one node.
    """

    def __init__(self, network: Network, members: Iterable[int]) -> None:
        self.network = network
        self.members = np.array(list(members))
        self.size = len(self.members)
        self.together = len(set(network.node[self.members])) == 1
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        # By sender, receiver and tag: what has been sent, and who waits.
        self._sent: dict[_Key, deque[tuple[float, Any]]] = defaultdict(deque)
        self._waiting: dict[_Key, deque[tuple[float, Any, Movement]]] = defaultdict(deque)

    def part(self, members: Sequence[int]) -> Group:
        """Return a group of some members, in this order."""
        return Group(self.network, self.members[list(members)])

    def now(self, rank: int) -> float:
        """Return the clock of a member."""
        return float(self.network.clock[self.members[rank]])

    def meet(self, rank: int, place: tuple[str, int], planner: Planner, part: Any) -> Movement:
        """Begin a member's part in a movement of all of them, who name the same place."""
        movement, begun = self._movement(rank), self.now(rank)

        def come() -> None:
            meeting = self._meetings.setdefault(place, _Meeting(self.size))
            meeting.parts[rank], meeting.movements[rank] = part, movement
            meeting.begun[rank] = begun
            meeting.planners.add(planner)
            if len(meeting.parts) == self.size:
                del self._meetings[place]
                self._play(meeting)

        self.network.at(begun, come)
        return movement

    def _play(self, meeting: _Meeting) -> None:
        if len(meeting.planners) > 1:
            raise RuntimeError("the ranks of a group begin different movements")
        (planner,) = meeting.planners
        plan = planner([meeting.parts[rank] for rank in range(self.size)])
        if plan.schedule is None:
            done = np.full(self.size, meeting.begun.max())
        else:
            nodes = plan.by_nodes
            begun = self._of_nodes(meeting.begun) if nodes else meeting.begun
            done = self.network.play(plan.schedule, self.members, begun)
            done = self._of_nodes(done) if nodes else done
        if plan.needed or self.network.moves_data:
            plan.deliver()
        for rank, movement in meeting.movements.items():
            movement.finish(float(done[rank]))

    def _of_nodes(self, times: Ranks) -> Ranks:
        """Return for each member the latest time on its node."""
        node = self.network.node[self.members]
        latest = np.zeros(self.network.size)
        np.maximum.at(latest, node, times)
        of_members: Ranks = latest[node]
        return of_members

    def send(self, source: int, target: int, tag: int, buffer: Any) -> Movement:
        """Send a message to a member."""
        movement, posted = self._movement(source), self.now(source)
        sender, receiver = int(self.members[source]), int(self.members[target])
        key = (source, target, tag)

        def leave() -> None:
            # Until this sender can send, others of its node may use their link.
            ready = self.network.can_send(sender)
            if ready > max(posted, self.network.time):
                self.network.at(ready, leave)
                return
            free, arrival = self.network.send(sender, receiver, len(buffer), posted)
            data = buffer.copy() if self.network.moves_data else buffer
            self._sent[key].append((arrival, data))
            movement.finish(free)
            self._deliver(key)

        self.network.at(posted, leave)
        return movement

    def receive(self, source: int, target: int, tag: int, buffer: Any) -> Movement:
        """Receive a message from a member."""
        movement, posted = self._movement(target), self.now(target)
        key = (source, target, tag)

        def wait() -> None:
            self._waiting[key].append((posted, buffer, movement))
            self._deliver(key)

        self.network.at(posted, wait)
        return movement

    def _deliver(self, key: _Key) -> None:
        sent, waiting = self._sent[key], self._waiting[key]
        while sent and waiting:
            (arrival, data), (posted, buffer, movement) = sent.popleft(), waiting.popleft()
            if self.network.moves_data:
                buffer[: len(data)] = data
            movement.finish(max(arrival, posted))

    def find(self, source: int | None, target: int, tags: range) -> tuple[int, int] | None:
        """Return sender and tag of a message that a member may receive."""
        for (sender, receiver, tag), sent in self._sent.items():
            if sent and receiver == target and tag in tags and source in (None, sender):
                return sender, tag
        return None

    def _movement(self, rank: int) -> Movement:
        return Movement(self.network, int(self.members[rank]))
