"""Interrupts that come while other ranks rely on this one: raised a moment later."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C interrupt this thread only at the end of the block; a second one is not deferred."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        # Python interrupts no other thread.
        yield
        return
    came: list[tuple[Any, ...]] = []

    def defer(*args: Any) -> None:
        if came:
            came.clear()
            handler(*args)
        came.append(args)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(*came[0])
