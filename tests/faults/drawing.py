"""Programs in which every rank does its part, drawn from a number.

Every rank draws the whole program, so each knows what the others pass, and what must come back.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Final

from arraycomm.testing._arrays.oracle import OPS, family
from tests.faults.programs import (
    BLOCKING_ONLY,
    CUSTOM,
    DTYPES,
    LARGE,
    OBJECTS,
    OPERATIONS,
    REDUCING,
    ROOTED,
    SHAPE_WEIGHTS,
    SHAPES,
    SMALL,
    Action,
    Call,
    Groups,
    Program,
)

# The dtypes in which sums of gradients are exact, so that the right mean is one number.
EXACT: Final = ("float32", "float64")
TAGS: Final = (0, 0, 1, 4_000)
_MOST_GROUPS: Final = 5
_UNEVEN: Final = ("exact", "pad", "drop")


class _Draft:
    """A program under way: what each rank does so far."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.size = random.randint(2, 5)
        self.groups: list[Groups] = [(tuple(range(self.size)),)]
        self.actions: list[list[Action]] = [[] for _ in range(self.size)]
        self.pending: list[list[int]] = [[] for _ in range(self.size)]
        # The communicators that collectives are called on, and those on which nothing can be under
        # way; with the settings of those that belong to optimizers.
        self.open = [0]
        self.quiet: set[int] = set()
        self.optimizers: dict[int, str] = {}
        self.parents: dict[int, int] = {}
        # Those on which a request is never waited for.
        self.unawaited: list[int] = []
        self.number = 0
        self.requests = 0

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def step(self) -> None:
        """Add something that some or all ranks do."""
        chosen = self.random.random()
        if chosen < 0.17 and len(self.groups) < _MOST_GROUPS:
            self.make()
        elif chosen < 0.33:
            self.message()
        elif chosen < 0.43:
            self.wait()
        elif chosen < 0.48:
            self.free()
        elif chosen < 0.62 and self.optimizers:
            self.update()
        else:
            self.collective()

    def make(self) -> None:
        random, parent, made = self.random, self.random.choice(self.open), len(self.groups)
        kind = random.choice(("split", "split", "dup", "optimizer", "optimizer"))
        colors = (
            random.choices((0, 1, 1, None), k=self.size) if kind == "split" else [0] * self.size
        )
        call = Call(kind, self.next_number())
        if kind == "optimizer":
            call = replace(call, setting=draw_optimizer(random))
            self.optimizers[made], self.parents[made] = call.setting, parent
        else:
            self.open.append(made)
            self.quiet.add(made)
        parts: list[tuple[int, ...]] = []
        for group in self.groups[parent]:
            for rank in group:
                action = Action("make", parent, call, makes=made, color=colors[rank])
                self.actions[rank].append(action)
            parts += [tuple(r for r in group if colors[r] == color) for color in (0, 1)]
        self.groups.append(tuple(part for part in parts if part))

    def free(self) -> None:
        """Free a communicator on which no request and no message was."""
        if self.quiet:
            comm = self.random.choice(sorted(self.quiet))
            self.quiet.discard(comm)
            self.open.remove(comm)
            # Its optimizers end with it.
            for made in [each for each in self.optimizers if self.parents[each] == comm]:
                del self.optimizers[made]
            self.everywhere(comm, Call("free", self.next_number()))

    def update(self) -> None:
        """Let an optimizer take a step."""
        comm = self.random.choice(list(self.optimizers))
        shape, dtype = draw_shape(self.random), self.random.choice(EXACT)
        setting = self.optimizers[comm]
        self.everywhere(comm, Call("update", self.next_number(), dtype, shape, setting=setting))

    def collective(self) -> None:
        random, comm = self.random, self.random.choice(self.open)
        call = draw_call(random, self.next_number())
        starts = call.operation not in BLOCKING_ONLY and random.random() < 0.35
        if starts:
            self.quiet.discard(comm)
        awaited = random.random() > 0.1
        for group in self.groups[comm]:
            root = call.root % len(group) if call.root >= 0 else -1
            for rank in group:
                action = Action("call", comm, replace(call, root=root))
                if starts:
                    action = self.started(rank, action, "start", awaited=awaited)
                self.actions[rank].append(action)
        if starts and not awaited:
            self.unawaited.append(comm)

    def everywhere(self, comm: int, call: Call) -> None:
        """Let all ranks of a communicator make a call."""
        for group in self.groups[comm]:
            for rank in group:
                self.actions[rank].append(Action("call", comm, call))

    def message(self) -> None:
        random, comm = self.random, self.random.choice(self.open)
        groups = [group for group in self.groups[comm] if len(group) > 1]
        if not groups:
            return
        self.quiet.discard(comm)
        group = random.choice(groups)
        source, dest = random.sample(range(len(group)), 2)
        dtype = random.choice(list(DTYPES))
        call = Call("message", self.next_number(), dtype, random.choice((SMALL, SMALL, LARGE)))
        tag = random.choice(TAGS)
        for kind, rank, peer in (("send", group[source], dest), ("recv", group[dest], source)):
            action = Action(kind, comm, call, peer=peer, tag=tag)
            starts = random.random() < 0.6
            self.actions[rank].append(self.started(rank, action, f"i{kind}") if starts else action)

    def started(self, rank: int, action: Action, kind: str, *, awaited: bool = True) -> Action:
        self.requests += 1
        if awaited:
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

    def end(self) -> None:
        """Let no rank end before the others are done with the requests that nobody waits for."""
        for comm in dict.fromkeys(self.unawaited):
            self.everywhere(comm, Call("barrier", self.next_number()))


def draw_draft(seed: int, random: Random) -> Program:
    """Return a program in which every rank does its part."""
    draft = _Draft(random)
    for _ in range(random.randint(2, 9)):
        draft.step()
    draft.wait()
    draft.collective()
    draft.wait()
    draft.end()
    return Program(seed, draft.size, draft.groups, draft.actions)


def draw_call(random: Random, number: int) -> Call:
    """Draw a collective; its root is to be taken modulo the number of ranks."""
    operation = random.choice((*OPERATIONS, "allreduce", "allreduce", "barrier"))
    root = random.randrange(60) if operation in ROOTED else -1
    if operation in OBJECTS or operation in ("barrier", "println", "raise_together"):
        return Call(operation, number, root=root)
    if operation == "container":
        return Call(operation, number, setting=draw_container(random))
    if operation == "join":
        return Call(operation, number, random.choice(EXACT), draw_shape(random))
    if operation in ("allreduce", "reduce", "scan") and random.random() < 0.1:
        return Call(operation, number, "int64", draw_shape(random), CUSTOM, root)
    dtype = random.choice(list(DTYPES))
    op = random.choice(OPS[family(DTYPES[dtype])]) if operation in REDUCING else ""
    return Call(operation, number, dtype, draw_shape(random), op, root)


def draw_shape(random: Random) -> tuple[int, ...]:
    """Draw a shape."""
    return random.choices(SHAPES, SHAPE_WEIGHTS)[0]


def draw_optimizer(random: Random) -> str:
    """Draw an op, how many steps are accumulated, and a framework."""
    framework = "torch" if random.random() < 0.15 else "numpy"
    return f"{random.choice(('mean', 'sum'))} {random.randint(1, 3)} {framework}"


def draw_container(random: Random) -> str:
    """Draw how many items there are, what happens if they are uneven, and the seed of an order."""
    return f"{random.randint(20, 60)} {random.choice(_UNEVEN)} {random.choice((-1, 7))}"
