"""NCCL in software, for ranks that are threads or processes. It is as strict as NCCL's documents about what may be called when.

Calls are nonblocking: an operation is on its stream only once its communicator has been polled for it. There
it waits for the other ranks, also for those whose operations do not match, until the communicator is aborted.
"""

from __future__ import annotations

import _thread
import ctypes
import itertools
import os
import random
import re
import socket
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import numpy as np
from cupy._driver import Library
from cupy._machine import machine

from arraycomm import _folds

OK, INVALID_ARGUMENT, REMOTE_ERROR, IN_PROGRESS = 0, 4, 6, 7
_TEXTS: Final = {INVALID_ARGUMENT: b"invalid argument", REMOTE_ERROR: b"remote error"}
_UINT8: Final = 1
_DTYPES: Final = {
    0: "int8", 1: "uint8", 2: "int32", 3: "uint32", 4: "int64", 5: "uint64", 7: "float32", 8: "float64"
}  # fmt: skip
_OPS: Final = {0: "sum", 1: "prod", 2: "max", 3: "min"}

_noise: Final = random.Random()

# What an operation sends, and what it then waits for.
Step = tuple[Callable[[], None], Callable[[], None]]


class _AbortedError(Exception):
    """What an operation waited for does not matter any more."""


class Mailbox:
    """One rank's connections to the others, and what came over them."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self._name, self._rank = name, rank
        self._users, self._closed = 0, False
        self._came: dict[Hashable, deque[Any]] = defaultdict(deque)
        self._change = threading.Condition()
        self._sending = threading.Lock()
        self._to: dict[int, Connection] = {}
        self._missing = set(range(size)) - {rank}
        if size > 1:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(self._address(rank))
            listener.listen(size)
            # None of the `threading` module's: it makes no calls, for which another rank might wait.
            _thread.start_new_thread(self._receive, (listener,))

    def _address(self, rank: int) -> str:
        return f"\0arraycomm-{self._name}-{rank}"

    def connect(self) -> bool:
        """Return whether there are connections to all ranks now."""
        for rank in list(self._missing):
            there = socket.socket(socket.AF_UNIX)
            try:
                there.connect(self._address(rank))
            except OSError:
                there.close()
                continue
            self._to[rank] = Connection(there.detach())
            self._missing.discard(rank)
        return not self._missing

    def send(self, rank: int, key: Hashable, what: Any) -> None:
        if rank == self._rank:
            self._put(key, what)
            return
        # Who has left misses nothing.
        with suppress(OSError), self._sending:
            self._to[rank].send((key, what))

    def has(self, key: Hashable) -> bool:
        with self._change:
            return bool(self._came.get(key))

    def take(self, key: Hashable, aborted: threading.Event) -> Any:
        with self._change:
            while not self._came.get(key):
                if aborted.is_set():
                    raise _AbortedError
                self._change.wait()
            found = self._came[key].popleft()
            if not self._came[key]:
                del self._came[key]
            return found

    def enter(self) -> None:
        """Note that one communicator more uses the connections."""
        self._users += 1

    def leave(self) -> None:
        """Note that one has ended, whose waits end as well."""
        self._users -= 1
        self.close(not self._users)

    def close(self, last: bool = True) -> None:
        self._closed |= last
        with self._change:
            self._change.notify_all()

    def _put(self, key: Hashable, what: Any) -> None:
        with self._change:
            self._came[key].append(what)
            self._change.notify_all()

    def _receive(self, listener: socket.socket) -> None:
        opened: list[Any] = [listener]
        while not self._closed:
            for ready in wait(opened, 0.05):
                if ready is listener:
                    opened.append(Connection(listener.accept()[0].detach()))
                    continue
                try:
                    self._put(*ready.recv())
                except (EOFError, OSError):
                    opened.remove(ready)
                    ready.close()
        for connection in (*opened, *self._to.values()):
            connection.close()


class Comm:
    """One rank's communicator."""

    def __init__(self, mailbox: Mailbox, name: str, rank: int, size: int) -> None:
        self.mailbox, self.name, self.rank, self.size = mailbox, name, rank, size
        self.device, self.owner = machine.here.device, machine.here.owner
        self.state, self.polls = OK, 0
        self.pending: Callable[[], bool] = lambda: True
        self.aborted = threading.Event()
        self.gone = ""
        # Groups of operations: how many are begun, and done on their streams.
        self.issued = self.finished = 0
        # How often each kind of operation was called.
        self.turns: Counter[Any] = Counter()
        mailbox.enter()

    def turn(self, *kind: Hashable) -> Hashable:
        """Return what this operation is called on all ranks."""
        self.turns[kind] += 1
        return self.name, *kind, self.turns[kind]

    def meet(self, kind: str, what: Any = None) -> Callable[[], dict[int, Any] | None]:
        """Return what tells, once all ranks have come, what each of them says."""
        key, found, sent = self.turn(kind), {}, set()

        def told() -> dict[int, Any] | None:
            if not self.mailbox.connect():
                return None
            for rank in set(range(self.size)) - sent:
                sent.add(rank)
                self.mailbox.send(self.peer(rank), (key, self.rank), what)
            for rank in set(range(self.size)) - set(found):
                if self.mailbox.has((key, rank)):
                    found[rank] = self.mailbox.take((key, rank), self.aborted)
            return found if len(found) == self.size else None

        return told

    def peer(self, rank: int) -> int:
        """Return the number that a rank has where the connections were made."""
        return rank

    def take(self, key: Hashable, nbytes: int) -> bytes:
        found: bytes = self.mailbox.take(key, self.aborted)
        if len(found) != nbytes:
            self.aborted.wait()
            raise _AbortedError
        return found

    def end(self, how: str) -> None:
        assert not self.gone, f"{how} after it was {self.gone}"
        self.gone = how
        self.aborted.set()
        self.mailbox.leave()


class _Child(Comm):
    """The communicator of a part of the ranks."""

    def __init__(self, parent: Comm, name: str, members: list[int]) -> None:
        super().__init__(parent.mailbox, name, members.index(parent.rank), len(members))
        self.device, self.owner = parent.device, parent.owner
        self._members = [parent.peer(rank) for rank in members]

    def peer(self, rank: int) -> int:
        return self._members[rank]


class Nccl(Library):
    """libnccl.so.2, as one rank has it. `slowness` is how many polls find an operation in progress."""

    # Of communicators, by which they are known in one process.
    _handles = itertools.count(0x5000, 16)

    def __init__(self) -> None:
        functions = {}
        for name, function in vars(Nccl).items():
            if name[0] != "_" and callable(function):
                camel = re.sub("(^|_)(.)", lambda found: found[2].upper(), name)
                functions[f"nccl{camel}"] = getattr(self, name)
        super().__init__(functions)
        self.comms: dict[int, Comm] = {}
        self.slowness: int | None = None
        self.version = 23007
        # The arguments of each operation but addresses: count, type, and peer, root or reduction.
        self.asked: list[tuple[Any, ...]] = []
        self.streams: set[int] = set()
        self._here = threading.local()

    def close(self) -> None:
        """End all waits, and the connections."""
        for comm in self.comms.values():
            comm.aborted.set()
            comm.mailbox.close()

    @property
    def only(self) -> Comm:
        (comm,) = self.comms.values()
        return comm

    def get_version(self, out: Any) -> int:
        out._obj.value = self.version
        return OK

    def get_unique_id(self, out: Any) -> int:
        out._obj.internal[:] = os.urandom(128)
        return OK

    def get_error_string(self, code: int) -> bytes:
        return _TEXTS.get(code, f"error {code}".encode())

    def get_last_error(self, _comm: Any) -> bytes:
        return b"the cable is out\n"

    # Communicators

    def comm_init_rank_config(self, out: Any, size: int, name: Any, rank: int, config: Any) -> int:
        assert (config._obj.size, config._obj.magic) == (48, 0xCAFEBEEF)
        assert config._obj.blocking == 0
        machine.enter()
        mailbox = Mailbox(bytes(name.internal).hex()[:32], rank, size)
        comm = self._add(Comm(mailbox, "", rank, size), out)
        told = comm.meet("init")
        return self._begin(comm, lambda: told() is not None)

    def _add(self, comm: Comm, out: Any) -> Comm:
        handle = out._obj.value = next(self._handles)
        self.comms[handle] = comm
        return comm

    def comm_split(self, handle: Any, color: int, key: int, out: Any, config: Any) -> int:
        comm = self._usable(handle)
        if comm is None:
            return INVALID_ARGUMENT
        assert config is None
        assert comm.issued == comm.finished, "split while operations are under way"
        told = comm.meet("split", (color, key))
        number = comm.turns["split",]

        def split() -> bool:
            said = told()
            if said is not None and color >= 0:
                order = sorted((said[rank][1], rank) for rank in said if said[rank][0] == color)
                members = [rank for _, rank in order]
                self._add(_Child(comm, f"{comm.name}/{number}.{color}", members), out)
            return said is not None

        return self._begin(comm, split)

    def comm_get_async_error(self, handle: Any, out: Any) -> int:
        comm = self.comms[handle.value]
        assert not comm.gone, f"polled after it was {comm.gone}"
        comm.polls -= 1
        if comm.state == IN_PROGRESS and comm.polls < 0 and comm.pending():
            comm.state = OK
        out._obj.value = comm.state
        return OK

    def comm_user_rank(self, handle: Any, out: Any) -> int:
        out._obj.value = self.comms[handle.value].rank
        return OK

    def comm_count(self, handle: Any, out: Any) -> int:
        out._obj.value = self.comms[handle.value].size
        return OK

    def comm_finalize(self, handle: Any) -> int:
        comm = self._usable(handle)
        if comm is None:
            return INVALID_ARGUMENT
        told = comm.meet("finalize")
        return self._begin(comm, lambda: told() is not None)

    def comm_destroy(self, handle: Any) -> int:
        assert self.comms[handle.value].state == OK
        self.comms[handle.value].end("destroyed")
        return OK

    def comm_abort(self, handle: Any) -> int:
        comm = self.comms[handle.value]
        comm.end("aborted")
        machine.wait_for_all(comm.owner)
        return OK

    def _usable(self, handle: Any) -> Comm | None:
        comm = self.comms[handle.value]
        assert not comm.gone, f"used after it was {comm.gone}"
        assert comm.state != IN_PROGRESS, "used while in progress"
        return comm if comm.state == OK else None

    def _begin(self, comm: Comm, pending: Callable[[], bool]) -> int:
        comm.polls = _noise.randrange(3) if self.slowness is None else self.slowness
        comm.state, comm.pending = IN_PROGRESS, pending
        return IN_PROGRESS

    # Operations

    def group_start(self) -> int:
        assert getattr(self._here, "group", None) is None
        self._here.group = []
        return OK

    def group_end(self) -> int:
        group, self._here.group = self._here.group, None
        if not group:
            return OK
        ((comm, stream),) = {(comm, stream) for comm, stream, _ in group}
        steps: list[Step] = [step for _, _, step in group]

        number = comm.issued
        comm.issued += 1

        def work() -> None:
            if comm.aborted.is_set():
                return
            assert comm.finished == number, (
                "operations of one communicator in streams without order"
            )
            with suppress(_AbortedError):
                for send, _ in steps:
                    send()
                for _, receive in steps:
                    receive()
            comm.finished += 1

        def put() -> bool:
            machine.stream_of(comm.device, stream).put("nccl", work)
            return True

        return self._begin(comm, put)

    def _enqueue(self, handle: Any, stream: int, make: Callable[[Comm], Step], *asked: Any) -> int:
        assert self._here.group is not None
        assert stream != 2
        comm = self._usable(handle)
        if comm is None:
            return INVALID_ARGUMENT
        self.asked.append(asked)
        self.streams.add(stream)
        self._here.group.append((comm, stream, make(comm)))
        return OK

    def send(self, buffer: int, count: int, dtype: int, peer: int, comm: Any, stream: int) -> int:
        def make(comm: Comm) -> Step:
            key = comm.turn(comm.rank, peer)
            return (
                lambda: comm.mailbox.send(comm.peer(peer), key, ctypes.string_at(buffer, count)),
                lambda: None,
            )

        return self._enqueue(comm, stream, make, count, dtype, peer)

    def recv(self, buffer: int, count: int, dtype: int, peer: int, comm: Any, stream: int) -> int:
        def make(comm: Comm) -> Step:
            key = comm.turn(peer, comm.rank)
            return lambda: None, lambda: ctypes.memmove(buffer, comm.take(key, count), count)

        return self._enqueue(comm, stream, make, count, dtype, peer)

    def broadcast(
        self, source: int, target: int, count: int, dtype: int, root: int, comm: Any, stream: int
    ) -> int:
        assert (source, dtype) == (target, _UINT8)

        def make(comm: Comm) -> Step:
            key = comm.turn("collective"), "broadcast", root
            others = [rank for rank in range(comm.size) if rank != root]

            def send() -> None:
                for rank in others if comm.rank == root else ():
                    comm.mailbox.send(comm.peer(rank), key, ctypes.string_at(source, count))

            def receive() -> None:
                if comm.rank != root:
                    ctypes.memmove(target, comm.take(key, count), count)

            return send, receive

        return self._enqueue(comm, stream, make, count, dtype, root)

    def all_gather(
        self, source: int, target: int, count: int, dtype: int, comm: Any, stream: int
    ) -> int:
        own = target + self.comms[comm.value].rank * count
        apart = source + count <= target or target + self.comms[comm.value].size * count <= source
        assert source == own or apart, "neither in place nor apart"
        assert dtype == _UINT8

        def finish(rows: list[bytes]) -> None:
            for rank, row in enumerate(rows):
                ctypes.memmove(target + rank * count, row, count)

        return self._collective(comm, stream, source, count, "gather", finish, count, dtype)

    def all_reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, comm: Any, stream: int
    ) -> int:
        kind = np.dtype(_DTYPES[dtype])
        nbytes = count * kind.itemsize
        if 0 < abs(source - target) < nbytes:
            # NCCL reduces in place, or into other memory.
            return INVALID_ARGUMENT

        def finish(rows: list[bytes]) -> None:
            reduced = np.empty(count, kind)
            parts = [np.frombuffer(row, kind) for row in rows]
            _folds.fold(_OPS[op], kind, parts, reduced)
            ctypes.memmove(target, reduced.ctypes.data, nbytes)

        what = f"reduce {op} {dtype}"
        return self._collective(comm, stream, source, nbytes, what, finish, count, dtype, op)

    def _collective(
        self,
        handle: Any,
        stream: int,
        source: int,
        nbytes: int,
        what: str,
        finish: Callable[[list[bytes]], None],
        *asked: Any,
    ) -> int:
        def make(comm: Comm) -> Step:
            key = comm.turn("collective"), what

            def send() -> None:
                for rank in range(comm.size):
                    row = ctypes.string_at(source, nbytes)
                    comm.mailbox.send(comm.peer(rank), (key, comm.rank), row)

            def receive() -> None:
                finish([comm.take((key, rank), nbytes) for rank in range(comm.size)])

            return send, receive

        return self._enqueue(handle, stream, make, *asked)
