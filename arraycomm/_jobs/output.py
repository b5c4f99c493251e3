"""What ranks print, on its way to the streams of this process: in whole lines, each of one rank."""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable
from contextlib import suppress
from typing import Final

# Seconds after which a line is shown that has not ended: a program that has no core may be in the
# middle of one for long.
UNENDED: Final = 1.0
# Progress bars begin their lines by a carriage return.
_END_OF_LINE: Final = re.compile(rb"\r?\n|\r(?=[^\n])")


def write_all(descriptor: int, data: bytes) -> None:
    """Write all to a descriptor; if it takes nothing at present, wait until it does."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            ready = select.poll()
            ready.register(descriptor, select.POLLOUT)
            ready.poll()


def say(text: str) -> None:
    """Print a line for the user, if that is possible."""
    with suppress(OSError):
        write_all(2, f"{text}\n".encode(errors="backslashreplace"))


class Target:
    """A stream that takes the lines of all ranks. If it fails that is said once; they go on."""

    def __init__(self, name: str, write: Callable[[bytes], object]) -> None:
        self._name, self._write = name, write
        # The rank of which a part of a line is shown, -1 for none.
        self._rank = -1
        self._has_failed = False

    def write(self, data: bytes, rank: int) -> None:
        """Write what a rank prints; a line that another one has not ended is broken."""
        if not data:
            return
        if self._rank not in (-1, rank):
            data = b"\n" + data
        self._rank = -1 if data.endswith(b"\n") else rank
        try:
            self._write(data)
        except (OSError, ValueError) as error:
            if not self._has_failed:
                self._has_failed = True
                reason = getattr(error, "strerror", None) or error
                say(f"{self._name} cannot be written ({reason}); what ranks print there is lost")


class Lines:
    """What one rank prints to one stream; handed on in whole lines, however it comes."""

    def __init__(
        self, rank: int, target: Target, *, prefix: bytes = b"", patience: float = UNENDED
    ) -> None:
        self._rank, self._target, self._prefix, self._patience = rank, target, prefix, patience
        # The parts of a line that has not ended, and for how long it has been waited for the rest.
        self._rest: list[bytes] = []
        self._waited = 0.0

    def take(self, chunk: bytes) -> None:
        """Hand on the lines that end in a chunk."""
        if not self._rest:
            self._waited = 0.0
        before = self._rest[-1][-1:] if self._rest else b""
        self._rest.append(chunk)
        if not (_END_OF_LINE.search(before + chunk) if self._prefix else b"\n" in chunk):
            return
        text = b"".join(self._rest)
        lines, end = self._prefixed(text) if self._prefix else (text, text.rfind(b"\n") + 1)
        # Before it is written, which Ctrl-C may interrupt.
        self._rest, self._waited = [text[end:]] if text[end:] else [], 0.0
        self._target.write(lines if self._prefix else text[:end], self._rank)

    def wait(self, seconds: float) -> None:
        """Show a line that has not ended, if it was waited for long enough."""
        self._waited += seconds
        if self._rest and self._waited >= self._patience and not self._prefix:
            self.finish()

    def finish(self) -> None:
        """Hand on a line without an end."""
        text, self._rest = b"".join(self._rest), []
        if text and self._prefix:
            text = self._prefix + text.rstrip(b"\r") + b"\n"
        self._target.write(text, self._rank)

    def _prefixed(self, text: bytes) -> tuple[bytes, int]:
        """Return the lines that have ended, each with the prefix, and where the next one begins."""
        start, lines = 0, list[bytes]()
        for end in _END_OF_LINE.finditer(text):
            line, start = text[start : end.start()], end.end()
            if line or end[0] != b"\r":
                lines.append(self._prefix + line + b"\n")
        return b"".join(lines), start
