"""Programs for a few ranks: drawn as a list of steps, and played by every rank against a model.

Ranks take the steps in one order, so that whatever blocks is waited for by nobody who blocks it: a
program that does not end has found a defect. Starts of requests may come earlier on some ranks than
on others, and waits go in each rank's own order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import numpy as np
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import Communicator, Request
from arraycomm.testing._arrays.rank_values import rank_count
from tests.support import internals

Array = np.ndarray[Any, Any]
# The ranks of the outermost communicator in each group that was made by one split, in their order.
Groups = tuple[tuple[int, ...], ...]

# What travels with a header, with an envelope, in a few steps, and in slices.
COUNTS: Final = (0, 3, 600, 9_000, 40_000)
COLLECTIVES: Final = (
    *("allreduce", "reduce", "bcast", "allgather", "allgatherv", "gather", "scatter", "alltoall"),
    *("reduce_scatter", "scan", "exscan", "barrier", "bcast_object", "allgather_object"),
)
BLOCKING_ONLY: Final = ("bcast_object", "allgather_object")


def minus(a: Any, b: Any) -> Any:
    """A function for `ac.op`: neither commutative nor associative."""
    return a - b


OPS: Final = {
    "sum": ("sum", np.add),
    "max": ("max", np.maximum),
    "whole": (ac.op(minus), np.subtract),
    "sliced": (ac.op(minus, elementwise=True), np.subtract),
}


# The steps


@dataclass(frozen=True)
class Split:
    """Make a communicator from that of `slot`: colors and keys by rank of the outermost."""

    slot: int
    colors: tuple[int | None, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Dup:
    """Make a communicator of the same groups."""

    slot: int


@dataclass(frozen=True)
class Free:
    """Free what one split made."""

    slot: int


@dataclass(frozen=True)
class Collective:
    """Every group of `slot` makes this call; `early` says how many steps before, by rank."""

    slot: int
    operation: str
    count: int = 3
    op: str = "sum"
    root: int = 0
    early: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Message:
    """In every group one rank sends, and one receives."""

    slot: int
    source: int
    dest: int
    tag: int = 0
    count: int = 3
    # How many steps before the request starts; None where the call blocks.
    send_early: int | None = None
    recv_early: int | None = None


@dataclass(frozen=True)
class Ring:
    """In every group each rank sends to one rank and receives from another."""

    slot: int
    shift: int = 1
    tag: int = 0
    count: int = 3


@dataclass(frozen=True)
class Wait:
    """Each rank waits for some of its requests, named by their steps; at once with `together`."""

    numbers: tuple[tuple[int, ...], ...]
    together: bool = False


Step = Split | Dup | Free | Collective | Message | Ring | Wait


@dataclass(frozen=True)
class Program:
    """Steps for this many ranks."""

    size: int
    steps: tuple[Step, ...]

    def groups(self) -> list[Groups]:
        """Return the groups of each slot."""
        made: list[Groups] = [(tuple(range(self.size)),)]
        for step in self.steps:
            if isinstance(step, Split):
                made.append(divided(made[step.slot], step.colors, step.keys))
            elif isinstance(step, Dup):
                made.append(made[step.slot])
        return made


def divided(groups: Groups, colors: Sequence[int | None], keys: Sequence[int]) -> Groups:
    """Return what a split makes of groups."""
    return tuple(
        tuple(sorted((r for r in group if colors[r] == color), key=lambda r: keys[r]))
        for group in groups
        for color in sorted({colors[r] for r in group} - {None})
    )


def group_of(groups: Groups, rank: int) -> tuple[int, ...]:
    """Return the group of a rank; an empty one where it has none."""
    return next((group for group in groups if rank in group), ())


# How they are drawn


@st.composite
def programs(draw: st.DrawFn, size: int | None = None) -> Program:
    """Draw a program, for as many ranks as the example has where no number is given."""
    return _Drawing(draw, rank_count() if size is None else size).program()


class _Drawing:
    """A program as far as it has been drawn."""

    def __init__(self, draw: st.DrawFn, size: int) -> None:
        self.draw, self.size = draw, size
        self.steps: list[Step] = []
        self.live = [0]
        self.made = 1
        # By rank: the numbers of the steps whose requests nobody has waited for.
        self.outstanding: list[list[int]] = [[] for _ in range(size)]

    def program(self) -> Program:
        kinds = [self.collective] * 4 + [self.message] * 4 + [self.wait] * 2
        kinds += [self.ring, self.split, self.dup, self.free]
        for _ in range(self.draw(st.integers(1, 24))):
            self.draw(st.sampled_from(kinds))()
        self.steps.append(self.wait_for([self.draw(st.permutations(o)) for o in self.outstanding]))
        return Program(self.size, tuple(self.steps))

    def groups(self, slot: int) -> Groups:
        return Program(self.size, tuple(self.steps)).groups()[slot]

    def slot(self) -> int:
        return self.draw(st.sampled_from(self.live))

    def split(self) -> None:
        colors = self.draw(st.tuples(*[st.sampled_from((0, 0, 1, None))] * self.size))
        keys = self.draw(st.tuples(*[st.integers(0, 2)] * self.size))
        self.make(Split(self.slot(), colors, keys))

    def dup(self) -> None:
        self.make(Dup(self.slot()))

    def make(self, step: Split | Dup) -> None:
        self.steps.append(step)
        self.live.append(self.made)
        self.made += 1

    def free(self) -> None:
        if len(self.live) > 1:
            slot = self.draw(st.sampled_from(self.live[1:]))
            self.live.remove(slot)
            self.steps.append(Free(slot))

    def collective(self) -> None:
        operation = self.draw(st.sampled_from(COLLECTIVES))
        early = None
        if operation not in BLOCKING_ONLY and self.draw(st.booleans()):
            early = self.draw(st.tuples(*[st.integers(0, 3)] * self.size))
        step = Collective(
            *(self.slot(), operation, self.draw(st.sampled_from(COUNTS))),
            *(self.draw(st.sampled_from(sorted(OPS))), self.draw(st.integers(0, 3)), early),
        )
        if early is not None:
            self.start(self.groups(step.slot))
        self.steps.append(step)

    def message(self) -> None:
        early = st.none() | st.integers(0, 3)
        rank, tag = st.integers(0, 3), st.integers(0, 1)
        step = Message(
            *(self.slot(), self.draw(rank), self.draw(rank), self.draw(tag)),
            *(self.draw(st.sampled_from(COUNTS)), self.draw(early), self.draw(early)),
        )
        self.start(requesting(step, group) for group in self.groups(step.slot))
        self.steps.append(step)

    def ring(self) -> None:
        shift, tag = self.draw(st.integers(0, 3)), self.draw(st.integers(0, 1))
        self.steps.append(Ring(self.slot(), shift, tag, self.draw(st.sampled_from(COUNTS))))

    def start(self, groups: Iterable[Iterable[int]]) -> None:
        """Keep the number of the next step for the ranks that start a request in it."""
        for group in groups:
            for rank in group:
                self.outstanding[rank].append(len(self.steps))

    def wait(self) -> None:
        numbers = [
            self.draw(st.lists(st.sampled_from(o), unique=True)) if o else []
            for o in self.outstanding
        ]
        self.steps.append(self.wait_for(numbers))

    def wait_for(self, numbers: list[list[int]]) -> Wait:
        for rank, mine in enumerate(numbers):
            self.outstanding[rank] = [n for n in self.outstanding[rank] if n not in mine]
        return Wait(tuple(map(tuple, numbers)), self.draw(st.booleans()))


def requesting(step: Message, group: tuple[int, ...]) -> set[int]:
    """Return the ranks of a group whose part in a message is a request."""
    if not group:
        return set()
    source, dest = ends(step, group)
    sends = {source} if step.send_early is not None else set()
    return sends | ({dest} if step.recv_early is not None else set())


def ends(step: Message, group: tuple[int, ...]) -> tuple[int, int]:
    """Return who sends and who receives in a group."""
    return group[step.source % len(group)], group[step.dest % len(group)]


# How they are played


@dataclass
class Part:
    """What one rank does in one step: one call, or the start of one request."""

    number: int
    step: Step
    # Of a message: whether this rank sends; it may do both.
    sends: bool = False
    early: int = 0
    requests: bool = False


def parts(program: Program, rank: int) -> list[Part]:
    """Return what a rank does, in its own order."""
    order: list[Part] = []
    groups = program.groups()
    for number, step in enumerate(program.steps):
        if not isinstance(step, Wait) and not group_of(groups[step.slot], rank):
            continue
        for part in _parts_of(number, step, groups, rank):
            place = len(order)
            while part.early and place and _may_pass(part, order[place - 1], groups, rank):
                place, part.early = place - 1, part.early - 1
            order.insert(place, part)
    return order


def _parts_of(number: int, step: Step, groups: list[Groups], rank: int) -> list[Part]:
    if isinstance(step, Collective) and step.early is not None:
        return [Part(number, step, early=step.early[rank], requests=True)]
    if not isinstance(step, Message):
        return [Part(number, step)]
    source, dest = ends(step, group_of(groups[step.slot], rank))
    # What a rank sends to itself, it begins to receive first.
    requests = step.recv_early is not None or source == dest
    recv = Part(number, step, early=step.recv_early or 0, requests=requests)
    sends = step.send_early is not None
    send = Part(number, step, sends=True, early=step.send_early or 0, requests=sends)
    return [recv] * (rank == dest) + [send] * (rank == source)


def _may_pass(part: Part, before: Part, groups: list[Groups], rank: int) -> bool:
    """Return whether a request may be started before a call that comes before it."""
    step, other = part.step, before.step
    if isinstance(other, Wait):
        return True
    if isinstance(other, Split | Dup):
        return False
    if step.slot != other.slot:
        return True
    if isinstance(step, Collective):
        return isinstance(other, Message | Ring)
    return isinstance(other, Collective) or (
        isinstance(other, Message | Ring) and other.tag != step.tag
    )


class Player:
    """One rank's part in a program, which fails where a result is not the model's."""

    def __init__(self, comm: Communicator, program: Program) -> None:
        self.rank, self.program = comm.rank, program
        self.groups = program.groups()
        self.comms = {0: comm}
        self.pending: dict[int, list[tuple[Request, Any]]] = {}

    def play(self) -> None:
        """Take all steps."""
        for part in parts(self.program, self.rank):
            match part.step:
                case Split(slot, colors, keys):
                    self.made(part, self.comms[slot].split(colors[self.rank], keys[self.rank]))
                case Dup(slot):
                    self.made(part, self.comms[slot].dup())
                case Free(slot):
                    self.comms.pop(slot).free()
                case Collective():
                    self.collective(part, part.step)
                case Message():
                    self.message(part, part.step)
                case Ring():
                    self.ring(part, part.step)
                case Wait(numbers, together):
                    self.wait(numbers[self.rank], together=together)
        assert not self.pending
        assert self.comms[0].allreduce(internals.unmatched(self.comms[0])) == 0

    def made(self, part: Part, comm: Communicator | None) -> None:
        slot = 1 + sum(isinstance(s, Split | Dup) for s in self.program.steps[: part.number])
        group = group_of(self.groups[slot], self.rank)
        assert (comm is None) == (not group)
        if comm is not None:
            assert (comm.size, group[comm.rank]) == (len(group), self.rank)
            self.comms[slot] = comm

    def collective(self, part: Part, step: Collective) -> None:
        comm, group = self.comms[step.slot], group_of(self.groups[step.slot], self.rank)
        arguments, want = modelled(step, part.number, group, self.rank)
        call = getattr(comm, f"{'i' if part.requests else ''}{step.operation}")
        self.settle(part, call(*arguments), want)

    def message(self, part: Part, step: Message) -> None:
        comm, group = self.comms[step.slot], group_of(self.groups[step.slot], self.rank)
        source, dest = ends(step, group)
        sent = numbers_of(part.number, source, step.count)
        if part.sends:
            call = comm.isend if part.requests else comm.send
            self.settle(part, call(sent, group.index(dest), step.tag), None)
        else:
            call = comm.irecv if part.requests else comm.recv
            self.settle(part, call(group.index(source), step.tag), sent)
        if part.sends and source == dest and step.recv_early is None:
            receiving, *others = self.pending.pop(part.number)
            self.check(part.number, receiving[0].wait(), receiving[1])
            if others:
                self.pending[part.number] = others

    def ring(self, part: Part, step: Ring) -> None:
        comm, group = self.comms[step.slot], group_of(self.groups[step.slot], self.rank)
        left = (comm.rank - step.shift) % comm.size
        got = comm.sendrecv(
            numbers_of(part.number, self.rank, step.count),
            *((comm.rank + step.shift) % comm.size, left, step.tag),
        )
        self.check(part.number, got, numbers_of(part.number, group[left], step.count))

    def settle(self, part: Part, result: Any, want: Any) -> None:
        """Check the result of a call, or keep a request for later."""
        if part.requests:
            self.pending.setdefault(part.number, []).append((result, want))
        else:
            self.check(part.number, result, want)

    def wait(self, numbers: Sequence[int], *, together: bool) -> None:
        kept = [(number, *pair) for number in numbers for pair in self.pending.pop(number)]
        requests = [request for _, request, _ in kept]
        if together:
            # Each rank in its own way.
            results = as_they_end(requests) if self.rank % 2 else ac.waitall(requests)
        else:
            results = [request.wait() for request in requests]
        for (number, request, want), result in zip(kept, results, strict=True):
            assert request.test()
            self.check(number, result, want)

    def check(self, number: int, got: Any, want: Any) -> None:
        step = self.program.steps[number]
        if isinstance(want, np.ndarray):
            assert isinstance(got, np.ndarray), f"step {number}, {step}: {got!r}"
            assert (got.dtype, got.shape) == (want.dtype, want.shape), f"step {number}, {step}"
            assert np.array_equal(got, want), f"step {number}, {step}"
        else:
            assert got == want, f"step {number}, {step}"


def as_they_end(requests: Sequence[Any]) -> list[Any]:
    """Return the results of requests in their order, of which each is taken once it is there."""
    left, results = dict(enumerate(requests)), dict[int, Any]()
    # Of several that are there, the first is meant.
    if are_there := len(requests) > 2 and len(requests) % 2:
        ac.waitall(requests)
    while left:
        place, result = ac.waitany(left.values(), timeout=60)
        assert place == 0 or not are_there
        number = list(left)[place]
        results[number] = result
        assert left.pop(number).test()
    return [results[number] for number in range(len(requests))]


# What they should give


def numbers_of(number: int, rank: int, *shape: int) -> Array:
    """Return what a rank of the outermost communicator has in one step."""
    count = int(np.prod(shape, dtype=np.int64))
    return (np.arange(count) * (rank + 1) + 7919 * number + 104729 * rank).reshape(shape)


def modelled(
    step: Collective, number: int, group: tuple[int, ...], rank: int
) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of a rank in a collective, and what it gets from it."""
    size, mine, root = len(group), group.index(rank), step.root % len(group)
    op, fold = OPS[step.op]
    each = [numbers_of(number, r, step.count) for r in group]
    rows = [numbers_of(number, r, size, step.count // size) for r in group]
    on_root = mine == root
    match step.operation:
        case "allreduce":
            return (each[mine], op), reduce(fold, each)
        case "reduce":
            return (each[mine], op, root), reduce(fold, each) if on_root else None
        case "scan":
            return (each[mine], op), reduce(fold, each[: mine + 1])
        case "exscan":
            return (each[mine], op), reduce(fold, each[:mine]) if mine else None
        case "reduce_scatter":
            return (rows[mine], op), reduce(fold, [row[mine] for row in rows])
        case "bcast":
            return (each[root] if on_root else None, root), each[root]
        case "allgather":
            return (each[mine],), np.stack(each)
        case "gather":
            return (each[mine], root), np.stack(each) if on_root else None
        case "scatter":
            return (rows[root] if on_root else None, root), rows[root][mine]
        case "alltoall":
            return (rows[mine],), np.stack([row[mine] for row in rows])
        case "allgatherv":
            ragged = [x[: len(x) * place // size] for place, x in enumerate(each)]
            return (ragged[mine],), np.concatenate(ragged)
        case "bcast_object":
            return ({"from": number} if on_root else None, root), {"from": number}
        case "allgather_object":
            return ((number, rank),), [(number, r) for r in group]
        case _:
            return (), None
