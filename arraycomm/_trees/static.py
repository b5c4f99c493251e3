"""What a container holds besides its leaves, such as a static field of a dataclass.

Leaves of equal shapes mean something else in another such setting: a length in metres, and one in
kilometres. So the ranks compare it, by a text that does not depend on a rank, an address or the
order of a set: a function by its module and name, an array by its bytes, any other object by what
`pickle` would take of it. Random generators, and what stands for this rank, are each rank's own.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import sys
from collections.abc import Iterable, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import Array, type_name
from arraycomm._arrays.views import view
from arraycomm._dtypes import name_of as dtype_name
from arraycomm._dtypes import without_padding
from arraycomm._errors import raise_interrupt
from arraycomm._protocol.mismatch import VALUE
from arraycomm._trees.keys import text_of_value
from arraycomm._trees.opened import is_generator, stays

# Longer texts are compared, and shown, as digests.
_SHOWN: Final = 60
_PLAIN: Final = frozenset((type(None), bool, int, float, complex, str, bytes, type(...)))
_SETS: Final = (set, frozenset)


class Static(NamedTuple):
    """What one container holds besides its leaves.

    `value` is what its class makes it of, with leaves; `parts` are the values that ranks compare,
    each with its path. Another rank's value can take its place unless it `stays`; then it may hold
    what ranks cannot compare.
    """

    value: Any
    parts: Sequence[tuple[str, Any]]
    stays: bool = False


class UnknownValueError(Exception):
    """An object has no description that is the same on every rank."""


def texts_of(statics: Iterable[Static], *, alone: bool) -> list[tuple[str, str]]:
    """Return the path of each part, and its value or a digest.

    Raises `TypeError` for a value that ranks cannot compare. One that is `alone` need not.
    """
    found, describe = [], Describer()
    for static in statics:
        for path, value in static.parts:
            try:
                found.append((path, describe.shown(value)))
            except UnknownValueError as error:
                if not (alone or static.stays):
                    raise TypeError(
                        f"{path} is {type_name(value)}, which ranks cannot compare ({error}), "
                        "although leaves may mean something else with another; use a value that "
                        "pickle takes, or give the class of the container a method "
                        "__arraycomm_tree__"
                    ) from None
    return found


def lines_of(statics: Iterable[Static], *, alone: bool) -> list[str]:
    """Return a line of a structure for each part; see `texts_of`."""
    return [f"{path}: {VALUE}{text}" for path, text in texts_of(statics, alone=alone)]


def taken_over(own: Any, given: Any) -> Any:
    """Return another rank's value, with this rank's objects where they are the same.

    An object that pickle has made is another one, and some are compared by their identity.
    """
    describe = Describer()
    if describe.shown(own) == describe.shown(given):
        return own
    if type(own) is type(given) and type(own) in (tuple, list) and len(own) == len(given):
        return type(own)(map(taken_over, own, given))
    if type(own) is type(given) is dict:
        return {
            key: taken_over(own[key], each) if key in own else each for key, each in given.items()
        }
    return given


class Describer:
    """Describes values; an object that comes again in one of them is looked at once.

    A `whole` description has also what is each rank's own: the states of random generators.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        # Each object with its text, or None while it is being described.
        self._known: dict[int, tuple[Any, str | None]] = {}

    def shown(self, value: Any) -> str:
        """Return a text that is the same for equal values on all ranks, and short."""
        try:
            return self._text(value)
        except Exception as error:
            raise_interrupt(error, MemoryError, UnknownValueError)
            # Of the object's own methods, or since it is nested too deeply.
            raise UnknownValueError(f"{type(error).__name__} in {type_name(value)}") from None

    def _text(self, value: Any) -> str:
        if type(value) in _PLAIN:
            return _short(repr(value), value)
        if id(value) in self._known:
            text = self._known[id(value)][1]
            return "itself" if text is None else text
        self._known[id(value)] = value, None
        try:
            text = _short(self._described(value), value)
        except BaseException:
            del self._known[id(value)]
            raise
        self._known[id(value)] = value, text
        return text

    def _described(self, value: Any) -> str:
        kind: Any = type(value)
        if isinstance(value, enum.Enum):
            return f"{kind.__qualname__}.{value.name}"
        if is_generator(value) or kind.__module__.partition(".")[0] == "arraycomm":
            return self._contents(value) if self._whole else type_name(value)
        if isinstance(value, MethodType):
            return f"{value.__module__}.{value.__qualname__} of {self._text(value.__self__)}"
        if isinstance(value, ModuleType) or stays(value):
            return self._function(value)
        if kind in (tuple, list):
            return self._several(kind, map(self._text, value))
        if isinstance(value, _SETS):
            return self._several(kind, sorted(map(self._text, value)), value)
        if isinstance(value, dict):
            pairs = (f"{self._text(key)}: {self._text(each)}" for key, each in value.items())
            return self._several(kind, sorted(pairs), value)
        if (array := _array(value)) is not None:
            return array
        if dataclasses.is_dataclass(value) and kind.__eq__ is not object.__eq__:
            return self._several(kind, self._fields(value))
        return self._contents(value)

    def _several(self, kind: type, texts: Iterable[str], value: Any = None) -> str:
        """Describe a container of these; a subclass may have attributes as well."""
        state = getattr(value, "__dict__", None)
        further = [self._text(state)] if state else []
        return f"{kind.__qualname__}({', '.join([*texts, *further])})"

    def _function(self, function: Any) -> str:
        """Describe a function by its name, what wraps one by that."""
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None and not isinstance(function, FunctionType | type):
            return f"{type(function).__name__} of {self._text(wrapped)}"
        return name_of(function) or type_name(function)

    def _fields(self, value: Any) -> Iterable[str]:
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                try:
                    yield f"{field.name}={self._text(getattr(value, field.name))}"
                except UnknownValueError:
                    if field.compare:
                        raise

    def _contents(self, value: Any) -> str:
        """Describe an object by what `pickle` takes of it, or by its text if that is its value."""
        try:
            reduced = value.__reduce_ex__(4)
            if isinstance(reduced, str):
                return f"{getattr(value, '__module__', None)}.{reduced}"
            make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
            if isinstance(state, dict):
                state = {name: each for name, each in state.items() if not _is_kept(value, name)}
            parts = [make, arguments, state, list(items or ()), list(pairs or ())]
            return self._several(type(value), map(self._text, parts))
        except Exception as error:
            raise_interrupt(error, MemoryError)
            text = text_of_value(value)
            if text is None:
                known = isinstance(error, UnknownValueError)
                raise UnknownValueError(
                    error if known else f"{type_name(value)}: {error}"
                ) from None
            return f"{type_name(value)} {text}"


def name_of(function: Any) -> str | None:
    """Return the module and the name of a function, a class or a module; None for other objects."""
    if isinstance(function, ModuleType):
        return function.__name__
    if not stays(function) or is_generator(function):
        return None
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return f"{getattr(function, '__module__', None)}.{name}" if isinstance(name, str) else None


def _short(text: str, value: Any) -> str:
    if len(text) <= _SHOWN and ": " not in text and "\n" not in text:
        return text
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{type(value).__qualname__} with the digest {digest}"


def _is_kept(value: Any, name: Any) -> bool:
    """Return whether an attribute only keeps what follows from others, maybe in this process."""
    cached = isinstance(getattr(type(value), str(name), None), functools.cached_property)
    return cached or str(name).strip("_") == "hash"


def _array(value: Any) -> str | None:
    """Return the dtype, the shape and a digest of an array; None for other objects."""
    if not (hasattr(value, "dtype") and hasattr(value, "shape")) or isinstance(value, type):
        return None
    if isinstance(value, np.generic):
        return repr(value)
    kind = dtype_name(value.dtype) if isinstance(value.dtype, np.dtype) else str(value.dtype)
    try:
        array = _memory(value, kind)
    except (TypeError, BufferError, ValueError, RuntimeError):
        return None
    digest = hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).data, digest_size=8)
    return f"{kind.rpartition('.')[2]} {tuple(array.shape)} {digest.hexdigest()}"


def _memory(value: Any, kind: str) -> Array:
    """Return the elements of an array, also of one that is differentiated or a key of JAX."""
    if kind.startswith("key<"):
        return view(sys.modules["jax"].random.key_data(value)).array
    array = view(value.detach() if getattr(value, "requires_grad", False) else value).array
    return without_padding(array).reshape(array.shape or 1)
