from __future__ import annotations

import enum
import random

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from arraycomm._arrays.views import view
from arraycomm._communicator import Communicator
from arraycomm._reduce import chain
from arraycomm._training.rounds import Bucket, Place, Rounds
from arraycomm._trees.leaves import array_leaf, spec_of
from tests.support import internals
from tests.support.on_ranks import LAUNCH

# What an optimizer of theirs imports takes each process seconds.
on_threads = pytest.mark.skipif(
    LAUNCH is not None, reason="modules of frameworks are the same whatever carries them"
)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def _mixed(rank: int, scale: int = 1) -> dict:
    return {
        "f32": np.full((3, scale), rank + 1, np.float32),
        "bf16": [np.full(5 * scale, rank, ml_dtypes.bfloat16), None],
        "f64": (np.full((), rank + 0.5), {"deep": np.full((2, 2, scale), rank)[:, ::-1]}),
        "number": rank + 0.25,
        "empty": np.empty((0, 4), np.float32),
        "big": np.full(400 * scale, rank, np.float32),
    }


def _large(rank: int, *, held: bool) -> dict[int, np.ndarray]:
    """Return gradients by the numbers of their parameters; results can be written over the first three.

    The native part can hold them, unless one is not contiguous.
    """
    random = np.random.default_rng(rank)
    leaves = {
        0: random.standard_normal((300, 401), np.float32),
        1: random.standard_normal(100_000, np.float32).astype(ml_dtypes.bfloat16),
        2: random.standard_normal(20_001),
        3: random.standard_normal((201, 300)).T,
        4: random.standard_normal(5),
        5: random.standard_normal(50_000),
    }
    leaves[5].flags.writeable = False
    if held:
        leaves[3] = np.ascontiguousarray(leaves[3])
    return leaves


@pytest.mark.parametrize("held", ["by all ranks", "by rank 0", "by none"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_results_are_written_over_large_gradients(on_ranks, size, op, held) -> None:
    def check(comm: Communicator) -> bool:
        is_held = held == "by all ranks" or (held == "by rank 0" and comm.rank == 0)
        mine = _large(comm.rank, held=is_held)
        want = ac.allreduce_tree(mine, op, comm=comm)
        rounds = Rounds(comm, op, {"bucket_bytes": 1 << 20, "compression": None})
        reduced = rounds.reduce(Bucket(0, list(mine)), lambda: mine, Place(), may_overwrite=True)
        over = [number for number, leaf in mine.items() if reduced.leaves[number] is leaf]
        for number, leaf in reduced.leaves.items():
            assert (leaf == want[number]).all()
            assert leaf.dtype == mine[number].dtype
            assert number in over or (mine[number] == _large(comm.rank, held=is_held)[number]).all()
        assert over in ([], [0, 1, 2], [0, 1, 2, 3])
        return bool(over)

    shared = on_ranks(size, lambda comm: internals.is_shared(comm) and size > 1)
    assert on_ranks(size, check) == shared


def test_gradients_that_share_memory_are_not_overwritten(on_ranks, several) -> None:
    def check(comm: Communicator) -> None:
        whole = np.arange(400_000.0) + comm.rank
        mine = {0: whole[:-8], 1: whole[8:]}
        want = ac.allreduce_tree(mine, comm=comm)
        rounds = Rounds(comm, "mean", {"bucket_bytes": 1 << 20, "compression": None})
        reduced = rounds.reduce(Bucket(0, [0, 1]), lambda: mine, Place(), may_overwrite=True)
        for number, leaf in reduced.leaves.items():
            assert (leaf == want[number]).all()
        assert (whole == np.arange(400_000.0) + comm.rank).all()

    on_ranks(several, check)


@pytest.mark.parametrize("scale", [1, 50, 2000])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_leaves_are_reduced_like_arrays_and_keep_their_kind(on_ranks, size, op, scale) -> None:
    def check(comm: Communicator) -> None:
        mine = _mixed(comm.rank, scale)
        got = ac.allreduce_tree(mine, op, comm=comm)
        for path in (
            lambda t: t["f32"],
            lambda t: t["bf16"][0],
            lambda t: t["f64"][1]["deep"],
            lambda t: t["number"],
            lambda t: t["empty"],
            lambda t: t["big"],
        ):
            want = comm.allreduce(path(mine), op)
            assert type(path(got)) is type(want)
            assert np.array_equal(path(got), want)
            assert np.asarray(path(got)).dtype == np.asarray(want).dtype
        assert list(got) == list(mine)
        assert got["bf16"][1] is None
        assert np.array_equal(mine["f32"], _mixed(comm.rank, scale)["f32"])

    on_ranks(size, check)


def test_bucket_size_does_not_change_a_bit(on_ranks, size) -> None:
    def check(comm: Communicator) -> bytes:
        rng = np.random.default_rng(comm.rank)
        tree = [rng.standard_normal(n).astype(np.float32) for n in (3000, 1, 7000, 50, 2)]
        results = [
            b"".join(a.tobytes() for a in ac.allreduce_gradients(tree, bucket_bytes=n, comm=comm))
            for n in (1, 4000, 1 << 25)
        ]
        assert results[0] == results[1] == results[2]
        assert results[0] == b"".join(comm.allreduce(a, "mean").tobytes() for a in tree)
        return results[0]

    on_ranks(size, check)


def test_a_tree_costs_one_header(on_ranks, size) -> None:
    def check(comm: Communicator) -> int:
        before = internals.steps(comm)
        ac.allreduce_tree([np.ones(50, dtype) for dtype in ("f2", "f4", "f8") * 20], comm=comm)
        return internals.steps(comm) - before

    assert on_ranks(size, check) == [1] * size


def test_few_leaves_of_a_dtype_cost_a_step_between_nodes(on_ranks, several, monkeypatch) -> None:
    """What fits into a slot of the board goes by it, and not by two calls of MPI's."""
    # Slots may be so large that a chain of nodes would be preferred.
    monkeypatch.setattr(chain, "is_quicker", lambda *_: False)

    def check(comm: Communicator) -> None:
        before, control = internals.steps(comm), internals.control(comm)
        # Within a node all of it travels with the header, and elsewhere one leaf has no room there.
        count = 1000 if control.shared else control.payload // 4 + 1
        tree = [np.ones(count, "f4"), np.full(3, 1.0 * comm.rank)]
        got = ac.allreduce_tree(tree, "sum", comm=comm)
        assert (got[0] == several).all()
        assert got[1].tolist() == [sum(range(several))] * 3
        assert internals.steps(comm) - before == (1 if control.shared else 2)

    on_ranks(several, check)


def test_tied_leaves_stay_tied(on_ranks, size) -> None:
    def check(comm: Communicator) -> None:
        shared = np.full(1000, comm.rank, np.float64)
        tree = {"encoder": shared, "decoder": [shared, shared.copy()]}
        for got in (
            ac.allreduce_tree(tree, "max", comm=comm),
            ac.synchronize(tree, root=comm.size - 1, comm=comm),
        ):
            assert got["encoder"] is got["decoder"][0]
            assert got["encoder"] is not got["decoder"][1]
            assert (got["encoder"] == comm.size - 1).all()

    on_ranks(size, check)


def test_results_of_a_tree_share_no_memory(on_ranks, size) -> None:
    def check(comm: Communicator) -> None:
        tree = [np.ones(n) for n in (1, 10, 5000)]
        got = ac.allreduce_tree(tree, comm=comm)
        again = ac.allreduce_tree(tree, comm=comm)
        for number, leaf in enumerate(got):
            leaf[...] = 7
            for other in (*got[number + 1 :], *again, *tree):
                assert (other == 1).all()

    on_ranks(size, check)


def test_synchronize_keeps_types_and_what_cannot_be_sent(on_ranks, size) -> None:
    def check(comm: Communicator) -> None:
        generator, twister = np.random.default_rng(comm.rank), random.Random(comm.rank)
        tree = {
            "int": comm.rank + 2**70,
            "bool": comm.rank == 0,
            "complex": complex(comm.rank),
            "numpy": np.int16(comm.rank),
            "text": "x" * comm.rank,
            "bytes": b"y" * comm.rank,
            "enum": Color.RED if comm.rank == 0 else Color.BLUE,
            "none": None,
            "function": len,
            "class": Color,
            "generator": generator,
            "random": twister,
            "date": np.full(2, comm.rank, "datetime64[s]"),
        }
        for root in range(comm.size):
            got = ac.synchronize(tree, root=root, comm=comm)
            assert got["int"] == root + 2**70
            assert got["bool"] is (root == 0)
            assert got["complex"] == complex(root)
            assert type(got["numpy"]) is np.int16
            assert got["numpy"] == root
            assert (got["text"], got["bytes"]) == ("x" * root, b"y" * root)
            assert got["enum"] is (Color.RED if root == 0 else Color.BLUE)
            assert (got["none"], got["function"], got["class"]) == (None, len, Color)
            assert got["generator"] is generator
            assert got["random"] is twister
            assert (got["date"] == np.datetime64(root, "s")).all()

    on_ranks(size, check)


def test_tree_of_root_goes_whole_to_ranks_that_pass_none(on_ranks, size) -> None:
    def check(comm: Communicator) -> None:
        tree = {"a": np.arange(5.0) + comm.rank, "n": comm.rank, "big": np.full(9000, comm.rank)}
        for root in range(comm.size):
            for others in ({root}, {root, 0}):
                mine = tree if comm.rank in others else None
                got = ac.synchronize(mine, root=root, comm=comm)
                assert got["a"].tolist() == (np.arange(5.0) + root).tolist()
                assert got["n"] == root
                assert (got["big"] == root).all()
        assert ac.synchronize(None, comm=comm) is None

    on_ranks(size, check)


def test_root_without_a_tree_is_an_error_everywhere(on_ranks, several) -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(ac.MismatchError, match="root 0 passed None, but rank 1 passed a tree"):
            ac.synchronize(None if comm.rank == 0 else {"a": 1.0}, comm=comm)

    on_ranks(several, check)


def test_wrong_argument_beside_missing_gradients_leaves_ranks_in_step(on_ranks, several) -> None:
    def check(comm: Communicator) -> None:
        mine = comm.rank == comm.size - 1
        tree = {"a": np.ones(2), "b": None if comm.rank == 0 else np.ones(3)}
        error = ValueError if mine else ac.PeerError
        with pytest.raises(error, match="got 'average'"):
            ac.allreduce_gradients(tree, "average" if mine else "sum", comm=comm)
        got = ac.allreduce_gradients(tree, "sum", comm=comm)
        assert got["b"].tolist() == [comm.size - 1] * 3

    on_ranks(several, check)


def test_torch_state_dict_is_a_tree(on_ranks, size) -> None:
    torch = pytest.importorskip("torch")

    def check(comm: Communicator) -> None:
        module = torch.nn.Linear(3, 2)
        with torch.no_grad():
            module.weight.fill_(comm.rank)
        state = ac.synchronize(module.state_dict(), root=comm.size - 1, comm=comm)
        assert type(state) is type(module.state_dict())
        module.load_state_dict(state)
        assert (module.weight == comm.size - 1).all()

    on_ranks(size, check)


@on_threads
def test_equinox_module_and_optax_state(on_ranks, size) -> None:
    equinox = pytest.importorskip("equinox")
    optax = pytest.importorskip("optax")
    jax = pytest.importorskip("jax")

    def check(comm: Communicator) -> None:
        # Built from NumPy values: threads that compile at the same time disturb one another.
        module = equinox.tree_at(
            lambda m: m.weight,
            equinox.nn.Linear(2, 3, use_bias=False, key=jax.random.key(0)),
            jax.numpy.asarray(np.full((3, 2), comm.rank, np.float32)),
        )
        got = ac.synchronize(module, root=comm.size - 1, comm=comm)
        assert type(got) is type(module)
        assert (np.asarray(got.weight) == comm.size - 1).all()
        state = optax.ScaleByAdamState(
            jax.numpy.asarray(np.int32(comm.rank)), {"w": got.weight}, {"w": None}
        )
        reduced = ac.allreduce_tree(state, "max", comm=comm)
        assert type(reduced) is type(state)
        assert int(reduced.count) == comm.size - 1
        assert reduced.nu == {"w": None}

    on_ranks(size, check)


def test_typed_jax_keys_travel_as_their_data(on_ranks, size) -> None:
    jax = pytest.importorskip("jax")
    keys = [jax.random.key(number) for number in range(4)]

    def check(comm: Communicator) -> None:
        root = comm.size - 1
        got = ac.synchronize({"key": keys[comm.rank]}, root=root, comm=comm)["key"]
        assert got.dtype == keys[root].dtype
        assert np.array_equal(jax.random.key_data(got), jax.random.key_data(keys[root]))

    on_ranks(size, check)


def test_frameworks_may_be_mixed_in_a_tree_and_differ_between_ranks(on_ranks, size) -> None:
    torch = pytest.importorskip("torch")
    jax = pytest.importorskip("jax")
    makes = [np.asarray, torch.tensor, jax.numpy.asarray]

    def check(comm: Communicator) -> None:
        mine = [makes[(comm.rank + k) % 3](np.full(4, comm.rank, np.float32)) for k in range(3)]
        got = ac.allreduce_tree(mine, "sum", comm=comm)
        for before, after in zip(mine, got, strict=True):
            assert type(before) is type(after)
            assert np.asarray(after).tolist() == [sum(range(comm.size))] * 4

    on_ranks(size, check)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 2), (1,) * 9, (10**12, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bool", "complex128"])
def test_description_of_a_leaf_is_understood(dtype, shape) -> None:
    leaf = array_leaf("tree", view(np.empty(shape, dtype)))
    assert spec_of(leaf) == (np.dtype(dtype), shape)
