"""Programs for a few ranks, drawn from a number, and what one of the ranks does differently.

Every rank draws the whole program, so each knows what the others pass, and what must come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Final

import ml_dtypes
import numpy as np

from arraycomm.testing._oracle import OPS, family

Groups = tuple[tuple[int, ...], ...]

# What travels with a header, in a few steps, and in slices; in a message: at once, and when received.
SHAPES: Final = ((), (3,), (0,), (2, 5), (700,), (9_000,), (60_000,))
SHAPE_WEIGHTS: Final = (4, 6, 2, 4, 4, 2, 1)
SMALL: Final = (3,)
LARGE: Final = (300_000,)
DTYPES: Final = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in ("bool", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64")
}
REDUCING: Final = ("allreduce", "reduce", "reduce_scatter", "scan", "exscan", "allreduce_tree")
MOVING: Final = (
    *("bcast", "allgather", "allgatherv", "gather", "gatherv", "scatter"),
    *("alltoall", "alltoallv"),
)
OBJECTS: Final = ("bcast_object", "allgather_object", "gather_object")
OPERATIONS: Final = (*REDUCING, *MOVING, *OBJECTS, "barrier")
ROOTED: Final = ("reduce", "bcast", "gather", "gatherv", "scatter", "bcast_object", "gather_object")
BLOCKING_ONLY: Final = (*OBJECTS, "allreduce_tree")
COLLECTIVE: Final = ("call", "start", "make")
MESSAGES: Final = ("send", "recv", "isend", "irecv")
# How a rank's own part can end: it goes no further in its list of actions.
ENDING: Final = ("raise", "interrupt", "exit", "leave", "sleep", "kill", "die")


@dataclass(frozen=True)
class Call:
    """One rank's part in a collective, or the array of a message; `number` gives its values."""

    operation: str
    number: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: str = ""
    root: int = -1
    wrong: str = ""


@dataclass(frozen=True)
class Action:
    """What a rank does next: a call on a communicator, a message, a wait, or its end."""

    kind: str
    comm: int = 0
    call: Call | None = None
    request: int = -1
    peer: int = -1
    tag: int = 0
    makes: int = -1
    color: int | None = None
    how: int = 0


@dataclass
class Program:
    """What each of `size` ranks does, and on which communicators."""

    seed: int
    size: int
    groups: list[Groups]
    actions: list[list[Action]]
    kind: str = "none"
    rank: int = 0
    place: int = 0
    text: str = ""

    def members(self, comm: int, rank: int) -> tuple[int, ...]:
        """Return the ranks of the program in the communicator `comm` of `rank`, in their order."""
        return next((group for group in self.groups[comm] if rank in group), ())

    @property
    def how(self) -> int:
        """A number that chooses among the ways in which the deviating rank may end."""
        actions = self.actions[self.rank]
        return actions[self.place].how if self.place < len(actions) else 0

    @cached_property
    def calls(self) -> dict[tuple[int, int], list[tuple[int, Action]]]:
        """Return the collective calls of a rank on a communicator, each with its place."""
        found: dict[tuple[int, int], list[tuple[int, Action]]] = {}
        for rank, actions in enumerate(self.actions):
            for place, action in enumerate(actions):
                if action.kind in ENDING:
                    break
                if action.kind in COLLECTIVE:
                    found.setdefault((rank, action.comm), []).append((place, action))
        return found

    def index(self, rank: int, place: int) -> int:
        """Return which call on its communicator the action at `place` is or waits for."""
        wanted = self.actions[rank][place]
        if wanted.kind == "wait":
            place = self.started(rank, wanted.request)
        comm = self.actions[rank][place].comm
        return [at for at, _ in self.calls.get((rank, comm), [])].index(place)

    def started(self, rank: int, request: int) -> int:
        """Return the place at which `rank` started a request."""
        return next(
            place
            for place, action in enumerate(self.actions[rank])
            if action.request == request and action.kind != "wait"
        )

    def together(self, comm: int, rank: int, index: int) -> list[Call] | None:
        """Return what the members of a communicator pass to its call `index`, if all get there."""
        found: list[Call] = []
        for member in self.members(comm, rank):
            calls = self.calls.get((member, comm), [])
            if index >= len(calls):
                return None
            call = calls[index][1].call
            assert call is not None
            found.append(call)
        return found

    def mail(self, kinds: tuple[str, str], rank: int, place: int) -> int:
        """Tell how many messages of the same kind and way are begun before the one at `place`."""
        wanted = self.actions[rank][place]
        return sum(
            action.kind in kinds and _placement(action) == _placement(wanted)
            for action in self.actions[rank][:place]
        )

    def nth(
        self, kinds: tuple[str, str], rank: int, like: Action, peer: int, number: int
    ) -> int | None:
        """Return the place of the message `number` to or from `peer` in the actions of `rank`."""
        places = [
            place
            for place, action in enumerate(self.actions[rank])
            if action.kind in kinds and _placement(action) == (like.comm, peer, like.tag)
        ]
        return places[number] if number < len(places) else None

    def __str__(self) -> str:
        lines = [f"{self.text}; communicators: {self.groups}"]
        for rank, actions in enumerate(self.actions):
            lines.append(f"rank {rank}:")
            lines += [f"    {place}: {describe(action)}" for place, action in enumerate(actions)]
        return "\n".join(lines)


def _placement(action: Action) -> tuple[int, int, int]:
    return action.comm, action.peer, action.tag


def describe(action: Action) -> str:
    """Return an action as one line."""
    shown = {
        name: value
        for name, value in vars(action).items()
        if name not in ("kind", "call") and value not in (-1, None)
    }
    call = "" if action.call is None else f" {_call_text(action.call)}"
    return f"{action.kind}{call} {shown}"


def _call_text(call: Call) -> str:
    return " ".join(
        f"{name}={value}" for name, value in vars(call).items() if value not in ("", -1)
    )


# Drawing


class _Draft:
    """A program under way: what each rank does so far."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.size = random.randint(2, 5)
        self.groups: list[Groups] = [(tuple(range(self.size)),)]
        self.actions: list[list[Action]] = [[] for _ in range(self.size)]
        self.pending: list[list[int]] = [[] for _ in range(self.size)]
        self.number = 0
        self.requests = 0

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def step(self) -> None:
        """Add something that some or all ranks do."""
        chosen = self.random.random()
        if chosen < 0.15 and len(self.groups) < 4:
            self.make()
        elif chosen < 0.35:
            self.message()
        elif chosen < 0.45:
            self.wait()
        else:
            self.collective()

    def make(self) -> None:
        random, parent, made = (
            self.random,
            self.random.randrange(len(self.groups)),
            len(self.groups),
        )
        splits = random.random() < 0.5
        colors = random.choices((0, 1, 1, None), k=self.size) if splits else [0] * self.size
        call = Call("split" if splits else "dup", self.next_number())
        parts: list[tuple[int, ...]] = []
        for group in self.groups[parent]:
            for rank in group:
                action = Action("make", parent, call, makes=made, color=colors[rank])
                self.actions[rank].append(action)
            parts += [tuple(r for r in group if colors[r] == color) for color in (0, 1)]
        self.groups.append(tuple(part for part in parts if part))

    def collective(self) -> None:
        random, comm = self.random, self.random.randrange(len(self.groups))
        call = draw_call(random, self.next_number())
        starts = call.operation not in BLOCKING_ONLY and random.random() < 0.35
        for group in self.groups[comm]:
            root = call.root % len(group) if call.root >= 0 else -1
            for rank in group:
                action = Action("call", comm, replace(call, root=root))
                self.actions[rank].append(self.started(rank, action, "start") if starts else action)

    def message(self) -> None:
        random, comm = self.random, self.random.randrange(len(self.groups))
        groups = [group for group in self.groups[comm] if len(group) > 1]
        if not groups:
            return
        group = random.choice(groups)
        source, dest = random.sample(range(len(group)), 2)
        dtype = random.choice(list(DTYPES))
        call = Call("message", self.next_number(), dtype, random.choice((SMALL, SMALL, LARGE)))
        tag = random.choice((0, 0, 1))
        for kind, rank, peer in (("send", group[source], dest), ("recv", group[dest], source)):
            action = Action(kind, comm, call, peer=peer, tag=tag)
            starts = random.random() < 0.6
            self.actions[rank].append(self.started(rank, action, f"i{kind}") if starts else action)

    def started(self, rank: int, action: Action, kind: str) -> Action:
        self.requests += 1
        self.pending[rank].append(self.requests)
        return replace(action, kind=kind, request=self.requests)

    def wait(self) -> None:
        """Let each rank wait for what it has started, in an order of its own."""
        for rank, requests in enumerate(self.pending):
            self.random.shuffle(requests)
            for request in requests:
                begun = next(a for a in self.actions[rank] if a.request == request)
                self.actions[rank].append(Action("wait", begun.comm, request=request))
            requests.clear()


def draw_call(random: Random, number: int) -> Call:
    """Draw a collective; its root is to be taken modulo the number of ranks."""
    operation = random.choice((*OPERATIONS, "allreduce", "allreduce", "barrier"))
    root = random.randrange(60) if operation in ROOTED else -1
    if operation in OBJECTS or operation == "barrier":
        return Call(operation, number, root=root)
    dtype = random.choice(list(DTYPES))
    shape = random.choices(SHAPES, SHAPE_WEIGHTS)[0]
    op = random.choice(OPS[family(DTYPES[dtype])]) if operation in REDUCING else ""
    return Call(operation, number, dtype, shape, op, root)


def draw(seed: int, kinds: tuple[str, ...]) -> Program:
    """Return the program of a number, in which one rank deviates in one of these kinds."""
    random = Random(f"fault {seed}")
    draft = _Draft(random)
    for _ in range(random.randint(2, 9)):
        draft.step()
    draft.wait()
    draft.collective()
    draft.wait()
    program = Program(seed, draft.size, draft.groups, draft.actions)
    deviate(program, random, random.choice(kinds))
    return program


# Deviating


def deviate(program: Program, random: Random, kind: str) -> None:
    """Let one rank deviate: in the wanted way where its part allows, else in none."""
    change = DEVIATIONS[kind]
    ranks = random.sample(range(program.size), program.size)
    for rank in ranks:
        actions = program.actions[rank]
        for place in random.sample(range(len(actions)), len(actions)):
            changed = change(random, program, rank, place)
            if changed is not None:
                program.kind, program.rank, program.place = kind, rank, place
                program.actions[rank] = changed
                if kind == "argument":
                    _leave_out_unmade(program)
                program.text = (
                    f"program {program.seed}: {kind} on rank {rank} of {program.size}, at {place}"
                )
                return
    program.text = f"program {program.seed}: no deviation, {program.size} ranks"


def _leave_out_unmade(program: Program) -> None:
    """Where the making of a communicator raises on one rank, none of its ranks has it to call."""
    making = program.actions[program.rank][program.place]
    if making.kind != "make" or making.call is None or not making.call.wrong:
        return
    for rank in program.members(making.comm, program.rank):
        unmade = {making.makes}
        kept = []
        for action in program.actions[rank]:
            if action.comm not in unmade:
                kept.append(action)
            elif action.kind == "make":
                unmade.add(action.makes)
        program.actions[rank] = kept


Change = Callable[[Random, Program, int, int], list[Action] | None]


def _with_call(actions: list[Action], place: int, **changes: object) -> list[Action]:
    call = actions[place].call
    assert call is not None
    changed = replace(actions[place], call=replace(call, **changes))  # type: ignore[arg-type]
    return [*actions[:place], changed, *actions[place + 1 :]]


def _other_op(random: Random, program: Program, rank: int, place: int) -> list[Action] | None:
    call = program.actions[rank][place].call
    if call is None or not call.op:
        return None
    ops = [op for op in OPS[family(DTYPES[call.dtype])] if op != call.op]
    return _with_call(program.actions[rank], place, op=random.choice(ops))


def _other_dtype(random: Random, program: Program, rank: int, place: int) -> list[Action] | None:
    call = program.actions[rank][place].call
    if call is None or not call.dtype:
        return None
    dtypes = [
        name
        for name, dtype in DTYPES.items()
        if name != call.dtype and (not call.op or call.op in OPS[family(dtype)])
    ]
    return _with_call(program.actions[rank], place, dtype=random.choice(dtypes))


def _other_shape(random: Random, program: Program, rank: int, place: int) -> list[Action] | None:
    call = program.actions[rank][place].call
    if call is None or not call.dtype:
        return None
    shapes = [(4,), (1, 3), (10,), (5, 2), (60_001,), *SHAPES]
    return _with_call(
        program.actions[rank], place, shape=random.choice([s for s in shapes if s != call.shape])
    )


def _other_root(random: Random, program: Program, rank: int, place: int) -> list[Action] | None:
    action = program.actions[rank][place]
    count = len(program.members(action.comm, rank))
    if action.call is None or action.call.root < 0 or count < 2:
        return None
    return _with_call(
        program.actions[rank], place, root=(action.call.root + random.randrange(1, count)) % count
    )


def _other_operation(
    random: Random, program: Program, rank: int, place: int
) -> list[Action] | None:
    action = program.actions[rank][place]
    if action.kind not in ("call", "start") or action.call is None:
        return None
    count = len(program.members(action.comm, rank))
    call = draw_call(random, action.call.number)
    if call.operation in BLOCKING_ONLY and action.kind == "start":
        return None
    changes = vars(replace(call, root=call.root % count if call.root >= 0 else -1))
    return _with_call(program.actions[rank], place, **changes)


def _other_order(random: Random, program: Program, rank: int, place: int) -> list[Action] | None:
    actions = program.actions[rank]
    if place + 1 == len(actions):
        return None
    first, second = actions[place : place + 2]
    starts_it = second.kind == "wait" and second.request == first.request
    makes_it = first.kind == "make" and second.comm == first.makes
    # Communicators are told apart by the order in which they are made.
    renames_it = first.kind == second.kind == "make"
    if starts_it or makes_it or renames_it:
        return None
    return [*actions[:place], second, first, *actions[place + 2 :]]


def _one_more(random: Random, program: Program, rank: int, place: int) -> list[Action] | None:
    actions = program.actions[rank]
    made = [0, *(action.makes for action in actions[:place] if action.kind == "make")]
    comm = random.choice([c for c in made if program.members(c, rank)])
    call = draw_call(random, 1000)
    count = len(program.members(comm, rank))
    root = call.root % count if call.root >= 0 else -1
    return [*actions[:place], Action("call", comm, replace(call, root=root)), *actions[place:]]


def _one_less(random: Random, program: Program, rank: int, place: int) -> list[Action] | None:
    actions = program.actions[rank]
    left_out = actions[place]
    if left_out.kind in ("make", "wait"):
        return None
    return [
        action
        for at, action in enumerate(actions)
        if at != place and not (left_out.request >= 0 and action.request == left_out.request)
    ]


def wrong_arguments(program: Program, rank: int, action: Action) -> Iterator[str]:
    """Name what can be wrong with the arguments of a call, seen from this rank alone."""
    call = action.call
    if call is None or action.kind in ("recv", "irecv"):
        return
    if call.operation in ("split", "dup"):
        yield call.operation
    if call.op:
        yield "op"
    if call.root >= 0:
        yield "root"
    sends = call.operation not in ("bcast", "scatter", "bcast_object")
    if not sends:
        sends = program.members(action.comm, rank)[call.root] == rank
    if call.operation in OBJECTS and sends:
        yield "unpicklable"
    elif call.dtype and sends and call.operation != "allreduce_tree":
        yield from ("list", "object dtype")
    if call.operation in ("allreduce", "allgather", "scan", "alltoall"):
        yield from ("out shape", "out frozen")


def _wrong_argument(random: Random, program: Program, rank: int, place: int) -> list[Action] | None:
    wrong = list(wrong_arguments(program, rank, program.actions[rank][place]))
    if not wrong:
        return None
    return _with_call(program.actions[rank], place, wrong=random.choice(wrong))


def _ending(kind: str) -> Change:
    def change(random: Random, program: Program, rank: int, place: int) -> list[Action]:
        actions = program.actions[rank]
        return [*actions[:place], Action(kind, how=random.randrange(12)), *actions[place:]]

    return change


def _no_change(random: Random, program: Program, rank: int, place: int) -> list[Action]:
    return program.actions[rank]


DEVIATIONS: Final[dict[str, Change]] = {
    "none": _no_change,
    "slow": _ending("slow"),
    "op": _other_op,
    "dtype": _other_dtype,
    "shape": _other_shape,
    "root": _other_root,
    "operation": _other_operation,
    "order": _other_order,
    "one more": _one_more,
    "one less": _one_less,
    "argument": _wrong_argument,
    "raise": _ending("raise"),
    "interrupt": _ending("interrupt"),
    "exit": _ending("exit"),
    "leave": _ending("leave"),
    "sleep": _ending("sleep"),
    "kill": _ending("kill"),
    "die": _ending("die"),
}
DISAGREEING: Final = ("op", "dtype", "shape", "root", "operation", "order", "one more", "one less")
