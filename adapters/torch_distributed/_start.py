"""How the ranks of torch.distributed meet: the store, and the communicator of each group."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

import arraycomm as ac
from arraycomm._launch import detect
from arraycomm._start.arguments import Arguments
from arraycomm._start.on_node import open_on_node
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
    made = _made.setdefault(ranks or tuple(range(options.group_size)), _Made())
    made.count += 1
    number = made.count
    options.store = PrefixStore(_unused_prefix(number), options.store)
    comm = _of_some(options, list(ranks)) if ranks else _of_all(options)
    if not ranks:
        _World.comm = comm
    made.free(comm)
    messages = comm.dup()

    def keep() -> None:
        made.destroyed[number] = [comm, messages]

    return ArrayCommProcessGroup(options.group_id, options.store, comm, messages, keep)


def _unused_prefix(number: int) -> str:
    """Name keys that no group has used before: torchrun keeps its store when it starts again."""
    return f"arraycomm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}/{number}"


def _of_all(options: Any) -> ac.Communicator:
    """Return the communicator of all ranks, numbered as torch does."""
    rank, size = options.group_rank, options.group_size
    if not ac.is_initialized() and detect(os.environ) is None:
        return _on_node(options)
    world = ac.init()
    if world.size != size:
        raise ac.BackendUnavailableError(
            f"init_process_group: WORLD_SIZE, or world_size, must be {world.size}, as many ranks "
            f"as arraycomm has; got {size}; unset it and RANK, or start the program with: "
            f"arraycomm run -n {size} …"
        )
    numbered = world.split(0, rank)
    assert numbered is not None
    with numbered:
        _agreed_rank(numbered, {"RANK": str(rank), "WORLD_SIZE": str(size)})
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
    rank, size = options.group_rank, options.group_size

    def tell(name: str, text: str) -> list[str]:
        store.set(f"{name}/{rank}", text)
        return [store.get(f"{name}/{other}").decode() for other in range(size)]

    opened = open_on_node(tell, rank, size, arguments)
    return ac.Communicator(opened.runner)


def _meet(options: Any) -> None:
    """Wait for the ranks of a group, for as long as its timeout: MPI itself would wait for ever."""
    store, size = options.store, options.group_size
    store.set(f"here/{options.group_rank}", "")
    store.wait([f"here/{rank}" for rank in range(size)], options.timeout)


# The rendezvous

Meeting = Iterator[tuple[Store, int, int]]


def rendezvous_or(others: Callable[..., Meeting]) -> Callable[..., Meeting]:
    """Return a rendezvous handler: arraycomm's if it knows the ranks and `others` cannot meet."""

    def meet(url: str, timeout: timedelta = timedelta(minutes=30), **options: Any) -> Meeting:
        said = _numbers(url)
        addressed = all(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT")))
        known = ac.is_initialized() or detect(os.environ) is not None
        if said["RANK"] and (not known or (addressed and said["WORLD_SIZE"])):
            yield from others(url, timeout=timeout, **options)
        else:
            comm = ac.init()
            rank = _agreed_rank(comm, said)
            yield _make_store(comm, timeout), rank, comm.size

    return meet


def _numbers(url: str) -> dict[str, str]:
    """Return what the program or the environment says of this rank, and of how many there are."""
    said = dict(parse_qsl(urlsplit(url).query))
    names = ("RANK", "WORLD_SIZE")
    return {name: said.get(name.lower()) or os.environ.get(name, "") for name in names}


def _agreed_rank(comm: ac.Communicator, said: dict[str, str]) -> int:
    """Return the number that torch is to have for this rank; raise on all if they do not fit."""
    own = {"RANK": str(comm.rank), "WORLD_SIZE": str(comm.size)}
    every = comm.allgather_object({name: said[name] or own[name] for name in own})
    ranks, sizes = ([each[name] for each in every] for name in own)
    if set(sizes) == {own["WORLD_SIZE"]} and set(ranks) == set(map(str, range(comm.size))):
        return int(ranks[comm.rank])
    raise ac.BackendUnavailableError(
        f"init_process_group: WORLD_SIZE must be {comm.size}, as many ranks as were started, and "
        f"RANK another one from 0 on each; got WORLD_SIZE {', '.join(sizes)} and RANK "
        f"{', '.join(ranks)}; start as many ranks, unset both, or set them so, as the arguments "
        "rank and world_size if you pass these"
    )


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
