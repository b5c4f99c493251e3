"""Steps between nodes in C: they end as they do in Python, which goes on with those that are not like the others.

The ranks are threads, their nodes are pretended, and so is MPI: its functions are found by their addresses.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Final, Self

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from arraycomm._errors import TransportError
from arraycomm._folds import in_c
from arraycomm._native import compiled
from arraycomm._protocol.header import Headers
from arraycomm._transports.control import PAYLOAD, message_slot
from arraycomm._transports.mpi import control as mpi_control
from arraycomm._transports.mpi import nodes as mpi_nodes
from arraycomm._transports.mpi import pieces as mpi_pieces
from arraycomm._transports.mpi import records as mpi_records
from arraycomm._transports.mpi import under_way as mpi_under_way
from arraycomm._transports.notes import Notes

if compiled is None:
    pytest.skip("the native part was not built, or is not to be used", allow_module_level=True)

_START: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_TEST: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.c_void_p
)
# Seconds after which a step hangs, and for how long the native part does not wait.
_LIMIT: Final = 20
_LATE: Final = 0.003
# Some of the steps below go in one piece, others in more than are under way at once.
_PIECES: Final = mpi_pieces.Pieces(256)
# An error of MPI's.
_ERROR: Final = 13


class _Request:
    """A message that may be sent or received again and again."""

    def __init__(self, wire: _Wire, memory: Any, route: tuple[int, int], *, sends: bool) -> None:
        self._wire, self._memory, self._route, self._sends = wire, memory, route, sends
        self._active, self._until, self.length = False, 0.0, -1
        # A message that has been sent: its memory, and what was in it.
        self._sent: list[Any] = []
        # What the native part is given in place of MPI's handle.
        self._handle = ctypes.c_int64()
        self.address = ctypes.addressof(self._handle)
        wire.requests[self.address] = self

    def Start(self) -> None:  # noqa: N802 - as MPI has it
        assert not self._active
        self._active = True
        if not self._sends:
            self.length = -1
            with self._wire.lock:
                wanted = self._wire.wanted[self._route]
                wanted.append(self)
                self._wire.most_wanted = max(self._wire.most_wanted, len(wanted))
        else:
            self._until = time.monotonic() + self._wire.seconds_of_sends
            self._sent = [self._memory, self._memory.copy()]
            with self._wire.lock:
                self._wire.sent[self._route].append(self._sent)
                self._wire.lengths.append(len(self._memory))

    def Test(self, status: Any = None) -> bool:  # noqa: N802 - as MPI has it
        """Return whether the message is over. As in MPI, one that is not under way is over at once, and empty."""
        if self._active and (time.monotonic() < self._until if self._sends else not self._come()):
            return False
        if self._sends and self._active:
            # The memory may be used again.
            self._sent[0] = self._sent[1]
        if status is not None:
            status.length = self.length if self._active else 0
        self._active = False
        return True

    def _come(self) -> bool:
        with self._wire.lock:
            waiting, wanted = self._wire.sent[self._route], self._wire.wanted[self._route]
            # In the order in which both were begun, as in MPI.
            while waiting and wanted:
                wanted.pop(0).take(*waiting.pop(0))
        return self.length >= 0

    def take(self, memory: Any, as_sent: Any) -> None:
        # MPI may read a message late: nothing may have written over it until it is over, or has been taken.
        assert (memory == as_sent).all()
        self._memory[: len(memory)] = memory
        self.length = len(memory)

    def Free(self) -> None:  # noqa: N802 - as MPI has it
        assert not self._active
        del self._wire.requests[self.address]


class _Null:
    """No request, which is over at once."""

    def __bool__(self) -> bool:
        return False

    def Test(self) -> bool:  # noqa: N802 - as MPI has it
        return True


class _Wire:
    """All messages, and functions for them that are called as MPI's are."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.requests: dict[int, _Request] = {}
        self.sent: dict[tuple[int, int], list[list[Any]]] = defaultdict(list)
        self.wanted: dict[tuple[int, int], list[_Request]] = defaultdict(list)
        # The most receives between two ranks that were under way at once.
        self.most_wanted = 0
        self.seconds_of_sends = 0.0
        self.lengths: list[int] = []
        self.error = 0
        # Kept: the native part has their addresses.
        self._start, self._test = _START(self._start_one), _TEST(self._test_one)
        self.functions = {
            name: ctypes.cast(function, ctypes.c_void_p).value
            for name, function in (("start", self._start), ("test", self._test))
        }

    def _start_one(self, address: int) -> int:
        self.requests[address].Start()
        return 0

    def _test_one(self, address: int, flag: Any, status: int) -> int:
        flag[0] = self.error == 0 and self.requests[address].Test()
        return self.error

    def comm(self, rank: int, size: int) -> SimpleNamespace:
        def receiving(what: list[Any], origin: int, tag: int) -> _Request:
            return _Request(self, what[0], (origin, rank), sends=False)

        def sending(what: list[Any], to: int, tag: int) -> _Request:
            return _Request(self, what[0], (rank, to), sends=True)

        def begun(prepare: Callable[..., _Request]) -> Callable[..., _Request]:
            def begin(*arguments: Any) -> _Request:
                request = prepare(*arguments)
                # The native part has nothing to do with it.
                del self.requests[request.address]
                request.Start()
                return request

            return begin

        return SimpleNamespace(
            rank=rank,
            size=size,
            Recv_init=receiving,
            Send_init=sending,
            Irecv=begun(receiving),
            Isend=begun(sending),
        )


class _Status:
    length = 0

    def Get_count(self, kind: None) -> int:  # noqa: N802 - as MPI has it
        return self.length


def _test_all(requests: list[_Request]) -> bool:
    over = [request.Test() for request in requests]
    return all(over)


class _Notes(Notes):
    def __init__(self, *_: Any) -> None:
        super().__init__()


class _Rank:
    """One rank: its control channel, and the reductions that it makes again and again."""

    def __init__(self, control: mpi_control.MpiControl) -> None:
        self.control = control
        self.turn = compiled.Turn()
        self.in_python = 0
        self.settled: Any = None
        self._exchanges: dict[tuple[int, int], Any] = {}

    def reduce(self, x: Any, header: int) -> Any:
        """Reduce an array of whole numbers; the header is the same if ranks call the same."""
        out, self.settled = np.full_like(x, -1), None
        key = header, len(x)
        if key not in self._exchanges:
            self._exchanges[key] = self._exchange(header, x)
        if self._exchanges[key].make(x, out, x, out) is NotImplemented:
            raise AssertionError("the exchange has not made its call")
        assert not self.turn.locked()
        return out

    def _exchange(self, header: int, x: Any) -> Any:
        control = self.control
        prefix = np.full(PAYLOAD - 8, _byte(header, len(x)), np.uint8).tobytes()
        return compiled.Exchange(
            memory=control.slots,
            rank=control.rank,
            size=control.size,
            slot=control.slot,
            header=prefix,
            headers=prefix[:8] * control.size,
            takes=(x.shape, x.nbytes),
            gives=(x.shape, x.nbytes),
            ranks=(0, control.size),
            place=0,
            fold=in_c.number_of("sum", x.dtype),
            dtype=x.dtype,
            control=control,
            queue=[],
            turn=self.turn,
            path=self,
            patient=True,
            nodes=control.native,
        )

    def await_others(self) -> None:
        assert self.turn.locked()
        self.in_python += 1
        self.control.go_on()
        assert self.is_over(), "the step does not end"

    def is_over(self) -> bool:
        """Return whether the step comes to its end."""
        deadline = time.monotonic() + _LIMIT
        while not (over := self.control.done()) and time.monotonic() < deadline:
            time.sleep(0)
        return over

    def give_up(self, error: BaseException) -> None:
        self.settled = error

    def settle(self, x: Any, out: Any) -> None:
        """Note what all ranks show: a byte of each header, and the elements."""
        control = self.control
        rows = control.rows[control.step & 1]
        assert not control.alike[control.step & 1]
        self.settled = [(int(row[8]), row[PAYLOAD:].view(np.int32).copy()) for row in rows]


class _Cluster:
    """Ranks on nodes; `nodes` has the first rank of its node for each rank."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self.size, self.wire = len(nodes), _Wire()
        members = [[r for r, n in enumerate(nodes) if n == node] for node in dict.fromkeys(nodes)]
        nbytes = 2 * self.size * message_slot(self.size) + (2 * self.size + 3) * 8
        memories = [np.zeros(nbytes, np.uint8) for _ in members]
        comms = [self.wire.comm(rank, self.size) for rank in range(self.size)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mpi_control, "MpiNotes", _Notes)
            patch.setattr(mpi_nodes, "_functions", lambda: self.wire.functions)
            patch.setattr(
                mpi_control,
                "_node_memory",
                lambda comm, nodes: (
                    next(
                        m for m, ranks in zip(memories, members, strict=True) if comm.rank in ranks
                    ),
                    members,
                ),
            )
            self.ranks = [
                _Rank(mpi_control.MpiControl(comm, comm, nodes, _PIECES)) for comm in comms
            ]
        self._threads = ThreadPoolExecutor(self.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        for rank in self.ranks:
            rank.control.close()
        assert not self.wire.requests

    def each(self, function: Callable[[_Rank], Any]) -> list[Any]:
        """Return what a function returns for each rank; all run at the same time."""
        futures = [self._threads.submit(function, rank) for rank in self.ranks]
        return [future.result(_LIMIT) for future in futures]

    def step(
        self, count: int, headers: Sequence[int], late: int | None, others: int | None = None
    ) -> None:
        """Reduce this many elements, and check that every rank gets the total, or sees what all show.

        Ranks with another header than the first may have another number of elements.
        """
        counts = [count if others is None or h == headers[0] else others for h in headers]
        own = [_elements(each, number) for number, each in enumerate(counts)]

        def one(rank: _Rank) -> Any:
            number = rank.control.rank
            if number == late:
                time.sleep(_LATE)
            out = rank.reduce(own[number], headers[number])
            shown = map(Headers(rank.control).call_digest, range(self.size))
            assert [word & 255 for word in shown] == [*map(_byte, headers, counts)]
            return out if rank.settled is None else rank.settled

        for got in self.each(one):
            if len(set(headers)) == 1:
                np.testing.assert_array_equal(got, sum(own))
                continue
            assert [byte for byte, _ in got] == [*map(_byte, headers, counts)]
            for (_, elements), shown in zip(got, own, strict=True):
                np.testing.assert_array_equal(elements[: len(shown)], shown)
        assert all(rank.control.step == self.ranks[0].control.step for rank in self.ranks)


def _byte(header: int, count: int) -> int:
    """Return the byte of which a header consists."""
    return (101 * header + count) % 251


def _elements(count: int, rank: int) -> Any:
    return np.arange(count, dtype=np.int32) * (rank + 1) + 5 * rank


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing go by MPI."""
    mpi = SimpleNamespace(
        BYTE=None,
        Request=SimpleNamespace(Testall=_test_all),
        Status=_Status,
        THREAD_MULTIPLE=3,
        Query_thread=lambda: 3,
        _sizeof=lambda kind: 24,
        _addressof=lambda request: request.address,
        Prequest=_Null,
        Is_finalized=lambda: False,
        Exception=mpi_control.MPI.Exception,
        ERR_REVOKED=mpi_control.MPI.ERR_REVOKED,
    )
    for module in (mpi_nodes, mpi_under_way, mpi_pieces):
        monkeypatch.setattr(module, "MPI", mpi)
    # Some by way of records, others from slot to slot.
    monkeypatch.setattr(mpi_records, "_LARGE", 800)


_NODES = [
    [0, 1],
    [0, 0, 2],
    [0, 1, 0, 1],
    [0, 1, 2],
    [0, 0, 2, 0, 2, 5],
    [0, 1, 1, 3, 4],
    [0, 0, 2, 3, 3, 5, 6, 6],
    [0, 1, 0, 3, 1, 0],
    [0, 1, 2, 3, 4, 5, 6],
]
_COUNTS = st.sampled_from([0, 1, 2, 33, 250, 300, 700])
_Step = tuple[int, list[int], int | None, float, int]


@st.composite
def _steps(draw: st.DrawFn) -> tuple[list[int], list[_Step]]:
    """Draw nodes, and for each step the elements, the headers, who is late, and how long sends take; and elements of others."""
    nodes = draw(st.sampled_from(_NODES))
    ranks = st.integers(0, len(nodes) - 1)
    same = st.just([0] * len(nodes))
    other = ranks.map(lambda rank: [int(rank == r) for r in range(len(nodes))])
    header = st.one_of(
        same, same, other, st.lists(st.integers(0, 1), min_size=len(nodes), max_size=len(nodes))
    )
    step = st.tuples(
        _COUNTS, header, st.one_of(st.none(), ranks), st.sampled_from([0.0, _LATE]), _COUNTS
    )
    return nodes, draw(st.lists(step, min_size=1, max_size=6))


@given(_steps())
@settings(deadline=None, max_examples=60)
def test_steps_end_alike_whoever_is_late_or_differs(drawn: tuple[list[int], list[_Step]]) -> None:
    nodes, steps = drawn
    with _Cluster(nodes) as cluster:
        for count, headers, late, seconds, others in steps:
            cluster.wire.seconds_of_sends = seconds
            cluster.step(count, headers, late, others)


@pytest.mark.parametrize("count", [3, 250])
@pytest.mark.parametrize("nodes", _NODES[:4], ids=str)
def test_steps_that_repeat_need_no_python(nodes: list[int], count: int) -> None:
    """By way of records, or from slot to slot, if all ranks come within a millisecond."""
    with _Cluster(nodes) as cluster:
        for _ in range(20_000):
            before = [rank.in_python for rank in cluster.ranks]
            cluster.step(count, [0] * cluster.size, None)
            if before == [rank.in_python for rank in cluster.ranks]:
                return
    pytest.fail("every step was made in Python")


@pytest.mark.parametrize(("nodes", "rounds"), [(3, 2), (5, 3)])
def test_messages_are_few(nodes: int, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header of all ranks for each round and node; elements go without the words in front of them."""
    monkeypatch.setattr(mpi_records, "_LARGE", 1 << 20)
    ranks = 2 * nodes
    with _Cluster([rank // 2 * 2 for rank in range(ranks)]) as cluster:
        for count in (0, 4):
            cluster.step(count, [0] * ranks, None)
            cluster.wire.lengths.clear()
            cluster.step(count, [0] * ranks, None)
            assert len(cluster.wire.lengths) == nodes * rounds
            elements = nodes * (nodes - 1) * 2 * 4 * count
            assert sum(cluster.wire.lengths) == nodes * rounds * PAYLOAD + elements


def test_python_waits_in_its_own_step_after_one_that_the_native_part_ended_late() -> None:
    with _Cluster([0, 1]) as cluster:
        for _ in range(4):
            cluster.step(1, [0, 0], 1)
        assert cluster.ranks[0].in_python
        first, second = (rank.control for rank in cluster.ranks)
        first.post(0)
        assert not first.done()
        second.post(0)
        assert all(cluster.each(_Rank.is_over))


def test_messages_of_many_lengths_are_prepared_anew() -> None:
    with _Cluster([0, 0, 2]) as cluster:
        for _ in range(2):
            for count in range(70):
                cluster.step(count, [0] * 3, None)
                # A round of up to three pieces each way on each of two nodes, for 64 lengths.
                assert len(cluster.wire.requests) <= 64 * 4 * 3


def test_an_error_of_mpi_ends_the_call() -> None:
    with _Cluster([0, 1]) as cluster:
        for _ in range(4):
            cluster.step(1, [0, 0], None)
        cluster.wire.error = _ERROR

        def failing(rank: _Rank) -> str:
            with pytest.raises(TransportError) as raised:
                rank.reduce(_elements(1, rank.control.rank), 0)
            assert rank.settled is raised.value
            return str(raised.value)

        assert all(cluster.each(failing))
        cluster.wire.error = 0
        # What was begun is over before it is freed.
        for request in [*cluster.wire.requests.values()]:
            request.Test()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"memory": np.zeros(64, np.uint8)}, "the slots are not as the control channel has them"),
        ({"members": []}, "the rounds do not bring all ranks"),
        ({"members": [0, 2]}, "no rank 2"),
        ({"others": []}, "each rank must be a member of this node or one of the others"),
        ({"received": [1, 1]}, "the rounds do not bring all ranks"),
        ({"ahead": 0}, "a piece at least must be under way"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_nodes_have_to_be_those_of_a_control_channel(changed: dict[str, Any], message: str) -> None:
    fitting = {
        "memory": np.zeros(4 * 256 + 7 * 8, np.uint8),
        "rank": 0,
        "size": 2,
        "slot": 256,
        "members": [0],
        "others": [1],
        "received": [1],
        "ahead": 4,
        "box": np.zeros(1024, np.uint8),
        "start": 1,
        "test": 1,
    }
    made = compiled.Nodes(**fitting)
    made.add(128, -1, [[1, 1]])
    for wrong, why in (
        ((129, -1, [[1, 1]]), "there is no room for 129 bytes"),
        ((-1, -1, [[1, 1]]), "there is no room for -1 bytes"),
        ((8, -1, []), "there must be a lane for each round"),
        ((8, -1, [[1]]), "there must be a receive and a send of each piece"),
    ):
        with pytest.raises(ValueError, match=why):
            made.add(*wrong)
    with pytest.raises(ValueError, match=message):
        compiled.Nodes(**fitting | changed)
