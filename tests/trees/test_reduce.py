from __future__ import annotations

import enum

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._reduce import chain
from tests.support import internals
from tests.support.on_ranks import each_rank_of


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@each_rank_of("few")
def test_a_tree_costs_one_header(comm: Communicator) -> None:
    before = internals.steps(comm)
    ac.allreduce_tree([np.ones(50, dtype) for dtype in ("f2", "f4", "f8") * 20], comm=comm)
    assert internals.steps(comm) - before == 1


@each_rank_of(3)
def test_few_leaves_of_a_dtype_cost_a_step_between_nodes(comm: Communicator, monkeypatch) -> None:
    """What fits into a slot of the board goes by it, and not by two calls of MPI's."""
    # Slots may be so large that a chain of nodes would be preferred.
    monkeypatch.setattr(chain, "is_quicker", lambda *_: False)
    before, control = internals.steps(comm), internals.control(comm)
    # Within a node all of it travels with the header, and elsewhere one leaf has no room there.
    count = 1000 if control.shared else control.payload // 4 + 1
    got = ac.allreduce_tree([np.ones(count, "f4"), np.full(3, 1.0 * comm.rank)], "sum", comm=comm)
    assert (got[0] == 3).all()
    assert got[1].tolist() == [3.0] * 3
    assert internals.steps(comm) - before == (1 if control.shared else 2)


@each_rank_of("few")
def test_synchronize_keeps_classes_and_generators_of_numpy(comm: Communicator) -> None:
    """And large integers; the other kinds of leaves are drawn by laws."""
    tree = [comm.rank + 2**70, Color, np.random.default_rng(comm.rank), None]
    for root in range(comm.size):
        assert ac.synchronize(tree, root=root, comm=comm) == [root + 2**70, *tree[1:]]
    assert ac.synchronize(None, comm=comm) is None


@each_rank_of(3)
def test_root_without_a_tree_is_an_error_everywhere(comm: Communicator) -> None:
    with pytest.raises(ac.MismatchError, match="root 0 passed None, but rank 1 passed a tree"):
        ac.synchronize(None if comm.rank == 0 else {"a": 1.0}, comm=comm)


@each_rank_of(3)
def test_wrong_argument_beside_missing_gradients_leaves_ranks_in_step(comm: Communicator) -> None:
    mine = comm.rank == comm.size - 1
    tree = {"a": np.ones(2), "b": None if comm.rank == 0 else np.ones(3)}
    error = ValueError if mine else ac.PeerError
    with pytest.raises(error, match="got 'average'"):
        ac.allreduce_gradients(tree, "average" if mine else "sum", comm=comm)
    got = ac.allreduce_gradients(tree, "sum", comm=comm)
    assert got["b"].tolist() == [comm.size - 1] * 3


@each_rank_of("few", "jax")
def test_typed_jax_keys_travel_as_their_data(comm: Communicator, jax) -> None:
    keys, root = [jax.random.key(number) for number in range(4)], comm.size - 1
    got = ac.synchronize({"key": keys[comm.rank]}, root=root, comm=comm)["key"]
    assert got.dtype == keys[root].dtype
    assert np.array_equal(jax.random.key_data(got), jax.random.key_data(keys[root]))
