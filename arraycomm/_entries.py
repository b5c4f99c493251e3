"""What users call: its name, what it shows of an error, and that torch does not compile it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Final, NoReturn, TypeVar, cast

from arraycomm._callsite import trim

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

# Methods that Python calls for the user, and that may communicate or raise.
_SPECIAL: Final = ("__init__", "__call__", "__enter__", "__exit__", "__iter__", "__getitem__")
# What communicators had in earlier versions, and what to do instead.
_REMOVED: Final = {"empty": "make the array by its own library, as in numpy.empty(shape, dtype)"}

# The code of what users call, as far as torch has not been told of it.
_codes: list[CodeType] = []


def entry(function: F) -> F:
    """Let a function that users call raise its errors without the library's frames."""

    @functools.wraps(function)
    def enter(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            trim(error)
            raise

    return cast(F, opaque(enter))


def entries(*, trimmed: bool = False) -> Callable[[C], C]:
    """Make the methods of a class entries.

    If what they call trims errors already, `trimmed`, only those are that are marked with `entry`.
    """

    def decorate(cls: C) -> C:
        for name, method in list(vars(cls).items()):
            if name.startswith("_") and name not in _SPECIAL:
                continue
            if isinstance(method, FunctionType):
                marked = trimmed or hasattr(method, "__wrapped__")
                setattr(cls, name, opaque(method) if marked else entry(method))
            elif isinstance(method, classmethod):
                setattr(cls, name, classmethod(entry(method.__func__)))
        return cls

    return decorate


def refuse_removed(communicator: object, name: str) -> NoReturn:
    """Raise for an attribute that communicators do not have, and say so of one that they had."""
    said = f"{type(communicator).__name__!r} object has no attribute {name!r}"
    if name in _REMOVED:
        said = f"Communicator.{name} was removed; {_REMOVED[name]}"
    raise AttributeError(said, name=name, obj=communicator)


def untraced(cls: C) -> C:
    """Make all methods and properties of a class opaque, for torch itself calls them."""
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, FunctionType):
            opaque(function)
    return cls


def publish(value: Any) -> None:
    """Let a class or function say that it is the package's, in errors and to pickle."""
    value.__module__ = "arraycomm"


def opaque(function: F) -> F:
    """Have `torch.compile` neither trace into a function nor compile it when it is called."""
    _codes.append(cast(FunctionType, function).__code__)
    return leave_to_python(function)


def leave_to_python(function: F) -> F:
    """Have `torch.compile` end its graph at calls of a function, which it would else trace into."""
    reason = "communication is no part of a graph"
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return function


def can_be_hidden() -> bool:
    """Return whether torch has been imported, and can be told of code; before 2.7 it cannot."""
    return hasattr(sys.modules.get("torch._C._dynamo.eval_frame"), "set_code_exec_strategy")


def hide_from_torch() -> None:
    """Keep `torch.compile` from compiling the library's functions when they are called.

    Called when a communicator is made, since torch may be imported at any time; costs nothing once
    done.
    """
    dynamo: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    if not can_be_hidden():
        return
    set_strategy = dynamo.set_code_exec_strategy
    skip = vars(dynamo)["_FrameAction"].SKIP
    strategy = vars(dynamo)["_FrameExecStrategy"](skip, skip)
    while _codes:
        set_strategy(_codes.pop(), strategy)
