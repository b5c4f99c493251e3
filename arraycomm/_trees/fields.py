"""Dataclasses as containers of their fields, and objects of them that hold more.

An attribute that is no field may be derived from the fields: it would be an old one beside new
fields. So such an object is made anew by its class. If that does not make it as it is, it holds
something that is no leaf and that nobody sends.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, Final, NamedTuple

from arraycomm._arrays.buffer import type_name
from arraycomm._arrays.dlpack import describe as describe_error
from arraycomm._errors import raise_interrupt
from arraycomm._trees.opened import stays
from arraycomm._trees.static import Describer, Static, UnknownValueError, texts_of

# Their subclasses have items that are no attributes.
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, deque, str, bytes)


class Fields(NamedTuple):
    """The fields of an object that have values, and what it holds besides, each with its path.

    `static` are the values of those fields that are no leaves, and `leaves` those of the others.
    `kept` are attributes that stay as they are.
    """

    instance: Any
    leaves: dict[str, Any]
    static: dict[str, Any]
    further: list[tuple[str, Any]]
    kept: dict[str, Any]

    def public(self) -> list[tuple[str, Any]]:
        """Return what it holds besides, but for what is its class's own matter."""
        pairs = ((path.rpartition(".")[2], path, value) for path, value in self.further)
        return [(path, value) for name, path, value in pairs if not name.startswith("_")]

    def rebuild(self, new: Iterable[Any], static: dict[str, Any]) -> Any:
        """Return such an object with other values."""
        values = dict(zip(self.leaves, new, strict=True)) | static
        make = _made_anew if self.further else _copied
        return _set(make(self.instance, values), values | self.kept)


def is_dataclass(leaf: Any) -> bool:
    """Return whether an object, no class, is of a dataclass."""
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def fields_of(instance: Any, path: str, *, rebuilds: bool) -> Fields:
    """Return the fields of an object; raise if it `rebuilds`, and cannot be made of them alone."""
    held = [each.name for each in dataclasses.fields(instance) if hasattr(instance, each.name)]
    static = static_fields(instance)
    leaves = {name: getattr(instance, name) for name in held if name not in static}
    further = _further(instance, path)
    if not rebuilds:
        return Fields(instance, leaves, static, further, {})
    kept = {where.removeprefix(f"{path}."): each for where, each in further if _is_inert(each)}
    derived = [(where, each) for where, each in further if not _is_inert(each)]
    found = Fields(instance, leaves, static, derived, kept)
    if derived:
        _check_derived(found, path)
    return found


def static_fields(instance: Any) -> dict[str, Any]:
    """Return the fields that say they are no leaves, as JAX, equinox, flax and optree write it."""
    return {
        each.name: getattr(instance, each.name)
        for each in dataclasses.fields(instance)
        if hasattr(instance, each.name) and _is_static(each.metadata)
    }


def _is_static(metadata: Mapping[Any, Any]) -> bool:
    return metadata.get("static") is True or metadata.get("pytree_node") is False


def _further(instance: Any, path: str) -> list[tuple[str, Any]]:
    """Return what an object holds besides its fields and what it has cached."""
    kind = type(instance)
    fields = {each.name for each in dataclasses.fields(instance)}
    slots = {name for base in kind.__mro__ for name in _slots(base)}
    held = {name: getattr(instance, name) for name in slots if hasattr(instance, name)}
    held |= vars(instance) if hasattr(instance, "__dict__") else {}
    found = [
        (f"{path}.{name}", value)
        for name, value in sorted(held.items())
        if name not in fields
        if not name.startswith("__")
        if not is_cache(kind, name)
    ]
    if isinstance(instance, _CONTAINERS):
        items = instance.items() if isinstance(instance, dict) else instance
        found.append((f"{path}, its items", list(items)))
    return found


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    named = (slots,) if isinstance(slots, str) else tuple(slots)
    return [name for name in named if name not in ("__dict__", "__weakref__")]


def is_cache(kind: type, name: str) -> bool:
    """Return whether the class computes an attribute where the object does not hold it."""
    computed = getattr(kind, name, None)
    is_method = isinstance(computed, FunctionType)
    return hasattr(computed, "__get__") and not hasattr(computed, "__set__") and not is_method


def _is_inert(value: Any) -> bool:
    """Return whether an attribute does not follow from numbers, so that another one may have it."""
    if isinstance(value, str | bytes | None) or stays(value):
        return True
    try:
        Describer().shown(value)
    except UnknownValueError:
        # Such as a lock.
        return not hasattr(value, "shape")
    return False


def _copied(instance: Any, values: dict[str, Any]) -> Any:
    made = copy.copy(instance)
    for name in [name for name in getattr(made, "__dict__", ()) if is_cache(type(made), name)]:
        # From the old fields, unless it is one.
        if name not in values:
            del made.__dict__[name]
    return made


def _made_anew(instance: Any, values: dict[str, Any]) -> Any:
    taken = [each.name for each in dataclasses.fields(instance) if each.init]
    return type(instance)(**{name: values[name] for name in taken if name in values})


def _set(made: Any, values: dict[str, Any]) -> Any:
    for name, value in values.items():
        # Works for frozen dataclasses too, and for fields that __init__ does not take.
        object.__setattr__(made, name, value)
    return made


def _check_derived(fields: Fields, path: str) -> None:
    """Raise unless the class makes all that an object holds of its fields alone."""
    try:
        made = fields.rebuild(fields.leaves.values(), fields.static)
        names = {where for where, _ in fields.further}
        again = [pair for pair in _further(made, path) if pair[0] in names]
        here, there = (
            texts_of([Static(None, each)], alone=False) for each in (fields.further, again)
        )
        if here == there:
            return
        reason = ""
    except Exception as error:
        raise_interrupt(error, MemoryError)
        reason = f": {describe_error(error)}"
    more = ", ".join(name.removeprefix(path).lstrip(", .") for name, _ in fields.further)
    raise TypeError(
        f"{path} is {type_name(fields.instance)}, which holds more than its fields ({more}), and "
        f"calling its class with these does not make that again{reason}; give the class a method "
        "__arraycomm_tree__, or pass the fields in a dict"
    )
