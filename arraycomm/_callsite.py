"""Where in the user's code a call was made."""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType

_OURS = (
    os.path.dirname(__file__) + os.sep,
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "adapters") + os.sep,
)
# A suite of tests that comes with the library, and calls it as a user does.
_LAWS = os.path.join("testing", "conformance.py")


def is_ours(filename: str) -> bool:
    """Tell whether a file of Python code belongs to the library, and not to a caller of it."""
    return filename.startswith(_OURS) and not filename.endswith(_LAWS)


def call_site() -> str:
    """Return `file.py:line` of the innermost frame outside the library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def describe_raise(error: BaseException) -> str:
    """Return the traceback as text, with the user's frames that led to where it was caught."""
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
