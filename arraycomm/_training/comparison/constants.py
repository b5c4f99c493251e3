"""Constants of functions: the hyperparameters of optimizers that are functions, as in optax."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any, Final

from arraycomm._training.comparison.verification import is_private, plain, scalar

# What a function knows of its rank, to print on one of them for example.
OF_A_RANK: Final = frozenset(
    ("rank", "local_rank", "global_rank", "node_rank", "is_root", "is_main")
)


def constants_of(function: Any, name: str) -> list[tuple[str, Any]]:
    """Return a function's constants: in its code, bound to it, and of the functions it refers to.

    Of a list of plain values it is what the list holds now: it may grow later on one rank. Objects
    of other kinds are left out, but for the functions in them.
    """
    found: dict[str, Any] = {}
    for each, value in _walk(function, name, set()):
        # Several functions of a chain may be made of one code.
        number = sum(other == each or other.startswith(f"{each} (") for other in found)
        found[f"{each} ({number + 1})" if number else each] = value
    return list(found.items())


def _walk(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    value = scalar(value)
    if plain(value):
        yield name, _as_it_is_now(value)
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        yield from _walk(value.func, name, seen)
        yield from _walk(tuple(value.args), f"the arguments of {name}", seen)
        for key, each in sorted(value.keywords.items()):
            yield from _walk(each, f"{key} of {name}", seen)
    elif isinstance(value, MethodType):
        yield from _walk(value.__func__, name, seen)
    elif isinstance(value, FunctionType):
        yield from _walk_function(value, name, seen)
    elif isinstance(value, tuple):
        for each in value:
            yield from _walk(each, name, seen)
    elif isinstance(value, dict | list):
        # In an order that does not depend on how a dict was filled.
        is_dict = isinstance(value, dict)
        for each in [value[key] for key in sorted(value, key=str)] if is_dict else value:
            if callable(each) or isinstance(each, tuple):
                yield from _walk(each, name, seen)


def _as_it_is_now(value: Any) -> Any:
    return tuple(map(_as_it_is_now, value)) if isinstance(value, tuple | list) else value


def _walk_function(function: FunctionType, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    code, called = function.__code__, function.__qualname__.replace("<locals>.", "")
    yield name, f"{function.__module__}.{called}"
    yield f"the constants of {called}", tuple(filter(plain, code.co_consts))
    bound: dict[str, Any] = {}
    for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        # A cell may be empty.
        with suppress(ValueError):
            bound[key] = cell.cell_contents
    yield from _walk(function.__defaults__ or (), f"the defaults of {called}", seen)
    for key, value in sorted((bound | (function.__kwdefaults__ or {})).items()):
        if key not in OF_A_RANK and not (is_private(key) and plain(scalar(value))):
            yield from _walk(value, f"{key} of {called}", seen)
