from __future__ import annotations

import copy
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from tests.support import internals
from tests.support.frameworks import need
from tests.support.on_ranks import each_rank_of

# Trees that travel with the header, in steps of the board, and through the window.
SCALES = [1, 400, 40_000]


def _tree(rank: int, scale: int) -> dict[str, Any]:
    """Leaves of every sort: dtypes, layouts, numbers, None, no elements, no dimensions."""
    tree = copy.deepcopy(_leaves(rank, scale))
    number, straight = tree["f64"]
    return tree | {"f64": (number, {"turned": straight.T[::-1]})}


@lru_cache(maxsize=48)
def _leaves(rank: int, scale: int) -> dict[str, Any]:
    rng = np.random.default_rng(rank)
    return {
        "f32": rng.standard_normal((3, scale)).astype(np.float32),
        "bf16": [rng.standard_normal(5 * scale).astype(ml_dtypes.bfloat16), None],
        "f64": (np.asarray(rank + 0.5), rng.standard_normal((2, 2, scale))),
        "f16": np.float16(rng.standard_normal(7 * scale)),
        "number": rank + 0.25,
        "numpy": np.float32(rank),
        "empty": np.empty((0, 4), np.float32),
        "complex": rng.standard_normal(scale) + 1j * rng.standard_normal(scale),
        "last": rng.standard_normal(11 * scale).astype(np.float32),
    }


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _flat(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in _flat(value)]
    return [tree]


def _assert_same(got: Any, want: Any) -> None:
    assert got.keys() == want.keys()
    for mine, wanted in zip(_flat(got), _flat(want), strict=True):
        assert type(mine) is type(wanted)
        assert np.asarray(mine).tobytes() == np.asarray(wanted).tobytes()
        assert np.shape(mine) == np.shape(wanted)


@each_rank_of("few")
def test_trees_without_leaves_have_plans(comm: Communicator) -> None:
    for tree in ({}, [], None, {"a": None}, [np.empty(0, np.float32)]):
        assert str(comm.plan(tree)(tree)) == str(tree)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@each_rank_of("few")
def test_a_leaf_that_is_still_used_keeps_its_values(comm: Communicator, framework) -> None:
    need(framework)

    def tree(value: int) -> list[Any]:
        arrays = [np.full(50_000, value + k, np.float32) for k in range(3)]
        return [ac.exchange(array, framework) for array in arrays]

    plan = comm.plan(tree(0))
    # One leaf of three is kept, by a view of it.
    kept = [plan(tree(step))[step % 3][5:] for step in range(6)]
    for step, part in enumerate(kept):
        assert (np.asarray(part) == np.full(49_995, step + step % 3)).all()


def test_a_step_allocates_nothing(on_ranks, few) -> None:
    def check(comm: Communicator) -> int:
        tree = {f"p{n}": np.full(n * 1000, n, np.float32) for n in range(60)}
        plan = comm.plan(tree)
        addresses = set()
        for step in range(5):
            # All ranks together, since those of threads share their memory's figures.
            comm.barrier()
            if step == 3:
                tracemalloc.start()
            result = plan(tree)
            addresses.add(result["p9"].__array_interface__["data"][0])
        comm.barrier()
        peak = tracemalloc.get_traced_memory()[1]
        comm.barrier()
        tracemalloc.stop()
        # The result of the step before is in use while the next is made.
        assert len(addresses) == 2
        return peak

    total = 4 * 1000 * sum(range(60))
    assert max(on_ranks(few, check)) < total / 8


@each_rank_of("few")
def test_plans_of_the_same_shapes_share_their_memory(comm: Communicator) -> None:
    first, second = np.zeros(9000), np.zeros(9000)
    plan, same = comm.plan({"a": first}), comm.plan([second], "sum")
    address = plan({"a": first})["a"].__array_interface__["data"][0]
    assert same([second])[0].__array_interface__["data"][0] == address
    assert internals.fusion(comm.plan([np.zeros(9001)])) is not internals.fusion(plan)


@each_rank_of(3)
def test_leaves_of_one_rank_may_lie_otherwise(comm: Communicator) -> None:
    """It then copies chunks in one by one, and the others let the native part do it."""
    order: Any = "F" if comm.rank == 1 else "C"
    tree = [
        np.asarray(np.arange(n * 300.0).reshape(n, 300) + comm.rank, order=order)
        for n in (700, 3, 400)
    ]
    plan = comm.plan(tree, "sum")
    for _ in range(2):
        for leaf, result in zip(tree, plan(tree), strict=True):
            want = 3 * (leaf - comm.rank) + 3
            np.testing.assert_array_equal(result, want)


WRONG: list[tuple[type[Exception], str, Callable[[dict[str, Any]], Any]]] = [
    (ValueError, r"tree\['z'\] is new", lambda t: {**t, "z": np.zeros(2)}),
    (ValueError, r"got 1, and tree\['b'\] is missing", lambda t: {"a": t["a"]}),
    (
        ValueError,
        r"got tree\['other'\] in place of tree\['b'\]",
        lambda t: {"a": t["a"], "other": t["b"], "t": t["t"], "u": t["u"]},
    ),
    (ValueError, r"got tree: OrderedDict in place of tree: dict", OrderedDict),
    (
        ValueError,
        r"tree\['b'\] must be float32 \(4,\).*got float32 \(4, 1\)",
        lambda t: {**t, "b": t["b"][:, None]},
    ),
    (
        TypeError,
        r"tree\['b'\] must be float32 \(4,\).*got float64 \(4,\)",
        lambda t: {**t, "b": t["b"].astype(np.float64)},
    ),
    (TypeError, r"tree\['b'\] must be float32 \(4,\).*got None", lambda t: {**t, "b": None}),
    (TypeError, r"tree\['b'\]", lambda t: {**t, "b": "text"}),
]


@pytest.mark.parametrize(("error", "message", "change"), WRONG)
@each_rank_of(3)
def test_another_tree_on_one_rank_raises_on_all(comm: Communicator, error, message, change) -> None:
    tree = {"a": np.ones(3), "b": np.ones(4, "f4"), "t": np.ones(2), "u": np.full(2, 2.0)}
    plan = comm.plan(tree, "sum")
    for wrong in range(comm.size):
        if comm.rank == wrong:
            with pytest.raises(error, match=rf"^Plan: .*{message}"):
                plan(change(tree))
        else:
            with pytest.raises(ac.PeerError, match="Plan"):
                plan(tree)
        assert plan(tree)["a"].tolist() == [comm.size] * 3
    with pytest.raises(error, match=rf"^Plan: .*{message}"):
        plan(change(tree))
    assert plan(tree)["a"].tolist() == [comm.size] * 3


@pytest.mark.parametrize("odd", ["shape", "op", "tree"])
@each_rank_of(3)
def test_plans_that_differ_raise_when_they_are_made(comm: Communicator, odd) -> None:
    mine = comm.rank == 1
    shape = (4,) if mine and odd == "shape" else (3,)
    tree = [np.zeros(shape)] if mine and odd == "tree" else {"w": np.zeros(shape)}
    match = {"shape": r"tree\['w'\] is float64 \(3,\) on rank 0", "op": "sum", "tree": "tree"}
    with pytest.raises(ac.MismatchError, match=match[odd]):
        comm.plan(tree, "sum" if mine and odd == "op" else "mean")


@pytest.mark.parametrize("other", ["plan", "tree", "making"])
@each_rank_of(3)
def test_a_rank_that_calls_something_else_is_a_mismatch(comm: Communicator, other) -> None:
    tree = {"w": np.zeros(3)}
    plan, another = comm.plan(tree), comm.plan([np.zeros(3)])
    calls = {
        "plan": lambda: another([np.zeros(3)]),
        "tree": lambda: ac.allreduce_tree(tree, comm=comm),
        "making": lambda: comm.plan(tree),
    }
    call = calls[other] if comm.rank == 0 else lambda: plan(tree)
    with pytest.raises(ac.MismatchError, match="Plan"):
        call()


@each_rank_of("few")
def test_a_plan_outlives_no_communicator(comm: Communicator) -> None:
    tree = [np.zeros(3)]
    with comm.dup() as other:
        plan = other.plan(tree)
    with pytest.raises(ac.CommunicatorClosedError, match="Plan: the communicator is closed"):
        plan(tree)
    with pytest.raises(ac.CommunicatorClosedError, match="plan: the communicator is closed"):
        other.plan(tree)


@each_rank_of(3)
def test_without_memory_to_share_the_result_is_the_same(comm: Communicator) -> None:
    if comm.rank == 1:
        internals.transport(comm).open_memory = lambda name, nbytes: None
    mine = _tree(comm.rank, SCALES[-1])
    plan = comm.plan(mine)
    _assert_same(plan(mine), ac.allreduce_tree(mine, comm=comm))
    assert not internals.segment(comm)
    with comm.dup() as other:
        _assert_same(plan(mine), other.plan(mine)(mine))
        assert bool(internals.segment(other)) is internals.control(comm).shared
