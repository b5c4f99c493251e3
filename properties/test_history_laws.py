"""A law of histories: calls made again, from other memory and in other ways, give what NumPy says.

How much travels with a header, and how long chunks and pieces are, is drawn as well: a few kilobytes take every
way that many megabytes do.
"""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm._native import compiled
from arraycomm.testing import given
from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays.dtypes import dtype_of
from arraycomm.testing._arrays.oracle import OPS, expected, family
from arraycomm.testing._arrays.rank_values import rank_count
from arraycomm.testing._ranks.rank_groups import RankGroup, lockstep_over
from arraycomm.testing.conformance._checks import check_elements
from properties.test_laws import NUMBERED
from properties.test_machine import LAUNCHED
from tests.support import internals

Array = np.ndarray[Any, Any]
# Calls are prepared by the native part: fewer find little of that.
LEAST: Final = 25 if compiled is not None else 1
EXAMPLES: Final = hypothesis.settings(
    max_examples=max(LEAST, int(os.environ.get("EXAMPLES") or 25))
)
DTYPES: Final = ("bool", "int8", "uint8", "int32", "int64", "float32", "float64", "complex64")
# Bytes that a rank reads more of others' slots, the most of a slot, and those of all slots between nodes.
SLOTS: Final = (*[(0, 4 << 10, 4 << 10)] * 3, internals.slots())
torch: Any = "torch" in ranked.installed_frameworks() and importlib.import_module("torch")

# For each call: how `x` and an `out` of this rank are passed, and what it gives, of all ranks' arrays.
CALLS: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "allreduce": (lambda c, size: (c.op,), lambda c, rows, rank: expected(rows, c.op)),
    "reduce": (
        lambda c, size: (c.op, c.root),
        lambda c, rows, rank: expected(rows, c.op) if rank == c.root else None,
    ),
    "scan": (lambda c, size: (c.op,), lambda c, rows, rank: expected(rows[: rank + 1], c.op)),
    "exscan": (
        lambda c, size: (c.op,),
        lambda c, rows, rank: expected(rows[:rank], c.op) if rank else None,
    ),
    "reduce_scatter": (lambda c, size: (c.op,), lambda c, rows, rank: expected(rows, c.op)[rank]),
    "bcast": (lambda c, size: (c.root,), lambda c, rows, rank: rows[c.root]),
    "allgather": (lambda c, size: (), lambda c, rows, rank: np.stack(rows)),
    "allgatherv": (lambda c, size: (), lambda c, rows, rank: np.concatenate(rows)),
    "gather": (
        lambda c, size: (c.root,),
        lambda c, rows, rank: np.stack(rows) if rank == c.root else None,
    ),
    "gatherv": (
        lambda c, size: (c.root,),
        lambda c, rows, rank: np.concatenate(rows) if rank == c.root else None,
    ),
    "scatter": (lambda c, size: (c.root,), lambda c, rows, rank: rows[c.root][rank]),
    "alltoall": (lambda c, size: (), lambda c, rows, rank: np.stack([row[rank] for row in rows])),
    "scatterv": (
        lambda c, size: ([1] * size, c.root),
        lambda c, rows, rank: rows[c.root][rank : rank + 1],
    ),
    "alltoallv": (
        lambda c, size: ([1] * size,),
        lambda c, rows, rank: np.concatenate([row[rank : rank + 1] for row in rows]),
    ),
    "plan": (lambda c, size: (c.op,), lambda c, rows, rank: expected(rows, c.op)),
    "tree": (lambda c, size: (c.op,), lambda c, rows, rank: expected(rows, c.op)),
}
TREES: Final = ("plan", "tree")
# The root alone passes an array.
FROM_ROOT: Final = ("scatter", "scatterv")
ROOTED: Final = ("reduce", "bcast", "gather", "gatherv", *FROM_ROOT)


class Subject(NamedTuple):
    """A call that is made again and again, of arrays that have a row of this shape for each rank."""

    name: str
    dtype: str
    op: str
    shape: tuple[int, ...]
    root: int


class Turn(NamedTuple):
    """How a subject is called `times` times; arrays lie as `place` says on rank `unusual`, or on all if it is none."""

    subject: int
    times: int
    way: str
    # What is done before the last time.
    before: str
    place: str
    unusual: int
    # How far `out` begins behind `x`, in eighths of its length, and elements.
    eighths: int
    elements: int
    tensors: bool
    # With which relative of the subject it takes turns; 0 for none.
    relative: int


class History(NamedTuple):
    """Subjects and turns, and the limits by which ways are chosen."""

    slots: tuple[int, int, int]
    chunk: int
    check: bool
    seed: int
    subjects: list[Subject]
    turns: list[Turn]


def subject(some: random.Random, chunk: int, size: int) -> Subject:
    """Return a call of a few elements, of as many as a small slot has room for, or of up to nine chunks or so."""
    dtype, chunks = some.choice(DTYPES), some.choice((*[0] * 10, 1, 2, 3, 5, 8, 9, 9))
    count = chunks * chunk // (dtype_of(dtype).itemsize * size) + some.randint(-1, 3)
    full = SLOTS[0][1] // (dtype_of(dtype).itemsize * size)
    count = count if chunks else some.choice((0, *[1, 2, 3, 30, 60] * 2, 1, 30, *[full] * 3))
    op = some.choice(OPS[family(dtype_of(dtype))])
    name = some.choice([*["allreduce"] * 16, *["plan"] * 3, *ROOTED, *CALLS])
    return Subject(name, dtype, op, (count,), some.randrange(size))


def relative(number: int, seed: int, like: Subject, size: int) -> Subject:
    """Return a call that is like another one but for one thing; the first one's elements are as long."""
    some = random.Random(f"{seed} {number}")
    [count], own = like.shape, dtype_of(like.dtype)
    dtypes = [each for each in DTYPES if like.op in OPS[family(dtype_of(each))]]
    as_long = [each for each in dtypes if dtype_of(each).itemsize == own.itemsize]
    other = some.choice([each for each in as_long if each != like.dtype] or dtypes)
    changes: list[dict[str, Any]] = [
        {"dtype": some.choice(dtypes)},
        {"op": some.choice(OPS[family(own)])},
        *[{"shape": some.choice(((count, 1), (1, count), (count + 1,)))}] * 2,
        {"root": some.randrange(size)},
        {"name": some.choice([*CALLS])},
    ]
    return like._replace(**({"dtype": other} if number == 1 else some.choice(changes)))


def turn(some: random.Random, size: int) -> Turn:
    """Return a turn of a subject whose number is a remainder."""
    relative = some.choice((*[0] * 4, *[1] * 3, 2, 3))
    way = some.choice((*["call"] * (12 if relative else 3), "full", "wait", "late"))
    places = ("new", *["out"] * 2, *["shifted"] * 4, "sliced", "into", "into", "odd")
    return Turn(
        subject=some.randrange(6),
        times=some.randint(2 if relative else 1, 4),
        way=way,
        before=some.choice(("", "", "refused", "refused", "others")),
        # Only in memory of their own do requests stay outstanding.
        place="new" if way == "late" else some.choice(places),
        unusual=some.choice((-1, some.randrange(size))),
        eighths=some.choice((-8, -4, -1, 0, *range(1, 9))),
        elements=some.randint(-1, 1),
        tensors=torch and some.random() < 0.2,
        relative=relative,
    )


# What Hypothesis draws itself is much alike from example to example, since it varies few examples. Of a longer range
# it would draw small numbers most of the time.
SEEDS: Final = st.integers(0, 2**24 - 1)
NUMBERS: Final = st.integers(0, 999)


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Draw a history; it shrinks to few turns."""
    seed, size = draw(SEEDS), rank_count()
    some = random.Random(seed)
    slots, chunk = some.choice(SLOTS), some.choice((1 << 10, 4 << 10))
    called = [subject(some, chunk, size) for _ in range(some.randint(1, 2))]
    numbers = draw(st.lists(NUMBERS, min_size=10, max_size=24, unique=True))
    turns = [turn(random.Random(f"{seed} {number}"), size) for number in numbers]
    return History(slots, chunk, some.random() < 0.9, seed, called, turns)


class Player:
    """One rank's part in a history."""

    def __init__(self, comm: ac.Communicator, history: History) -> None:
        self.history, self.parent = history, comm
        self.comm = comm.dup(check=history.check)
        self.rank, self.size = comm.rank, comm.size
        self.plans: dict[Subject, Any] = {}
        self.memory: dict[Subject, Array] = {}
        # Requests with what they give, and results that stay as they are.
        self.late: list[tuple[Any, Array | None, Subject]] = []
        self.kept: list[tuple[Array, Array, Subject]] = []

    def play(self) -> None:
        made = 0
        for turn in self.history.turns:
            for time in range(turn.times):
                made += 1
                self.take(turn, made, self.called(turn, time), last=time + 1 == turn.times)
        self.settle()
        for got, want, subject in self.kept:
            check_elements(got, want, subject.op)

    def take(self, turn: Turn, number: int, subject: Subject, *, last: bool) -> None:
        rows = [self.values(subject, number, rank) for rank in range(self.size)]
        want = CALLS[subject.name][1](subject, rows, self.rank)
        if last and turn.before == "others":
            self.use_others()
        if last and turn.before == "refused" and self.history.check:
            self.refuse(turn, subject, rows[self.rank])
        unusual = turn.unusual in (self.rank, -1)
        place = turn.place if unusual and subject.name not in TREES else "new"
        x, out = self.placed(place, turn, subject, rows[self.rank], want)
        passed = [ranked_as(each, turn.tensors) for each in (x, out)]
        # Of a broadcast the others need pass nothing.
        nothing = subject.name == "bcast" and turn.elements > 0 and self.rank != subject.root
        if nothing:
            passed[0] = None
        if turn.way in ("wait", "late") and subject.name not in TREES:
            request = self.begin(f"i{subject.name}", subject, *passed)
            if turn.way == "late" and place == "new":
                self.late.append((request, want, subject))
                return
            got = request.wait()
        else:
            limit = {"timeout": 60.0} if turn.way == "full" else {}
            got = self.call(subject, *passed, **limit)
        assert out is None or got is passed[1]
        alone = nothing or (subject.name in FROM_ROOT and self.rank != subject.root)
        assert got is None or alone or type(got) is type(passed[0])
        self.check(got, want, subject, stays=place != "shifted")
        if place != "shifted":
            # Nobody reads it any more.
            x.flags.writeable = True
            x[...] = 1

    def called(self, turn: Turn, time: int) -> Subject:
        subject = self.history.subjects[turn.subject % len(self.history.subjects)]
        if not turn.relative or time % 2 == 0:
            return subject
        return relative(turn.relative, self.history.seed, subject, self.size)

    def values(self, subject: Subject, number: int, rank: int) -> Array:
        """Return what a rank has in a turn."""
        seeded = np.random.default_rng((number, rank, *subject.shape))
        drawn = seeded.integers(-99, 99, (self.size, *subject.shape))
        return (drawn > 0 if subject.dtype == "bool" else drawn / 3).astype(subject.dtype)

    def placed(
        self, place: str, turn: Turn, subject: Subject, x: Array, want: Array | None
    ) -> tuple[Array, Array | None]:
        """Return the array in other memory, and memory for the result."""
        if place == "sliced":
            return np.repeat(x, 2, axis=1)[:, ::2], None
        if place == "odd":
            odd = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
            odd[...] = x
            odd.flags.writeable = False
            return odd, None
        if want is None or place == "new":
            return x.copy(), None
        if place == "into":
            return x.copy(), np.zeros((*want.shape, 2), want.dtype)[..., 0]
        if place == "out":
            return x.copy(), np.zeros_like(want)
        # In memory that is used again in the turns that follow.
        n, m = x.size, want.size
        shift = min(max(max(n, m) * turn.eighths // 8 + turn.elements, -m), n)
        memory = self.memory.setdefault(subject, np.zeros(n + 2 * m, x.dtype))
        own = memory[m : m + n].reshape(x.shape)
        own[...] = x
        return own, memory[m + shift : 2 * m + shift].reshape(want.shape)

    def begin(self, name: str, subject: Subject, x: Any, out: Any) -> Any:
        passed = None if subject.name in FROM_ROOT and self.rank != subject.root else x
        return getattr(self.comm, name)(
            passed, *CALLS[subject.name][0](subject, self.size), out=out
        )

    def call(self, subject: Subject, x: Any, out: Any, **limit: float) -> Any:
        if subject.name == "tree":
            return ac.allreduce_tree([x], subject.op, comm=self.comm, **limit)[0]
        if subject.name != "plan":
            passed = None if subject.name in FROM_ROOT and self.rank != subject.root else x
            arguments = CALLS[subject.name][0](subject, self.size)
            return getattr(self.comm, subject.name)(passed, *arguments, out=out, **limit)
        if subject not in self.plans:
            self.plans[subject] = self.comm.plan([x], subject.op)
        return self.plans[subject]([x], **limit)[0]

    def refuse(self, turn: Turn, subject: Subject, x: Array) -> None:
        """Pass on one rank what is not like the others', a root that is no integer, or no array."""
        wrong, other = self.rank == subject.root, subject
        passed: Any = x.copy()
        if wrong and subject.name == "plan" and subject in self.plans:
            # Of another dtype with elements as long, or of another shape.
            kind = "u" if x.dtype.kind == "i" else "i"
            longer = *x.shape[:-1], x.shape[-1] + 1
            passed = x.view(f"{kind}{x.itemsize}") if turn.eighths % 2 else np.resize(x, longer)
        elif wrong and subject.name in ROOTED and turn.elements:
            other = subject._replace(root=float(subject.root))  # type: ignore[arg-type]
        elif wrong:
            passed = object()
        with pytest.raises((TypeError, ValueError) if wrong else ac.PeerError):
            self.call(other, passed, None)

    def use_others(self) -> None:
        """Make two more communicators, and drop them in another order on each rank."""
        others = [self.parent.dup(), self.parent.dup()]
        for _ in range(3):
            for number, other in enumerate(others):
                x = np.full(3000, self.rank + number)
                assert (other.allreduce(x) == sum(range(self.size)) + self.size * number).all()
        del other
        others.pop(self.rank % 2)

    def settle(self) -> None:
        """Wait for all requests, in another order on each rank."""
        while self.late:
            request, want, subject = self.late.pop(self.rank % 2 - 1)
            self.check(request.wait(), want, subject)

    def check(self, got: Any, want: Array | None, subject: Subject, *, stays: bool = True) -> None:
        assert (got is None) == (want is None), subject
        if want is not None:
            found = np.asarray(got)
            check_elements(found, want, subject.op)
            self.kept += [(found, want, subject)] * stays


def ranked_as(array: Array | None, tensor: bool) -> Any:
    """Return an array, or a tensor of its memory if there can be one."""
    if tensor and array is not None and array.flags.writeable:
        with suppress(ValueError):
            return torch.from_numpy(array)
    return array


class Histories:
    """Subclasses say over what."""

    @pytest.mark.both_control_channels
    @EXAMPLES
    @given(history=histories(), timeout=60.0)
    def test_calls_made_again_give_what_numpy_says(
        self, comm: ac.Communicator, history: History
    ) -> None:
        with internals.small_limits(comm, history.slots, history.chunk):
            Player(comm, history).play()


if LAUNCHED:
    from properties.test_laws import over_mpi

    class TestSharedMemory(Histories):
        def _group(self) -> RankGroup:
            return lockstep_over(over_mpi(share=True))

    class TestMessages(Histories):
        def _group(self) -> RankGroup:
            return lockstep_over(over_mpi(share=False))

elif NUMBERED:

    class TestProcesses(Histories):
        def _group(self) -> RankGroup:
            return lockstep_over(ac.init())

else:

    class TestThreads(Histories):
        pass
