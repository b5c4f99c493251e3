from __future__ import annotations

import dataclasses
import enum
import os
import random
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque
from datetime import date
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._trees.pytrees import flatten
from arraycomm.testing import run


class Point(NamedTuple):
    x: object
    y: object


@dataclasses.dataclass(frozen=True)
class Config:
    weight: object
    inner: dict
    derived: object = dataclasses.field(init=False, default=None)


def test_paths_name_each_leaf() -> None:
    tree = {"layers": [Point(1, None), (2.0,)], 3: Config(np.ones(1), {"k": "v"})}
    assert list(flatten(tree, "params").paths) == [
        "params[3].weight",
        "params[3].inner['k']",
        "params[3].derived",
        "params['layers'][0].x",
        "params['layers'][0].y",
        "params['layers'][1][0]",
    ]


def test_rebuilt_trees_have_the_same_containers_and_order() -> None:
    tree = {
        "b": OrderedDict(z=1, a=2),
        "a": [defaultdict(list, {"k": 3}), deque([4, None], maxlen=5), (), {}, []],
        "p": Point(5, (6,)),
        "c": [None, Config(1, {"a": 2})],
    }
    flat = flatten(tree)
    again = flat.rebuild(list(flat.leaves))
    assert repr(again) == repr(tree)
    assert list(again) == list(tree)
    assert again is not tree


class Named(Point):
    """Has a `__dict__`, as no class of `NamedTuple` itself."""

    def __new__(cls, *args):
        made = super().__new__(cls, *args)
        made.summed = np.sum(made.x) if type(made.x) is np.ndarray else 0
        return made

    @cached_property
    def total(self):
        return np.sum(self.x)


def with_attribute(container, value, name="_metadata"):
    if value is not None:
        setattr(container, name, value)
    return container


@pytest.mark.parametrize("held", [[None, 1], [{"version": 2}, "own"]], ids=["one", "both"])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: OrderedDict(b=x, a=x),
        lambda x: Named(x, 1.0),
        lambda x: Named(OrderedDict(a=x), 1.0),
    ],
    ids=["OrderedDict", "named tuple", "nested"],
)
def test_attributes_of_containers_stay(make, held) -> None:
    def check(comm) -> None:
        tree = with_attribute(make(np.ones(2)), held[comm.rank])
        for _ in range(3):
            for call in (ac.synchronize, ac.allreduce_tree, ac.allreduce_gradients):
                made = call(tree, comm=comm)
                assert type(made) is type(tree)
                assert vars(made) == vars(tree)
            assert vars(comm.plan(tree)(tree)) == vars(tree)
            assert vars(comm.plan(make(np.ones(2)))(tree)) == vars(tree)
        ac.raise_on_difference(tree, comm=comm)
        with pytest.raises(ac.MismatchError, match="unit"):
            ac.raise_on_difference(with_attribute(tree, comm.rank, "unit"), comm=comm)

    run(2, check)


def test_attributes_that_follow_from_children_are_those_of_the_new_ones() -> None:
    def check(comm) -> None:
        tree = Named(np.full(2, comm.rank), 1.0)
        assert tree.total == 2 * comm.rank
        for call in (partial(ac.allreduce_tree, op="sum"), partial(ac.synchronize, root=1)):
            made = call(tree, comm=comm)
            assert (made.summed, made.total) == (2, 2)

    run(2, check)


def test_trees_may_be_as_deep_as_python_calls() -> None:
    tree = 1.0
    for _ in range(700):
        tree = [tree]
    assert len(flatten(tree).paths) == 1


@pytest.mark.parametrize("kind", [np.ndarray, np.float64, Point, "torch.Tensor"])
def test_classes_stay_also_those_of_arrays(kind) -> None:
    tree = {"kind": pytest.importorskip("torch").Tensor if type(kind) is str else kind, "x": 1.0}
    for call in (ac.synchronize, ac.allreduce_tree, ac.raise_on_difference):
        assert run(2, lambda comm, call=call: call(tree, comm=comm)["kind"]) == [tree["kind"]] * 2


def test_equinox_modules_are_opened_by_jax() -> None:
    equinox = pytest.importorskip("equinox")
    import jax

    module = equinox.nn.MLP(2, 3, 4, depth=1, key=jax.random.key(0))
    flat = flatten({"net": module})
    assert "tree['net'].layers[0].weight" in flat.paths
    again = flat.rebuild([leaf * 2 if hasattr(leaf, "shape") else leaf for leaf in flat.leaves])
    assert type(again["net"]) is type(module)
    assert (again["net"].layers[0].weight == 2 * module.layers[0].weight).all()
    assert again["net"].activation is module.activation


def test_torch_modules_take_new_values_in_place() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    flat = flatten(module)
    assert list(flat.paths[:2]) == ["tree.0.weight", "tree.0.bias"]
    assert "tree.1.running_mean" in flat.paths
    again = flat.rebuild([torch.full_like(leaf, 2) for leaf in flat.leaves])
    assert again is module
    assert (module[0].weight == 2).all()
    assert (module[1].running_mean == 2).all()
    assert module[0].weight.requires_grad


# Keys ------------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Place:
    names: frozenset
    row: int = 0


# Keys that optree leaves in the order of their insertion, or names by what differs between processes.
KEYS = {
    "enums": [Color.BLUE, Color.RED],
    "sets": [frozenset("abc"), frozenset("abd"), frozenset()],
    "sets in dataclasses": [Place(frozenset("xyz")), Place(frozenset("xy")), Place(frozenset(), 1)],
    "mixed": ["a", 3, None, b"a", (1, Color.RED), 2.5, -1j, Color.RED, float("inf")],
    "classes": [int, Point, len, Place],
    "numbers": [10, True, np.int64(2), np.float32(2.5), Fraction(1, 3)],
    "paths": [Path("b"), Path("a"), date(2000, 1, 1)],
    "strings": ["it's", np.str_("b"), "a"],
}


def _paths() -> list[str]:
    trees = [flatten(dict.fromkeys(random.sample(keys, len(keys)), 1)) for keys in KEYS.values()]
    return [path for tree in trees for path in tree.paths]


def test_keys_have_the_same_paths_in_every_process() -> None:
    program = "from tests.trees.test_pytrees import _paths; print(*_paths(), sep='\\n')"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.splitlines() == _paths() == _paths()


class Reprs:
    """Compared by identity, whatever its representation."""

    def __repr__(self) -> str:
        return "Reprs()"


@dataclasses.dataclass(frozen=True, eq=False)
class NoValue:
    number: int = 1


@pytest.mark.parametrize(
    "make", [object, Reprs, NoValue, lambda: (1, object()), lambda: frozenset([Reprs()])]
)
@pytest.mark.parametrize("container", [dict, OrderedDict, lambda items: defaultdict(list, items)])
def test_keys_that_are_no_values_are_refused(make, container) -> None:
    with pytest.raises(TypeError, match=r"^tree\[0\]\['k'\] has a key of type .*; use strings"):
        flatten([{"k": container({make(): 1})}])


def test_keys_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^tree has two keys .*both are .*<lambda>"):
        flatten({lambda: 1: 1, lambda: 2: 2})


def test_the_keys_of_types_registered_with_jax_are_described() -> None:
    tree_util = pytest.importorskip("jax").tree_util

    class Box(dict):
        pass

    tree_util.register_pytree_with_keys(
        Box, lambda b: ([(tree_util.DictKey(k), v) for k, v in b.items()], tuple(b)), lambda k, v: Box(zip(k, v, strict=True))
    )  # fmt: skip
    assert list(flatten(Box({Color.RED: 1, "a": 2})).paths) == ["tree[Color.RED]", "tree['a']"]
    with pytest.raises(TypeError, match=r"^tree\[1\] has a key of type"):
        flatten([0, Box({object(): 1})])
