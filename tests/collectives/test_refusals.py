"""A result that the framework of one rank cannot have is an error on all, before data moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._arrays.frameworks.torch import TORCH
from arraycomm._arrays.views import view
from arraycomm._calls import refusals
from arraycomm._communicator import Communicator
from tests.support.frameworks import need
from tests.support.on_ranks import each_rank_of

UNLOADED = replace(TORCH, module="a module that is not loaded")
Call = Callable[[Communicator, Any, Any], Any]


# Of a root that alone knows the dtype, with what the other ranks want.
CALLS: dict[str, Call] = {
    "bcast": lambda c, x, like: c.bcast(x, like=like),
    "scatter": lambda c, x, like: c.scatter(x, like=like),
    "scatterv": lambda c, x, like: c.scatterv(x, None if x is None else [1] * c.size, like=like),
}
LIKES: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "jax": (lambda: need("jax").numpy.ones(2), np.float64, "JAX would cut float64"),
    "strict": (
        lambda: need("array_api_strict").ones(2),
        np.float16,
        "array_api_strict has no dtype float16",
    ),
    "torch": (lambda: need("torch").ones(2), "M8[s]", "torch has no dtype datetime64"),
}


@pytest.mark.parametrize("kind", LIKES)
@pytest.mark.parametrize("call", CALLS)
@each_rank_of(3)
def test_all_ranks_raise_and_go_on(comm: Communicator, call, kind) -> None:
    make, dtype, message = LIKES[kind]
    like = make() if comm.rank == 1 else None
    for count in (1, 10_000):
        x = None if comm.rank else np.zeros((comm.size, count), dtype)
        with pytest.raises(
            TypeError if comm.rank == 1 else ac.PeerError,
            match=rf"^{call}: .*{message if comm.rank == 1 else ' rank 1 has no dtype'}",
        ):
            CALLS[call](comm, x, like)
        assert comm.allreduce(1) == comm.size
        ones = None if comm.rank else np.ones((comm.size, count), np.float32)
        assert ac.exchange(CALLS[call](comm, ones, like), "numpy").flat[0] == 1


@each_rank_of(3, "jax")
def test_a_missing_gradient_that_cannot_be_made_here(comm: Communicator, jax) -> None:
    leaf, ones = None if comm.rank == 1 else np.ones(3), jax.numpy.ones(1)
    with pytest.raises(
        TypeError if comm.rank == 1 else ac.PeerError,
        match=r"^allreduce_gradients: (JAX would cut|the framework of rank 1 has no dtype float64)",
    ):
        ac.allreduce_gradients({"a": leaf, "b": ones}, comm=comm)
    got = ac.allreduce_gradients({"a": leaf, "b": None if leaf is None else ones}, comm=comm)
    assert type(got["a"]) is np.ndarray
    assert comm.allreduce(1) == comm.size


@each_rank_of(3, "jax", "torch")
def test_bcast_gives_numpy_if_the_framework_of_the_root_is_no_use_here(
    comm: Communicator, monkeypatch, jax, torch
) -> None:
    with jax.enable_x64(comm.rank == 0):
        x = jax.numpy.ones(2, "float64") if comm.rank == 0 else None
        got = comm.bcast(x)
        assert type(got) is (type(x) if comm.rank == 0 else np.ndarray)
    x = torch.ones(2) if comm.rank == 0 else None
    comm.barrier()
    monkeypatch.setitem(refusals.BY_CODE, refusals.framework_code(view(torch.ones(2))), UNLOADED)
    comm.barrier()
    assert type(comm.bcast(x)) is (torch.Tensor if comm.rank == 0 else np.ndarray)
    assert type(comm.bcast(2.5 if comm.rank == 0 else None)) is (
        float if comm.rank == 0 else np.ndarray
    )
