"""Containers of which optree knows nothing, or not enough: their children, and what they hold.

A type may say itself what is in it, or be registered with optree or JAX (equinox, flax), a torch
module, a module of Flax, or a dataclass.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import optree

from arraycomm._arrays.dlpack import offered
from arraycomm._arrays.results import overlaps_itself
from arraycomm._errors import forgiving
from arraycomm._trees.fields import Fields, fields_of, is_dataclass, static_fields
from arraycomm._trees.keys import describe_keys
from arraycomm._trees.opened import opened, says_contents, stays
from arraycomm._trees.static import Static

_NUMBERS_AND_TEXTS: Final = (bool, int, float, complex, str, bytes, np.ndarray, np.generic)


class ExtraState(NamedTuple):
    """The path of what a torch module's `get_extra_state` returns."""

    path: str
    module: Any


class Node(NamedTuple):
    """The children of a container, and how it is made of others; see `Flat` for the rest.

    `rebuild` is called with new children, and with the value of what is `static`, if that is any.
    """

    children: Sequence[Any]
    suffixes: Sequence[str]
    rebuild: Callable[..., Any]
    static: Sequence[Static] = ()
    extras: Sequence[ExtraState] = ()
    stayed: Sequence[tuple[str, Any]] = ()
    sparse: Sequence[tuple[str, str]] = ()


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


def is_custom(kind: Any) -> bool:
    """Return whether a class is registered with optree by the program or another library."""
    entry: Any = optree.register_pytree_node.get(kind)
    return entry is not None and entry.kind == optree.PyTreeKind.CUSTOM


def open_node(leaf: Any, path: str, *, rebuilds: bool) -> Node | None:
    """Return the contents of a leaf of optree, or None if it is no container; see `flatten`."""
    tree_util = getattr(sys.modules.get("jax"), "tree_util", None)
    is_array = offered(leaf) and not _is_variable(leaf)
    if (is_array or isinstance(leaf, _NUMBERS_AND_TEXTS)) and not says_contents(leaf):
        return None
    found = opened(leaf, path)
    if found is not None:
        return Node([found.tree], [""], lambda new: found.rebuild(new[0]))
    if (state := _open_state(leaf, path)) is not None:
        return state
    if stays(leaf):
        return Node([], [], lambda _: leaf, stayed=[(path, leaf)])
    if is_torch(leaf, "nn", "Module"):
        return _open_module(leaf, path, rebuilds=rebuilds)
    if is_torch(leaf, "optim", "Optimizer"):
        return None
    node = None if tree_util is None else _open_registered(tree_util, leaf, path)
    if node is None and is_dataclass(leaf):
        return _open_dataclass(fields_of(leaf, path, rebuilds=rebuilds), path, rebuilds=rebuilds)
    return node


def _open_module(module: Any, path: str, *, rebuilds: bool) -> Node:
    """Open a torch module: its children are parameters and buffers, which are changed in place."""
    import torch

    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        if torch.nn.parameter.is_lazy(tensor):
            raise TypeError(
                f"{path}.{name} has no shape yet; call the lazy module once on every rank before"
            )
        if (
            rebuilds
            and tensor.layout is torch.strided
            and overlaps_itself(tensor.shape, tensor.stride())
        ):
            raise TypeError(
                f"{path}.{name} has elements that share memory, as if it was expanded, and cannot "
                "be written; register a copy of it"
            )

    def rebuild(new: list[Any]) -> Any:
        with torch.no_grad():
            for (_, tensor), value in zip(named, new, strict=True):
                if value is not None:
                    tensor.copy_(value)
        return module

    inner = [(f"{path}{'.' * bool(name)}{name}", each) for name, each in module.named_modules()]
    return Node(
        [tensor.detach() for _, tensor in named],
        [f".{name}" for name, _ in named],
        rebuild,
        extras=[
            ExtraState(f"{where}._extra_state", each)
            for where, each in inner
            if type(each).get_extra_state is not torch.nn.Module.get_extra_state
        ],
        # What it computes with them is each rank's own matter, unless the program asks for that.
        stayed=[] if rebuilds else [(where, _described_module(each)) for where, each in inner],
    )


def _described_module(module: Any) -> str:
    text = ""
    with forgiving:
        text = module.extra_repr()
    return f"{type(module).__qualname__}({'' if ' at 0x' in text else text})"


def open_mapping(mapping: Any, path: str) -> Node:
    """Open a dict whose keys optree does not sort, in the order of their descriptions."""
    ordered = sorted(
        zip(describe_keys(mapping, path), mapping, strict=True), key=lambda pair: pair[0]
    )

    def rebuild(new: list[Any]) -> Any:
        made = copy.copy(mapping)
        for (_, key), value in zip(ordered, new, strict=True):
            made[key] = value
        return made

    return Node(
        [mapping[key] for _, key in ordered], [f"[{key.text}]" for key, _ in ordered], rebuild
    )


def open_custom(leaf: Any, path: str) -> Node:
    """Open a type that is registered with optree, one level deep."""
    children, metadata, _, make = optree.tree_flatten_one_level(leaf, none_is_leaf=True)
    spec: Any = optree.tree_structure(leaf, is_leaf=lambda x: x is not leaf, none_is_leaf=True)
    suffixes = [accessor[0].codify("") for accessor in spec.accessors()]
    return Node(
        children,
        suffixes,
        lambda new, data: make(data, new),
        _static(leaf, path, suffixes, metadata),
    )


def _open_registered(tree_util: Any, leaf: Any, path: str) -> Node | None:
    """Open a type that is registered with JAX, one level deep."""
    entries, treedef = tree_util.tree_flatten_with_path(leaf, is_leaf=lambda x: x is not leaf)
    if len(entries) == 1 and entries[0][1] is leaf:
        return None
    keys = [where[0].key for where, _ in entries if isinstance(where[0], tree_util.DictKey)]
    described = iter(describe_keys(keys, path))
    suffixes = [
        f"[{next(described).text}]"
        if isinstance(where[0], tree_util.DictKey)
        else tree_util.keystr(where)
        for where, _ in entries
    ]
    kind, data = treedef.node_data()

    def rebuild(new: list[Any], data: Any) -> Any:
        registry, inner = tree_util.default_registry, treedef.children()
        made = treedef.from_node_data_and_children(registry, (kind, data), inner)
        return tree_util.tree_unflatten(made, new)

    return Node(
        [child for _, child in entries],
        suffixes,
        rebuild,
        _static(leaf, path, suffixes, data),
        sparse=[(path, kind.__qualname__)] if is_sparse(leaf) else [],
    )


def _static(leaf: Any, path: str, suffixes: Sequence[str], data: Any) -> list[Static]:
    """Return the auxiliary data of a registered class, and by their names its static fields."""
    fields = static_fields(leaf) if is_dataclass(leaf) else {}
    parts = [
        (f"{path}.{name}", each) for name, each in fields.items() if f".{name}" not in suffixes
    ]
    return [Static(data, [*parts, (f"{path} beside its leaves", data)])]


def is_sparse(leaf: Any) -> bool:
    """Return whether a container of JAX has indices among its leaves."""
    module = sys.modules.get("jax.experimental.sparse")
    return module is not None and isinstance(leaf, module.JAXSparse)


def _open_dataclass(fields: Fields, path: str, *, rebuilds: bool) -> Node:
    parts = [(f"{path}.{name}", value) for name, value in fields.static.items()]
    if not rebuilds:
        # If it is made anew, these are made of its fields.
        parts += fields.public()
    suffixes = [f".{name}" for name in fields.leaves]
    held = [Static(fields.static, parts)]
    return Node(list(fields.leaves.values()), suffixes, fields.rebuild, held)


def _is_variable(leaf: Any) -> bool:
    """Return whether a leaf is a variable, which looks like the array that it holds."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(leaf, nnx.Variable)


def _open_state(leaf: Any, path: str) -> Node | None:
    """Open a module or an optimizer of Flax, to be changed in place; return None for others.

    Its random generators are left out.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(leaf, (nnx.Module, nnx.Optimizer)):
        return None
    state = nnx.state(leaf, nnx.Not(nnx.RngState))

    def update(new: list[Any], _: Any) -> Any:
        nnx.replace_by_pure_dict(state, new[0])
        nnx.update(leaf, state)
        return leaf

    static = Static(None, list(_attributes(nnx, leaf, path)), stays=True)
    return Node([nnx.to_pure_dict(state)], [""], update, [static])


def _attributes(nnx: Any, module: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module of Flax, and of those inside it, that are no state."""
    for where, node in nnx.iter_graph(module):
        if isinstance(node, (nnx.Module, nnx.Optimizer)):
            inside = "".join(f".{part}" if isinstance(part, str) else f"[{part}]" for part in where)
            for name, value in sorted(vars(node).items()):
                if not name.startswith("_") and not _holds_state(nnx, value):
                    yield f"{path}{inside}.{name}", value


def _holds_state(nnx: Any, value: Any) -> bool:
    """Return whether there are variables, arrays or modules in a value."""
    kinds = (nnx.Variable, nnx.Module)
    leaves = sys.modules["jax"].tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, kinds))
    return any(
        isinstance(leaf, kinds) or (hasattr(leaf, "dtype") and hasattr(leaf, "shape"))
        for leaf in leaves
        if not isinstance(leaf, type)
    )
