"""Ranks as threads of one process, which read one another's memory directly."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from arraycomm._arrays.buffer import allocate
from arraycomm._transports.base import Bytes, Handle, Parts, PartsTransport, Transport, Wait, poll
from arraycomm._transports.control import SharedControl
from arraycomm._transports.mailbox import Mailbox, copy


class Group:
    """The memory that the ranks of one group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = np.zeros(SharedControl.nbytes(size), np.uint8)
        # For each rank: how many movements it has offered and read so far, and the parts that it
        # offers to other ranks in the last two.
        self.offered = [0] * size
        self.read = [0] * size
        self.parts: list[list[Parts]] = [[{}, {}] for _ in range(size)]
        # Messages, by sender, receiver and tag.
        self.mailbox = Mailbox()
        # Memory that a rank has offered to the others, by name.
        self.offers: dict[str, Bytes] = {}
        self._lock = threading.Lock()
        self._children: dict[tuple[int, int], tuple[Group, int]] = {}

    def child(self, split: int, color: int, size: int) -> Group:
        """Return the group that all callers with the same arguments share."""
        with self._lock:
            group, waited_for = self._children.pop((split, color), (None, size))
            group = group or Group(size)
            if waited_for > 1:
                self._children[split, color] = (group, waited_for - 1)
            return group


class _Swap:
    """Offer parts to all ranks, copy those offered to this rank, wait until all ranks have read."""

    def __init__(self, group: Group, rank: int, parts: Parts, into: Parts) -> None:
        self._group, self._rank, self._into = group, rank, into
        self._number = group.offered[rank] + 1
        self._copied = False
        group.parts[rank][self._number & 1] = parts
        group.offered[rank] = self._number

    def done(self) -> bool:
        group, number = self._group, self._number
        if not self._copied:
            if min(group.offered) < number:
                return False
            self._copy()
        if min(group.read) < number:
            return False
        group.parts[self._rank][number & 1] = {}
        return True

    def _copy(self) -> None:
        group, parity = self._group, self._number & 1
        for peer, target in self._into.items():
            source = group.parts[peer][parity].get(self._rank)
            if len(target) and source is not None and source is not target:
                copy(target, source)
        self._copied = True
        group.read[self._rank] = self._number


class ThreadsTransport(PartsTransport):
    """One rank of a group of threads."""

    name = "threads"

    def __init__(self, group: Group, rank: int) -> None:
        self._group = group
        self.rank = self.local_rank = rank
        self.size = self.local_size = group.size
        self.control = SharedControl(rank, group.size, group.memory)
        self._splits = 0

    def move(self, parts: Parts, into: Parts) -> Handle:
        return _Swap(self._group, self.rank, parts, into)

    def send(self, buffer: Bytes, dest: int, tag: int) -> Handle:
        return self._group.mailbox.send((self.rank, dest, tag), buffer)

    def recv(self, buffer: Bytes, source: int, tag: int) -> Handle:
        return self._group.mailbox.recv((source, self.rank, tag), buffer)

    def probe(self, source: int | None, tags: range) -> tuple[int, int] | None:
        return self._group.mailbox.probe(source, self.rank, tags)

    def split(
        self, color: int | None, members: Sequence[int], wait: Wait = poll
    ) -> Transport | None:
        self._splits += 1
        if color is None:
            return None
        group = self._group.child(self._splits, color, len(members))
        return type(self)(group, members.index(self.rank))

    def offer_memory(self, nbytes: int) -> str:
        self._group.offers["memory"] = allocate((nbytes,), np.dtype(np.uint8))
        return "memory"

    def open_memory(self, name: str, nbytes: int) -> Bytes | None:
        return self._group.offers.get(name)

    def close_memory(self, name: str) -> None:
        del self._group.offers[name]

    def free(self) -> None:
        self.control.close()
        # The memory is released with its last rank; Python would collect the communicators late.
        del self._group

    def nodes(self) -> Sequence[int]:
        return [0] * self.size


class SelfTransport(ThreadsTransport):
    """One rank alone; it needs no MPI library."""

    name = "self"

    def __init__(self, group: Group | None = None, rank: int = 0) -> None:
        super().__init__(group or Group(1), rank)


def make_group(size: int) -> list[Any]:
    """Return the transports of a new group of threads, one for each rank."""
    group = Group(size)
    return [ThreadsTransport(group, rank) for rank in range(size)]
