"""The numbers with which a function computes: hyperparameters of optimizers that are functions, as optax's are."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from arraycomm._training.verification import plain, scalar


def constants_of(function: Any, name: str) -> list[tuple[str, Any]]:
    """Return the constants of a function: in its code, bound to it, and of the functions that it refers to.

    What may change later, such as a list, and objects of other kinds are left out, but for the functions in them.
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
        yield name, value
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
        for each in value.values() if isinstance(value, dict) else value:
            if callable(each) or isinstance(each, tuple):
                yield from _walk(each, name, seen)


def _walk_function(function: FunctionType, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    code, called = function.__code__, function.__qualname__.replace("<locals>.", "")
    yield name, f"{function.__module__}.{called}"
    yield f"the constants of {called}", tuple(filter(plain, code.co_consts))
    bound = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
    names = [
        n
        for n, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
        if _is_set(cell)
    ]
    defaults = (function.__defaults__ or (), function.__kwdefaults__ or {})
    yield from _walk(defaults[0], f"the defaults of {called}", seen)
    for key, value in [*zip(names, bound, strict=True), *sorted(defaults[1].items())]:
        yield from _walk(value, f"{key} of {called}", seen)


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None or True
    except ValueError:
        return False
