"""Wherever ranks are, the movements and the results are the same; the nodes here are pretended."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._native import compiled
from arraycomm._reduce import algorithms, chain, chunks
from arraycomm._training.rounds import Bucket, Part, Place, Rounds
from arraycomm._transports.base import Blocks, Steps, Transport
from arraycomm._transports.mpi import pieces as mpi_pieces
from arraycomm._trees import fusion
from arraycomm._trees import held as leaves_held
from arraycomm._trees.held import Held
from tests.collectives.test_trace import traced
from tests.support import internals
from tests.support.on_ranks import LAUNCH, TIMEOUT

pytestmark = pytest.mark.skipif(
    LAUNCH is None or LAUNCH.size not in (3, 4), reason="needs to be run under mpiexec -n 3 or 4"
)

# For each rank the first one on its node: by number of ranks in the job. Two ranks are the first ones.
_PLACEMENTS = {
    3: ([0, 1, 2], [0, 0, 2], [0, 1, 0], [0, 1, 1]),
    4: ([0, 1], [0, 1, 2, 3], [0, 0, 2, 2], [0, 1, 0, 1], [0, 1, 1, 1]),
}


@pytest.fixture(params=_PLACEMENTS[LAUNCH.size] if LAUNCH and LAUNCH.size in _PLACEMENTS else [])
def comm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Communicator]:
    from mpi4py import MPI

    # Most messages here go in several pieces, and many in more than are under way at once.
    monkeypatch.setattr(mpi_pieces, "PIECE", 8 << 10)
    world, nodes = MPI.COMM_WORLD, request.param
    group = world.Split(int(world.rank < len(nodes)), world.rank)
    if world.rank >= len(nodes):
        # The others have the same tests to themselves.
        nodes = [0, 1][: group.size]
    made = internals.mpi_communicator(group, nodes=nodes, timeout=TIMEOUT)
    yield made
    internals.transport(made).free()


def _blocks(counts: list[int]) -> Blocks:
    offsets = [sum(counts[:rank]) for rank in range(len(counts))]
    return Blocks(np.full(sum(counts), 255, np.uint8), counts, offsets)


def test_movements_that_overlap_do_not_mix(comm: Communicator) -> None:
    link, rank, size = internals.transport(comm), comm.rank, comm.size
    assert link.overlaps
    moved, handles = [], []
    for number, scale in enumerate((1, 50_000, 0, 7)):
        gathered = _blocks([scale * (peer + 1) for peer in range(size)])
        gathered.block(rank)[...] = 10 * number + rank
        # What some send one another differs much in length.
        sent = _blocks([scale * (peer + 4 * rank) for peer in range(size)])
        for peer in range(size):
            sent.block(peer)[...] = 10 * peer + rank
        got = _blocks([scale * (rank + 4 * peer) for peer in range(size)])
        said = np.full(7 * scale, 10 * number + rank, np.uint8)
        handles += [
            link.alltoall(sent, got),
            link.bcast(said, number % size),
            link.allgather(gathered),
        ]
        moved.append((number, gathered, got, said))
    # The last ones first.
    internals.finish(*handles[::-1])
    for number, gathered, got, said in moved:
        assert (said == 10 * number + number % size).all()
        for peer in range(size):
            assert (gathered.block(peer) == 10 * number + peer).all()
            assert (got.block(peer) == 10 * rank + peer).all()


@pytest.mark.parametrize("count", [3, 20_001, 700_001])
def test_sums_have_the_bits_of_the_order_of_ranks(comm: Communicator, count: int) -> None:
    """With the header, in one chunk, and in several."""
    rows = [
        np.random.default_rng((rank, count)).standard_normal(count, np.float32)
        for rank in range(comm.size)
    ]
    expected = rows[0].copy()
    for row in rows[1:]:
        expected += row
    x = rows[comm.rank].copy()
    assert comm.allreduce(x).tobytes() == expected.tobytes()
    # In place the elements of other ranks come where this rank's are.
    assert comm.allreduce(x, out=x).tobytes() == expected.tobytes()
    reduced = comm.reduce(rows[comm.rank], root=1)
    assert comm.rank != 1 or reduced.tobytes() == expected.tobytes()


def test_headers_with_large_payloads_are_sent_again_and_again(comm: Communicator) -> None:
    """By messages that are made once, and in more pieces one way if nodes have different numbers of ranks."""
    few = internals.slots()
    internals.set_slots(*internals.SLOTS)
    with comm.dup() as made:
        internals.set_slots(*few)
        x = np.full((1 << 18) // comm.size - 16, comm.rank + 1.0, np.float32)
        out = np.empty_like(x)
        assert ac.explain(x, comm=made).algorithm == "header"
        for _ in range(10):
            made.allreduce(x, "max", out=out)
            assert (out == comm.size).all()


@pytest.mark.parametrize("chunk", [0, 64 << 10])
def test_chunks_that_overlap_have_the_bits_of_the_order_of_ranks(
    comm: Communicator, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of one are on their way to other ranks while the next is folded."""
    internals.transport(comm).chunk_bytes = chunk
    if chunk:
        monkeypatch.setattr(chunks, "overlapping_chunk", lambda *_: chunk)
    count, size, rank = 70_001, comm.size, comm.rank
    blocks = [
        np.random.default_rng(r).standard_normal((size, count), np.float32) for r in range(size)
    ]
    *_, total = sums = list(accumulate(block[0] for block in blocks))
    x = blocks[rank][0].copy()
    assert comm.scan(x).tobytes() == sums[rank].tobytes()
    before = comm.exscan(x)
    assert rank == 0 or before.tobytes() == sums[rank - 1].tobytes()
    *_, share = accumulate(block[rank] for block in blocks)
    assert comm.reduce_scatter(blocks[rank]).tobytes() == share.tobytes()
    for root in range(size):
        into = np.empty_like(x) if rank == root else None
        comm.reduce(x, root=root, out=into)
        assert into is None or into.tobytes() == total.tobytes()
    # In place, which only the root's is; the others' stay.
    comm.reduce(x, root=1, out=x if rank == 1 else None)
    assert x.tobytes() == (total if rank == 1 else blocks[rank][0]).tobytes()
    x = blocks[rank][0].copy()
    assert comm.scan(x, out=x).tobytes() == sums[rank].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16"])
def test_a_chain_of_nodes_has_the_bits_of_slices(
    comm: Communicator, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of arrays, also in place, and of trees of several dtypes; in many chunks, and again and again.

    A rank folds its part of large leaves from where they lie, and copies in the others' and small ones.
    """
    link, rank = internals.transport(comm), comm.rank
    if link.chain is None:
        pytest.skip("these nodes are no chain")
    monkeypatch.setattr(chain, "_CHUNK", 32 << 10)
    monkeypatch.setattr(leaves_held, "_PIECE", 4 << 10)
    copied, fill = list[int](), Held.fill

    def noted(held: Held, row: np.ndarray, parts: np.ndarray) -> None:
        copied.extend(nbytes for _, _, nbytes, _ in parts.tolist())
        fill(held, row, parts)

    monkeypatch.setattr(Held, "fill", noted)
    rng, kind = np.random.default_rng(rank), np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    # The first node sends totals, which bfloat16 has in float32, and the last one results.
    chained = [True]
    monkeypatch.setattr(chain, "is_quicker", lambda *_: chained[0])
    wide = 4 if dtype == "bfloat16" else kind.itemsize
    explained = ac.explain(np.zeros(1000, kind), comm=comm)
    assert explained.algorithm == "header"
    explained = ac.explain(np.zeros(100_000, kind), comm=comm)
    assert explained.algorithm == "chain"
    assert explained.sent == 50_000 * (wide if rank < 2 else kind.itemsize)
    for count in (40_001, 150_003):
        x = rng.standard_normal(count).astype(kind)
        # The native part holds leaves that are all contiguous.
        held = {"a": x[: count // 3], "b": rng.standard_normal(count // 2), "d": x[:0]}
        held |= {f"s{n}": x[n : n + 300] for n in range(40)}
        trees = [held, {**held, "c": x[::2]}]
        chained[0] = False
        expected = comm.allreduce(x)
        reduced = [ac.allreduce_tree(tree, "sum", comm=comm) for tree in trees]
        chained[0] = True
        plans = [comm.plan(tree, "sum") for tree in trees]
        for _ in range(2):
            assert comm.allreduce(x).tobytes() == expected.tobytes()
            for tree, want, plan in zip(trees, reduced, plans, strict=True):
                for found in (plan(tree), ac.allreduce_tree(tree, "sum", comm=comm)):
                    assert all(found[k].tobytes() == want[k].tobytes() for k in tree)
        y = x.copy()
        assert comm.allreduce(y, out=y).tobytes() == expected.tobytes()
        if count < 100_000:
            # Such trees go in steps.
            continue
        copied.clear()
        plans[0](held)
        nbytes = sum(leaf.nbytes for leaf in held.values())
        if compiled is not None:
            assert 0.45 * nbytes < sum(copied) < 0.9 * nbytes
        rounds = Rounds(comm, "sum", {"bucket_bytes": 1 << 22, "compression": None})
        for tree, want in zip(trees, reduced, strict=True):
            mine = {n: leaf.copy() for n, leaf in enumerate(tree.values())}
            if "c" in tree:
                mine[len(held)] = tree["c"]
            bucket = Bucket(0, list(mine))
            got = rounds.reduce(
                Part(bucket, lambda mine=mine: mine, Place(), may_overwrite=True)
            ).leaves
            assert any(got[n] is leaf for n, leaf in mine.items())
            assert all(got[n].tobytes() == want[k].tobytes() for n, k in enumerate(tree))


@pytest.mark.parametrize("kind", ["plan", "tree", "compressed", "overwritten"])
def test_large_leaves_are_sent_from_where_they_lie(
    comm: Communicator, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they are contiguous, which other ranks' need not be; in several messages, and with the bits of `allreduce`."""
    monkeypatch.setattr(chain, "is_quicker", lambda *_: False)
    monkeypatch.setattr(chunks, "overlapping_chunk", lambda *_: 75 << 10)
    monkeypatch.setattr(fusion, "_ALONE", (1 << 18) // comm.size)
    sent, reduce = list[np.ndarray](), algorithms.allreduce_in_turn

    def noted(link: Transport, pairs: list[tuple[np.ndarray, np.ndarray]], op: str) -> Steps:
        sent.extend(source for source, _ in pairs)
        return reduce(link, pairs, op)

    monkeypatch.setattr(algorithms, "allreduce_in_turn", noted)
    rng = np.random.default_rng(comm.rank)
    normal = rng.standard_normal
    tree = {
        "large": normal((600, 250), np.float32),
        "small": normal(70, np.float32),
        "on one rank in order": normal((250, 300), np.float32),
        "backwards": normal(75_000, np.float32)[::-1],
        "bfloat16": normal(150_001).astype(ml_dtypes.bfloat16),
        "none": np.zeros((0, 3)),
        "locked": normal(37_500),
        "last": normal(3),
    }
    if comm.rank:
        tree["on one rank in order"] = tree["on one rank in order"].reshape(300, 250).T
    tree["locked"].flags.writeable = False
    calls = {
        "plan": comm.plan(tree, "mean"),
        "tree": lambda tree: ac.allreduce_tree(tree, "mean", comm=comm),
        "compressed": lambda tree: ac.allreduce_gradients(tree, compression="float16", comm=comm),
    }

    def overwritten(tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        mine = {n: leaf.copy() for n, leaf in enumerate(tree.values())}
        rounds = Rounds(comm, "mean", {"bucket_bytes": 1 << 22, "compression": None})
        reduced = rounds.reduce(Part(Bucket(0, [*mine]), lambda: mine, Place(), may_overwrite=True))
        return dict(zip(tree, map(reduced.leaves.__getitem__, mine), strict=True))

    calls["overwritten"] = overwritten
    narrow = np.float16 if kind == "compressed" else None
    wanted = {
        k: comm.allreduce(x.astype(narrow if x.dtype.itemsize > 2 and narrow else x.dtype), "mean")
        for k, x in tree.items()
    }
    sent.clear()
    for _ in range(2):
        found = calls[kind](tree)
        for k, x in tree.items():
            assert found[k].tobytes() == wanted[k].astype(x.dtype).tobytes(), k
            assert not np.shares_memory(found[k], x)
    whole = {k for k, x in tree.items() if any(np.shares_memory(x, source) for source in sent)}
    in_order = set() if comm.rank else {"on one rank in order"}
    plain = set() if narrow else {"large", "locked"} | in_order
    # Where results may be written over leaves, these are copies here.
    assert whole == (plain | {"bfloat16"} if kind != "overwritten" else set())


def _no_memory(*_: object) -> None:
    raise MemoryError


def test_without_memory_a_chain_of_nodes_is_left_aside(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one rank has none, then on all of them."""
    if internals.transport(comm).chain is None:
        pytest.skip("these nodes are no chain")
    if comm.rank == 1:
        monkeypatch.setattr(chain, "allocate", _no_memory)
    monkeypatch.setattr(chain, "is_quicker", lambda *_: True)
    x = np.arange(300_000.0) + comm.rank
    assert (comm.allreduce(x) == comm.size * np.arange(300_000.0) + sum(range(comm.size))).all()
    assert not chain.opened(internals.transport(comm))
    events = traced(comm, lambda comm: comm.allreduce(x))["traceEvents"]
    assert {e["args"]["algorithm"] for e in events if e["name"] == "allreduce"} == {"slices"}


@pytest.mark.parametrize("nbytes", [1 << 17, 2 << 20])
def test_every_rank_gets_what_each_root_has(comm: Communicator, nbytes: int) -> None:
    """In one piece, and in pieces of which each is passed on while others come; without their dtype known before."""
    for root in range(comm.size):
        x = np.random.default_rng(root).integers(0, 256, (2, nbytes // 2), np.uint8)
        mine = x.T if comm.rank == root else None
        assert (comm.bcast(mine, root) == x.T).all()
        out = np.zeros_like(x)
        comm.bcast(x if comm.rank == root else None, root, out=out)
        assert (out == x).all()
    tree = {"w": np.arange(nbytes // 8.0) + comm.rank, "b": np.full(3, comm.rank)}
    found = ac.synchronize(tree, root=1, comm=comm)
    assert (found["w"] == np.arange(nbytes // 8.0) + 1).all()
    assert (found["b"] == 1).all()
