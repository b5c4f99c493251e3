"""Laws of programs over devices in software: requests, errors and late ranks, on several communicators."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import Communicator
from arraycomm.testing import run
from arraycomm.testing._arrays.oracle import expected
from tests.support.device import in_own_stream, library, linked_devices
from tests.support.on_ranks import alone

pytestmark = alone
SIZE = 2
TIMEOUT, PATIENT = 1.0, 60.0
# That of a step which is given up, on a machine that does other things as well.
GIVEN_UP = TIMEOUT + 3.0


def _tree(comm: Communicator, x: Any) -> Any:
    return ac.allreduce_tree([x, x[:1]], "sum", comm=comm)[0]


# What is called, its request if it has one, and the result of all ranks' rows.
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None, Callable[..., Any]]] = {
    "sum": (Communicator.allreduce, Communicator.iallreduce, lambda rows, _: expected(rows, "sum")),
    "max": (
        lambda comm, x: comm.allreduce(x, "max"),
        lambda comm, x: comm.iallreduce(x, "max"),
        lambda rows, _: expected(rows, "max"),
    ),
    "in place": (
        lambda comm, x: comm.allreduce(x, out=x),
        None,
        lambda rows, _: expected(rows, "sum"),
    ),
    "allgather": (Communicator.allgather, Communicator.iallgather, lambda rows, _: np.stack(rows)),
    "bcast": (Communicator.bcast, Communicator.ibcast, lambda rows, _: rows[0]),
    "shares": (
        Communicator.reduce_scatter,
        Communicator.ireduce_scatter,
        lambda rows, rank: expected(rows, "sum")[rank],
    ),
    "tree": (_tree, None, lambda rows, _: expected(rows, "sum")),
}


def _long(comm: Communicator) -> Any:
    import cupy

    return cupy.full(20_000, comm.rank + 1, "float32")


# What the first rank calls, and what the other does. In most of them as many bytes are moved.
Ends = tuple[Callable[[Communicator, Any], Any], Callable[[Communicator, Any], Any]]
DIFFERENT: dict[str, Ends] = {
    "length": (Communicator.allreduce, lambda comm, x: comm.allreduce(x[:3].copy())),
    "op": (Communicator.allreduce, lambda comm, x: comm.allreduce(x, "max")),
    "shape": (Communicator.allreduce, lambda comm, x: comm.allreduce(x.reshape(2, 2))),
    "dtype": (Communicator.allreduce, lambda comm, x: comm.allreduce(x.view("int32"))),
    "bits": (
        lambda comm, x: comm.allreduce(x.view("int32")),
        lambda comm, x: comm.allreduce(x.view("uint32")),
    ),
    "collective": (Communicator.allreduce, Communicator.allgather),
    "gather": (Communicator.allgather, lambda comm, x: comm.allgather(x.view("int32"))),
    "request": (
        lambda comm, x: comm.iallreduce(x).wait(),
        lambda comm, x: comm.iallreduce(x, "max").wait(),
    ),
    "scan": (Communicator.scan, lambda comm, x: comm.scan(x, "max")),
    "shares": (
        lambda comm, x: comm.reduce_scatter(x.reshape(2, 2)),
        lambda comm, x: comm.reduce_scatter(x.reshape(2, 2), "max"),
    ),
    "parts": (
        lambda comm, x: comm.alltoall(x.reshape(2, 2)),
        lambda comm, x: comm.alltoall(x.reshape(2, 2).view("int32")),
    ),
    "leaves": (
        lambda comm, x: ac.allreduce_tree([x, x[:2]], "sum", comm=comm)[0],
        lambda comm, x: ac.allreduce_tree([x[:2], x], "sum", comm=comm)[0],
    ),
    "in slices": (
        lambda comm, _: comm.allreduce(_long(comm)),
        lambda comm, _: comm.allreduce(_long(comm), "max"),
    ),
    "to the host": (
        lambda comm, x: comm.allreduce(x, out=np.empty(4, "float32")),
        lambda comm, x: comm.allreduce(x, "max"),
    ),
}
ENDS = ("", *DIFFERENT, "wrong argument", "does not come")


class Turn(NamedTuple):
    """A call: of which communicator, what, how many elements, and which rank comes late, if any."""

    comm: int
    kind: str
    count: int
    dtype: str
    late: int | None
    request: bool


TURNS = st.builds(
    Turn,
    st.integers(0, 3),
    st.sampled_from(sorted(KINDS)),
    # One is reduced in slices.
    st.sampled_from([2, 2, 6, 20_000]),
    st.sampled_from(["float32", "float32", "int32", "float16"]),
    st.sampled_from([None, None, None, 0, 1]),
    st.booleans(),
)


def _rows(turn: Turn, number: int) -> list[Any]:
    values = (np.arange(SIZE * turn.count) * 7 + number) % 23
    shape = (SIZE, SIZE, -1) if turn.kind == "shares" else (SIZE, -1)
    return list(values.astype(turn.dtype).reshape(shape))


def _put_there(rank: int) -> int:
    """Return how many operations of NCCL a rank has begun."""
    comms = list(library().comms.values())
    return sum(comm.issued for comm in comms if comm.owner == rank)


def _follow(comm: Communicator, many: int, turns: list[Turn], end: str) -> None:
    import cupy

    comms = [comm, *(comm.dup(timeout=PATIENT) for _ in range(many - 1))]
    last = comm.dup(timeout=TIMEOUT)
    outstanding: list[tuple[Any, Any]] = []
    for number, turn in enumerate(turns):
        rows = _rows(turn, number)
        call, start, result = KINDS[turn.kind]
        x, want = cupy.asarray(rows[comm.rank]), result(rows, comm.rank)
        if turn.late == comm.rank:
            time.sleep(2e-3)
        where = comms[turn.comm % many]
        if turn.request and start is not None:
            request = start(where, x)
            begun = _put_there(comm.rank)
            outstanding.append((request, want))
            # All of it was put there before the call returned.
            time.sleep(1e-3)
            assert _put_there(comm.rank) == begun
        else:
            assert np.array_equal(call(where, x).get(), want)
    for request, want in reversed(outstanding):
        assert np.array_equal(request.wait().get(), want)
    _end(last, end)
    for each in comms:
        each.barrier()


def _go_on(comm: Communicator, x: Any) -> None:
    """Make a call that looks at the header of the call before, and goes ahead, and one that waits."""
    if x is not None:
        comm.allreduce(x)
    comm.barrier()


def _end(comm: Communicator, end: str) -> None:
    """Make some calls that are prepared in the end, and one that cannot be right.

    Whoever reads a result of it at once reads no number.
    """
    import cupy

    x = cupy.full(4, comm.rank + 1, "float32")
    for _ in range(3):
        assert (comm.allreduce(x).get() == 3).all()
        assert (comm.allreduce(x, "max").get() == 2).all()
    if not end:
        return
    began, wrong = time.monotonic(), comm.rank == 1
    got = None
    if not (wrong and end == "does not come"):
        calls: Any = (Communicator.allreduce, lambda comm, _: comm.allreduce("text"))
        with suppress(ac.ArrayCommError, TypeError):
            got = DIFFERENT.get(end, calls)[wrong](comm, x)
            got = got if isinstance(got, np.ndarray) else got.get()
        with pytest.raises(ac.ArrayCommError):
            _go_on(comm, x if end in DIFFERENT else None)
        assert time.monotonic() - began < GIVEN_UP
    else:
        time.sleep(TIMEOUT + 0.5)
        with pytest.raises(ac.ArrayCommError):
            comm.allreduce(x)
    assert got is None or (got.view("uint8") == 255).all(), end


@given(many=st.integers(1, 4), turns=st.lists(TURNS, max_size=8), end=st.sampled_from(ENDS))
def test_programs_are_right_or_end_in_an_error_in_time(
    many: int, turns: list[Turn], end: str
) -> None:
    """Each puts its work on the devices before its calls return: with one queue as well as with several."""
    with linked_devices("nccl"):
        run(SIZE, in_own_stream(lambda comm: _follow(comm, many, turns, end)), timeout=PATIENT)
