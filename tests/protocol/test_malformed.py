"""What a rank announces that it cannot have meant is a clear error on the others, and takes no memory."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.ma  # before numpy.empty is replaced, whose docstring it reads
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import _launch
from arraycomm._calls.pickles import loads
from arraycomm._communicator import Communicator
from arraycomm._protocol.announced import node_bytes
from arraycomm._protocol.details import Description
from arraycomm.testing import run
from tests.support import internals

pytestmark = pytest.mark.skipif(
    _launch.detect(os.environ) is not None, reason="runs where pytest is alone"
)

ERRORS = (ac.MismatchError, ac.PeerError, ac.TransportError, ac.CommTimeoutError)
RECORDS = np.zeros(3, "i4,f8")

# What both ranks call; rank 1 is the root, and the one whose messages are malformed.
CALLS: dict[str, Callable[[Communicator], Any]] = {
    "allreduce": lambda c: c.allreduce(np.ones(3)),
    "large allreduce": lambda c: c.allreduce(np.ones(30_000)),
    "bcast": lambda c: c.bcast(np.ones(3) if c.rank else None, 1),
    "large bcast": lambda c: c.bcast(np.ones(30_000) if c.rank else None, 1),
    "bcast of records": lambda c: c.bcast(RECORDS if c.rank else None, 1),
    "bcast of 9 axes": lambda c: c.bcast(np.ones((1,) * 9) if c.rank else None, 1),
    "scatter": lambda c: c.scatter(np.ones((2, 3)) if c.rank else None, 1),
    "scatterv": lambda c: c.scatterv(*((np.ones((3, 3)), [1, 2]) if c.rank else ()), root=1),
    "allgather": lambda c: c.allgather(np.ones(3)),
    "allgatherv": lambda c: c.allgatherv(np.ones((1 + c.rank, 2))),
    "gatherv": lambda c: c.gatherv(np.ones((1 + c.rank, 2))),
    "alltoallv": lambda c: c.alltoallv(np.ones((2, 2)), [1, 1]),
    "large alltoallv": lambda c: c.alltoallv(np.ones((20_000, 2)), [10_000, 10_000]),
    "bcast_object": lambda c: c.bcast_object({"a": 1}, 1),
    "large bcast_object": lambda c: c.bcast_object(b"x" * 100_000, 1),
    "allgather_object": lambda c: c.allgather_object([c.rank] * 5),
    "gather_object": lambda c: c.gather_object("xyz"),
    "barrier": lambda c: c.barrier(),
    "split": lambda c: c.split(0),
    "synchronize": lambda c: ac.synchronize({"a": np.ones(3), "b": "s"}, root=1, comm=c),
    "whole tree": lambda c: ac.synchronize({"a": 1.0} if c.rank else None, root=1, comm=c),
    "tree": lambda c: ac.allreduce_tree({"a": np.ones(3)}, "sum", comm=c),
    "gradients": lambda c: ac.allreduce_gradients([None if c.rank else np.ones(2), 1.0], comm=c),
    "metrics": lambda c: ac.mean_metrics({"a": 1.0}, 2.0, comm=c),
    "mismatch": lambda c: c.allreduce(np.ones(3 + c.rank)),
    "raising": lambda c: c.allreduce("text" if c.rank else np.ones(3)),
    "message": lambda c: c.send(np.ones(3), 0) if c.rank else c.recv(1),
    "large message": lambda c: c.send(np.ones(3_000), 0) if c.rank else c.recv(1),
    "message of records": lambda c: c.send(RECORDS, 0) if c.rank else c.recv(1),
}

# Words of a header (from 1), or of the head of a message.
WORDS = st.dictionaries(
    st.integers(1, 17),
    st.integers(-(2**63), 2**63 - 1)
    | st.sampled_from([0, 1, -1, 2, 24, 2**15, 2**15 + 1, 2**31, 2**37, 2**40, 2**62, -(2**63)]),
    min_size=1,
    max_size=3,
)


def _spoil(comm: Communicator, step: int, words: dict[int, int], payload: bytes) -> None:
    """Overwrite what this rank shows in one step, or the first message that it sends."""
    control, transport = internals.control(comm), internals.transport(comm)
    post, send = control.post, transport.send
    first = control.step + 1 + step

    def spoiled_post(nbytes: int | None = None) -> None:
        if control.step + 1 == first:
            parity = first & 1
            for place, word in words.items():
                control.my_words[parity][place] = word
            control.mine[parity][128 : 128 + len(payload)] = payload
            nbytes = None
        post(nbytes)

    def spoiled_send(buffer: Any, dest: int, tag: int) -> Any:
        transport.send = send
        spoiled = buffer.copy()
        for place, word in words.items():
            if place * 8 <= len(spoiled):
                spoiled[place * 8 - 8 : place * 8].view(np.int64)[...] = word
        return send(spoiled, dest, tag)

    control.post, transport.send = spoiled_post, spoiled_send


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(CALLS)),
    step=st.integers(0, 2),
    words=WORDS,
    payload=st.binary(max_size=64),
)
@example(name="bcast_object", step=0, words={14: 2**37}, payload=b"")
@example(name="synchronize", step=0, words={14: 2**37}, payload=b"")
@example(name="bcast", step=0, words={5: 2**34}, payload=b"")
@example(name="bcast", step=0, words={5: -1}, payload=b"")
@example(name="scatter", step=0, words={5: -1}, payload=b"")
@example(name="scatterv", step=0, words={6: 0}, payload=b"")
@example(name="scatterv", step=0, words={6: 0}, payload=b"\0\0\0\0\0\0\0\x10")
@example(name="barrier", step=0, words={4: 99}, payload=b"")
@example(name="mismatch", step=1, words={13: 10}, payload=b"\xff" * 10)
@example(name="raising", step=1, words={13: 2}, payload=b"[]")
@example(name="gather_object", step=0, words={1: 0}, payload=b"\xff")
@example(name="allgather_object", step=0, words={14: 2**15 + 1, 13: -1}, payload=b"")
@example(name="allgatherv", step=0, words={14: 9_000, 13: -1}, payload=b"")
@example(name="message", step=0, words={3: 2**37}, payload=b"")
def test_malformed_message_is_a_clear_error(
    name: str, step: int, words: dict[int, int], payload: bytes
) -> None:
    def check(comm: Communicator) -> None:
        if comm.rank == 1:
            _spoil(comm, step, words, payload)
        # What is malformed may be what another error or another message looks like.
        own = (TypeError,) if name == "raising" or "message" in name else ()
        with suppress(*ERRORS, *own):
            CALLS[name](comm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "empty", _bounded)
        run(2, check, timeout=2.0)


_empty = np.empty


def _bounded(shape: Any, dtype: Any = float, **keywords: Any) -> Any:
    """Refuse, in place of `numpy.empty`, more memory than this machine has."""
    nbytes = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    assert nbytes <= node_bytes() + 128, f"{nbytes} bytes were taken"
    return _empty(shape, dtype, **keywords)


@pytest.mark.parametrize("data", [b"", b"\xff\x00", b"\x80\x05K", b"\x80\x05\x95\xff\xff\xff\xff"])
def test_bytes_that_are_no_pickle(data: bytes) -> None:
    with pytest.raises(ac.TransportError, match="rank 3 announced an object that is no pickle"):
        loads(3, np.frombuffer(data, np.uint8))


class Unloadable:
    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> Any:
    raise ValueError("the object's own")


def test_error_of_an_objects_own_code_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match="the object's own"):
        loads(0, np.frombuffer(pickle.dumps(Unloadable()), np.uint8))


@pytest.mark.parametrize(
    "text", ["", "(", "1", "('f8', (2, -1))", "('f8', (1 << 60,))", "('x', (1,))"]
)
def test_description_that_is_none(text: str) -> None:
    with pytest.raises(ac.TransportError, match="rank 2 announced"):
        Description(text).parse(2)
