"""The way of an error out of a compiled program.

XLA knows only the text of what a callback raises, and raises an error of its own where the result
is awaited. So the error is kept here, its number is put into the text, and JAX's class of errors
makes of that text an error of the original class again, which is JAX's as well.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import MemberDescriptorType
from typing import Any, Final

from jax.errors import JaxRuntimeError

# As many errors are kept as programs may be in flight that nobody has awaited.
_KEPT: Final = 64
_MARK: Final = re.compile(r"\[arraycomm error (\d+)\]")

_numbers: Final = itertools.count()
_lock: Final = threading.Lock()
_kept: Final[dict[int, BaseException]] = {}


class CallFailedError(Exception):
    """What a callback raises in place of an error that is kept here."""


def kept(error: BaseException) -> CallFailedError:
    """Keep an error that a callback raises; return what to raise in its place."""
    with _lock:
        number = next(_numbers)
        _kept[number] = error
        _kept.pop(number - _KEPT, None)
    return CallFailedError(f"{type(error).__name__}: {error} [arraycomm error {number}]")


def unwrap(failed: Callable[[], None]) -> None:
    """Have JAX raise the errors that are kept here; `failed` is called whenever it does."""

    def make(cls: type[JaxRuntimeError], *args: Any) -> Any:
        found = _MARK.findall(str(args[0])) if args and cls is JaxRuntimeError else []
        error = _kept.get(int(found[-1])) if found else None
        if error is None:
            return RuntimeError.__new__(cls, *args)
        failed()
        return as_jax_error(error)

    JaxRuntimeError.__new__ = make


def as_jax_error(error: BaseException) -> BaseException:
    """Return an error of the same class, message and attributes that is one of JAX's too."""
    kind: Any = _class_like(type(error))  # type: ignore[arg-type]
    base = kind
    # Only the class of Python's own that has its memory laid out makes an instance.
    while base.__module__ != "builtins":
        base = base.__base__
    made: BaseException = base.__new__(kind, *error.args)
    made.args = error.args
    vars(made).update(vars(error))
    for each in type(error).__mro__:
        for name, slot in vars(each).items():
            # Those of groups can only be read, slots may be empty, and OSError shows a None.
            with suppress(AttributeError):
                if isinstance(slot, MemberDescriptorType) and getattr(error, name) is not None:
                    setattr(made, name, getattr(error, name))
    made.__cause__, made.__suppress_context__ = error.__cause__, True
    return made


@cache
def _class_like(kind: Any) -> type[BaseException]:
    def init(self: BaseException, *args: Any) -> None:
        """Leave the error as it is: Python calls this with the arguments of JAX's error."""

    bases = (JaxRuntimeError,) if issubclass(JaxRuntimeError, kind) else (kind, JaxRuntimeError)
    names = {"__init__": init, "__str__": kind.__str__, "__repr__": kind.__repr__}
    made: type[BaseException] = type(kind.__name__, bases, names)
    made.__module__, made.__qualname__ = kind.__module__, kind.__qualname__
    return made
