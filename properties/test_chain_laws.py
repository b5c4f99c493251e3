"""The chain of nodes: what it is chosen for, and its results whatever the order in which ranks and messages go on."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arraycomm import Communicator, allreduce_tree
from arraycomm._folds import fold, total_dtype
from arraycomm._reduce import chain
from arraycomm._reduce.chain import ChainSegment, chunk_bytes, chunk_tasks, largest_chunk
from arraycomm._reduce.segment import ChunkTask
from arraycomm._transports.base import NodeChain, is_chain
from arraycomm._transports.control import SharedControl
from arraycomm._transports.threads import ThreadsTransport
from arraycomm._trees import held
from arraycomm.testing import given as given_on_ranks
from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays.rank_values import rank_count
from arraycomm.testing.conformance._inputs import reductions, reductions_of_sizes
from arraycomm.testing.conformance._tree_inputs import reducible_trees
from properties.test_algorithm_laws import check_reduction
from properties.test_tree_laws import FEW, check_tree
from tests.support import internals
from tests.support.on_ranks import alone

# Nothing in it depends on what else runs; test_placements.py has processes.
pytestmark = alone

MIB = 1 << 20


@given(st.integers(0, 1 << 36), st.integers(2, 4096), st.integers(2, 512))
def test_chunks_fit_in_the_segment_and_are_about_equally_long(nbytes, nodes, most) -> None:
    largest = largest_chunk(most)
    assert largest % 64 == 0
    assert (chain.ROWS * most + 5) * largest <= (64 * MIB if most <= 1000 else 1 << 30)
    chunk = chunk_bytes(nbytes, nodes, largest)
    assert 0 < chunk <= largest
    assert chunk % 64 == 0
    count = -(-nbytes // chunk)
    assert count * chunk - nbytes < chunk
    assert chunk_bytes(nbytes, 2 * nodes, largest) <= chunk


# Ranks that go on in any order


class _Message:
    """A send or a receive, which is finished when the network says so."""

    def __init__(self, buffer: Any) -> None:
        self.buffer, self.moved = buffer, False

    def done(self) -> bool:
        return self.moved


class _Network:
    """Messages between ranks, moved at any time after both have begun; a send is finished later still."""

    def __init__(self) -> None:
        self.leaving: list[tuple[_Message, bytes]] = []
        self.sent: dict[tuple[int, int], deque[_Message]] = defaultdict(deque)
        self.asked: dict[tuple[int, int], deque[_Message]] = defaultdict(deque)
        self.nbytes: dict[tuple[int, int], int] = defaultdict(int)

    def ready(self) -> list[tuple[int, int]]:
        return [key for key, sent in self.sent.items() if sent and self.asked[key]]

    def move(self, key: tuple[int, int]) -> None:
        sent, asked = self.sent[key].popleft(), self.asked[key].popleft()
        assert len(sent.buffer) == len(asked.buffer)
        asked.buffer[...] = sent.buffer
        asked.moved = True
        self.leaving.append((sent, sent.buffer.tobytes()))
        self.nbytes[key] += len(sent.buffer)

    def finish(self) -> None:
        """Finish the send that was moved first; until then MPI may still read its memory."""
        sent, content = self.leaving.pop(0)
        assert sent.buffer.tobytes() == content
        sent.moved = True


class _Chain(NodeChain):
    def __init__(
        self, network: _Network, rank: int, members: list[list[int]], control: SharedControl
    ) -> None:
        super().__init__(rank, members, control)
        self._network, self._rank = network, rank

    def send(self, buffer: Any, peer: int) -> _Message:
        self._network.sent[self._rank, peer].append(message := _Message(buffer))
        return message

    def recv(self, buffer: Any, peer: int) -> _Message:
        self._network.asked[peer, self._rank].append(message := _Message(buffer))
        return message


class _Job:
    """Ranks as coroutines, on nodes of these sizes."""

    def __init__(self, sizes: list[int], seed: int) -> None:
        starts = np.cumsum([0, *sizes])
        self.members = [list(range(a, b)) for a, b in pairwise(starts)]
        self.network, self._rng = _Network(), np.random.default_rng(seed)
        self.segments: list[ChainSegment] = []
        for ranks in self.members:
            memory = np.zeros(SharedControl.nbytes(len(ranks)), np.uint8)
            shared: Any = None
            for place, rank in enumerate(ranks):
                control = SharedControl(place, len(ranks), memory)
                own = _Chain(self.network, rank, self.members, control)
                if shared is None:
                    shared = np.zeros(ChainSegment.nbytes_of(own), np.uint8)
                self.segments.append(ChainSegment(own, shared))

    def run(self, programs: list[Any]) -> None:
        """Let any rank that can go on do so, or any message be moved, until all are finished."""
        waiting: dict[int, Any] = dict.fromkeys(range(len(programs)))
        while waiting:
            able: list[Callable[[], None]] = [
                lambda rank=rank: self._go_on(rank, programs[rank], waiting)
                for rank, handle in waiting.items()
                if handle is None or handle.done()
            ]
            able += [lambda key=key: self.network.move(key) for key in self.network.ready()]
            able += [self.network.finish] if self.network.leaving else []
            assert able, "no rank can go on"
            able[int(self._rng.integers(len(able)))]()
        assert not self.network.leaving, "a message may still read memory of the caller's"

    @staticmethod
    def _go_on(rank: int, program: Any, waiting: dict[int, Any]) -> None:
        try:
            waiting[rank] = next(program)
        except StopIteration:
            del waiting[rank]


def _in_pieces(own: ChainSegment, tasks: Iterable[ChunkTask], source: Any, seed: int) -> Any:
    """Have a rank's own part of each chunk folded in three pieces, two of which lie elsewhere, as large leaves do."""
    rng, start = np.random.default_rng(seed), 0
    for task in tasks:
        count, part = len(task.rows[0]), own.own(len(task.rows[0]))
        elements = np.array(source[start : start + count])
        start += count
        cuts = sorted(rng.integers(part.start, part.stop + 1, 2).tolist())
        bounds = [part.start, *cuts, part.stop]
        pieces = [
            (slice(i, j), elements[i:j] if number != 1 else None)
            for number, (i, j) in enumerate(pairwise(bounds))
        ]
        rows, rank = task.rows, own.control.rank
        if not isinstance(rows, np.ndarray):
            rows = [*rows[:rank], np.array(rows[rank]), *rows[rank + 1 :]]
        yield task._replace(fill=partial(_fill, task, rows[rank], pieces), rows=rows, pieces=pieces)


def _fill(task: ChunkTask, row: Any, pieces: Any) -> None:
    """Fill a row, with wrong elements where others do not read them."""
    task.fill()
    for part, elements in pieces:
        if elements is not None:
            row[part] = 77


DTYPES = [np.dtype(name) for name in ("f4", "f8", "i2", "c8", "c16", "f2")] + [
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn),
]
SMALL = 4096


@contextmanager
def small_chunks(**others: Any) -> Iterator[None]:
    small = {"_CHUNK": SMALL, "_LEAST_CHUNK": SMALL // 4, "_WORKED": 256, **others}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in small.items():
            patch.setattr(chain, name, value)
        yield


@given(
    sizes=st.lists(st.integers(2, 7), min_size=2, max_size=4)
    | st.lists(st.integers(2, 3), min_size=5, max_size=8),
    many=st.sampled_from([2, 16]),
    in_pieces=st.booleans(),
    seed=st.integers(0, 1 << 30),
    calls=st.lists(
        st.tuples(st.integers(0, 12 * SMALL // 4), st.sampled_from(DTYPES), st.booleans()),
        min_size=1,
        max_size=3,
    ),
)
def test_results_are_in_rank_order_whoever_goes_on_first(
    sizes, many, in_pieces, seed, calls
) -> None:
    """Several calls one after another, of no chunk, one and more than memory has rows for; also in place."""
    with small_chunks(_MANY=many):
        job = _Job(sizes, seed)
        rng, expected, made = np.random.default_rng(seed), [], []
        for count, dtype, in_place in calls:
            op = "sum" if dtype.kind == "i" else "mean"
            rows = (9 * rng.standard_normal((sum(sizes), count))).astype(dtype)
            result = np.empty(count, dtype)
            fold(op, dtype, list(rows.copy()), result)
            outs = rows if in_place else np.empty_like(rows)
            expected.append((result, outs))
            made.append((rows, outs, op))

        def program(rank: int) -> Any:
            own = job.segments[rank]
            for rows, outs, op in made:
                tasks = chunk_tasks(own, rows[rank], outs[rank])
                if in_pieces:
                    tasks = _in_pieces(own, tasks, rows[rank], seed)
                yield from own.reduce(tasks, op)

        job.run([program(rank) for rank in range(sum(sizes))])
        for result, outs in expected:
            assert all(out.tobytes() == result.tobytes() for out in outs)
    # A link between nodes carries each element once in each direction: a total, and the result.
    node = np.repeat(range(len(sizes)), sizes)
    links: dict[tuple[int, int], int] = defaultdict(int)
    for (source, target), nbytes in job.network.nbytes.items():
        links[node[source], node[target]] += nbytes
    totals = sum(count * total_dtype(dtype).itemsize for count, dtype, _ in calls)
    results = sum(count * dtype.itemsize for count, dtype, _ in calls)
    pairs = list(pairwise(range(len(sizes))))
    want = dict.fromkeys(pairs, totals) | dict.fromkeys([(b, a) for a, b in pairs], results)
    assert {link: links[link] for link in want} == want == {**want, **links}


# Threads on pretended nodes


def members_of(nodes: list[int]) -> list[list[int]]:
    """Return the ranks of each node."""
    return [[r for r, n in enumerate(nodes) if n == node] for node in dict.fromkeys(nodes)]


class _Nodes(ThreadsTransport):
    """One of the threads of `link`, on nodes of which each has memory of its own."""

    def __init__(self, link: ThreadsTransport, nodes: list[int]) -> None:
        group, rank, members = link._group, link.rank, members_of(nodes)
        super().__init__(group, rank)
        self._nodes, ranks = nodes, next(ranks for ranks in members if rank in ranks)
        if is_chain(members):
            memory = np.zeros(SharedControl.nbytes(len(ranks)), np.uint8)
            memory = group.offers.setdefault(f"control of {ranks}", memory)
            here = SharedControl(ranks.index(rank), len(ranks), memory)
            self.chain = _Between(self, members, here)

    @property
    def slot(self) -> tuple[int, bool]:
        return self.control.payload, False

    def nodes(self) -> list[int]:
        return self._nodes

    def offer_memory(self, nbytes: int) -> str:
        name = f"of node {self._nodes[self.rank]}"
        self._group.offers[name] = np.zeros(nbytes, np.uint8)
        return name

    def open_memory(self, name: str, nbytes: int) -> Any:
        own = name == f"of node {self._nodes[self.rank]}"
        return super().open_memory(name, nbytes) if own else None


class _Between(NodeChain):
    def __init__(self, link: _Nodes, members: list[list[int]], control: SharedControl) -> None:
        super().__init__(link.rank, members, control)
        self._link = link

    def send(self, buffer: Any, peer: int) -> Any:
        # No message of a user has this tag.
        return self._link.send(buffer, peer, -1)

    def recv(self, buffer: Any, peer: int) -> Any:
        return self._link.recv(buffer, peer, -1)


@pytest.fixture
def _chained(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(held, "_PIECE", 64)
    with small_chunks(is_quicker=lambda *_: True):
        yield


@st.composite
def nodes_of_ranks(draw: st.DrawFn) -> list[int]:
    """Draw the node of each rank: mostly of two ranks at least, and in the order of ranks."""
    count = rank_count()
    nodes = draw(st.integers(1, count // 2))
    more = draw(st.lists(st.integers(0, nodes - 1), min_size=count, max_size=count))
    in_order = sorted([*range(nodes), *range(nodes), *more[2 * nodes :]])
    in_order[-1] += draw(st.sampled_from((0, 0, 1)))
    return draw(st.just(in_order) | st.permutations(in_order))


def _on_nodes(comm: Communicator, nodes: list[int]) -> tuple[Communicator, _Nodes]:
    made = _Nodes(internals.transport(comm).split(0, range(comm.size)), nodes)
    return internals.communicator(made, timeout=internals.options(comm).timeout), made


@given_on_ranks(ranks=range(4, 9), nodes=nodes_of_ranks(), count=st.integers(1, 40_000))
@pytest.mark.usefixtures("_chained")
def test_exact_sums_are_not_rounded_between_nodes(comm, nodes, count) -> None:
    """What nodes have is added up at once: a total of some of them would have too few bits."""
    part, _ = _on_nodes(comm, nodes)
    internals.set_inline_bytes(part, 0)
    numbers = [(1e100, 1.0, -1e100, 2.0**-60)[rank % 4] for rank in range(comm.size)]
    x, want = np.full(count, numbers[comm.rank]), math.fsum(numbers)
    for found in (part.allreduce(x, "fsum"), *allreduce_tree([x], "fsum", comm=part)):
        assert (found == want).all()


@FEW
@given_on_ranks(
    ranks=range(4, 9),
    nodes=nodes_of_ranks(),
    reduction=reductions() | reductions_of_sizes(),
    tree=reducible_trees(),
    root=ranked.roots(),
)
@pytest.mark.usefixtures("_chained")
def test_nodes_do_not_matter(comm, nodes, reduction, tree, root) -> None:
    """What ranks reduce does not depend on which of them share a node."""
    part, made = _on_nodes(comm, nodes)
    several = len(set(nodes)) > 1 and all(nodes.count(node) > 1 for node in nodes)
    follow = nodes == sorted(nodes, key=nodes.index)
    assert (made.chain is not None) == (several and follow)
    check_reduction(part, reduction, root)
    # A tree of no bytes is none for a chain.
    check_tree(part, tree, inline=0)
