"""How a rank that is stuck in Python is interrupted."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import traceback
from dataclasses import dataclass, field

from arraycomm._errors import CommTimeoutError

_TESTING = os.path.dirname(os.path.dirname(__file__)) + os.sep
# From where pytest calls tests and fixtures.
_PYTEST = tuple(os.path.join("_pytest", name) for name in ("python.py", "fixtures.py"))


class Interruption(BaseException):
    """Raised in a rank that is stuck in Python; not an Exception, so that no test catches it."""


@dataclass(eq=False)
class Interruptible:
    """A thread that may be interrupted until `end` is called."""

    rank: int
    ident: int
    ended: bool = False
    # The stack of the thread when it was first interrupted.
    stack: str = ""
    _ending: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        """Begin no more interruptions; one that has begun may still arrive."""
        with self._ending:
            self.ended = True

    def interrupt(self) -> None:
        """Raise `Interruption` in the thread, as soon as it runs Python code."""
        with self._ending:
            if not self.ended:
                self.stack = self.stack or stack_of(self.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self.ident), ctypes.py_object(Interruption)
                )

    def error(self) -> CommTimeoutError:
        """Return the error to show if the thread was interrupted."""
        return CommTimeoutError(
            f"rank {self.rank} did not end in time, and was interrupted here:\n{self.stack}"
        )

    def hopeless(self) -> CommTimeoutError:
        """Return the error to show if no interruption arrives."""
        return CommTimeoutError(
            f"rank {self.rank} did not end in time, and cannot be interrupted outside Python; it "
            f"is here:\n{stack_of(self.ident)}"
        )


def stack_of(ident: int) -> str:
    """Return the stack of a thread as text, from the first frame of the user's code."""
    frame = sys._current_frames().get(ident)
    frames = traceback.extract_stack(frame) if frame else []
    ours = [number for number, entry in enumerate(frames) if _calls_user(entry.filename)]
    return "".join(traceback.format_list(frames[ours[-1] + 1 if ours else 0 :]))


def _calls_user(filename: str) -> bool:
    return filename.startswith(_TESTING) or filename.endswith(_PYTEST)
