"""Any pytree as a list of leaves with their paths, and back.

Optree decides what a container is; None is a leaf. What optree does not know, or not enough of,
`arraycomm._trees.nodes` opens. Functions, classes and random generators stay as they are:
containers without leaves.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, reduce
from operator import getitem
from typing import Any, Final, NamedTuple

import numpy as np
import optree

from arraycomm._protocol.header import Settings
from arraycomm._protocol.mismatch import STATIC, STRUCTURE
from arraycomm._trees.fields import is_cache
from arraycomm._trees.keys import are_plain, describe_keys
from arraycomm._trees.nodes import ExtraState, Node, is_custom, open_custom, open_mapping, open_node
from arraycomm._trees.opened import says_contents
from arraycomm._trees.static import Static, lines_of, texts_of

# Leaves of these types have nothing inside; skipping further checks saves time.
_PLAIN: Final = frozenset((type(None), bool, int, float, complex, str, bytes, np.ndarray))
# Containers of Python that have more than leaves.
_WITH_SETTINGS: Final = (defaultdict, deque)


class Flat(NamedTuple):
    """A tree's leaves, a path for each, and how to make a tree of new leaves.

    `structure` names each container by its path and type, a line for each, in an order that does
    not depend on how the tree was flattened. `static` is what containers hold besides leaves, for
    which `rebuild` takes other values. `extras` are beside the leaves: a reduction leaves them
    alone. `stayed` are the paths and objects of what is no value: functions, classes and random
    generators. `sparse` are the paths and types of containers that have indices among their leaves.
    """

    leaves: list[Any]
    paths: Sequence[str]
    structure: str
    rebuild: Callable[..., Any]
    static: Sequence[Static] = ()
    extras: Sequence[ExtraState] = ()
    stayed: Sequence[tuple[str, Any]] = ()
    sparse: Sequence[tuple[str, str]] = ()

    def settings(self, *, alone: bool) -> Settings:
        """Return the containers as ranks compare them, or as one that is `alone` does."""
        if not self.static:
            return ((STRUCTURE, self.structure),)
        kept = lines_of((each for each in self.static if each.stays), alone=alone)
        sent = lines_of((each for each in self.static if not each.stays), alone=alone)
        return (STRUCTURE, "\n".join([self.structure, *kept])), (STATIC, "\n".join(sent))


class Place(NamedTuple):
    """The path of a container, and the keys that lead to it."""

    path: str
    keys: tuple[Any, ...] = ()


class Outline(NamedTuple):
    """What optree's structure says of the ranks' trees."""

    paths: tuple[str, ...]
    structure: str
    # Containers of types whose instances may have attributes.
    holders: tuple[Place, ...]


class NotPlainError(Exception):
    """A tree has containers of which optree does not know enough."""


def flatten(tree: Any, name: str = "tree", *, rebuilds: bool = True) -> Flat:
    """Return the leaves of `tree`, with paths that begin with `name`.

    Unless it `rebuilds`, a tree may hold objects that cannot be made of new leaves.
    """
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    try:
        outline = outline_of(spec, name)
    except NotPlainError:
        leaves, spec = optree.tree_flatten(tree, is_leaf=_is_opened_here, none_is_leaf=True)
        outline = outline_of(spec, name)
        found = [_open_here(*pair) for pair in zip(leaves, outline.paths, strict=True)]
    else:
        found = [None] * len(leaves)
    nodes = [
        node or (None if type(leaf) in _PLAIN else open_node(leaf, path, rebuilds=rebuilds))
        for node, leaf, path in zip(found, leaves, outline.paths, strict=True)
    ]
    holders = outline.holders
    whole = Flat(
        leaves,
        outline.paths,
        outline.structure,
        lambda new, static=None: unflatten(spec, holders, tree, new),
        stayed=[
            (f"{path}.{attribute}", value)
            for path, keys in holders
            for attribute, value in _attributes(reduce(getitem, keys, tree)).items()
            if not attribute.startswith("_")
        ],
    )
    return _flatten_nodes(whole, nodes, rebuilds=rebuilds) if any(nodes) else whole


def unflatten(
    spec: optree.PyTreeSpec, holders: Sequence[Place], tree: Any, new: Sequence[Any]
) -> Any:
    """Return a tree of new leaves, whose containers have the attributes of those of `tree`."""
    made: Any = optree.tree_unflatten(spec, new)
    for _, keys in holders:
        if held := _attributes(reduce(getitem, keys, tree)):
            into = vars(reduce(getitem, keys, made))
            # What its class makes of the new children is not that of the old ones.
            into.update(held | into)
    return made


def _attributes(container: Any) -> dict[str, Any]:
    """Return the attributes of a container of optree, but for what it has cached."""
    kind, held = type(container), vars(container)
    return {name: each for name, each in held.items() if not is_cache(kind, name)}


# Only of structures of plain containers: others may have metadata that changes, or has no `==`.
@lru_cache(maxsize=256)
def outline_of(spec: optree.PyTreeSpec, name: str) -> Outline:
    """Return the outline of a structure, or raise if optree does not know enough of it."""
    paths: list[str] = []
    lines: list[str] = []
    holders: list[Place] = []
    _walk(spec, Place(name), paths, lines, holders)
    return Outline(tuple(paths), "\n".join(sorted(lines)), tuple(holders))


def _walk(
    spec: optree.PyTreeSpec, place: Place, paths: list[str], lines: list[str], holders: list[Place]
) -> None:
    """Note the paths of leaves, and the containers; raise for those that are opened here."""
    path, keys = place
    if spec.is_leaf():
        paths.append(path)
        return
    kind: Any = spec.type
    root: Any = spec.one_level()
    like = root.unflatten(range(root.num_children)) if kind in _WITH_SETTINGS else None
    lines.append(_container(path, kind, like))
    entries = spec.entries()
    other_keys = kind in (dict, defaultdict) and not are_plain(entries)
    if other_keys or is_custom(kind):
        raise NotPlainError
    if kind.__dictoffset__:
        holders.append(place)
    places = map(Place, _child_paths(spec, path), [(*keys, key) for key in entries])
    for inside, child in zip(places, spec.children(), strict=True):
        _walk(child, inside, paths, lines, holders)


def _container(path: str, kind: Any, like: Any) -> str:
    """Return a line of a structure; `like` is a container of this kind."""
    line = f"{path}: {getattr(kind, '__qualname__', kind)}"
    if kind is defaultdict:
        factory = Static(None, [("factory", like.default_factory)], stays=True)
        return "".join([line, *(f" of {text}" for _, text in texts_of([factory], alone=True))])
    return line if kind is not deque or like.maxlen is None else f"{line} of at most {like.maxlen}"


def _child_paths(spec: optree.PyTreeSpec, path: str) -> list[str]:
    root: Any = spec.one_level()
    entries = [accessor[0] for accessor in root.accessors()]
    if all(isinstance(entry, optree.MappingEntry) for entry in entries):
        keys = describe_keys((entry.entry for entry in entries), path)
        return [f"{path}[{key.text}]" for key in keys]
    return [entry.codify(path) for entry in entries]


def _is_opened_here(tree: Any) -> bool:
    kind = type(tree)
    return (kind in (dict, defaultdict) and not are_plain(tree)) or is_custom(kind)


def _open_here(tree: Any, path: str) -> Node | None:
    if not _is_opened_here(tree) or says_contents(tree):
        return None
    return (
        open_mapping(tree, path) if type(tree) in (dict, defaultdict) else open_custom(tree, path)
    )


def _flatten_nodes(outer: Flat, nodes: list[Node | None], *, rebuilds: bool) -> Flat:
    """Flatten those leaves of optree that are containers."""
    whole = Flat([], [], "", lambda: None, [], [], [*outer.stayed], [])
    lines = outer.structure.splitlines()
    parts: list[tuple[Node | None, list[Flat]]] = []
    for leaf, path, node in zip(outer.leaves, outer.paths, nodes, strict=True):
        if node is None:
            inner = [Flat([leaf], [path], "", lambda new, static: new[0])]
        else:
            lines.append(_container(path, type(leaf), leaf))
            _add(whole, node)
            inner = [
                flatten(child, path + suffix, rebuilds=rebuilds)
                for child, suffix in zip(node.children, node.suffixes, strict=True)
            ]
        for flat in inner:
            whole.leaves.extend(flat.leaves)
            whole.paths.extend(flat.paths)  # type: ignore[attr-defined]
            lines.extend(flat.structure.splitlines())
            _add(whole, flat)
        parts.append((node, inner))

    def rebuild(new: list[Any], static: Sequence[Any] | None = None) -> Any:
        rest = iter(new)
        given = iter([each.value for each in whole.static] if static is None else static)
        return outer.rebuild([_built(node, inner, rest, given) for node, inner in parts])

    return whole._replace(structure="\n".join(sorted(lines)), rebuild=rebuild)


def _add(whole: Any, found: Node | Flat) -> None:
    """Add what a container has besides its leaves, or those inside it have."""
    for name in ("static", "extras", "stayed", "sparse"):
        getattr(whole, name).extend(getattr(found, name))


def _built(
    node: Node | None, inner: list[Flat], leaves: Iterator[Any], static: Iterator[Any]
) -> Any:
    """Make a container of new leaves, and of what it holds besides."""
    own = [] if node is None else [next(static) for _ in node.static]
    children = [
        flat.rebuild([next(leaves) for _ in flat.leaves], [next(static) for _ in flat.static])
        for flat in inner
    ]
    return children[0] if node is None else node.rebuild(children, *own)
