"""What one rank of a program does differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from arraycomm.testing._arrays.oracle import OPS, family
from tests.faults.drawing import EXACT, draw_call, draw_container, draw_draft, draw_optimizer
from tests.faults.programs import (
    BLOCKING_ONLY,
    CUSTOM,
    DTYPES,
    ENDING,
    HUGE,
    OBJECTS,
    SHAPES,
    TREES,
    Action,
    Call,
    Program,
)
from tests.faults.values import passes_nothing

# How many programs are drawn to find one that has room for a deviation.
_ATTEMPTS: Final = 10


def draw(seed: int, kinds: tuple[str, ...]) -> Program:
    """Return the program of a number, in which one rank deviates in one of these kinds."""
    random = Random(f"fault {seed}")
    kind = random.choice(kinds)
    for _ in range(_ATTEMPTS):
        program = draw_draft(seed, random)
        deviate(program, random, kind)
        if program.kind == kind:
            break
    return program


def deviate(program: Program, random: Random, kind: str) -> None:
    """Let one rank deviate: in the wanted way where its part allows, else in none."""
    change = DEVIATIONS[kind]
    ranks = random.sample(range(program.size), program.size)
    for rank in ranks:
        actions = program.actions[rank]
        for place in random.sample(range(len(actions)), len(actions)):
            changed = change(Spot(random, program, rank, place))
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


@dataclass(frozen=True)
class Spot:
    """Where a rank is to deviate."""

    random: Random
    program: Program
    rank: int
    place: int

    @property
    def actions(self) -> list[Action]:
        return self.program.actions[self.rank]

    @property
    def action(self) -> Action:
        return self.actions[self.place]

    @property
    def call(self) -> Call | None:
        return self.action.call

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the action's communicator."""
        return self.program.members(self.action.comm, self.rank)

    def with_call(self, **changes: object) -> list[Action]:
        """Return the rank's actions with another call here."""
        assert self.call is not None
        changed = replace(self.action, call=replace(self.call, **changes))  # type: ignore[arg-type]
        return [*self.actions[: self.place], changed, *self.actions[self.place + 1 :]]

    def inserted(self, action: Action) -> list[Action]:
        """Return the rank's actions with one more here."""
        return [*self.actions[: self.place], action, *self.actions[self.place :]]


# Returns the rank's actions, or None where the spot has no room for the deviation.
Change = Callable[[Spot], list[Action] | None]


def _other_op(at: Spot) -> list[Action] | None:
    call = at.call
    if call is None or not call.op:
        return None
    ops = [op for op in (*OPS[family(DTYPES[call.dtype])], CUSTOM) if op != call.op]
    if call.operation in TREES or not call.dtype.startswith("int"):
        ops = [op for op in ops if op != CUSTOM]
    return at.with_call(op=at.random.choice(ops))


def _other_dtype(at: Spot) -> list[Action] | None:
    call = at.call
    if call is None or not call.dtype:
        return None
    names = EXACT if call.operation in ("update", "join") else DTYPES
    fit = [n for n in names if not call.op or call.op in OPS[family(DTYPES[n])]]
    others = [name for name in fit if name != call.dtype]
    return at.with_call(dtype=at.random.choice(others)) if others else None


def _other_shape(at: Spot) -> list[Action] | None:
    call = at.call
    if call is None or not call.dtype:
        return None
    shapes = [(4,), (1, 3), (10,), (5, 2), (60_001,), *SHAPES]
    return at.with_call(shape=at.random.choice([s for s in shapes if s != call.shape]))


def _other_root(at: Spot) -> list[Action] | None:
    count = len(at.members)
    if at.call is None or at.call.root < 0 or count < 2:
        return None
    return at.with_call(root=(at.call.root + at.random.randrange(1, count)) % count)


def _other_operation(at: Spot) -> list[Action] | None:
    if at.action.kind not in ("call", "start") or at.call is None or at.call.operation == "update":
        return None
    call = _called(at, draw_call(at.random, at.call.number), at.action.comm)
    if call.operation in BLOCKING_ONLY and at.action.kind == "start":
        return None
    return at.with_call(**vars(call))


def _called(at: Spot, call: Call, comm: int) -> Call:
    """Return a call that was drawn, with a root that the communicator has."""
    count = len(at.program.members(comm, at.rank))
    return replace(call, root=call.root % count if call.root >= 0 else -1)


def _other_order(at: Spot) -> list[Action] | None:
    if at.place + 1 == len(at.actions):
        return None
    first, second = at.actions[at.place : at.place + 2]
    starts_it = second.kind == "wait" and second.request == first.request
    makes_it = first.kind == "make" and second.comm == first.makes
    # Communicators are told apart by the order in which they are made.
    renames_it = first.kind == second.kind == "make"
    frees_it = any(action.call and action.call.operation == "free" for action in (first, second))
    if starts_it or makes_it or renames_it or frees_it:
        return None
    return [*at.actions[: at.place], second, first, *at.actions[at.place + 2 :]]


def _one_more(at: Spot) -> list[Action] | None:
    comm = at.random.choice(_at_hand(at))
    return at.inserted(Action("call", comm, _called(at, draw_call(at.random, 1000), comm)))


def _at_hand(at: Spot) -> list[int]:
    """Return the communicators on which a rank can call what it likes."""
    made = [
        action.makes
        for action in at.actions[: at.place]
        if action.kind == "make" and action.call and action.call.operation != "optimizer"
    ]
    freed = [a.comm for a in at.actions if a.call and a.call.operation == "free"]
    return [c for c in (0, *made) if at.program.members(c, at.rank) and c not in freed]


def _one_less(at: Spot) -> list[Action] | None:
    left_out = at.action
    if left_out.kind in ("make", "wait"):
        return None
    return [
        action
        for place, action in enumerate(at.actions)
        if place != at.place and not (left_out.request >= 0 and action.request == left_out.request)
    ]


def _other_setting(at: Spot) -> list[Action] | None:
    call = at.call
    # Alone it may set what it likes, and later calls follow its setting.
    if call is None or call.operation not in ("optimizer", "container") or len(at.members) < 2:
        return None
    draw_setting = draw_optimizer if call.operation == "optimizer" else draw_container
    setting = draw_setting(at.random)
    # What framework an optimizer is of is each rank's own affair.
    if setting.split()[:2] == call.setting.split()[:2]:
        return None
    return at.with_call(setting=setting)


def _crossed(at: Spot) -> list[Action] | None:
    """Swap two calls on different communicators, which another rank is a member of as well."""
    actions, place = at.actions, at.place
    following = (
        later for later in range(place + 1, len(actions))
        if actions[later].kind in ("call", "make", "wait")
    )  # fmt: skip
    other = next(following, None)
    if other is None or actions[place].kind != "call" or actions[other].kind != "call":
        return None
    first, second = actions[place], actions[other]
    both = set(at.members).intersection(at.program.members(second.comm, at.rank))
    if first.comm == second.comm or len(both) < 2:
        return None
    return [*actions[:place], second, *actions[place + 1 : other], first, *actions[other + 1 :]]


def wrong_arguments(program: Program, rank: int, action: Action) -> Iterator[str]:
    """Name what can be wrong with the arguments of a call, seen from this rank alone."""
    call = action.call
    if call is None or action.kind in ("recv", "irecv"):
        return
    yield from _WRONG.get(call.operation, ())
    if call.operation == "update" and "numpy" in call.setting:
        yield "gradient"
    if call.op:
        yield "op"
    if call.op == CUSTOM:
        yield "custom op"
    if call.root >= 0:
        yield "root"
    if call.operation in TREES:
        if call.operation == "synchronize" and call.root == rank_in(program, rank, action.comm):
            members = range(len(program.members(action.comm, rank)))
            yield from ["unpicklable"] * any(passes_nothing(call, member) for member in members)
        return
    sends = call.operation not in ("bcast", "scatter", "bcast_object")
    if not sends:
        sends = rank_in(program, rank, action.comm) == call.root
    if call.operation in OBJECTS and sends:
        yield "unpicklable"
    elif call.dtype and sends and call.operation not in _WRONG:
        yield from ("list", "object dtype")
    if call.operation in ("allreduce", "allgather", "scan", "alltoall"):
        yield from ("out shape", "out frozen")


# What can be wrong with what is above the collectives.
_WRONG: Final = {
    "split": ("split",),
    "dup": ("dup",),
    "optimizer": ("no optimizer",),
    "update": ("optimizer",),
    "mean_metrics": ("weight",),
    "raise_together": ("block", "block"),
    "join": ("block", "block"),
    "container": ("data",),
    "println": ("line",),
}


def rank_in(program: Program, rank: int, comm: int) -> int:
    """Return which rank of a communicator a rank of the program is."""
    return program.members(comm, rank).index(rank)


def _wrong_argument(at: Spot) -> list[Action] | None:
    wrong = list(wrong_arguments(at.program, at.rank, at.action))
    return at.with_call(wrong=at.random.choice(wrong)) if wrong else None


def _lost_error(at: Spot) -> list[Action] | None:
    """Pass a wrong argument to a request for which another rank does not wait."""
    action, actions = at.action, at.program.actions
    wrong = set(wrong_arguments(at.program, at.rank, action)) - {"custom op"}
    others = [r for r in at.members if r != at.rank]
    if action.kind != "start" or action.call is None or not wrong or not others:
        return None
    other = at.random.choice(others)
    theirs, number = actions[other], action.call.number
    request = next(a.request for a in theirs if a.call and a.call.number == number)
    actions[other] = [a for a in theirs if a.kind != "wait" or a.request != request]
    # A rank that waits for nothing else might end before the others are done with the request.
    barrier = Action("call", action.comm, Call("barrier", 2000))
    for member in (at.rank, *others):
        actions[member] = [*actions[member], barrier]
    return at.with_call(wrong=at.random.choice(sorted(wrong)))


def _scarce(what: str) -> Change:
    """Make a call while there is too little of something."""

    def change(at: Spot) -> list[Action] | None:
        # CPython waits for ever for a thread that has no memory to begin.
        takes_no_part = at.action.kind in ("irecv", "recv", "start")
        if at.call is None or takes_no_part or not _needs(at.call, what):
            return None
        if at.call.shape and at.call.operation != "message" and at.random.random() < 0.6:
            for actions in at.program.actions:
                actions[:] = [_enlarged(a, at.call.number) for a in actions]
        return at.with_call(wrong=what)

    return change


def _needs(call: Call, what: str) -> bool:
    """Return whether a call may need memory, or a file of shared memory."""
    if call.operation in ("dup", "split", "optimizer", "container", *TREES):
        return True
    return what == "memory" and (bool(call.dtype) or call.operation in OBJECTS)


def _enlarged(action: Action, number: int) -> Action:
    if action.call is None or action.call.number != number:
        return action
    return replace(action, call=replace(action.call, shape=HUGE))


def _ending(kind: str) -> Change:
    return lambda at: at.inserted(Action(kind, how=at.random.randrange(12)))


DEVIATIONS: Final[dict[str, Change]] = {
    "none": lambda at: at.actions,
    "slow": _ending("slow"),
    "op": _other_op,
    "dtype": _other_dtype,
    "shape": _other_shape,
    "root": _other_root,
    "operation": _other_operation,
    "order": _other_order,
    "one more": _one_more,
    "one less": _one_less,
    "setting": _other_setting,
    "crossed": _crossed,
    "argument": _wrong_argument,
    **{kind: _ending(kind) for kind in ENDING},
    "lost error": _lost_error,
    "memory": _scarce("memory"),
    "files": _scarce("files"),
    **{kind: _ending(kind) for kind in ("sigint", "stop", "suspend", "fork", "launcher")},
}
DISAGREEING: Final = (
    *("op", "dtype", "shape", "root", "operation", "order", "one more", "one less"),
    *("setting", "crossed"),
)
# Those for which a rank needs a process of its own.
OF_PROCESSES: Final = (
    *("kill", "die", "memory", "files", "sigint", "stop", "suspend", "fork", "launcher"),
)
