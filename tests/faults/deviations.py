"""What one rank of a program does differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Final

from arraycomm.testing._oracle import OPS, family
from tests.faults.drawing import (
    EXACT,
    draw_call,
    draw_container,
    draw_draft,
    draw_optimizer,
)
from tests.faults.programs import (
    BLOCKING_ONLY,
    CUSTOM,
    DTYPES,
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
    ops = [op for op in (*OPS[family(DTYPES[call.dtype])], CUSTOM) if op != call.op]
    if call.operation in TREES or not call.dtype.startswith("int"):
        ops = [op for op in ops if op != CUSTOM]
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
    if call.operation in ("update", "join"):
        dtypes = [name for name in EXACT if name != call.dtype]
    if not dtypes:
        return None
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
    if action.call.operation == "update":
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
    frees_it = any(action.call and action.call.operation == "free" for action in (first, second))
    if starts_it or makes_it or renames_it or frees_it:
        return None
    return [*actions[:place], second, first, *actions[place + 2 :]]


def _one_more(random: Random, program: Program, rank: int, place: int) -> list[Action] | None:
    actions = program.actions[rank]
    comm = random.choice(_at_hand(program, rank, place))
    call = draw_call(random, 1000)
    count = len(program.members(comm, rank))
    root = call.root % count if call.root >= 0 else -1
    return [*actions[:place], Action("call", comm, replace(call, root=root)), *actions[place:]]


def _at_hand(program: Program, rank: int, place: int) -> list[int]:
    """Return the communicators on which a rank can call what it likes."""
    actions = program.actions[rank]
    made = [
        action.makes
        for action in actions[:place]
        if action.kind == "make" and action.call and action.call.operation != "optimizer"
    ]
    freed = [action.comm for action in actions if action.call and action.call.operation == "free"]
    return [c for c in (0, *made) if program.members(c, rank) and c not in freed]


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


def _other_setting(random: Random, program: Program, rank: int, place: int) -> list[Action] | None:
    call = program.actions[rank][place].call
    if call is None or call.operation not in ("optimizer", "container"):
        return None
    if len(program.members(program.actions[rank][place].comm, rank)) < 2:
        # Alone it may set what it likes, and later calls follow its setting.
        return None
    draw_setting = draw_optimizer if call.operation == "optimizer" else draw_container
    setting = draw_setting(random)
    # What framework an optimizer is of is each rank's own affair.
    if setting.split()[:2] == call.setting.split()[:2]:
        return None
    return _with_call(program.actions[rank], place, setting=setting)


def _crossed(random: Random, program: Program, rank: int, place: int) -> list[Action] | None:
    """Swap two calls on different communicators."""
    actions = program.actions[rank]
    following = (
        at for at in range(place + 1, len(actions)) if actions[at].kind in ("call", "make", "wait")
    )
    other = next(following, None)
    if other is None or actions[place].kind != "call" or actions[other].kind != "call":
        return None
    first, second = actions[place], actions[other]
    if first.comm == second.comm or not _shared(program, rank, first.comm, second.comm):
        return None
    return [*actions[:place], second, *actions[place + 1 : other], first, *actions[other + 1 :]]


def _shared(program: Program, rank: int, *comms: int) -> bool:
    """Return whether another rank is a member of these communicators too."""
    return len(set.intersection(*(set(program.members(c, rank)) for c in comms))) > 1


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


def _wrong_argument(random: Random, program: Program, rank: int, place: int) -> list[Action] | None:
    wrong = list(wrong_arguments(program, rank, program.actions[rank][place]))
    if not wrong:
        return None
    return _with_call(program.actions[rank], place, wrong=random.choice(wrong))


def _lost_error(random: Random, program: Program, rank: int, place: int) -> list[Action] | None:
    """Pass a wrong argument to a request for which another rank does not wait."""
    action = program.actions[rank][place]
    wrong = set(wrong_arguments(program, rank, action)) - {"custom op"}
    others = [r for r in program.members(action.comm, rank) if r != rank]
    if action.kind != "start" or action.call is None or not wrong or not others:
        return None
    other = random.choice(others)
    theirs = program.actions[other]
    request = next(a.request for a in theirs if a.call and a.call.number == action.call.number)
    waits = [a for a in theirs if a.kind == "wait" and a.request == request]
    program.actions[other] = [a for a in theirs if a not in waits]
    # A rank that waits for nothing else might end before the others are done with the request.
    barrier = Action("call", action.comm, Call("barrier", 2000))
    for member in (rank, *others):
        program.actions[member] = [*program.actions[member], barrier]
    return _with_call(program.actions[rank], place, wrong=random.choice(sorted(wrong)))


def _scarce(what: str) -> Change:
    """Make a call while there is too little of something."""

    def change(random: Random, program: Program, rank: int, place: int) -> list[Action] | None:
        action = program.actions[rank][place]
        call = action.call
        if call is None or action.kind in ("irecv", "recv") or not _needs(call, what):
            return None
        if action.kind == "start":
            # CPython waits for ever for a thread that has no memory to begin.
            return None
        if call.shape and call.operation != "message" and random.random() < 0.6:
            for actions in program.actions:
                actions[:] = [_enlarged(a, call.number) for a in actions]
        return _with_call(program.actions[rank], place, wrong=what)

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
    "setting": _other_setting,
    "crossed": _crossed,
    "argument": _wrong_argument,
    "raise": _ending("raise"),
    "interrupt": _ending("interrupt"),
    "exit": _ending("exit"),
    "leave": _ending("leave"),
    "sleep": _ending("sleep"),
    "kill": _ending("kill"),
    "die": _ending("die"),
    "lost error": _lost_error,
    "memory": _scarce("memory"),
    "files": _scarce("files"),
    "sigint": _ending("sigint"),
    "stop": _ending("stop"),
    "suspend": _ending("suspend"),
    "fork": _ending("fork"),
    "launcher": _ending("launcher"),
}
DISAGREEING: Final = (
    *("op", "dtype", "shape", "root", "operation", "order", "one more", "one less"),
    *("setting", "crossed"),
)
# Those for which a rank needs a process of its own.
OF_PROCESSES: Final = (
    *("kill", "die", "memory", "files", "sigint", "stop", "suspend", "fork", "launcher"),
)
