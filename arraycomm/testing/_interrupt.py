"""How a rank that is stuck in Python is made to end."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import traceback

from arraycomm._errors import CommTimeoutError

_HERE = os.path.dirname(__file__) + os.sep


class Interruption(BaseException):
    """Raised inside a rank that is stuck in Python; not an Exception, lest it be caught."""


class Interruptible:
    """The part of a thread in which it may be interrupted: from its making until `end`."""

    def __init__(self, rank: int, ident: int) -> None:
        self.rank = rank
        self.ident = ident
        self.ended = False
        self._ending = threading.Lock()
        # Where the thread was when it was first interrupted.
        self.stack = ""

    def end(self) -> None:
        """From here on no interruption is begun; one that was begun may still arrive."""
        with self._ending:
            self.ended = True

    def interrupt(self) -> None:
        """Raise `Interruption` in the thread, the next time that it runs Python code."""
        with self._ending:
            if not self.ended:
                self.stack = self.stack or stack_of(self.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self.ident), ctypes.py_object(Interruption)
                )

    def error(self) -> CommTimeoutError:
        """Return the error to show for the interruption."""
        return CommTimeoutError(
            f"rank {self.rank} did not end in time, and was interrupted here:\n{self.stack}"
        )

    def hopeless(self) -> CommTimeoutError:
        """Return the error to show where no interruption arrives."""
        return CommTimeoutError(
            f"rank {self.rank} did not end in time, and cannot be interrupted outside Python; it is "
            f"here:\n{stack_of(self.ident)}"
        )


def stack_of(ident: int) -> str:
    """Return the stack of a thread as text, from where the user's code begins."""
    frame = sys._current_frames().get(ident)
    frames = traceback.extract_stack(frame) if frame else []
    ours = [place for place, entry in enumerate(frames) if entry.filename.startswith(_HERE)]
    return "".join(traceback.format_list(frames[ours[-1] + 1 if ours else 0 :]))
