"""How processes of one node come together without MPI, by a store that all can reach."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Protocol

from arraycomm._callsite import describe_raise
from arraycomm._cuda.device import DeviceRequest
from arraycomm._errors import BackendUnavailableError, text_of
from arraycomm._launch.joining import join
from arraycomm._launch.numbering import Numbering, without_mpi
from arraycomm._mpi_start import Arguments, Opened, code_digest, open_root, refuse_different
from arraycomm._protocol.details import Detail, Failure, Nothing
from arraycomm._protocol.ends.exit import refuse_forked_child, watch_exit
from arraycomm._protocol.group import Options
from arraycomm._protocol.mismatch import peer_error
from arraycomm._transports.processes.lives import find_lives
from arraycomm._transports.processes.transport import ProcessesTransport, meet


class Store(Protocol):
    """What brings the processes together, as the stores of torch.distributed do."""

    def set(self, key: str, value: str, /) -> object:
        """Let the other processes get a text."""

    def get(self, key: str, /) -> bytes:
        """Return a text that a process has set, or will set."""


def open_by_numbers(found: Numbering, arguments: Arguments) -> Opened:
    """Open a group over the processes that the environment numbers; collective."""
    refuse_forked_child("init")
    meeting = join(found, os.environ)
    try:
        opened = open_on_node(meeting, found.rank, found.size, arguments)
    except BaseException:
        meeting.leave(well=False)
        raise
    meeting.leave(well=True)
    return opened


def open_on_node(store: Store, rank: int, size: int, arguments: Arguments) -> Opened:
    """Open a group over the processes that call this with the same store; collective.

    If the arguments of a rank are wrong, it raises, and all others raise `PeerError`.
    """
    refuse_forked_child("init")
    watch_exit()
    store.set(f"version/{rank}", code_digest())
    refuse_different([store.get(f"version/{other}").decode() for other in range(size)])
    options, request = _checked_by_all(store, rank, size, arguments)

    def get(key: str) -> str:
        return store.get(key).decode()

    memory = meet(store.set, get, rank, size)
    if memory is None:
        raise BackendUnavailableError(
            "init: the ranks are not able to map the same memory, as on several hosts or in "
            f"several containers; {without_mpi(size)}"
        )
    lives = find_lives(store.set, get, rank, size)
    return open_root(ProcessesTransport(memory, rank, size, lives), options, request)


def _checked_by_all(
    store: Store, rank: int, size: int, arguments: Arguments
) -> tuple[Options, DeviceRequest]:
    """Return this rank's arguments, once every rank has found its own to be right."""
    key = "arguments/{}"
    try:
        options, request = replace(arguments, backend="auto").checked(rank, size)
    except Exception as error:
        store.set(key.format(rank), json.dumps([text_of(error), describe_raise(error)]))
        raise
    store.set(key.format(rank), json.dumps([]))
    said = [json.loads(store.get(key.format(other))) for other in range(size)]
    replies: list[Detail] = [Failure(*texts) if texts else Nothing() for texts in said]
    if any(said):
        raise peer_error("init", replies)
    return options, request
