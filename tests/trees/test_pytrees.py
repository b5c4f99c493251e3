from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from typing import NamedTuple

import numpy as np
import pytest

from arraycomm._trees.pytrees import flatten


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
    }
    flat = flatten(tree)
    again = flat.rebuild(list(flat.leaves))
    assert repr(again) == repr(tree)
    assert list(again) == list(tree)
    assert again is not tree


def test_none_is_a_leaf() -> None:
    assert flatten(None).leaves == [None]
    assert flatten([None, {"a": None}]).leaves == [None, None]


def test_frozen_dataclasses_are_made_anew() -> None:
    config = Config(1, {"a": 2})
    flat = flatten(config)
    again = flat.rebuild([10, 20, 30])
    assert (again.weight, again.inner, again.derived) == (10, {"a": 20}, 30)
    assert config.weight == 1


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
