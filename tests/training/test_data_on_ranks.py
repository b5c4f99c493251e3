"""The data container on ranks that do not agree, or of which one passes something wrong."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator, DistributedDataContainer
from arraycomm._training.batches import data
from tests.support.on_ranks import each_rank_of

MATCHING: dict[str, Any] = {"shuffle": True, "seed": 3, "uneven": "exact"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        *(({"seed": 4}, "seed=4"), ({"shuffle": False}, "shuffle=False")),
        *(({"uneven": "pad"}, "'pad'"), ({"data": np.zeros(10)}, "count=10")),
    ],
    ids=["seed", "shuffle", "uneven", "length"],
)
@each_rank_of(3)
def test_settings_that_differ(comm: Communicator, changed, said) -> None:
    settings = {"data": range(9), **MATCHING, **(changed if comm.rank == 1 else {})}
    with pytest.raises(ac.MismatchError, match=rf"rank 1: DistributedDataContainer\(.*{said}"):
        DistributedDataContainer(comm=comm, **settings)


CALLS = {
    "set_epoch": (lambda c, n: c.set_epoch(n), "epoch=1", "epoch=2"),
    "batches": (lambda c, n: c.batches(n), "n=1", "n=2"),
    "load_state_dict": (
        lambda c, n: c.load_state_dict({**c.state_dict(), "consumed": n}),
        "consumed=1",
        "consumed=2",
    ),
}


@pytest.mark.parametrize("name", CALLS)
@each_rank_of(3)
def test_arguments_that_differ(comm: Communicator, name) -> None:
    call, one, two = CALLS[name]
    container = DistributedDataContainer(range(9), comm=comm, **MATCHING)
    with pytest.raises(ac.MismatchError, match=rf"{name}\(.*{one}.*{name}\(.*{two}"):
        call(container, 1 + (comm.rank == 2))


@pytest.mark.parametrize("name", CALLS)
def test_argument_that_one_rank_alone_has_wrong(on_ranks, name) -> None:
    call, _, _ = CALLS[name]

    def check(comm: Communicator) -> list[int]:
        container = DistributedDataContainer(range(9), comm=comm)
        error = ValueError if comm.rank == 1 else ac.PeerError
        with pytest.raises(error, match=name):
            call(container, -1 if comm.rank == 1 else 1)
        assert container.state_dict()["consumed"] == 0
        return [item for batch in container.batches(2) for item in batch.items]

    parts = on_ranks(3, check)
    assert sorted(item for part in parts for item in part) == list(range(9))


@each_rank_of(3)
def test_data_that_one_rank_alone_has_wrong(comm: Communicator) -> None:
    error = TypeError if comm.rank == 1 else ac.PeerError
    with pytest.raises(error, match=r"DistributedDataContainer: .* must have a length"):
        DistributedDataContainer(3 if comm.rank == 1 else range(3), comm=comm)
    assert comm.allreduce(1) == 3


STEPS = {
    "the constructor": lambda c, comm: DistributedDataContainer(range(9), comm=comm, **MATCHING),
    "set_epoch": lambda c, comm: c.set_epoch(1),
    "batches": lambda c, comm: list(c.batches(1)),
    "load_state_dict": lambda c, comm: c.load_state_dict({**c.state_dict(), "consumed": 3}),
}


@pytest.mark.parametrize(
    ("what", "name"), [("RawArray", "the constructor"), *(("part_of", name) for name in STEPS)]
)
def test_memory_that_one_rank_does_not_have(on_ranks, monkeypatch, name, what) -> None:
    scarce = threading.local()

    take = getattr(data, what)

    def taken(*args: Any) -> Any:
        if getattr(scarce, "error", None) is not None:
            raise scarce.error
        return take(*args)

    monkeypatch.setattr(data, what, taken)

    def check(comm: Communicator) -> None:
        container = DistributedDataContainer(range(9), comm=comm, **MATCHING)
        container.load_state_dict({**container.state_dict(), "consumed": 2})
        scarce.error = (
            (MemoryError("text") if what == "part_of" else OSError(28, "full"))
            if comm.rank == 1
            else None
        )
        wanted = "MemoryError|text" if what == "part_of" else "no memory that worker.*full"
        with pytest.raises((MemoryError, OSError, ac.PeerError), match=wanted) as caught:
            STEPS[name](container, comm)
        assert isinstance(caught.value, ac.PeerError) is (comm.rank != 1)
        scarce.error = None
        assert container.state_dict()["consumed"] == 2
        STEPS[name](container, comm)
        assert comm.allreduce(1) == comm.size

    on_ranks(3, check)
