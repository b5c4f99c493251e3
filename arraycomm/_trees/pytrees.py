"""Any pytree as a list of leaves with their paths, and back.

Optree decides what a container is; None is a leaf. A type that optree does not know may still say
itself what is in it, or be a torch module, a type registered with JAX (equinox, flax) if JAX is
loaded, or a dataclass. Functions, classes and random generators stay as they are: containers
without leaves. Optree sorts the keys of a dict if that is possible; other keys are sorted here.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import optree

from arraycomm._trees.keys import are_plain, describe_keys
from arraycomm._trees.opened import Opened, opened, says_contents, stays

# Leaves of these types have nothing inside; skipping further checks saves time.
_PLAIN: Final = frozenset((type(None), bool, int, float, complex, str, bytes, np.ndarray))


class Flat(NamedTuple):
    """A tree's leaves, a path for each, and how to make a tree of new leaves.

    `structure` names each container by its path and type, a line for each, in an order that does
    not depend on how the tree was flattened. `extras` are beside the leaves: a reduction leaves
    them alone. `stayed` are the paths and objects of what is no value: functions, classes and
    random generators.
    """

    leaves: list[Any]
    paths: Sequence[str]
    structure: str
    rebuild: Callable[[list[Any]], Any]
    extras: Sequence[ExtraState] = ()
    stayed: Sequence[tuple[str, Any]] = ()


class ExtraState(NamedTuple):
    """The path of what a torch module's `get_extra_state` returns."""

    path: str
    module: Any


class _Node(NamedTuple):
    """A container that optree does not know, or whose keys it does not sort."""

    children: list[Any]
    suffixes: list[str]
    rebuild: Callable[[list[Any]], Any]
    extras: Sequence[ExtraState] = ()
    stayed: Sequence[tuple[str, Any]] = ()


class _Outline(NamedTuple):
    """What optree's structure says of the ranks' trees."""

    paths: tuple[str, ...]
    structure: str


class _OtherKeysError(Exception):
    """A mapping has keys that optree does not sort."""


def flatten(tree: Any, name: str = "tree") -> Flat:
    """Return the leaves of `tree`, with paths that begin with `name`."""
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    try:
        outline = _outline(spec, name)
    except _OtherKeysError:
        leaves, spec = optree.tree_flatten(tree, is_leaf=_has_other_keys, none_is_leaf=True)
        outline = _outline(spec, name)
    nodes = [
        None if type(leaf) in _PLAIN else _open(leaf, path)
        for leaf, path in zip(leaves, outline.paths, strict=True)
    ]
    if not any(nodes):
        return Flat(
            leaves, outline.paths, outline.structure, lambda new: optree.tree_unflatten(spec, new)
        )
    return _flatten_nodes(leaves, outline, nodes, spec)


def is_torch(obj: Any, *names: str) -> bool:
    """Return whether `obj` is an instance of a class of torch, given by its dotted name."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    kind: Any = torch
    for name in names:
        # If another thread is importing torch, a name may be missing, but no object exists yet.
        kind = getattr(kind, name, None)
    return kind is not None and isinstance(obj, kind)


@lru_cache(maxsize=256)
def _outline(spec: optree.PyTreeSpec, name: str) -> _Outline:
    paths: list[str] = []
    lines: list[str] = []
    _walk(spec, name, paths, lines)
    return _Outline(tuple(paths), "\n".join(sorted(lines)))


def _walk(spec: optree.PyTreeSpec, path: str, paths: list[str], lines: list[str]) -> None:
    """Note the paths of leaves, and the containers; raise for keys that optree does not sort."""
    if spec.is_leaf():
        paths.append(path)
        return
    lines.append(_container(path, spec.type))
    if spec.type in (dict, defaultdict) and not are_plain(spec.entries()):
        # So that nothing is kept, which would be taken for equal keys that optree sorts.
        raise _OtherKeysError
    for child_path, child in zip(_child_paths(spec, path), spec.children(), strict=True):
        _walk(child, child_path, paths, lines)


def _container(path: str, kind: Any) -> str:
    return f"{path}: {getattr(kind, '__qualname__', kind)}"


def _child_paths(spec: optree.PyTreeSpec, path: str) -> list[str]:
    root: Any = spec.one_level()
    entries = [accessor[0] for accessor in root.accessors()]
    if all(isinstance(entry, optree.MappingEntry) for entry in entries):
        keys = describe_keys((entry.entry for entry in entries), path)
        return [f"{path}[{key.text}]" for key in keys]
    return [entry.codify(path) for entry in entries]


def _has_other_keys(tree: Any) -> bool:
    return type(tree) in (dict, defaultdict) and not are_plain(tree)


def _flatten_nodes(
    leaves: list[Any], outline: _Outline, nodes: list[_Node | None], spec: optree.PyTreeSpec
) -> Flat:
    """Flatten those leaves of optree that are containers."""
    all_leaves: list[Any] = []
    all_paths: list[str] = []
    extras: list[ExtraState] = []
    stayed: list[tuple[str, Any]] = []
    lines = outline.structure.splitlines()
    parts: list[tuple[_Node | None, list[Flat]]] = []
    for leaf, path, node in zip(leaves, outline.paths, nodes, strict=True):
        if node is None:
            inner = [Flat([leaf], [path], "", lambda new: new[0])]
        else:
            lines.append(_container(path, type(leaf)))
            extras.extend(node.extras)
            stayed.extend(node.stayed)
            inner = [
                flatten(child, path + suffix)
                for child, suffix in zip(node.children, node.suffixes, strict=True)
            ]
        for flat in inner:
            all_leaves.extend(flat.leaves)
            all_paths.extend(flat.paths)
            lines.extend(flat.structure.splitlines())
            extras.extend(flat.extras)
            stayed.extend(flat.stayed)
        parts.append((node, inner))

    def rebuild(new: list[Any]) -> Any:
        rest = iter(new)
        built = []
        for node, inner in parts:
            children = [flat.rebuild([next(rest) for _ in flat.leaves]) for flat in inner]
            built.append(children[0] if node is None else node.rebuild(children))
        return optree.tree_unflatten(spec, built)

    return Flat(all_leaves, all_paths, "\n".join(sorted(lines)), rebuild, extras, stayed)


def _open(leaf: Any, path: str) -> _Node | None:
    """Return the contents of a leaf of optree, or None if it is no container."""
    if type(leaf) in (dict, defaultdict):
        return _open_mapping(leaf, path)
    tree_util = getattr(sys.modules.get("jax"), "tree_util", None)
    is_array = hasattr(leaf, "__dlpack__") and not is_variable(leaf)
    if (is_array or isinstance(leaf, (*_PLAIN, np.generic))) and not says_contents(leaf):
        return None
    found = opened(leaf, path) or _opened_state(leaf)
    if found is not None:
        return _Node([found.tree], [""], lambda new: found.rebuild(new[0]))
    if stays(leaf):
        return _Node([], [], lambda _: leaf, stayed=[(path, leaf)])
    if is_torch(leaf, "nn", "Module"):
        return _open_module(leaf, path)
    if is_torch(leaf, "optim", "Optimizer"):
        return None
    node = None if tree_util is None else _open_registered(tree_util, leaf, path)
    if node is not None:
        return node
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return _open_dataclass(leaf)
    return None


def _open_module(module: Any, path: str) -> _Node:
    """Open a torch module: its children are parameters and buffers, which are changed in place."""
    import torch

    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        if torch.nn.parameter.is_lazy(tensor):
            raise TypeError(
                f"{path}.{name} has no shape yet; call the lazy module once on every rank before"
            )

    def rebuild(new: list[Any]) -> Any:
        with torch.no_grad():
            for (_, tensor), value in zip(named, new, strict=True):
                if value is not None:
                    tensor.copy_(value)
        return module

    return _Node(
        [tensor.detach() for _, tensor in named],
        [f".{name}" for name, _ in named],
        rebuild,
        [
            ExtraState(f"{path}{'.' * bool(name)}{name}._extra_state", each)
            for name, each in module.named_modules()
            if type(each).get_extra_state is not torch.nn.Module.get_extra_state
        ],
    )


def _open_mapping(mapping: Any, path: str) -> _Node:
    """Open a dict whose keys optree does not sort, in the order of their descriptions."""
    ordered = sorted(
        zip(describe_keys(mapping, path), mapping, strict=True), key=lambda pair: pair[0]
    )

    def rebuild(new: list[Any]) -> Any:
        made = copy.copy(mapping)
        for (_, key), value in zip(ordered, new, strict=True):
            made[key] = value
        return made

    return _Node(
        [mapping[key] for _, key in ordered], [f"[{key.text}]" for key, _ in ordered], rebuild
    )


def _open_registered(tree_util: Any, leaf: Any, path: str) -> _Node | None:
    """Open a type that is registered with JAX, one level deep."""
    entries, treedef = tree_util.tree_flatten_with_path(leaf, is_leaf=lambda x: x is not leaf)
    if len(entries) == 1 and entries[0][1] is leaf:
        return None
    keys = [where[0].key for where, _ in entries if isinstance(where[0], tree_util.DictKey)]
    described = iter(describe_keys(keys, path))
    return _Node(
        [child for _, child in entries],
        [
            f"[{next(described).text}]"
            if isinstance(where[0], tree_util.DictKey)
            else tree_util.keystr(where)
            for where, _ in entries
        ],
        lambda new: tree_util.tree_unflatten(treedef, new),
    )


def _open_dataclass(instance: Any) -> _Node:
    names = [field.name for field in dataclasses.fields(instance)]

    def rebuild(new: list[Any]) -> Any:
        made = copy.copy(instance)
        for name, value in zip(names, new, strict=True):
            # Works for frozen dataclasses too, and for fields that __init__ does not take.
            object.__setattr__(made, name, value)
        return made

    return _Node(
        [getattr(instance, name) for name in names], [f".{name}" for name in names], rebuild
    )


def is_variable(leaf: Any) -> bool:
    """Return whether a leaf is a variable, which looks like the array that it holds."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(leaf, nnx.Variable)


def _opened_state(leaf: Any) -> Opened | None:
    """Return what a module or an optimizer of Flax holds, to be changed in place; None for others.

    Its random generators are left out.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(leaf, (nnx.Module, nnx.Optimizer)):
        return None
    state = nnx.state(leaf, nnx.Not(nnx.RngState))

    def update(new: dict[Any, Any]) -> Any:
        nnx.replace_by_pure_dict(state, new)
        nnx.update(leaf, state)
        return leaf

    return Opened(nnx.to_pure_dict(state), update)
