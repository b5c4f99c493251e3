"""Which code is the library's, where the user's code made a call, and what a traceback shows.

A user sees an error with frames of their own code, also of functions that the library called, and
without those of the library; with `ARRAYCOMM_TRACEBACK=full` in the environment, all frames.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from opcode import opmap
from types import CodeType, FrameType, TracebackType
from typing import Final, NamedTuple

_OURS: Final = (
    os.path.dirname(__file__) + os.sep,
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "adapters") + os.sep,
)
# The conformance suite and the programs of the command line are part of the library, but call it as
# users do.
_USERS: Final = (("testing", "conformance"), ("cli", "bench"))
_USERS_FILES: Final = tuple(
    os.path.join(os.path.dirname(__file__), *names) + os.sep for names in _USERS
)
_USERS_MODULES: Final = tuple(".".join(("arraycomm", *names)) for names in _USERS)
# What stands between a user's code and a call: a line in there tells the user nothing.
_FRAMEWORKS: Final = frozenset(
    [
        "_pytest",
        "arraycomm",
        "array_api_compat",
        "equinox",
        "flax",
        "hypothesis",
        "jax",
        "jaxlib",
        "keras",
        "mlx",
        "numpy",
        "optax",
        "optree",
        "pluggy",
        "pytest",
        "scipy",
        "sklearn",
        "thinc",
        "torch",
    ]
)
_MACHINERY: Final = frozenset(
    ["concurrent", "contextlib", "contextvars", "functools", "importlib", "runpy", "threading"]
)
# Files of the machinery through which the library is called, and calls itself.
_BETWEEN: Final = tuple(f"{os.sep}{name}.py" for name in ("contextlib", "functools", "threading"))
_RAISE: Final = (opmap["RAISE_VARARGS"], opmap["RERAISE"])

_INSIDE: Final = _FRAMEWORKS | _MACHINERY
_packages: dict[object, str] = {}


def is_ours(filename: str) -> bool:
    """Return whether a file of Python code belongs to the library."""
    return filename.startswith(_OURS) and not filename.startswith(_USERS_FILES)


class CallSite(NamedTuple):
    """Where a call was made: its text, which only errors need, is `file.py:line`."""

    code: CodeType | None
    line: int
    thread: str = ""

    def __str__(self) -> str:
        if self.code is None:
            return f"thread {self.thread}"
        return f"{self.code.co_filename.rpartition(os.sep)[2]}:{self.line}"


def call_site(inside: int = 1) -> str:
    """Return the text of `find_call_site`."""
    return str(find_call_site(inside + 1))


def find_call_site(inside: int = 1) -> CallSite:
    """Return the innermost line outside the library and the frameworks.

    A thread of a framework or of a pool may have none: then it is the framework's outermost frame,
    or the thread's name. The first `inside` frames are known to be the library's.
    """
    frame: FrameType | None = sys._getframe(inside)
    outermost = None
    while frame is not None:
        module = frame.f_globals.get("__name__")
        package = _packages.get(module)
        if package is None:
            package = _add_package(module)
        if package not in _INSIDE:
            return CallSite(frame.f_code, frame.f_lineno)
        if package in _FRAMEWORKS and package != "arraycomm":
            outermost = frame
        frame = frame.f_back
    if outermost is None:
        return CallSite(None, 0, threading.current_thread().name)
    return CallSite(outermost.f_code, outermost.f_lineno)


def _add_package(module: object) -> str:
    """Return the first part of a module's name; an empty string if that is a user's."""
    if not isinstance(module, str):
        return ""
    users = module.startswith(_USERS_MODULES)
    found = _packages[module] = "" if users else module.partition(".")[0]
    return found


def user_level() -> int:
    """Return the `stacklevel` with which the caller's warning is about the user's line."""
    level, frame = 1, sys._getframe(1)
    while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


def raised_by_us(error: BaseException) -> bool:
    """Return whether a `raise` of the library raised an error, with only its code between.

    An error of a function that the library was given is not the library's. Neither is an error of a
    C function: the traceback ends in library code, but at a call.
    """
    steps = list(_steps(error.__traceback__))
    return bool(steps) and all(map(_step_is_ours, steps)) and _raises(steps[-1])


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _step_is_ours(step: TracebackType) -> bool:
    return is_ours(step.tb_frame.f_code.co_filename)


def _raises(step: TracebackType) -> bool:
    return step.tb_frame.f_code.co_code[step.tb_lasti] in _RAISE


# Tracebacks


def trim(error: BaseException) -> None:
    """Take the library's frames out of the traceback of an error that is about to reach the user.

    For an `except` block that ends with a bare `raise`: that adds no frame of its own. The errors
    that led to this one are trimmed too, if they never left the library. One of the user's own, in
    whose traceback the library has no frame, stays as it is.
    """
    if not _shows_all() and any(map(_step_is_ours, _steps(error.__traceback__))):
        _trim(error, set())


def _shows_all() -> bool:
    return os.environ.get("ARRAYCOMM_TRACEBACK", "").lower() == "full"


def _trim(error: BaseException, seen: set[int]) -> None:
    seen.add(id(error))
    # A traceback has these from an earlier raise. Not the frames, which would refer to themselves.
    above = {id(frame) for frame, _ in traceback.walk_stack(sys._getframe())}
    kept = [
        step
        for step in _steps(error.__traceback__)
        if not _is_hidden(step.tb_frame.f_code.co_filename)
    ]
    error.__traceback__ = _chain([step for step in kept if id(step.tb_frame) not in above])
    for linked in (error.__cause__, error.__context__):
        if linked is not None and id(linked) not in seen and _is_inside(linked):
            _trim(linked, seen)


def _is_hidden(filename: str) -> bool:
    return is_ours(filename) or filename.endswith(_BETWEEN)


def _is_inside(error: BaseException) -> bool:
    """Return whether an error was caught in the library."""
    return error.__traceback__ is not None and _step_is_ours(error.__traceback__)


def _chain(steps: list[TracebackType]) -> TracebackType | None:
    chained = None
    for step in reversed(steps):
        chained = TracebackType(chained, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return chained


def describe_raise(error: BaseException) -> str:
    """Return the traceback as text, with the user's frames that led to the call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return describe_exception(error, [] if frame is None else traceback.extract_stack(frame))


def describe_exception(error: BaseException, outer: Sequence[traceback.FrameSummary] = ()) -> str:
    """Return the traceback as text, below the frames `outer`."""
    described = traceback.TracebackException.from_exception(error)
    described.stack = traceback.StackSummary.from_list([*outer, *described.stack])
    if not _shows_all():
        _shorten(described)
    return "".join(described.format())


def _shorten(described: traceback.TracebackException) -> None:
    shown = [frame for frame in described.stack or () if not _is_hidden(frame.filename)]
    described.stack = traceback.StackSummary.from_list(shown)
    for linked in (described.__cause__, described.__context__, *(described.exceptions or ())):
        if linked is not None:
            _shorten(linked)
