"""Laws of programs over devices in software: requests, errors and late ranks, on several communicators."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import Communicator
from arraycomm._cuda import selection
from arraycomm._training.rounds import Bucket, Part, Place, Rounds
from arraycomm.testing import run
from arraycomm.testing._arrays.oracle import expected
from tests.support.device import in_own_stream, library, linked_devices
from tests.support.on_ranks import alone

pytestmark = alone
SIZE = 2
TIMEOUT, PATIENT = 1.0, 60.0
# A step is given up within so many seconds after that, on a machine that does nothing else.
GIVEN_UP = 1.0
# In which each rank makes calls, before it makes others that may go ahead of their check.
TWICE = range(2)


class Lateness:
    """For how many seconds the machine has kept a thread of this process waiting that only naps."""

    NAP = 0.02

    def __init__(self) -> None:
        self.seconds, self._over = 0.0, threading.Event()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        thread = threading.Thread(target=self._nap)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _nap(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            time.sleep(self.NAP)
            self.seconds += time.monotonic() - began - self.NAP


def _tree(comm: Communicator, x: Any) -> Any:
    return ac.allreduce_tree([x, x[:1]], "sum", comm=comm)[0]


# The rounds of each communicator, as an optimizer has them, and its buckets by what they are for.
_ROUNDS: WeakKeyDictionary[Communicator, dict[Any, Any]] = WeakKeyDictionary()


def _bucket(comm: Communicator, x: Any, *, start: bool, sparse: bool = False) -> Any:
    """Reduce a bucket of two gradients, of which the last rank may have one."""
    options = {"bucket_bytes": 25 << 20, "compression": None}
    kept = _ROUNDS.setdefault(comm, {"rounds": Rounds(comm, "sum", options)})
    bucket = kept.setdefault((x.dtype, x.shape), Bucket(1, range(2)))
    lacks = sparse and comm.rank == comm.size - 1
    reduce = kept["rounds"].start if start else kept["rounds"].reduce
    gradients = {0: x, 1: None if lacks else x[:1]}
    return reduce(Part(bucket, lambda: gradients, Place(), may_overwrite=True))


def _bucket_and_others(comm: Communicator, x: Any) -> Any:
    """Reduce a bucket, one that a rank lacks a gradient of, and the same in a request."""
    found = [_bucket(comm, x, start=False, sparse=sparse).leaves for sparse in (False, True)]
    found.append(_bucket(comm, x, start=True, sparse=True).wait().leaves)
    for leaves in found[1:]:
        # The others have added theirs to zeros.
        assert np.array_equal(leaves[0].get(), found[0][0].get())
        assert leaves[1].get().shape == (1,)
    assert np.array_equal(found[0][1].get(), found[0][0].get()[:1])
    return found[0][0]


class _Leaf:
    """The request of a bucket, of which this is the first gradient."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> Any:
        """Wait for it."""
        return self._request.wait().leaves[0]


def _overlapping(comm: Communicator, x: Any) -> Any:
    """Reduce an array into memory that begins a little behind its own, before it, and where it does."""
    import cupy

    for start in (2, 0, 1):
        memory = cupy.zeros(x.size + 2, x.dtype)
        own, out = memory[1:-1], memory[start:][: x.size]
        own[...] = x
        comm.allreduce(own, out=out)
    return out


def _gradients(comm: Communicator, x: Any) -> Any:
    return ac.allreduce_gradients([x, x[:1]], "sum", comm=comm)[0]


# What is called, its request if it has one, and the result of all ranks' rows.
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None, Callable[..., Any]]] = {
    "sum": (Communicator.allreduce, Communicator.iallreduce, lambda rows, _: expected(rows, "sum")),
    "max": (
        lambda comm, x: comm.allreduce(x, "max"),
        lambda comm, x: comm.iallreduce(x, "max"),
        lambda rows, _: expected(rows, "max"),
    ),
    "overlapping": (_overlapping, None, lambda rows, _: expected(rows, "sum")),
    "allgather": (Communicator.allgather, Communicator.iallgather, lambda rows, _: np.stack(rows)),
    "bcast": (Communicator.bcast, Communicator.ibcast, lambda rows, _: rows[0]),
    "shares": (
        Communicator.reduce_scatter,
        Communicator.ireduce_scatter,
        lambda rows, rank: expected(rows, "sum")[rank],
    ),
    "scan": (
        Communicator.scan,
        Communicator.iscan,
        lambda rows, rank: expected(rows[: rank + 1], "sum"),
    ),
    "parts": (
        lambda comm, x: comm.alltoall(x.reshape(SIZE, -1)).reshape(-1),
        lambda comm, x: comm.ialltoall(x.reshape(SIZE, -1)),
        lambda rows, rank: np.concatenate([row.reshape(SIZE, -1)[rank] for row in rows]),
    ),
    "tree": (_tree, None, lambda rows, _: expected(rows, "sum")),
    "gradients": (_gradients, None, lambda rows, _: expected(rows, "sum")),
    "bucket": (
        _bucket_and_others,
        lambda comm, x: _Leaf(_bucket(comm, x, start=True)),
        lambda rows, _: expected(rows, "sum"),
    ),
}


def _long(comm: Communicator, op: str = "sum", seconds: float = 0) -> Any:
    import cupy

    cupy.RawKernel("", "spin")((1,), (1,), (1e9 * seconds,))
    return comm.allreduce(cupy.full(20_000, comm.rank + 1, "float32"), op)


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
    "root": (Communicator.bcast, lambda comm, x: comm.bcast(x, 1)),
    "what the root has": (Communicator.bcast, lambda comm, x: comm.bcast(x.view("int32"))),
    "request of shares": (
        lambda comm, x: comm.ireduce_scatter(x.reshape(2, 2)).wait(),
        lambda comm, x: comm.ireduce_scatter(x.reshape(2, 2), "max").wait(),
    ),
    "parts": (
        lambda comm, x: comm.alltoall(x.reshape(2, 2)),
        lambda comm, x: comm.alltoall(x.reshape(2, 2).view("int32")),
    ),
    "leaves": (
        lambda comm, x: ac.allreduce_tree([x, x[:2]], "sum", comm=comm)[0],
        lambda comm, x: ac.allreduce_tree([x[:2], x], "sum", comm=comm)[0],
    ),
    "in slices": (lambda comm, _: _long(comm), lambda comm, _: _long(comm, op="max")),
    "to the host": (
        lambda comm, x: comm.allreduce(x, out=np.empty(4, "float32")),
        lambda comm, x: comm.allreduce(x, "max"),
    ),
}
ENDS = ("", *DIFFERENT, "wrong argument", "does not come")


# How NCCL fails to join the ranks, which then use another link.
STARTS = ("", "", "", "", "refuses", "does not connect")


@contextmanager
def _joined(start: str) -> Iterator[None]:
    from cupy import _nccl

    if start == "refuses":
        library().fails["ncclCommInitRankConfig"] = 5
    if start != "does not connect":
        yield
        return
    with (
        mock.patch.object(_nccl.Mailbox, "connect", return_value=False),
        mock.patch.object(selection, "_LIMIT", 0.2),
    ):
        yield


class Turn(NamedTuple):
    """Calls: of which communicator, what, how many elements, and how often.

    Which rank comes late, if any, and has arrays that are not where prepared calls take them.
    """

    comm: int
    kind: str
    count: int
    dtype: str
    late: int | None
    request: bool
    times: int
    apart: int | None


TURNS = st.builds(
    Turn,
    st.integers(0, 3),
    st.sampled_from(sorted(KINDS)),
    # One is reduced in slices.
    st.sampled_from([2, 2, 6, 20_000]),
    st.sampled_from(["float32", "float32", "int32", "float16"]),
    st.sampled_from([None, None, None, 0, 1]),
    st.booleans(),
    st.sampled_from([1, 1, 3]),
    st.sampled_from([None, None, None, 0, 1]),
)


def _array(turn: Turn, row: Any, rank: int) -> Any:
    import cupy

    if turn.apart != rank:
        return cupy.asarray(row)
    flat = np.concatenate([row.reshape(-1)[:1], row.reshape(-1)])
    return cupy.asarray(flat)[1:].reshape(row.shape)


def _rows(turn: Turn, number: int) -> list[Any]:
    values = (np.arange(SIZE * turn.count) * 7 + number) % 23
    shape = (SIZE, SIZE, -1) if turn.kind == "shares" else (SIZE, -1)
    return list(values.astype(turn.dtype).reshape(shape))


def _put_there(rank: int) -> int:
    """Return how many operations of NCCL a rank has begun."""
    comms = list(library().comms.values())
    return sum(comm.issued for comm in comms if comm.owner == rank)


def _follow(
    comm: Communicator, many: int, turns: list[Turn], end: str, start: str, late: Lateness
) -> None:
    comms = [comm, *(comm.dup(timeout=PATIENT) for _ in range(many - 1))]
    outstanding: list[tuple[Any, Any]] = []
    for number, turn in enumerate(one for one in turns for _ in range(one.times)):
        rows = _rows(turn, number)
        call, begin, result = KINDS[turn.kind]
        x, want = _array(turn, rows[comm.rank], comm.rank), result(rows, comm.rank)
        if turn.late == comm.rank:
            time.sleep(2e-3)
        where = comms[turn.comm % many]
        if turn.request and begin is not None:
            request = begin(where, x)
            begun = _put_there(comm.rank)
            outstanding.append((request, want))
            # All of it was put there before the call returned.
            time.sleep(1e-3)
            assert _put_there(comm.rank) == begun
        else:
            assert np.array_equal(call(where, x).get(), want)
    # While work is under way, for which the device takes long.
    _long(comm, seconds=3e-2)
    last = comm.dup(timeout=TIMEOUT)
    for request, want in reversed(outstanding):
        assert np.array_equal(request.wait().get().reshape(want.shape), want)
    _end(last, end, late, ahead=not start)
    for each in comms:
        each.barrier()


def _go_on(comm: Communicator, x: Any) -> None:
    """Make a call that looks at the header of the call before, and goes ahead, and one that waits."""
    if x is not None:
        comm.allreduce(x)
    comm.barrier()


def _end(comm: Communicator, end: str, late: Lateness, *, ahead: bool) -> None:
    """Make some calls that are prepared in the end, and one that cannot be right.

    Whoever reads a result of it at once reads no number. Calls go `ahead` of their check over NCCL.
    """
    import cupy

    x = cupy.full(4, comm.rank + 1, "float32")
    for _ in TWICE:
        assert (comm.allreduce(x).get() == 3).all()
        assert (comm.allreduce(x, "max").get() == 2).all()
        for call in DIFFERENT.get(end, ()):
            call(comm, x)
    if not end:
        return
    wrong, before, began = comm.rank == 1, late.seconds, time.monotonic()
    got = raised = None
    if not (wrong and end == "does not come"):
        calls: Any = (Communicator.allreduce, lambda comm, _: comm.allreduce("text"))
        try:
            got = DIFFERENT.get(end, calls)[wrong](comm, x)
            got = got if isinstance(got, np.ndarray) else got.get()
        except (ac.ArrayCommError, TypeError) as error:
            raised = error
        if end == "wrong argument" and not ahead:
            # All ranks have raised, and can go on.
            assert raised is not None
            return
        with pytest.raises(ac.ArrayCommError):
            _go_on(comm, x if end in DIFFERENT else None)
        took = time.monotonic() - began - (late.seconds - before)
        assert took < TIMEOUT + GIVEN_UP, (took, late.seconds - before)
    else:
        time.sleep(TIMEOUT + 0.5)
        with pytest.raises(ac.ArrayCommError):
            comm.allreduce(x)
    assert got is None or (got.view("uint8") == 255).all(), end


@given(
    many=st.integers(1, 4),
    turns=st.lists(TURNS, max_size=8),
    end=st.sampled_from(ENDS),
    start=st.sampled_from(STARTS),
)
def test_programs_are_right_or_end_in_an_error_in_time(
    many: int, turns: list[Turn], end: str, start: str
) -> None:
    """Each puts its work on the devices before its calls return: with one queue as well as with several."""
    late = Lateness()
    with linked_devices("nccl"), _joined(start), late():
        ranks = in_own_stream(lambda comm: _follow(comm, many, turns, end, start, late))
        run(SIZE, ranks, timeout=PATIENT)
