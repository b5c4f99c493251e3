"""Hears the ranks of a job: what they print, which it passes on, and how they end."""

from __future__ import annotations

import os
import re
import selectors
import socket
import subprocess
import threading
import time
from binascii import a2b_base64
from contextlib import ExitStack, suppress
from functools import partial
from queue import Queue
from struct import unpack
from typing import Any, Final, NamedTuple

from arraycomm._jobs.output import UNENDED, Lines, Target, say, write_all

# Seconds between looks for signals: the kernel may give one to the thread that passes output on,
# which leaves the main thread, the one that runs handlers, asleep.
LOOK: Final = 0.2
# Where the ranks of this host connect: a name that is in no file system, which may be full.
NAME: Final = "\0arraycomm-{}"


class Report(NamedTuple):
    """How the program of a rank has ended; that of rank -1 is the launcher."""

    rank: int
    status: int


# No `SimpleQueue`: a handler of a signal that outlasts its timeout lets that wait without limit.
Events = Queue[Report]


class _Source:
    """What ranks are heard from: a connection of one, or a stream that the launcher forwards."""

    def __init__(self, relay: Relay, others: Lines | None = None) -> None:
        self._relay, self._others = relay, others
        self._rest = b""

    def take(self, chunk: bytes) -> None:
        """Take what has come; an empty chunk is the end."""
        lines, end, self._rest = (self._rest + chunk).rpartition(b"\n")
        text, start = lines + end, 0
        if not chunk:
            text, self._rest = self._rest, b""
        for found in self._relay.message.finditer(text):
            self._take_other(text[start : found.start()])
            with suppress(ValueError):  # A launcher may have broken it.
                self._relay.hear(int(found[1]), found[2], a2b_base64(found[3]))
            start = found.end()
        self._take_other(text[start:])
        if not chunk and self._others is not None:
            self._others.finish()

    def _take_other(self, text: bytes) -> None:
        if text and self._others is not None and not self._relay.quiet:
            self._others.take(text)


class Relay(threading.Thread):
    """Hears ranks by a connection of each; through the launcher those that cannot connect to it.

    That is so on other hosts, and in some containers. `quiet` leaves out what the launcher prints.
    """

    def __init__(self, ranks: int, mark: str, nodes: int, *, prefix: bool, logs: str) -> None:
        super().__init__(daemon=True)
        self.events: Events = Queue()
        self.message = re.compile(rb"\x02%b (\d+) ([12s]) ([\w+/=]*)\n" % mark.encode())
        self.quiet = False
        self._ranks, self._nodes, self._prefix = ranks, nodes, prefix
        # What is open until the end: the selector, logs and connections.
        self._files = ExitStack()
        self._selector = self._files.enter_context(selectors.DefaultSelector())
        out = Target("run: the standard output", partial(write_all, 1))
        same = os.path.sameopenfile(1, 2)
        err = out if same else Target("run: the standard error", partial(write_all, 2))
        self._targets = {b"1": out, b"2": err}
        self._lines: dict[tuple[int, bytes], Lines] = {}
        # With one rank alone nothing can be mixed.
        self._patience = UNENDED if ranks > 1 else 0.0
        self._logs = [self._log(logs, rank) for rank in range(ranks)] if logs else []
        # The streams and connections that are open, and the processes of the ranks behind them.
        self._open = 0
        self._pids: dict[Any, int] = {}
        self.connected = 0
        listener = self._files.enter_context(socket.socket(socket.AF_UNIX))
        with suppress(OSError):
            listener.bind(NAME.format(mark))
            listener.listen(ranks)
            self._selector.register(listener, selectors.EVENT_READ)

    def processes(self) -> list[int]:
        """Return the processes that run a rank's program, of those that are connected."""
        return list(self._pids.values())

    def listen_to(self, process: subprocess.Popen[bytes]) -> None:
        """Begin to hear the ranks that a launcher starts."""
        for number, stream in ((b"1", process.stdout), (b"2", process.stderr)):
            assert stream is not None
            own = Lines(-1, self._targets[number], patience=self._patience)
            self._lines[-1, number] = own
            self._files.enter_context(stream)
            self._selector.register(stream, selectors.EVENT_READ, _Source(self, own))
            self._open += 1
        self.start()

    def run(self) -> None:
        # If this fails, so do the ranks, whose connections it closes.
        with self._files:
            while self._open:
                began = time.monotonic()
                ready = self._selector.select(LOOK)
                waited = time.monotonic() - began
                for key, _ in ready:
                    if key.data is None:
                        self._accept(key.fileobj)
                    else:
                        self._read(key)
                # Writing may take long, in which the programs cannot go on: that counts for none.
                for lines in self._lines.values():
                    lines.wait(waited)
            for lines in self._lines.values():
                lines.finish()

    def _accept(self, listener: Any) -> None:
        connection, _ = listener.accept()
        self._files.enter_context(connection)
        pid, user, _ = unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        if user != os.geteuid():
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, _Source(self))
        self._open += 1
        if pid:
            self._pids[connection] = pid
            self.connected += 1
        if self.connected == self._ranks > 1 and self._nodes > 1:
            say(
                f"run: all {self._ranks} ranks are on this node, one of {self._nodes} that the "
                "batch system gave; to use all, start the program with srun, or with mpiexec and "
                "a list of hosts"
            )

    def _read(self, key: selectors.SelectorKey) -> None:
        try:
            chunk = os.read(key.fd, 1 << 16)
        except ConnectionError:
            chunk = b""
        key.data.take(chunk)
        if not chunk:
            self._selector.unregister(key.fileobj)
            self._pids.pop(key.fileobj, None)
            key.fileobj.close()  # type: ignore[union-attr]
            self._open -= 1

    def hear(self, rank: int, kind: bytes, data: bytes) -> None:
        """Take what a rank says: what it has printed on a stream, or how it has ended."""
        if kind == b"s":
            for number in self._targets:
                self._of(rank, number).finish()
            self.events.put(Report(rank, int(data)))
            return
        self._of(rank, kind).take(data)
        if rank < len(self._logs):
            self._logs[rank].write(data, -1)

    def _of(self, rank: int, number: bytes) -> Lines:
        if (rank, number) not in self._lines:
            prefix = f"[{rank}] ".encode() if self._prefix else b""
            made = Lines(rank, self._targets[number], prefix=prefix, patience=self._patience)
            self._lines[rank, number] = made
        return self._lines[rank, number]

    def _log(self, directory: str, rank: int) -> Target:
        path = os.path.join(directory, f"rank-{rank}.log")
        file = self._files.enter_context(open(path, "wb", buffering=0))  # noqa: SIM115
        return Target(f"run: {path}", partial(write_all, file.fileno()))
