"""How the ranks of torch.distributed meet: the store, and the communicator of each group."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import HashStore, Store, TCPStore

import arraycomm as ac
from arraycomm._launch import detect
from arraycomm._mpi_start import Arguments
from arraycomm._node_start import open_on_node
from arraycomm.adapters.torch_distributed._group import ArrayCommProcessGroup


class _World:
    """The communicator of the default group, of which the others are made."""

    comm: ac.Communicator | None = None


class _Made:
    """What groups of the same ranks have left: communicators of destroyed ones, by number."""

    def __init__(self) -> None:
        self.count = 0
        self.destroyed: dict[int, list[ac.Communicator]] = {}

    def free(self, comm: ac.Communicator) -> None:
        """Free what all ranks have destroyed: each destroys when it likes, and frees in step."""
        every = comm.allgather_object(list(self.destroyed))
        for number in sorted(set.intersection(*map(set, every))):
            for left in self.destroyed.pop(number):
                # An error may have ended it on some ranks: the others hear of it here.
                with suppress(ac.ArrayCommError):
                    left.free()


_made: Final[dict[tuple[int, ...], _Made]] = {}


def make_group(options: Any, _: Any = None) -> ArrayCommProcessGroup:
    """Make a process group for torch.distributed; its ranks call this at the same time."""
    ranks = tuple(options.global_ranks_in_group)
    comm = _of_some(options, list(ranks)) if ranks else _of_all(options)
    if not ranks:
        _World.comm = comm
    made = _made.setdefault(ranks or tuple(range(comm.size)), _Made())
    made.free(comm)
    messages = comm.dup()
    made.count += 1
    number = made.count

    def keep() -> None:
        made.destroyed[number] = [comm, messages]

    return ArrayCommProcessGroup(options.group_id, options.store, comm, messages, keep)


def _of_all(options: Any) -> ac.Communicator:
    """Return the communicator of all ranks, numbered as torch does."""
    rank, size = options.group_rank, options.group_size
    if not ac.is_initialized() and detect(os.environ) is None:
        return _on_node(options)
    world = ac.init()
    if world.size != size:
        raise ac.BackendUnavailableError(
            f"init_process_group: torch.distributed has {size} ranks, but arraycomm has "
            f"{world.size}; start the program with: arraycomm run -n {size} …"
        )
    numbered = world.split(0, rank)
    assert numbered is not None
    with numbered:
        return numbered.dup(timeout=options.timeout.total_seconds())


def _of_some(options: Any, ranks: list[int]) -> ac.Communicator:
    """Return the communicator of some ranks; no other rank takes part in making it."""
    assert _World.comm is not None
    world = _World.comm.mpi_comm
    if world is None:
        return _on_node(options)
    _meet(options)
    group = world.Get_group().Incl(ranks)
    made = world.Create_group(group)
    try:
        return ac.Communicator.from_mpi(made, timeout=options.timeout.total_seconds())
    finally:
        made.Free()
        group.Free()


def _on_node(options: Any) -> ac.Communicator:
    """Return a communicator without MPI, over memory that the ranks of one node share."""
    store, seconds = options.store, options.timeout.total_seconds()
    store.set_timeout(options.timeout)
    arguments = Arguments("auto", None, check=True, reproducible=True, timeout=seconds)
    opened = open_on_node(store, options.group_rank, options.group_size, arguments)
    return ac.Communicator(opened.runner)


def _meet(options: Any) -> None:
    """Wait for the ranks of a group, for as long as its timeout: MPI itself would wait for ever."""
    store, size = options.store, options.group_size
    store.set(f"arraycomm/{options.group_rank}", "here")
    store.wait([f"arraycomm/{rank}" for rank in range(size)], options.timeout)


# The rendezvous

Meeting = Iterator[tuple[Store, int, int]]


def rendezvous_or(others: Callable[..., Meeting]) -> Callable[..., Meeting]:
    """Return a rendezvous handler: arraycomm's if nothing has numbered the ranks, else `others`."""

    def meet(url: str, timeout: timedelta = timedelta(minutes=30), **options: Any) -> Meeting:
        if "RANK" in os.environ or "rank=" in url:
            yield from others(url, timeout=timeout, **options)
        else:
            comm = ac.init()
            yield _make_store(comm, timeout), comm.rank, comm.size

    return meet


def _make_store(comm: ac.Communicator, timeout: timedelta) -> Store:
    """Return a store that all ranks share; it is rank 0's."""
    if comm.size == 1:
        return HashStore()
    host = "127.0.0.1" if comm.local_size == comm.size else socket.gethostname()
    host, port = comm.bcast_object((host, 0))
    store = None
    if comm.rank == 0:
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout)
        port = store.port
    port = comm.bcast_object(port)
    return store or TCPStore(host, port, is_master=False, timeout=timeout)
