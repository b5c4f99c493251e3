"""What a program for a few ranks is: the actions of each rank, and the communicators they are on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import ml_dtypes
import numpy as np

Groups = tuple[tuple[int, ...], ...]

# What travels with a header, in a few steps, and in slices; in a message: at once, and when received.
SHAPES: Final = ((), (3,), (0,), (2, 5), (700,), (9_000,), (60_000,))
SHAPE_WEIGHTS: Final = (4, 6, 2, 4, 4, 2, 1)
SMALL: Final = (3,)
LARGE: Final = (300_000,)
# Of a call that a rank makes with little memory.
HUGE: Final = (400_000,)
DTYPES: Final = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in ("bool", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64")
}
REDUCING: Final = (
    *("allreduce", "reduce", "reduce_scatter", "scan", "exscan"),
    *("allreduce_tree", "allreduce_gradients", "plan"),
)
# The op of reductions by a function of the program's own, of integers.
CUSTOM: Final = "custom"
MOVING: Final = (
    *("bcast", "allgather", "allgatherv", "gather", "gatherv", "scatter"),
    *("alltoall", "alltoallv"),
)
OBJECTS: Final = ("bcast_object", "allgather_object", "gather_object")
# What programs call above the collectives; each is one or more calls on its communicator.
TREES: Final = ("allreduce_tree", "allreduce_gradients", "plan", "synchronize", "mean_metrics")
BLOCKS: Final = ("join", "raise_together")
ABOVE: Final = (*TREES, *BLOCKS, "container", "println")
OPERATIONS: Final = (*REDUCING, *MOVING, *OBJECTS, *ABOVE[3:], "barrier")
ROOTED: Final = (
    *("reduce", "bcast", "gather", "gatherv", "scatter", "bcast_object", "gather_object"),
    "synchronize",
)
BLOCKING_ONLY: Final = (*OBJECTS, *ABOVE, "update", "free")
COLLECTIVE: Final = ("call", "start", "make")
MESSAGES: Final = ("send", "recv", "isend", "irecv")
# How a rank's own part can end: it goes no further in its list of actions.
ENDING: Final = ("raise", "interrupt", "exit", "leave", "sleep", "kill", "die")
# What happens to a rank from outside, or beside its calls; it goes on.
DISTURBING: Final = ("slow", "fork", "stop", "suspend", "launcher", "sigint")
# What is wrong with a call of one rank, but may leave it and the calls of the others as they are:
# who runs the function that raises, and how much memory is needed, depends on the algorithm.
HARMLESS: Final = ("custom op", "optimizer", "memory", "files")


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
    # What the ranks compare besides: the settings of an optimizer or a container.
    setting: str = ""


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


def harms(call: Call) -> bool:
    """Return whether what is wrong with a call surely makes it raise."""
    return bool(call.wrong) and call.wrong not in HARMLESS


def _placement(action: Action) -> tuple[int, int, int]:
    return action.comm, action.peer, action.tag


def describe(action: Action) -> str:
    """Return an action as one line."""
    shown = {
        name: value
        for name, value in vars(action).items()
        if name not in ("kind", "call") and value not in (-1, None)
    }
    call = {} if action.call is None else vars(action.call)
    words = [f"{name}={value}" for name, value in call.items() if value not in ("", -1)]
    return " ".join([action.kind, *words, str(shown)])
