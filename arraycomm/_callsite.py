"""Which code is the library's, and where in the user's code a call was made."""

from __future__ import annotations

import os
import sys
import traceback
from opcode import opmap
from types import FrameType

_OURS = (
    os.path.dirname(__file__) + os.sep,
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "adapters") + os.sep,
)
# The conformance suite is part of the library, but calls it as a user does.
_LAWS = os.path.join(os.path.dirname(__file__), "testing", "conformance") + os.sep
_RAISE = opmap["RAISE_VARARGS"]


def is_ours(filename: str) -> bool:
    """Tell whether a file of Python code belongs to the library."""
    return filename.startswith(_OURS) and not filename.startswith(_LAWS)


def call_site() -> str:
    """Return `file.py:line` of the innermost frame outside the library, and outside torch.

    Torch calls the library in backward passes and hooks; its own lines say nothing of the program.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (is_ours(frame.f_code.co_filename) or _is_of_torch(frame)):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _is_of_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"


def raised_by_us(error: BaseException) -> bool:
    """Tell whether a `raise` statement of the library raised an error, with only its code between.

    An error of a function that the library was given is not the library's. Neither is an error of a
    C function: the traceback ends in library code, but at a call.
    """
    step = error.__traceback__
    while step is not None and is_ours(step.tb_frame.f_code.co_filename):
        if step.tb_next is None:
            return step.tb_frame.f_code.co_code[step.tb_lasti] == _RAISE
        step = step.tb_next
    return False


def describe_raise(error: BaseException) -> str:
    """Return the traceback as text, with the user's frames that led to the call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    outer = "".join(traceback.format_stack(frame)) if frame is not None else ""
    inner = describe_exception(error)
    heading, _, rest = inner.rpartition("Traceback (most recent call last):\n")
    return f"{heading}Traceback (most recent call last):\n{outer}{rest}"


def describe_exception(error: BaseException) -> str:
    """Return the traceback as text."""
    return "".join(traceback.format_exception(error))
