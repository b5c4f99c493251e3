"""The keys of mappings: described and ordered in the same way on every rank.

Ranks compare trees by the paths of their leaves. So a key's description depends on its value alone,
and not on its address, the seed of hashes, or the order in which it was inserted. Keys that are
equal have one description.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import type_name

_NAMED: Final = (type, FunctionType, BuiltinFunctionType)


class Key(NamedTuple):
    """One key's description; keys are sorted by kind, then by value if there is an order."""

    kind: str
    value: Any
    text: str


def are_plain(keys: Iterable[Any]) -> bool:
    """Return whether optree sorts these keys, and names them, in the same way on every rank."""
    kinds = set(map(type, keys))
    return len(kinds) <= 1 and kinds <= {str, int}


def describe_keys(keys: Iterable[Any], path: str) -> list[Key]:
    """Describe the keys of one mapping; raise `TypeError` if ranks could take one for another."""
    described: dict[Key, Any] = {}
    for key in keys:
        found = _describe(key)
        if found is None:
            raise TypeError(
                f"{path} has a key of type {type_name(key)}, which cannot be told from others in "
                "the same way on every rank; use strings, numbers, enums, or tuples of these as "
                "keys"
            )
        if found in described:
            raise TypeError(
                f"{path} has two keys that other ranks cannot tell apart, since both are "
                f"{found.text}; use strings, numbers, enums, or tuples of these as keys"
            )
        described[found] = key
    return list(described)


def _describe(key: Any) -> Key | None:
    if key is None:
        return Key("", 0, "None")
    if isinstance(key, numbers.Number | np.bool_):
        return _number(key)
    if isinstance(key, str):
        return Key("str", str.__str__(key), repr(str.__str__(key)))
    if isinstance(key, bytes):
        return Key("bytes", bytes(key), repr(bytes(key)))
    if isinstance(key, enum.Enum):
        return Key("", 0, f"{type(key).__qualname__}.{key.name}")
    if isinstance(key, _NAMED):
        return Key("", 0, f"{key.__module__}.{key.__qualname__}")
    if isinstance(key, tuple):
        return _several("(", key, ")" if len(key) != 1 else ",)", sort=False)
    if isinstance(key, frozenset):
        return _several("frozenset({", key, "})", sort=True)
    if dataclasses.is_dataclass(key) and _has_value(key):
        values = [getattr(key, field.name) for field in dataclasses.fields(key) if field.compare]
        return _several(f"{type(key).__qualname__}(", values, ")", sort=False)
    text = text_of_value(key)
    return None if text is None else Key("", 0, text)


def _number(key: Any) -> Key:
    """Describe a number by its value: 1, True, 1.0 and NumPy's 1 are the same key."""
    if key != key:  # noqa: PLR0124 - NaN
        return Key("nan", 0, "nan")
    if isinstance(key, numbers.Complex) and not isinstance(key, numbers.Real):
        if key.imag != 0:
            return Key("complex", 0, repr(complex(key)))
        key = key.real
    if key in {float("inf"), -float("inf")}:
        return Key("number", float(key), repr(float(key)))
    if key == int(key):
        return Key("number", int(key), repr(int(key)))
    exact = float(key) if float(key) == key else key
    return Key("number", exact, repr(exact))


def _several(start: str, parts: Iterable[Any], end: str, *, sort: bool) -> Key | None:
    described = [_describe(part) for part in parts]
    found = [part for part in described if part is not None]
    if len(found) < len(described):
        return None
    if sort:
        found.sort()
    return Key("", 0, start + ", ".join(part.text for part in found) + end)


def text_of_value(x: Any) -> str | None:
    """Return the text of an object that is equal to others by value and says its value, or None."""
    kind: Any = type(x)
    text = repr(x)
    is_dtype = kind.__module__ == "torch" and kind.__name__ == "dtype"
    says_value = kind.__repr__ is not object.__repr__ and " at 0x" not in text
    return text if is_dtype or (_has_value(x) and says_value) else None


def _has_value(key: Any) -> bool:
    """Return whether a key is compared by its value, and not by its identity."""
    kind: Any = type(key)
    return kind.__eq__ is not object.__eq__ and kind.__hash__ is not object.__hash__
