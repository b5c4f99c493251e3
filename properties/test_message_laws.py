"""Laws of messages that a program repeats: each receive gets what the model says, whichever way it and those before it went."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import Communicator
from arraycomm.testing import given
from arraycomm.testing._ranks.rank_groups import RankGroup, lockstep_over
from properties.test_laws import TIMEOUT
from properties.test_machine import LAUNCHED
from tests.support import internals

Array = np.ndarray[Any, Any]

# What a round sends with numbers of its own: few elements, none, those of another layout or dtype, many that still fit an
# envelope, more than that, and what the envelope has to describe.
FORMS: dict[str, Callable[[Array], Array]] = {
    "one": lambda x: x[:1],
    "few": lambda x: x[:6].reshape(2, 3),
    "strided": lambda x: x[:12:2].reshape(2, 3),
    "empty": lambda x: x[:0],
    "other dtype": lambda x: x[:6].astype(np.int16),
    "other order": lambda x: x[:6].astype(">f8"),
    "envelope": lambda x: x[: 64 << 7],
    "columns": lambda x: x[: 64 << 7].reshape(64, -1).T,
    "pieces": lambda x: x[:20_000],
    "fields": lambda x: x[:6].view([("a", "f8"), ("b", "f8")]),
}


def native(x: Array) -> np.dtype[Any]:
    """Return the dtype with which an array arrives."""
    return x.dtype.newbyteorder("=")


# What a message does not fit into, or cannot be like: it is lost.
UNFIT: list[tuple[type[Exception], Callable[[Array], dict[str, Any]]]] = [
    (ValueError, lambda _: {"out": np.empty(7)}),
    (ValueError, lambda x: {"out": np.empty((*x.shape, 1), x.dtype)}),
    (TypeError, lambda x: {"out": np.empty(x.shape, np.float16)}),
    (BufferError, lambda x: {"out": np.broadcast_to(np.zeros((), native(x)), x.shape)}),
    (TypeError, lambda x: {"out": [0.0] * x.size}),
    (TypeError, lambda _: {"like": [0.0]}),
]
SENDS = ("send", "isend", "wrong")
RECEIVES = (
    "recv",
    "like",
    "out",
    "unfit",
    "irecv",
    "irecv any",
    "impatient",
    "any source",
    "any tag",
    "probed",
    "object",
)


class Step(NamedTuple):
    """A message from one of two ranks to the other, or one each way by `sendrecv`, and how each rank makes it."""

    source: int
    tag: int
    forms: tuple[str, str]
    send: str
    receive: str
    both: bool


@st.composite
def bursts(draw: st.DrawFn) -> list[Step]:
    """Draw messages of one kind that follow one another: what is under way meets the like of it."""
    source, tag = draw(st.integers(0, 1)), draw(st.sampled_from((0, 70)))
    forms = st.sampled_from(sorted(FORMS)) | st.sampled_from(("few", "envelope", "columns"))
    both = draw(st.sampled_from((False, False, False, True)))
    # What is under way shows most.
    sends = st.sampled_from(SENDS) | st.just("isend")
    receives = st.sampled_from(RECEIVES) | st.sampled_from(("irecv", "irecv any"))
    ways = draw(st.lists(st.tuples(sends, receives), min_size=1, max_size=4))
    pair = draw(st.tuples(forms, forms))
    return [Step(source, tag, pair, *way, both) for way in ways]


STEPS = st.lists(bursts(), min_size=1, max_size=3).map(lambda found: [*chain.from_iterable(found)])


class Rank:
    """One of the two ranks: makes its part of each step, and compares what it gets."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.other = comm, 1 - comm.rank
        self.requests: list[tuple[Any, Array | None]] = []
        self.counts = {"send": 0, "recv": 0, "bytes": 0}

    def sends(self, step: Step, mine: Array) -> None:
        self.counts["send"] += step.send != "wrong"
        self.counts["bytes"] += mine.nbytes * (step.send != "wrong")
        if step.send == "wrong":
            with pytest.raises(TypeError, match="send: "):
                self.comm.send([object()], self.other, step.tag)
            self.counts["send"] += 1
        elif step.send == "isend":
            self.requests.append((self.comm.isend(mine, self.other, step.tag), None))
        else:
            self.comm.send(mine, self.other, step.tag)

    def receives(self, step: Step, wanted: Array) -> None:
        comm, at, status = self.comm, (self.other, step.tag), ac.Status()
        self.counts["recv"] += 1
        if step.send == "wrong":
            with pytest.raises(ac.PeerError, match=f"rank {self.other} raised instead of sending"):
                comm.recv(*at)
            return
        if step.receive == "unfit":
            kind, passed = UNFIT[self.counts["recv"] % len(UNFIT)]
            with pytest.raises(kind, match="recv: "):
                comm.recv(*at, **passed(wanted))
            return
        if step.receive == "object":
            with pytest.raises(TypeError, match="has sent an array; receive it by recv"):
                comm.recv_object(*at)
            return
        if step.receive in ("irecv", "irecv any", "impatient"):
            anyone = step.receive == "irecv any"
            request = comm.irecv(ac.ANY_SOURCE if anyone else self.other, step.tag)
            if step.receive == "impatient":
                with contextlib.suppress(ac.CommTimeoutError):
                    request.wait(1e-6)
            self.requests.append((request, wanted))
            return
        if step.receive == "probed":
            found = comm.probe(*at)
            assert (found.source, found.tag) == at
        if step.receive == "like":
            got = comm.recv(*at, like=wanted, status=status)
        elif step.receive == "out":
            out = np.empty(wanted.shape, wanted.dtype.newbyteorder("="))
            got = comm.recv(*at, out=out, status=status)
            assert got is out
        elif step.receive == "any source":
            got = comm.recv(ac.ANY_SOURCE, step.tag, status=status)
        elif step.receive == "any tag":
            got = comm.recv(self.other, ac.ANY_TAG, status=status)
        else:
            got = comm.recv(*at, status=status)
        self.compare(got, wanted)
        said = (status.source, status.tag, status.dtype, status.shape, status.nbytes)
        assert said == (*at, native(wanted), wanted.shape, wanted.nbytes)

    def exchanges(self, step: Step, mine: Array, wanted: Array) -> None:
        self.counts["send"] += 1
        self.counts["recv"] += 1
        self.counts["bytes"] += mine.nbytes
        fits = (mine.dtype, mine.shape) == (wanted.dtype, wanted.shape) and mine.dtype.isnative
        out = mine if step.receive == "out" and fits else None
        got = self.comm.sendrecv(mine, self.other, self.other, step.tag, out=out)
        assert out is None or got is out
        self.compare(got, wanted)

    def ends_round(self) -> None:
        for request, wanted in self.requests:
            got = request.wait()
            if wanted is not None:
                self.compare(got, wanted)
        self.requests.clear()

    def compare(self, got: Array, wanted: Array) -> None:
        assert (got.dtype, got.shape) == (native(wanted), wanted.shape)
        assert np.array_equal(got, wanted)


class Messages:
    """Subclasses say over what."""

    @given(ranks=range(2, 3), steps=STEPS, rounds=st.integers(3, 5), timeout=TIMEOUT)
    def test_repeated_messages_bring_what_was_sent(
        self, comm: Communicator, steps: list[Step], rounds: int
    ) -> None:
        c = comm.dup()
        if c.rank < 2:
            rank = Rank(c)
            for turn in range(rounds):
                for number, step in enumerate(steps):
                    arrays = [
                        np.random.default_rng((turn, number, r)).normal(size=20_000) for r in (0, 1)
                    ]
                    mine, theirs = (FORMS[step.forms[r]](arrays[r]) for r in (c.rank, 1 - c.rank))
                    # What any tag takes could be a later message, if requests are still to take earlier ones.
                    if step.receive == "any tag":
                        rank.ends_round()
                    if step.both:
                        rank.exchanges(step, mine, theirs)
                    elif c.rank == step.source:
                        rank.sends(step, mine)
                    else:
                        rank.receives(step, theirs)
                rank.ends_round()
            counts = c.stats()
            assert counts.get("send", {"calls": 0})["calls"] == rank.counts["send"]
            assert counts.get("send", {"bytes": 0})["bytes"] == rank.counts["bytes"]
            assert counts.get("recv", {"calls": 0})["calls"] == rank.counts["recv"]
            assert internals.unmatched(c) == sum(
                rank.counts[n] * s for n, s in (("send", 1), ("recv", -1))
            )
        c.free()


if LAUNCHED:
    from properties.test_laws import over_mpi

    class TestSharedMemory(Messages):
        def _group(self) -> RankGroup:
            return lockstep_over(over_mpi(share=True))

    class TestMessages(Messages):
        def _group(self) -> RankGroup:
            return lockstep_over(over_mpi(share=False))

else:

    class TestThreads(Messages):
        pass
