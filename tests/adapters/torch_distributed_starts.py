"""How a program may start torch.distributed over arraycomm; run by test_torch_distributed.py.

Under mpiexec: whatever part of torch's variables is set. Under torchrun, with the argument
`restart`: in a later attempt, and again in one process.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from typing import Any, Final

import torch
import torch.distributed as dist

import arraycomm as ac
import arraycomm.adapters.torch_distributed
from tests.support.launched import checks_in, perform

_NAMES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _set(values: dict[str, Any]) -> None:
    for name in _NAMES:
        os.environ.pop(name, None)
    os.environ.update({name: str(value) for name, value in values.items()})


def _meet(backend: str = "arraycomm", **options: Any) -> list[int]:
    """Start, and return torch's number of every rank, in the order of those numbers."""
    dist.init_process_group(backend, **options)
    try:
        rows = [torch.empty((), dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, torch.tensor(ac.world().rank))
        return [int(row) for row in rows]
    finally:
        dist.destroy_process_group()


def any_part_of_the_variables() -> None:
    world = ac.init()
    for backend, reverse in (("arraycomm", True), ("gloo", False)):
        rank = world.size - 1 - world.rank if reverse else world.rank
        # Nobody else can take its port. Torch's own rendezvous uses it again, in the same process.
        server = dist.TCPStore(
            "127.0.0.1", 0, None, True, multi_tenant=True, wait_for_workers=False
        )
        port = world.bcast_object(server.port, world.size - 1 if reverse else 0)
        for given in itertools.product((False, True), repeat=len(_NAMES)):
            values = (rank, world.size, "127.0.0.1", port)
            _set(dict(itertools.compress(zip(_NAMES, values, strict=True), given)))
            ranks = list(range(world.size))
            assert _meet(backend) == (ranks[::-1] if reverse and given[0] else ranks)
        _set({})
        assert _meet(backend, rank=world.rank, world_size=world.size) == ranks


def wrong_variables() -> None:
    world = ac.init()
    for values in (
        {"WORLD_SIZE": 1},
        {"WORLD_SIZE": world.size + world.rank},
        {"RANK": 0},
        {"RANK": 0, "WORLD_SIZE": 1},
        {"RANK": "first", "WORLD_SIZE": world.size},
    ):
        _set(values)
        for backend in ("arraycomm", "gloo"):
            text = _refused(backend)
            assert f"WORLD_SIZE must be {world.size}, as many ranks as were started" in text
            assert "unset both" in text
    # Torch itself meets by these, each rank alone.
    _set({"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0})
    assert f"must be {world.size}, as many ranks as arraycomm has; got 1" in _refused("arraycomm")
    _set({})
    assert _meet() == list(range(world.size))


def _refused(backend: str) -> str:
    try:
        _meet(backend)
    except ac.BackendUnavailableError as error:
        return str(error)
    raise AssertionError("no BackendUnavailableError")


def _restart() -> None:
    """End rank 0 in the first attempt, as a lost node would."""
    for turn in range(3):
        dist.init_process_group("arraycomm")
        group = dist.new_group()
        dist.all_reduce(x := torch.tensor(turn), group=group)
        assert x.item() == turn * dist.get_world_size()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if dist.get_rank() == 0:
                os._exit(9)
            signal.pause()
        dist.destroy_process_group()


if __name__ == "__main__":
    if "restart" in sys.argv:
        perform([_restart])
    else:
        perform(checks_in(globals()))
