"""Objects in trees: those that say what is in them, those that stay, and those that are refused."""

from __future__ import annotations

import functools
import math
import operator
import random
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from arraycomm._trees.opened import stays
from arraycomm._trees.pytrees import flatten
from tests.support.on_ranks import each_rank_of


class Model:
    """A plain model, whose class says what is in it."""

    def __init__(self, weight: Any, name: str = "m") -> None:
        self.weight, self.name = weight, name

    def __call__(self, x: Any) -> Any:
        return x * self.weight

    def __arraycomm_tree__(self) -> Any:
        return {"weight": self.weight}, lambda leaves: Model(leaves["weight"], self.name)


class Silent:
    """A model that says nothing."""

    def __init__(self) -> None:
        self.weight = np.ones(2)

    def __call__(self, x: Any) -> Any:
        return x * self.weight


def _tree_functions(comm: Communicator) -> list[Any]:
    root = comm.size - 1
    return [
        functools.partial(ac.synchronize, root=root, comm=comm),
        functools.partial(ac.allreduce_tree, op="max", comm=comm),
        functools.partial(ac.allreduce_gradients, op="max", comm=comm),
        lambda tree: comm.plan(tree, "max")(tree),
    ]


@each_rank_of("few")
def test_objects_that_say_what_is_in_them_are_opened(comm: Communicator) -> None:
    array = np.full(3, float(comm.rank))
    tree = {"m": [Model(array, f"of {comm.rank}")], "f": functools.partial(pow, array, mod=None)}
    for call in _tree_functions(comm):
        got = call(tree)
        [model] = got["m"]
        assert type(model) is Model
        assert model.name == f"of {comm.rank}"
        assert model.weight.tolist() == [comm.size - 1] * 3
        assert got["f"].func is pow
        # The leaf was one object in the tree.
        assert got["f"].args[0] is model.weight
    assert array.tolist() == [comm.rank] * 3


def test_paths_go_through_the_tree_that_an_object_says() -> None:
    flat = flatten([Model({"a": 1.0}), functools.partial(int, 2.0, base=None)])
    assert flat.paths == [
        "tree[0]['weight']['a']",
        "tree[1]['args'][0]",
        "tree[1]['keywords']['base']",
    ]
    assert "tree[0]: Model" in flat.structure


@functools.lru_cache
def _cached() -> None: ...


STAYING = {
    "function": flatten,
    "lambda": lambda x: x,
    "builtin": len,
    "builtin of a module": math.sqrt,
    "operator": operator.add,
    "ufunc": np.tanh,
    "NumPy's function": np.dot,
    "class": Model,
    "method of a class": dict.fromkeys,
    "method without an object": str.upper,
    "cached function": _cached,
    "generator": np.random.default_rng(),
    "random state": np.random.RandomState(0),
    "its method": np.random.rand,
    "twister": random.Random(),
    "its sampling": random.gauss,
}


@each_rank_of("few")
def test_functions_classes_and_generators_stay_in_every_tree_function(comm: Communicator) -> None:
    for call in _tree_functions(comm):
        got = call(STAYING | {"x": np.full(2, comm.rank)})
        assert all(got[name] is kept for name, kept in STAYING.items())
        assert got["x"].tolist() == [comm.size - 1] * 2


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_functions_of_frameworks_stay(framework: str) -> None:
    module = pytest.importorskip(framework)
    functions = {
        "jax": lambda: [module.nn.relu, module.nn.gelu, module.numpy.tanh, module.numpy.add],
        "torch": lambda: [module.relu, module.nn.functional.relu, module.Generator()],
    }
    assert all(map(stays, functions[framework]()))


@pytest.mark.parametrize(
    ("leaf", "named"),
    [
        (Silent(), r"tree\['m'\]\[0\] .*Silent, .*__arraycomm_tree__"),
        (Silent().__call__, r"tree\['m'\]\[0\] .*got method"),
        (np.ones(2).sum, r"tree\['m'\]\[0\] .*got builtin_function_or_method"),
        (functools.partial(Silent(), 1), r"tree\['m'\]\[0\]\['func'\] .*Silent"),
    ],
    ids=["callable", "method", "array's method", "partial"],
)
@each_rank_of(3)
def test_what_is_not_known_is_refused_with_its_path(comm: Communicator, leaf, named: str) -> None:
    for call in _tree_functions(comm):
        # The last rank alone passes it; the others hear of it.
        last = comm.rank == comm.size - 1
        with pytest.raises(TypeError if last else ac.PeerError, match=named):
            call({"m": [leaf if last else 1.0]})
    assert comm.allreduce(1) == comm.size


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda self: [1.0], r"must return a pair \(leaves, rebuild\)"),
        (lambda self: ([1.0], None), r"must return a pair \(leaves, rebuild\)"),
        (lambda self: (self, len), "returns the object itself"),
    ],
)
def test_a_wrong_answer_of_an_object_is_refused(returned: Any, said: str) -> None:
    wrong = type("Wrong", (), {"__arraycomm_tree__": returned})()
    with pytest.raises(TypeError, match=rf"^tree\[0\]: Wrong.__arraycomm_tree__ {said}"):
        flatten([wrong])


@each_rank_of(3)
def test_ranks_whose_objects_differ_are_told_which(comm: Communicator) -> None:
    leaf = len if comm.rank == 1 else Model(1.0)
    with pytest.raises(ac.MismatchError, match=r"tree\[0\]"):
        ac.synchronize([leaf], comm=comm)


def test_variables_of_flax_stay_variables(on_ranks, few: int) -> None:
    nnx = pytest.importorskip("flax.nnx")
    jax = pytest.importorskip("jax")
    arrays = [jax.numpy.asarray(np.full(2, rank, np.float32)) for rank in range(4)]

    def check(comm: Communicator) -> None:
        state = nnx.State({"kernel": nnx.Param(arrays[comm.rank])})
        assert flatten(state).paths == ["tree['kernel'].value"]
        for call in _tree_functions(comm):
            got = call(state)
            assert type(got) is nnx.State
            assert type(got["kernel"]) is nnx.Param
            assert np.asarray(got["kernel"][...]).tolist() == [comm.size - 1] * 2

    on_ranks(few, check)
